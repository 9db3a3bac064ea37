"""A lost or damaged catalog comes back from its copy, from what lies beside replicas, and from the archive itself."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.unit.rebuilding import CALLER, World, policy_of
from tierfs.catalog import KEPT, Catalog, MendableCatalog
from tierfs.catalog.database import journals
from tierfs.errors import MountError, UsageError
from tierfs.fs.filesystem import Change
from tierfs.fsck import rebuild_all, restore_clean
from tierfs.fsck.session import Report, catalog_path
from tierfs.migrator import progress as batches
from tierfs.migrator.keeping import keep_closed
from tierfs.migrator.steps import Action, Batch, Effect, Step
from tierfs.report import read_rebuild
from tierfs.tiers.assembly import Tiers
from tierfs.tiers.beside import SUFFIX, XATTR
from tierfs.tiers.copies import CatalogCopies, parse_manifest
from tierfs.types import ROOT_INO, OpKind


@pytest.fixture
def top() -> Iterator[Path]:
    """On a real disk: records are xattrs there."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        yield Path(path)


@pytest.fixture
def world(top: Path) -> Iterator[World]:
    made = World(top)
    yield made
    made.close()


def lose_catalog(world: World) -> None:
    for file in world.policy.state.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()


def rebuild(world: World) -> Report:
    report = rebuild_all(world.policy, lambda done, total, what: None)
    assert report.problems == []
    return report


def rebuilt(world: World, *lost: str) -> Report:
    """The world after its catalog, and the directories ``lost``, are gone and the catalog was made again."""
    world.crash()
    lose_catalog(world)
    for name in lost:
        shutil.rmtree(world.top / name)
    report = rebuild(world)
    assert world.problems() == []
    world.reopen()
    return report


def kinds(report: Report, kind: str) -> list[str]:
    return [deed.path for deed in report.deeds if deed.kind == kind]


def drop_copies(world: World) -> None:
    shutil.rmtree(world.top / "archive" / ".tierfs" / "catalog")


@pytest.mark.parametrize("lost", [(), ("memory",), ("memory", "nvme")], ids=["state", "memory", "a new machine"])
@pytest.mark.parametrize("source", ["copy", "log", "tiers"])
def test_everything_comes_back_bit_for_bit(world: World, source: str, lost: tuple[str, ...]) -> None:
    """Names that are not UTF-8, hard links, symlinks, a fifo, xattrs, owners, times, holes."""
    world.fill()
    if source == "copy":
        world.drain()
        world.copy_catalog()
    else:
        world.drain()
        if source == "tiers":
            drop_copies(world)
    before = world.look()
    report = rebuilt(world, *lost)
    assert (report.facts["copy"] is not None) == (source == "copy")
    assert (report.facts["batches_logged"] != 0) == (source == "log")
    assert world.look() == before
    assert kinds(report, "lost") == kinds(report, "recovered") == []
    sparse = world.parts.tree.status((b"run", b"sparse"))
    assert sparse is not None
    assert sparse.st_blocks * 512 < 1 << 20
    world.write(b"run/new", b"goes on")
    world.drain()
    world.crash()
    assert world.problems() == []
    world.reopen()


def test_what_was_drained_after_the_last_copy_comes_back_under_its_name(world: World) -> None:
    world.fill()
    world.drain()
    world.copy_catalog()
    world.mkdir(b"run/step-2", 0o711)
    world.write(b"run/step-2/model.pt", b"2" * 100_000)
    world.write(b"run/step-1/model.pt", b"another version")
    world.drain("nvme")
    before = world.look()
    rebuilt(world, "memory")
    assert world.look(times=False).keys() == before.keys()
    assert world.look() == before


def test_renames_and_deletes_that_the_archive_has_followed_are_not_forgotten(world: World) -> None:
    world.fill()
    world.drain()
    world.copy_catalog()
    world.rename(b"run/step-1", b"run/step-one")
    world.unlink(b"best.pt")
    world.unlink(b"run/empty")
    world.write(b"run/late", b"late")
    world.rename(b"run/late", b"run/step-one/later")
    world.set(b"run/step-one/later", Change(mode=0o600))
    world.drain()
    before = world.look()
    rebuilt(world, "memory", "nvme")
    assert world.look() == before


