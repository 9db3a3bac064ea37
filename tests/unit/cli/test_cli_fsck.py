"""fsck and recover."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from tests.unit.cli.talking import Capture, Json, run
from tierfs.cli import render
from tierfs.fsck.session import Report as FsckReport
from tierfs.report import Lost, Report, keep_rebuild, keep_report


def test_fsck(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    problems = [{"severity": "error", "what": "digest", "path": "a"}]
    fake = types.ModuleType("tierfs.fsck")
    fake.check_all = lambda policy, progress, data: problems  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tierfs.fsck", fake)
    assert run("fsck", config, "--json") == 1
    assert json.loads(capsys.readouterr().out) == problems
    assert run("fsck", config) == 1
    assert "digest" in capsys.readouterr().out
    problems.clear()
    assert run("fsck", config) == 0


def test_fsck_after_a_reboot_is_one_line(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    problems = [{"severity": "memory", "what": "memory tier memory is gone: nothing is lost", "path": "/m"}]
    fake = types.ModuleType("tierfs.fsck")
    fake.check_all = lambda policy, progress, data: problems  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tierfs.fsck", fake)
    assert run("fsck", config) == 0
    assert capsys.readouterr().out == "memory tier memory is gone: nothing is lost\nno other problems found\n"
    problems.append({"severity": "rolled back", "what": "rolled back: a.pt is again", "path": "a.pt"})
    problems.append({"severity": "undone", "what": "undone: unlink of b.pt", "path": "b.pt"})
    assert run("fsck", config) == 0
    out = capsys.readouterr().out
    assert out.startswith("memory tier memory is gone: nothing is lost (--json lists them)\nno other")
    assert ".pt" not in out
    problems.append({"severity": "lost", "what": "lost: c.pt", "path": "c.pt"})
    assert run("fsck", config) == 1, "bytes of a file are lost"
    problems[-1] = {"severity": "error", "what": "no file for the replica on nvme", "path": "d.pt"}
    assert run("fsck", config) == 1
    out = capsys.readouterr().out
    assert "no file for the replica on nvme" in out
    assert "no other problems" not in out.splitlines()[-1]
    assert run("fsck", config, "--json") == 1
    assert json.loads(capsys.readouterr().out) == problems


@pytest.mark.parametrize("option", ["--repair", "--rebuild"])
def test_fsck_that_lost_a_file_has_failed(
    config: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    report = FsckReport()
    report.did("replaced the missing replica on nvme", b"good.pt")
    fake = types.ModuleType("tierfs.fsck")
    fake.repair_all = lambda policy, progress, data, gone: report  # type: ignore[attr-defined]
    fake.rebuild_all = lambda policy, progress: report  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tierfs.fsck", fake)
    assert run("fsck", option, config) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no problems left"
    for number, last in ((1, "1 file lost"), (2, "2 files lost")):
        report.did("missing on the archive; to be made there again", b"%d.pt" % number)
        report.lose("no tier has its bytes", b"%d.pt" % number)
        assert run("fsck", option, config) == 1
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == last
        assert "no problems" not in out
        assert out.count(f"{number}.pt") == 1
    assert run("fsck", option, config, "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["lost"] == ["1.pt", "2.pt"]
    assert [done["path"] for done in answer["done"]] == ["good.pt", "1.pt", "2.pt"]


@pytest.mark.parametrize("copy", [None, {"number": 3, "made": "2026-01-02T03:04:05Z"}])
def test_a_rebuild_is_told_in_sentences(copy: Json | None, capsys: Capture) -> None:
    render.rebuilt({"why": "there is none", "kept_aside": None, "copy": copy, "batches_logged": 2, "files": 7})
    out = capsys.readouterr().out
    assert ("began with copy 3 of the catalog, made 2026-01-02T03:04:05Z" in out) == (copy is not None)
    assert "{" not in out
    assert "None" not in out


def test_recover_shows_the_last_rebuild_among_the_recoveries(config: Path, tmp_path: Path, capsys: Capture) -> None:
    rebuild = FsckReport()
    rebuild.facts |= {"at": 2e9, "why": "there is none", "kept_aside": "/s/catalog.damaged-1", "files": 7}
    rebuild.facts |= {"copy": {"number": 3, "made": "2026-01-02T03:04:05Z"}, "batches_logged": 2}
    rebuild.did("came back from nvme", "run/a.pt", "restored")
    rebuild.lose("no tier has its bytes", b"run/b\x1b.pt")
    (tmp_path / "state").mkdir()
    keep_rebuild(tmp_path / "state", rebuild.as_json())
    assert run("recover", config) == 0
    alone = capsys.readouterr().out
    assert "nothing to report" not in alone
    keep_report(tmp_path / "state", Report(at=1e9, lost=[Lost("early", 1, 5)]))
    keep_report(tmp_path / "state", Report(at=3e9, orphans_removed=1))
    assert run("recover", config) == 0
    out = capsys.readouterr().out
    assert alone in out
    assert out.index("lost: early") < out.index("the catalog was rebuilt, 1 restored, 1 lost") < out.index("1 orphans")
    for told in (
        "\n  the former one is kept in /s/catalog.damaged-1\n",
        "\n  began with copy 3 of the catalog",
        "\n  restored: run/a.pt: came back from nvme\n",
        "\n  lost: run/b\\x1b.pt: no tier has its bytes\n",
    ):
        assert told in out
    assert run("recover", config, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(report["kind"], [lost["path"] for lost in report["lost"]]) for report in answer] == [
        ("recovery", ["early"]),
        ("rebuild", ["run/b\x1b.pt"]),
        ("recovery", []),
    ]
    assert answer[1]["done"] == rebuild.as_json()["done"]
