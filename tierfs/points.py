"""Points between the steps of everything that must survive a crash (docs/DURABILITY.md). A process may end at each:
tests/fault/test_kill_points.py ends it there. In production passing one costs an ``if``."""

from __future__ import annotations

from collections.abc import Callable


class Point:
    """A member of `At`: its name, and what is done there and what is not yet."""

    __slots__ = ("means", "name")

    def __init__(self, means: str) -> None:
        self.means = means
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"At.{self.name}"


class At:
    """An enumeration; no `enum.Enum`, because looking up a member of one costs several times as much as `reach`."""

    CREATE_UNRECORDED = Point("the new file's backing file is made; the journal does not have its name")
    CREATE_RECORDED = Point("the new name is in the journal; nobody has a handle, and nobody was answered")
    OPEN_UNANSWERED = Point("the handle is in the keeper's table; the kernel does not know it")
    UNLINK_UNRECORDED = Point("the statements of the removal are executed; the journal does not have them")
    UNLINK_RECORDED = Point("the removal is in the journal; nobody was answered")
    RENAME_UNRECORDED = Point("the statements of the rename are executed; the journal does not have them")
    RENAME_RECORDED = Point("the rename is in the journal; nobody was answered")
    CATALOG_COMMITTED = Point("SQLite has the group of transactions; the journal's next generation has not begun")

    REWRITE_UNRECORDED = Point("the file of a truncated version is made; the journal does not have the version")
    REWRITE_RECORDED = Point("the truncated version has begun; nobody was answered")
    APPEND_RECORDED = Point("the replica has turned into the next version in place; nobody was answered")
    CLOSE_UNRECORDED = Point("the last writer is gone; the version is OPEN")
    CLOSE_RECORDED = Point("the version is WRITTEN and its copies are queued; none has begun")

    DRAIN_COPIED = Point("the bytes are in a temporary file of the target; nothing is synced")
    DRAIN_NAMED = Point("the copy on a local tier has its name, synced; the catalog does not name it")
    DRAIN_RECORDED = Point("the catalog has the replica DURABLE; it is not synced, older versions' bytes are there")
    SETTLE_SYNCED = Point("the replica on a persistent ack tier is synced; the catalog has it WRITTEN")
    SETTLE_RECORDED = Point("that replica is DURABLE in the catalog; which is not synced")

    CHUNK_WRITTEN = Point("a chunk is in a temporary file of the archive, synced; it does not have its name")
    CHUNK_NAMED = Point("the chunk has its name, not synced; no manifest names it")
    CHUNKS_SYNCED = Point("all chunks of a file are there, synced with their names; its manifest is not written")
    PUBLISH_READY = Point("content is in the archive's temporary area, synced; nobody knows")
    PUBLISH_COPIED = Point("the migrator knows that this content is there; no batch brings it")
    PUBLISH_PLANNED = Point("the batch is stored in the catalog; which is not synced")
    PUBLISH_SYNCED = Point("the catalog with the batch is synced; the archive's log does not have it")
    PUBLISH_LOGGED = Point("the batch is in the archive's log, synced; no step is taken")
    PUBLISH_CONTENT = Point("content has its attributes and is synced; it is not renamed over its name")
    PUBLISH_EXCHANGE = Point("the journal of an exchange is written; the names are not exchanged")
    PUBLISH_STEPPED = Point("one more step of the batch is taken; those after it are not")
    PUBLISH_TAKEN = Point("all steps of the batch are taken; their directories are not synced")
    PUBLISH_DURABLE = Point("the directories are synced; the catalog has the batch as one to be carried out")
    PUBLISH_RECORDED = Point("the batch is gone from the catalog, its effects are there; which is not synced")

    COLLECT_MARKED = Point("the chunks that no manifest names are known; all are there")
    COLLECT_REMOVED = Point("one more of them is removed; others are not")

    NAME_FORGOTTEN = Point("the kernel forgot a deleted file, whose row is held or goes; the journal does not have it")
    HELD_RELEASED = Point("rows that were held are dropped; the catalog is not synced, the bytes are there")
    EVICT_RECORDED = Point("the catalog names an evicted replica no longer; its bytes are there")
    REMOVE_SYNCED = Point("the catalog without these replicas is synced where need be; their bytes are there")
    REMOVE_DONE = Point("the bytes are removed; what comes next does not know")

    RECALL_COPIED = Point("a cold file's bytes are in a temporary file and compared; it has no name")
    RECALL_NAMED = Point("the recalled file has its name; the catalog does not name it")
    RECALL_RECORDED = Point("the catalog names the recalled replica; the open is not answered")
    FILL_BEGUN = Point("the file to be filled is made; no byte has come")
    FILL_FETCHED = Point("one more chunk was compared and is in the temporary file; others are not")
    FILL_NAMED = Point("all chunks are there and the file has its name; the catalog does not name it")
    FILL_RECORDED = Point("the catalog names the filled replica; whoever waits for it was not told")

    ROLLBACK_BEGUN = Point("the replicas that were lost are known; nothing is taken back")
    ROLLBACK_REPORTED = Point("the report of what is taken back is synced; none of it is committed")
    ROLLBACK_COMMITTED = Point("what was lost is taken back; versions that were left open are not closed")

    RESTART_ADOPTED = Point("the kernel's handles are taken over; versions that nobody has open are OPEN")
    RESTART_SETTLED = Point("versions that nobody has open are closed; the kernel was not asked to send requests again")
    RESTART_RESENT = Point("unanswered requests were asked for again; this daemon does not count as serving")
    ORPHANS_FOUND = Point("files that no catalog names are known; they are there")
    ORPHANS_REMOVED = Point("they are removed; temporary files are not")
    REPORT_WRITTEN = Point("a report is in a temporary file of the state directory, synced; it does not have its name")
    KEEPER_REAPED = Point("the daemon is dead and the keeper knows; the next one is not started")
    KEEPER_HANDED_OVER = Point("what the next program must know can be inherited; it is not executed")
    UMOUNT_DRAINED = Point("the mount ended and everything is drained; discarded bytes are there, the catalog is open")
    UMOUNT_FOLDED = Point("the catalog is one file on stable storage; the archive has no copy of it as it is now")
    COPY_NAMED = Point("a copy of the catalog is on the archive; its manifest is not")
    COPY_UNDECLARED = Point("the copy has its manifest; nothing says that it is the catalog as it was closed")
    UMOUNT_KEPT = Point("the copy is declared to be the catalog; the memory tier is mounted")

    REBUILD_ASIDE = Point("what is left of a damaged catalog is in a directory of its own; no other is begun")
    REBUILD_BASED = Point("the new catalog has what the newest copy and the log say; not what lies beside the replicas")
    REBUILD_ADOPTED = Point("it has what the tiers say; it does not agree with all of them")
    REBUILD_REPAIRED = Point("it is complete and closed; it does not have its name")
    REBUILD_RENAMED = Point("the new catalog has its name; the archive has no copy of it")


POINTS = tuple(point for point in vars(At).values() if isinstance(point, Point))

struck: Callable[[Point], None] | None = None
"""Called at each point; None but in tests."""


def reach(point: Point) -> None:
    if struck is not None:
        struck(point)