def test_what_the_archive_has_set_aside_is_no_name_and_may_become_the_content_again(top: Path) -> None:
    catalog = MendableCatalog(top / "catalog")
    with catalog.transaction():
        ino = catalog.add_inode(stat.S_IFREG | 0o644, 0, 0, 0).ino
        batch = Batch(7)
        effect = Effect([Step(Action.RENAME, (b"x",), (b".tierfs", b"kept", b"%x" % ino))])
        effect.put(ROOT_INO, b"y", ino, 0)
        effect.put(KEPT, b"%x" % ino, ino, -ino)
        batch.add(7, effect)
        logged = batches.decode(batches.encode(0, batch.encode(), []))
        assert logged is not None
        assert logged.batch.names == batch.names
        for row in logged.batch.names.values():
            assert row is not None
            catalog.put_published(row.parent, row.name, row.ino, row.occupant)
        catalog.names_from_archive()
    assert catalog.all_entries(ino) == [(ROOT_INO, b"y")]
    assert [(op.kind, op.ino) for op in catalog.operations(9)] == [(OpKind.ATTRIBUTES, ino)]
    catalog.close()


def test_names_that_the_archive_has_not_heard_of_are_those_of_the_copy(world: World) -> None:
    """Bytes are durable, a rename that came after the last copy and the last batch is not: the older name is legal."""
    world.fill()
    world.drain()
    world.copy_catalog()
    before = world.look()
    world.rename(b"run", b"walk")
    rebuilt(world)
    assert world.look() == before


def test_without_a_copy_a_file_renamed_after_its_drain_has_the_archives_name_once(world: World) -> None:
    world.mkdir(b"tmp")
    world.write(b"tmp/model.pt", b"m" * 70_000)
    world.drain("nvme")
    world.rename(b"tmp", b"step-1")
    world.drain()
    drop_copies(world)
    before = world.look()
    rebuilt(world, "memory")
    found = world.look()
    assert found[b"step-1/model.pt"] == before[b"step-1/model.pt"]
    assert b"tmp/model.pt" not in found
    replicas = world.parts.catalog.replicas(world.ino(b"step-1/model.pt"))
    assert {replica.tier for replica in replicas} == {"nvme", "archive"}
    assert len({replica.digest for replica in replicas}) == 1


def test_a_file_that_took_anothers_name_loses_nobodys_bytes(world: World) -> None:
    world.write(b"log", b"first")
    world.drain()
    world.copy_catalog()
    world.rename(b"log", b"log.1")
    world.write(b"log", b"second")
    world.drain("nvme")
    world.crash()
    lose_catalog(world)
    shutil.rmtree(world.top / "memory")
    for log in (world.top / "archive" / ".tierfs" / "catalog").glob("log-*"):
        log.unlink()
    rebuild(world)
    world.reopen()
    contents = sorted(entry[9][0] for entry in world.look().values() if entry[9])  # type: ignore[index]
    assert contents == [b"first", b"second"]
    assert world.look()[b"log"][9] == [b"second"]


def test_bytes_in_memory_whose_names_are_known_are_the_files(world: World) -> None:
    """The daemon and its catalog are gone, the memory tier is not: nothing of what it holds is lost."""
    world.write(b"old", b"1" * 1000)
    world.drain()
    world.copy_catalog()
    world.write(b"old", b"2" * 2000)
    world.write(b"new", b"n" * 3000)
    report = rebuilt(world)
    found = world.look()
    assert found[b"old"][9] == [b"2" * 2000]
    assert [entry[9] for path, entry in found.items() if path.startswith(b"tierfs-recovered/")] == [[b"n" * 3000]]
    assert kinds(report, "restored") == ["old"]
    assert len(kinds(report, "recovered")) == 1
    world.drain()
    assert (world.top / "archive" / "old").read_bytes() == b"2" * 2000


def test_written_in_place_after_it_was_recorded(world: World) -> None:
    """The record beside it says what the replica was; the file itself says what it is."""
    world.write(b"log", b"a" * 1000)
    world.drain()
    world.copy_catalog()
    world.close()
    (file,) = [path for path in (world.top / "nvme" / "data").rglob("*-*") if path.is_file()]
    with file.open("ab") as log:
        log.write(b"b" * 500)
    lose_catalog(world)
    shutil.rmtree(world.top / "memory")
    rebuild(world)
    world.reopen()
    assert world.look()[b"log"][9] == [b"a" * 1000 + b"b" * 500]
    world.drain()
    assert (world.top / "archive" / "log").read_bytes() == b"a" * 1000 + b"b" * 500


