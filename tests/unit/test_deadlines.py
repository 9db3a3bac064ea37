"""Deadlines for the last tier: which rows count, in which order copies wait, and that a missed one is said once."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from assembled import Parts, assemble

from tierfs.fs.admission import Ticket
from tierfs.fs.caller import Caller
from tierfs.types import ROOT_INO, OpKind, Replica, ReplicaState

ME = Caller(0, 0)
RULES = """
  - {match: "**/*.soon", durable_within: 1m}
  - {match: "**/*.later", durable_within: 1h}
"""


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = assemble(tmp_path, rules=RULES)
    yield made
    made.close()


def write(parts: Parts, name: str, size: int = 1 << 20) -> int:
    fh, attributes = parts.names.create(ROOT_INO, name.encode(), 0o644, os.O_WRONLY, ME)
    os.ftruncate(parts.files.handles[fh].inode.fd, size)
    parts.files.release(fh)
    return attributes.ino


def names(parts: Parts, tier: str) -> list[str]:
    """In the order in which the plan would take them."""
    queue = [p for p in parts.migrator.queue.pending() if p.tier == tier]
    queue.sort(key=lambda p: (p.due_ns is None, p.due_ns or 0))
    return [parts.migrator.flusher.path(parts.catalog.attributes(p.ino).ino) for p in queue]  # type: ignore[union-attr]


def test_a_local_copy_goes_by_its_own_deadline_and_contents_by_what_comes_after(parts: Parts) -> None:
    for name in ("a", "b.later", "c.soon", "d"):
        write(parts, name)
    assert names(parts, "nvme") == ["c.soon", "b.later", "a", "d"]
    assert names(parts, "archive") == ["a", "b.later", "c.soon", "d"], "what is published before has to be there, too"
    dues = {p.ino: p.due_ns for p in parts.migrator.queue.pending() if p.tier == "archive"}
    assert len({due for due in dues.values() if due is not None}) == 1


def test_an_early_deadline_is_seen_behind_any_number_of_others(parts: Parts) -> None:
    for number in range(300):
        write(parts, f"{number}", 0)
    write(parts, "last.soon")
    assert names(parts, "nvme")[0] == "last.soon"


def test_superseded_deleted_and_lost_files_have_none(parts: Parts) -> None:
    for name in ("overwritten.soon", "deleted.soon", "lost.soon", "kept.soon"):
        write(parts, name)
    later = time.time_ns() + 3600 * 10**9
    assert parts.catalog.late(later)[0] == 4
    found = parts.names.lookup(ROOT_INO, b"overwritten.soon")
    assert found is not None
    parts.files._replace(found, parts.files.rule_of((b"x",))[1], (0, b""), Ticket(over=True))
    parts.names.unlink(ROOT_INO, b"deleted.soon", ME)
    lost = parts.names.lookup(ROOT_INO, b"lost.soon")
    assert lost is not None
    with parts.catalog.transaction():
        for replica in parts.catalog.replicas(lost.ino):
            parts.catalog.remove_replica(replica)
    kept = parts.names.lookup(ROOT_INO, b"kept.soon")
    assert kept is not None
    assert parts.catalog.late_files(later, 10) == [kept.ino]
    assert parts.catalog.late(later) == (1, 1 << 20)


def test_a_rename_brings_the_deadline_of_the_new_rule_and_never_a_later_one(parts: Parts) -> None:
    """safetensors writes .tmpXXXX and renames it."""
    ino = write(parts, "tmp")
    assert parts.catalog.deadline(ino, 1) is None
    parts.names.rename(ROOT_INO, b"tmp", ROOT_INO, b"model.soon", 0, ME)
    soon = parts.catalog.deadline(ino, 1)
    assert soon is not None
    assert soon <= time.time_ns() + 60 * 10**9
    parts.names.rename(ROOT_INO, b"model.soon", ROOT_INO, b"model.later", 0, ME)
    assert parts.catalog.deadline(ino, 1) == soon


def test_what_the_archive_has_is_late_no_more(parts: Parts) -> None:
    ino = write(parts, "a.soon")
    batch = parts.migrator.archive.next_batch(10, {})
    assert batch is not None
    batch.stored[ino] = Replica(parts.catalog.attributes(ino).ino, 1, "archive", ReplicaState.DURABLE, "", 1, b"")  # type: ignore[union-attr]
    parts.migrator.archive.commit(batch)
    assert parts.catalog.deadline(ino, 1) is None


def test_a_missed_deadline_is_said_once(parts: Parts, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tierfs.migrator")
    inos = [write(parts, f"{n}.soon") for n in range(8)]
    parts.migrator.queue._look()
    assert not caplog.records
    with parts.catalog.transaction():
        for ino in inos:
            parts.catalog.set_deadline(ino, 1, 1, time.time_ns() - 1)
    for _ in range(3):
        parts.migrator.queue._look()
    (said,) = caplog.records
    assert said.levelno == logging.WARNING
    assert "0.soon" in said.getMessage()
    assert "and 3 more" in said.getMessage()
    with parts.catalog.transaction():
        for ino in inos:
            parts.catalog.drop_deadline(ino)
    parts.migrator.queue._look()
    assert "no file is past its deadline" in caplog.records[-1].getMessage()


def test_a_catalog_from_before_deadlines_is_opened(tmp_path: Path) -> None:
    made = assemble(tmp_path)
    made.catalog._run("DROP TABLE deadlines")
    with made.catalog.transaction():
        made.catalog.log(OpKind.ATTRIBUTES, 1, 0)
    made.close()
    again = assemble(tmp_path)
    assert again.catalog.late(time.time_ns()) == (0, 0)
    again.close()
