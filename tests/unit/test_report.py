"""Reports of recoveries outlive the mounts that wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierfs.report import (
    FILE,
    KEPT,
    REBUILD,
    Lost,
    Report,
    RolledBack,
    Undone,
    keep_report,
    read_rebuild,
    read_reports,
)

FULL = Report(
    at=1.5,
    rolled_back=[RolledBack("a\udcff", 3, 10, 1, 20)],
    lost=[Lost("b", 1, 5)],
    undone=[Undone("unlink", "c"), Undone("rename", "tmp", "d")],
    orphans_removed=2,
)


def test_what_is_kept_is_read_again(tmp_path: Path) -> None:
    assert read_reports(tmp_path) == []
    keep_report(tmp_path, FULL)
    keep_report(tmp_path, Report(at=2.0, orphans_removed=1))
    assert read_reports(tmp_path) == [FULL, Report(at=2.0, orphans_removed=1)]


def test_a_report_that_is_kept_again_replaces_itself(tmp_path: Path) -> None:
    report = Report(at=1.0, lost=[Lost("b", 1, 5)])
    keep_report(tmp_path, report)
    report.orphans_removed += 3
    keep_report(tmp_path, report)
    assert read_reports(tmp_path) == [report]


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    for number in range(KEPT + 5):
        keep_report(tmp_path, Report(at=float(number), orphans_removed=1))
    assert [report.at for report in read_reports(tmp_path)] == [float(n) for n in range(5, KEPT + 5)]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"reports": 3}', '{"reports": [{"at": "x"}]}', '{"reports": [7]}'])
def test_a_damaged_file_is_no_obstacle(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert read_reports(tmp_path) == []
    keep_report(tmp_path, FULL)
    assert read_reports(tmp_path) == [FULL]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"at": 1}', '{"at": 1, "copy": 3}', "\\xff"])
def test_a_damaged_report_of_a_rebuild_is_none(tmp_path: Path, text: str) -> None:
    assert read_rebuild(tmp_path) is None
    (tmp_path / REBUILD).write_text(text)
    assert read_rebuild(tmp_path) is None


def test_lines_name_every_path() -> None:
    assert FULL.lines() == [
        "rolled back: a\udcff is again its version 1 of 20 bytes, instead of version 3 of 10 bytes",
        "lost: b had bytes in memory only",
        "undone: unlink of c",
        "undone: rename of tmp to d",
    ]


def test_a_report_of_nothing_is_none() -> None:
    assert not Report()
    assert Report(orphans_removed=1)