def test_what_was_deleted_before_the_copy_stays_deleted(world: World) -> None:
    world.write(b"gone", b"g" * 100)
    world.drain()
    (file,) = [path for path in (world.top / "nvme" / "data").rglob("*-*") if path.is_file()]
    kept = world.top / "kept"
    os.link(file, kept)
    world.unlink(b"gone")
    world.drain()
    world.copy_catalog()
    os.link(kept, file)  # its removal did not come through
    rebuilt(world)
    assert world.look() == {}
    assert not file.exists()


def test_a_delete_that_waited_for_what_was_lost_is_undone(world: World) -> None:
    """Checkpoint N is in memory alone when the machine dies, N-1 was deleted: N-1 is there again."""
    world.write(b"step-1", b"1" * 5000)
    world.drain()
    before = world.look()
    world.write(b"step-2", b"2" * 5000)
    world.unlink(b"step-1")
    world.copy_catalog()
    report = rebuilt(world, "memory")
    assert world.look() == before
    assert kinds(report, "restored") == ["step-1"]
    assert kinds(report, "lost") == ["step-2"]


@pytest.mark.parametrize("damage", ["newest", "manifest", "both", "log"])
def test_damaged_copies_are_passed_over(world: World, damage: str) -> None:
    world.fill()
    world.drain()
    world.copy_catalog()
    world.set(b"run/step-1/model.pt", Change(mode=0o640))
    world.drain()
    world.copy_catalog()
    before = world.look()
    directory = world.top / "archive" / ".tierfs" / "catalog"
    newest, older = sorted((int(p.name[5:]) for p in directory.glob("copy-*") if p.suffix == ""), reverse=True)
    if damage in ("newest", "both"):
        with (directory / f"copy-{newest}").open("r+b") as file:
            file.seek(5000)
            file.write(b"\xa5" * 3000)
    if damage == "both":
        os.truncate(directory / f"copy-{older}", 4096)
    if damage == "manifest":
        (directory / f"copy-{newest}.json").write_text("[" * 2000)
    if damage == "log":
        for log in directory.glob("log-*"):
            data = bytearray(log.read_bytes())
            data[len(data) // 2] ^= 1
            log.write_bytes(data)
    rebuilt(world)
    assert world.look() == before


def test_the_catalog_is_copied_while_it_is_used(world: World) -> None:
    """What is done while the thread copies is not in the copy, and the copy is whole."""
    for number in range(300):
        world.write(b"%d" % number, b"")
    world.drain()

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.parts.migrator.copier.copy)
            for number in range(300, 600):
                fh, _ = world.parts.names.create(ROOT_INO, b"%d" % number, 0o600, os.O_WRONLY, CALLER)
                world.parts.files.release(fh)
                await trio.lowlevel.checkpoint()

    trio.run(run)
    copies = CatalogCopies(world.parts.tree)
    (manifest,) = copies.manifests()
    assert copies.fetch(manifest, world.top / "fetched")
    copy = Catalog(world.top / "fetched", verify=True)
    assert copy.check() == copy.inconsistencies() == []
    assert 300 <= len(copy.entries(ROOT_INO, 0, 1000)) < 600
    copy.close()


def test_two_copies_are_kept_and_nothing_between_is_missing(world: World) -> None:
    directory = world.top / "archive" / ".tierfs" / "catalog"
    for number in range(4):
        world.write(b"%d" % number, b"x")
        world.drain()
        world.copy_catalog()
    world.write(b"last", b"x")
    world.drain()
    names = sorted(path.name for path in directory.iterdir())
    copies = [name for name in names if name.startswith("copy-") and not name.endswith(".json")]
    assert len(copies) == 2
    assert all(int(name.partition("-")[2]) >= int(min(copies)[5:]) for name in names if name.startswith("log-"))
    before = world.look()
    with (directory / max(copies)).open("r+b") as file:
        file.write(b"damaged")
    rebuilt(world, "memory", "nvme")
    assert world.look() == before


def test_a_sound_catalog_is_not_rebuilt(world: World) -> None:
    world.fill()
    world.drain()
    world.close()
    before = catalog_path(world.policy).read_bytes()
    with pytest.raises(UsageError, match="sound"):
        rebuild_all(world.policy, lambda done, total, what: None)
    assert catalog_path(world.policy).read_bytes()[:100] == before[:100]
    world.reopen()


def test_a_damaged_catalog_is_kept_aside(world: World) -> None:
    world.fill()
    world.drain()
    before = world.look()
    world.crash()
    damaged = b"\x00garbage" * 5000
    catalog_path(world.policy).write_bytes(damaged)
    report = rebuild(world)
    aside = Path(str(report.facts["kept_aside"]))
    assert (aside / catalog_path(world.policy).name).read_bytes() == damaged
    assert {path.name for path in aside.iterdir()} >= {path.name for path in journals(catalog_path(world.policy))}
    world.reopen()
    assert world.look() == before
    assert read_rebuild(world.policy.state) == report.as_json()


def test_tiers_of_different_catalogs_are_refused(world: World) -> None:
    world.fill()
    world.drain()
    world.crash()
    lose_catalog(world)
    (world.top / "nvme" / "tierfs-owner").write_text("another\n")
    with pytest.raises(MountError, match="different catalogs"):
        rebuild_all(world.policy, lambda done, total, what: None)
    (world.top / "nvme" / "tierfs-owner").unlink()
    rebuild(world)
    world.reopen()


def test_a_rebuild_that_was_killed_begins_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each step between its calls of rename, unlink and fsync the catalog is whole, or rebuilt at the next try."""
    world.fill()
    world.drain()
    world.copy_catalog()
    world.write(b"run/late", b"late")
    world.drain()
    before = world.look()
    world.crash()
    lose_catalog(world)
    for steps in range(40):
        left = steps

        class Killed(BaseException):
            pass

        def counting(real: object) -> object:
            def call(*args: object, **kwargs: object) -> object:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return real(*args, **kwargs)  # type: ignore[operator]

            return call

        with monkeypatch.context() as patch:
            for name in ("rename", "unlink", "fsync"):
                patch.setattr(os, name, counting(getattr(os, name)))
            try:
                rebuild_all(world.policy, lambda done, total, what: None)
            except Killed:
                continue
            except UsageError:
                break  # an earlier try had come through
        break
    else:
        rebuild(world)
    assert world.problems() == []
    world.reopen()
    assert world.look() == before


def test_a_clean_end_leaves_a_copy_that_is_the_catalog(world: World) -> None:
    world.fill()
    world.drain()
    before = world.look()
    path = catalog_path(world.policy)
    world.parts.catalog.close()
    copies = CatalogCopies(world.parts.tree)
    assert keep_closed(path, world.parts.catalog.uuid, world.parts.catalog.seq, copies)
    closed = path.read_bytes()
    path.write_bytes(b"damaged")
    tiers = Tiers.open(world.policy)
    assert restore_clean(world.policy, tiers) is not None
    assert path.read_bytes() == closed
    # Once a mount began, the copy is no more than a copy.
    copies.forget_clean()
    path.write_bytes(b"damaged")
    assert restore_clean(world.policy, tiers) is None
    assert path.read_bytes() == b"damaged"
    tiers.close()
    rebuild(world)
    world.reopen()
    assert world.look() == before


# what others left there


JUNK = st.binary(max_size=300)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(JUNK, JUNK, JUNK, st.sampled_from(["", "x", "1", "99999999999999999999"]))
@example(b"[[2, 1, 1], [33188, 0, 0, 5], [0, 0, 0, 0], null, [[[2, \"..\"]]], [], []]", b"", b"", "1")
def test_no_junk_on_the_tiers_makes_a_rebuild_fail_or_leave_them(
    record: bytes, log: bytes, copy: bytes, number: str
) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        top = Path(path) / "top"
        top.mkdir()
        outside = Path(path) / "outside"
        outside.mkdir()
        (outside / "file").write_bytes(b"not ours")
        world = World(top)
        world.write(b"file", b"content")
        world.drain()
        world.crash()
        lose_catalog(world)
        shutil.rmtree(top / "memory")
        (replica,) = [path for path in (top / "nvme" / "data").rglob("*-*") if path.is_file()]
        os.setxattr(replica, XATTR, record)
        (replica.parent / "7-7").symlink_to(outside / "file")
        (replica.parent / f"8-8{SUFFIX}").write_bytes(record)
        os.mkfifo(replica.parent / "9-9")
        catalog = top / "archive" / ".tierfs" / "catalog"
        (catalog / f"log-{number}").write_bytes(log)
        (catalog / f"copy-{number}").write_bytes(copy)
        (catalog / f"copy-{number}.json").write_bytes(record)
        (top / "archive" / "outside").symlink_to(outside)
        (top / "archive" / "strange").mkdir()
        report = rebuild_all(world.policy, lambda done, total, what: None)
        assert report.problems == []
        world.reopen()
        found = world.look()
        assert found[b"file"][9] == [b"content"]
        assert found[b"outside"][7] == os.fsencode(outside)
        assert b"outside/file" not in found
        world.close()
        assert (outside / "file").read_bytes() == b"not ours"
        assert os.listdir(outside) == ["file"]


@pytest.mark.parametrize("kind", ["directory", "fifo", "symlink"])
@pytest.mark.parametrize("name", ["log-999", "copy-999", "copy-999.json"])
def test_something_else_in_the_place_of_a_log_or_copy_is_passed_over(world: World, name: str, kind: str) -> None:
    world.write(b"file", b"content")
    world.drain()
    world.crash()
    lose_catalog(world)
    path = world.top / "archive" / ".tierfs" / "catalog" / name
    path.mkdir() if kind == "directory" else os.mkfifo(path) if kind == "fifo" else path.symlink_to("/dev/zero")
    assert rebuild_all(world.policy, lambda done, total, what: None).problems == []
    world.reopen()
    assert world.look()[b"file"][9] == [b"content"]


VALUES = st.recursive(st.none() | st.integers() | st.text(max_size=5), st.lists)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
@example(b'[1,0,"[5,[[\\"remove\\",\\"../x\\",\\"\\",\\"\\",0,0,null]],[],[],[]]",[]]')
@example(b'[1,0,"[5,[],[[1,\\"..\\",2,2]],[],[]]",[]]')
@example(b'[1,0,"[5,[],[[1,\\".tierfs\\",2,2]],[],[]]",[]]')
@example(b'[1,0,"[5,[],[],[],[]]",[[2,16877,0,0,0,0,0,0,0,"x",null,{}]]]')
def test_a_logged_batch_is_a_legal_one_or_none(raw: bytes) -> None:
    assert batches.decode(raw) is None


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=100))
@example(b"{}")
@example(b'{"format":1,"number":1,"bytes":-1,"digest":"x","uuid":"u","seq":1,"at_ns":1}')
@example(b'{"format":1,"number":1,"bytes":1,"digest":"/etc","uuid":"u","seq":1,"at_ns":1}')
@example(b"[" * 4000)
def test_a_damaged_manifest_is_none(raw: bytes) -> None:
    assert parse_manifest(raw, 1) is None


def test_a_very_deep_archive_is_walked(top: Path) -> None:
    world = World(top)
    path = b"d"
    world.mkdir(path)
    for _ in range(120):
        path += b"/d"
        world.mkdir(path)
    world.write(path + b"/file", b"deep")
    world.drain()
    drop_copies(world)
    rebuilt(world, "memory", "nvme")
    assert world.look()[path + b"/file"][9] == [b"deep"]
    world.close()


def test_a_directory_of_files_becomes_an_archive(top: Path) -> None:
    """No state, no tier and nobody's archive: what is there is mounted as it is."""
    (top / "archive" / "a").mkdir(parents=True)
    (top / "archive" / "a" / "file").write_bytes(b"plain")
    os.link(top / "archive" / "a" / "file", top / "archive" / "b")
    world = World.__new__(World)
    world.top, world.policy = top, policy_of(top)
    world.policy.state.mkdir()
    rebuild(world)
    world.reopen()
    found = world.look()
    assert found[b"a/file"][9] == [b"plain"]
    assert found[b"a/file"][5] == 2
    assert stat.S_ISDIR(found[b"a"][0])  # type: ignore[arg-type]
    world.close()
