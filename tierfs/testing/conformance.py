"""What every tier must do, as tests: subclass a contract, give it the fixture ``tier``, and pytest runs it.

The contracts look at what stands in the tier's directory, not only at what the tier says of itself, so that a wrapper
or another kind of store cannot pass by agreeing with itself.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierfs.errors import TierError
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.blobs import PART, unescape
from tierfs.tiers.copy import digest_file
from tierfs.tiers.object_content import send_file
from tierfs.tiers.object_tree import ObjectTree
from tierfs.tiers.root import RESERVED
from tierfs.tiers.tree import TreeStore
from tierfs.tiers.walk import walk

DATA = b"checkpoint" * 1000
MTIME = 1_700_000_000_123_456_789


def files_below(root: Path) -> dict[str, bytes]:
    """Path → content of every regular file."""
    found = {}
    for where, _, names in os.walk(root):
        for name in names:
            path = Path(where) / name
            if path.is_file() and not path.is_symlink():
                found[str(path.relative_to(root))] = path.read_bytes()
    return found


def fill(fd: int, data: bytes) -> None:
    assert os.pwrite(fd, data, 0) == len(data)


class ReplicaStoreContract:
    """For a prepared store of replicas, empty."""

    def contents(self, tier: ReplicaStore) -> dict[str, bytes]:
        """Key → content, as it stands there."""
        return {Path(path).name: data for path, data in files_below(tier.root).items() if path.startswith("data/")}

    def test_created_written_read_removed(self, tier: ReplicaStore) -> None:
        fd = tier.create("2-1")
        fill(fd, DATA)
        os.close(fd)
        assert self.contents(tier) == {"2-1": DATA}
        assert (tier.size("2-1"), list(tier.keys())) == (len(DATA), ["2-1"])
        fd = tier.open("2-1", write=False)
        assert os.pread(fd, len(DATA) + 1, 0) == DATA
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        os.close(fd)
        tier.remove("2-1")
        tier.remove("2-1")
        assert (self.contents(tier), list(tier.keys())) == ({}, [])

    def test_a_key_is_given_once(self, tier: ReplicaStore) -> None:
        os.close(tier.create("2-1"))
        with pytest.raises(FileExistsError):
            tier.create("2-1")

    def test_what_is_not_there(self, tier: ReplicaStore) -> None:
        for call in (tier.open, tier.size):
            with pytest.raises(FileNotFoundError):
                call("2-1")

    def test_published_at_once_and_whole(self, tier: ReplicaStore) -> None:
        temp = tier.temporary("2-1")
        fill(temp.fd, DATA)
        assert (self.contents(tier), list(tier.keys())) == ({}, [])
        tier.publish(temp, "2-1")
        assert self.contents(tier) == {"2-1": DATA}
        assert [path for path in files_below(tier.root) if path.startswith("tmp/")] == []

    def test_discarded_leaves_nothing(self, tier: ReplicaStore) -> None:
        temp = tier.temporary("2-1")
        fill(temp.fd, DATA)
        temp.discard()
        assert [path for path in files_below(tier.root) if path.startswith(("tmp/", "data/"))] == []

    @pytest.mark.parametrize(
        "key", ["", "..", ".", "../2-1", "2-1/../..", "/etc/passwd", "2-1\0", "2-1\n", "2_1", "x-1", "f" * 16 + "-1"]
    )
    def test_no_key_leads_out(self, tier: ReplicaStore, key: str) -> None:
        before = files_below(tier.root.parent)
        for call in (tier.create, tier.open, tier.size, tier.remove):
            with pytest.raises(OSError, match="not a replica key") as refused:
                call(key)
            assert refused.value.errno == errno.EINVAL
        assert files_below(tier.root.parent) == before

    def test_what_others_left_is_no_replica(self, tier: ReplicaStore) -> None:
        os.close(tier.create("2-1"))
        (directory,) = [path.parent for path in (tier.root / "data").rglob("2-1")]
        for name in ("README", "2-1.bak", "f" * 20 + "-1", "-"):
            (directory / name).touch()
        (tier.root / "data" / "stray").touch()
        assert list(tier.keys()) == ["2-1"]

    def test_a_symlink_in_a_replicas_place_is_not_followed(self, tier: ReplicaStore, tmp_path: Path) -> None:
        outside = tmp_path / "outside"
        outside.write_bytes(b"secret")
        os.close(tier.create("2-1"))
        (place,) = (tier.root / "data").rglob("2-1")
        place.unlink()
        place.symlink_to(outside)
        with pytest.raises(OSError, match="symbolic links") as refused:
            tier.open("2-1")
        assert refused.value.errno == errno.ELOOP
        assert tier.size("2-1") != len(b"secret")
        tier.remove("2-1")
        assert outside.read_bytes() == b"secret"

    def test_nobody_else_may_look(self, tier: ReplicaStore) -> None:
        os.close(tier.create("2-1"))
        for where, directories, names in os.walk(tier.root):
            for path in [Path(where), *(Path(where) / name for name in (*directories, *names))]:
                status = path.lstat()
                private = stat.S_IMODE(status.st_mode) & 0o077 == 0
                assert private or path.name == "tierfs-tier" or path.parent != tier.root
        assert stat.S_IMODE(tier.root.stat().st_mode) == 0o700

    def test_space(self, tier: ReplicaStore) -> None:
        usage = tier.usage(5)
        assert usage.used == 5
        assert 0 <= usage.available <= usage.capacity

    def test_works_again_after_it_was_closed(self, tier: ReplicaStore) -> None:
        fd = tier.create("2-1")
        fill(fd, DATA)
        os.close(fd)
        tier.close()
        for call in (lambda: tier.create("2-2"), lambda: tier.usage(0), lambda: list(tier.keys())):
            with pytest.raises(OSError, match="not open"):
                call()
        tier.prepare()
        assert self.contents(tier) == {"2-1": DATA}
        tier.probe()
        assert [path for path in files_below(tier.root) if path.startswith("tmp/")] == []

    def test_another_directory_in_its_place_is_left_alone(self, tier: ReplicaStore) -> None:
        aside = tier.root.with_name("aside")
        tier.root.rename(aside)
        tier.root.mkdir()
        for call in (tier.probe, lambda: tier.temporary("2-1")):
            with pytest.raises(TierError) as failed:
                call()
            assert failed.value.temporary
        assert list(tier.root.iterdir()) == []
        tier.root.rmdir()
        aside.rename(tier.root)
        tier.probe()


class ArchiveContract:
    """For a prepared archive, empty, whatever it is kept in."""

    def tree(self, tier: Any) -> dict[str, bytes]:
        """Path → content of every regular file, as ordinary tools see it."""
        raise NotImplementedError

    def send(self, tier: Any, data: bytes) -> bytes:
        """Name of a temporary with this content, durable."""
        raise NotImplementedError

    def read(self, tier: Any, path: tuple[bytes, ...]) -> bytes:
        raise NotImplementedError

    def another(self, tier: Any) -> Any:
        """The same archive, as another process has it."""
        raise NotImplementedError

    def put(self, tier: Any, path: tuple[bytes, ...], data: bytes = DATA, mode: int = 0o640) -> bytes:
        temp = self.send(tier, data)
        assert tier.publish(temp, path, mode, os.geteuid(), os.getegid(), MTIME, {b"user.a": b"1"})
        return temp

    def test_published_at_once_whole_and_with_its_attributes(self, tier: Any) -> None:
        temp = self.send(tier, DATA)
        assert self.tree(tier) == {}
        assert tier.publish(temp, (b"a", b"b"), 0o640, os.geteuid(), os.getegid(), MTIME, {})
        assert self.tree(tier) == {"a/b": DATA}
        status = tier.status((b"a", b"b"))
        assert stat.S_ISREG(status.st_mode)
        assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns, status.st_size) == (0o640, MTIME, len(DATA))
        assert (status.st_uid, status.st_gid, status.st_nlink) == (os.geteuid(), os.getegid(), 1)
        assert not tier.publish(temp, (b"a", b"b"), 0o640, 0, 0, MTIME, {}), "it is there already"
        assert tier.stands((b"a", b"b"), temp, len(DATA))

    def test_a_publish_replaces_what_stood_there(self, tier: Any) -> None:
        self.put(tier, (b"f",), b"old")
        tier.symlink(b"f", (b"l",))
        self.put(tier, (b"f",), b"new content")
        self.put(tier, (b"l",), b"a file now")
        assert self.tree(tier) == {"f": b"new content", "l": b"a file now"}
        tier.symlink(b"f", (b"f",))
        assert self.tree(tier) == {"l": b"a file now"}

    def test_every_step_may_be_taken_twice(self, tier: Any) -> None:
        self.put(tier, (b"f",))
        twice: list[Callable[[], object]] = [
            lambda: tier.mkdir((b"d",)),
            lambda: tier.symlink(b"f", (b"l",)),
            lambda: tier.special((b"p",), stat.S_IFIFO | 0o600, 0),
            lambda: tier.link((b"f",), (b"h",)),
            lambda: tier.rename((b"f",), (b"d", b"g")),
            lambda: tier.set_attributes((b"h",), 0o600, os.geteuid(), os.getegid(), MTIME, {}),
            lambda: tier.sync_directories([(), (b"d",)]),
        ]
        for step in twice:
            step()
            step()
        assert self.tree(tier) == {"d/g": DATA, "h": DATA}
        kinds = {standing.path: stat.S_IFMT(standing.status.st_mode) for standing in walk(tier)}
        assert kinds == {
            (b"d",): stat.S_IFDIR,
            (b"d", b"g"): stat.S_IFREG,
            (b"h",): stat.S_IFREG,
            (b"l",): stat.S_IFLNK,
            (b"p",): stat.S_IFIFO,
        }
        assert [standing.target for standing in walk(tier) if standing.path == (b"l",)] == [b"f"]
        removals: list[Callable[[], object]] = [
            lambda: tier.rmdir((b"d",)),  # it is not empty
            lambda: tier.remove((b"h",)),
            lambda: tier.remove((b"d",)),  # it is a directory
            lambda: tier.remove((b"d", b"g")),
            lambda: tier.remove((b"l",)),
            lambda: tier.remove((b"p",)),
            lambda: tier.rmdir((b"d",)),
        ]
        for step in removals:
            step()
            step()
        assert self.tree(tier) == {}
        assert list(walk(tier)) == []

    def test_names_of_one_file_share_their_attributes(self, tier: Any) -> None:
        self.put(tier, (b"f",))
        tier.link((b"f",), (b"d", b"h"))
        tier.set_attributes((b"f",), 0o604, os.geteuid(), os.getegid(), MTIME + 1, {b"user.b": b"2"})
        tier.rename((b"d",), (b"e",))
        first, second = tier.status((b"f",)), tier.status((b"e", b"h"))
        assert first.st_ino == second.st_ino
        assert first.st_nlink > 1
        for status in (first, second):
            assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o604, MTIME + 1)
        xattrs = {standing.path: standing.xattrs for standing in walk(tier)}
        assert xattrs[b"f",] == xattrs[b"e", b"h"]
        self.put(tier, (b"f",), b"another file")
        assert tier.status((b"f",)).st_ino != second.st_ino
        assert self.tree(tier) == {"f": b"another file", "e/h": DATA}
        tier.link((b"f",), (b"e", b"h"))
        assert self.tree(tier) == {"f": b"another file", "e/h": b"another file"}
        assert tier.status((b"f",)).st_ino == tier.status((b"e", b"h")).st_ino

    def test_two_names_of_one_file_become_one(self, tier: Any) -> None:
        self.put(tier, (b"f",))
        tier.link((b"f",), (b"h",))
        for _ in range(2):
            tier.rename((b"f",), (b"h",))
        assert self.tree(tier) == {"h": DATA}

    def test_a_directory_moves_with_all_that_is_in_it(self, tier: Any) -> None:
        tier.mkdir((b"d",))
        tier.set_attributes((b"d",), 0o750, os.geteuid(), os.getegid(), MTIME, {})
        tier.mkdir((b"d", b"empty"))
        tier.symlink(b"x", (b"d", b"l"))
        for number in range(20):
            self.put(tier, (b"d", b"sub", b"%d" % number), b"%d" % number)
        self.put(tier, (b"da",), b"beside")
        for _ in range(2):
            tier.rename((b"d",), (b"there", b"e"))
        assert self.tree(tier) == {f"there/e/sub/{n}": b"%d" % n for n in range(20)} | {"da": b"beside"}
        assert stat.S_IMODE(tier.status((b"there", b"e")).st_mode) == 0o750
        assert stat.S_ISDIR(tier.status((b"there", b"e", b"empty")).st_mode)
        assert stat.S_ISLNK(tier.status((b"there", b"e", b"l")).st_mode)
        assert tier.status((b"d",)) is None

    def test_a_directory_is_merged_into_one_that_is_there(self, tier: Any) -> None:
        self.put(tier, (b"a", b"both"), b"moved")
        self.put(tier, (b"a", b"sub", b"x"), b"x")
        self.put(tier, (b"b", b"both"), b"stood")
        self.put(tier, (b"b", b"sub", b"y"), b"y")
        tier.rename((b"a",), (b"b",))
        assert self.tree(tier) == {"b/both": b"moved", "b/sub/x": b"x", "b/sub/y": b"y"}

    def test_what_is_of_another_kind_gives_way(self, tier: Any) -> None:
        self.put(tier, (b"f",))
        tier.mkdir((b"d",))
        tier.rename((b"f",), (b"d",))
        assert self.tree(tier) == {"d": DATA}
        self.put(tier, (b"e", b"x"))
        tier.rename((b"e",), (b"d",))
        assert self.tree(tier) == {"d/x": DATA}
        self.put(tier, (b"g",))
        with pytest.raises(TierError):
            tier.rename((b"g",), (b"d",))
        assert self.tree(tier) == {"d/x": DATA, "g": DATA}

    def test_two_names_change_places_once(self, tier: Any) -> None:
        self.put(tier, (b"a",), b"1")
        self.put(tier, (b"b",), b"2")
        for _ in range(2):
            tier.exchange((b"a",), (b"b",), "7")
        assert self.tree(tier) == {"a": b"2", "b": b"1"}
        tier.forget_exchange("7")
        tier.forget_exchange("7")
        self.put(tier, (b"d", b"x"), b"in a directory")
        tier.exchange((b"a",), (b"d",), "8")
        assert self.tree(tier) == {"a/x": b"in a directory", "d": b"2", "b": b"1"}
        tier.forget_exchange("8")

    def test_read_back(self, tier: Any) -> None:
        self.put(tier, (b"a", b"b"))
        assert self.read(tier, (b"a", b"b")) == DATA
        assert (tier.size((b"a", b"b")), tier.size((b"gone",)), tier.size((b"a",))) == (len(DATA), None, None)
        with pytest.raises(TierError) as missing:
            self.read(tier, (b"gone",))
        assert missing.value.errno == errno.ENOENT

    def test_names_of_any_bytes(self, tier: Any) -> None:
        names = [b"a b%41", "Ω é".encode(), b"\xff\xfe", b"line\nfeed", b"back\\slash", b"...", b"n" * 255]
        for name in names:
            self.put(tier, (b"d", name), name)
        deep = tuple(b"%d" % number * 60 for number in range(9)) * 4
        self.put(tier, deep, b"deep")
        for path in [*((b"d", name) for name in names), deep]:
            assert self.read(tier, path) == (b"deep" if path == deep else path[1])
        found = {standing.path for standing in walk(tier) if stat.S_ISREG(standing.status.st_mode)}
        assert found == {deep, *((b"d", name) for name in names)}
        tier.rename((deep[0],), (b"moved",))
        assert self.read(tier, (b"moved", *deep[1:])) == b"deep"

    @pytest.mark.parametrize(
        "path", [(b"..", b"x"), (b".",), (b"",), (b"a/b",), (b"a\0",), (RESERVED, b"tmp"), (), (b"a", b"..", b"..")]
    )
    def test_no_path_leads_out(self, tier: Any, path: tuple[bytes, ...]) -> None:
        self.put(tier, (b"f",))
        temp = self.send(tier, b"")
        calls: list[Callable[[], Any]] = [
            lambda: tier.mkdir(path),
            lambda: tier.symlink(b"x", path),
            lambda: tier.rename((b"f",), path),
            lambda: tier.link((b"f",), path),
            lambda: tier.publish(temp, path, 0o600, 0, 0, MTIME, {}),
            lambda: self.read(tier, path),
        ]
        for call in calls:
            with pytest.raises(TierError):
                call()
        tier.discard(temp)
        assert self.tree(tier) == {"f": DATA}

    def test_what_is_set_aside_is_none_of_the_tree(self, tier: Any) -> None:
        self.put(tier, (b"f",))
        for _ in range(2):
            tier.rename((b"f",), (RESERVED, b"kept", b"1a"))
        assert self.tree(tier) == {}
        assert list(walk(tier)) == []
        assert self.read(tier, (RESERVED, b"kept", b"1a")) == DATA

    def test_what_waits_is_removed_by_a_sweep_of_another_process(self, tier: Any) -> None:
        kept, gone = self.send(tier, b"kept"), self.send(tier, b"gone")
        tier.sweep([])
        self.another(tier).sweep([kept])
        owner = os.geteuid(), os.getegid()
        assert tier.publish(kept, (b"kept",), 0o600, *owner, MTIME, {})
        assert not tier.publish(gone, (b"gone",), 0o600, *owner, MTIME, {})
        assert self.tree(tier) == {"kept": b"kept"}

    def test_belongs_to_one_catalog(self, tier: Any) -> None:
        assert tier.owner() is None
        with pytest.raises(TierError):
            tier.check_catalog("one", claim=False, known=True)
        tier.check_catalog("one", claim=True)
        tier.check_catalog("one", claim=True, known=True)
        assert tier.owner() == "one"
        with pytest.raises(TierError):
            tier.check_catalog("another", claim=True)

    def test_space(self, tier: Any) -> None:
        usage = tier.usage(5)
        assert usage.used == 5
        assert 0 <= usage.available <= usage.capacity


class ObjectTreeContract(ArchiveContract):
    """For an archive in a store of blobs."""

    def tree(self, tier: ObjectTree) -> dict[str, bytes]:
        return {
            "/".join(os.fsdecode(unescape(part)) for part in blob.key.split("/")): bytes(tier.blobs.get(blob.key))
            for blob in tier.blobs.scan()
        }

    def send(self, tier: ObjectTree, data: bytes) -> bytes:
        return send_all(tier, data)

    def another(self, tier: ObjectTree) -> ObjectTree:
        made = ObjectTree(tier.blobs, tier.root)
        made.prepare()
        return made

    def read(self, tier: ObjectTree, path: tuple[bytes, ...]) -> bytes:
        content = tier.content(path)
        assert tier.content_first([(b"not there",), path], content.size).size == content.size
        return bytes(content.read(0, content.size))

    def test_a_large_file_goes_in_parts_to_where_it_will_stand(self, tier: ObjectTree) -> None:
        data = os.urandom(PART + 12345)
        for direct, path in ((True, (b"a", b"direct")), (False, (b"by the way",))):
            temp = send_all(tier, data, path if direct else None)
            assert "/".join(map(os.fsdecode, path)) not in self.tree(tier)
            assert tier.publish(temp, path, 0o600, 0, 0, MTIME, {})
            assert self.read(tier, path) == data
            assert not tier.publish(temp, path, 0o600, 0, 0, MTIME, {})

    def test_sent_to_a_name_that_it_lost_meanwhile_it_is_not_published(self, tier: ObjectTree) -> None:
        temp = send_all(tier, os.urandom(PART + 1), (b"before",))
        assert not tier.publish(temp, (b"after",), 0o600, 0, 0, MTIME, {})
        assert not tier.publish(temp, (b"before",), 0o600, 0, 0, MTIME, {})
        assert self.tree(tier) == {}
        assert tier.ends_with_process(temp)
        assert not tier.temporary("2-2", (b"after",)).direct, "the next time it waits where any name will do"
        other = tier.temporary("3-1", (b"other",))
        assert other.direct
        other.discard()

    def test_another_version_of_the_same_size_is_not_taken_for_what_was_published(self, tier: ObjectTree) -> None:
        self.put(tier, (b"f",), b"1" * 10)
        lost = self.send(tier, b"2" * 10)
        tier.discard(lost)
        assert not tier.publish(lost, (b"f",), 0o600, 0, 0, MTIME, {})
        assert not tier.stands((b"f",), lost, 10)

    def test_files_of_others_are_seen_and_moved(self, tier: ObjectTree) -> None:
        tier.blobs.put("theirs/a/b", b"1")
        tier.blobs.put("theirs/c", b"2")
        assert {standing.path for standing in walk(tier)} == {
            (b"theirs",),
            (b"theirs", b"a"),
            (b"theirs", b"a", b"b"),
            (b"theirs", b"c"),
        }
        tier.rename((b"theirs",), (b"ours",))
        tier.set_attributes((b"ours", b"c"), 0o600, 1, 2, MTIME, {})
        assert self.tree(tier) == {"ours/a/b": b"1", "ours/c": b"2"}
        status = tier.status((b"ours", b"c"))
        assert status is not None
        assert (stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid) == (0o600, 1, 2)


def send_all(tier: ObjectTree, data: bytes, path: tuple[bytes, ...] | None = None) -> bytes:
    """Name of a temporary with this content."""
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        temp = tier.temporary("2-1", path)
        digest = send_file(file.fileno(), temp, len(data))
        assert digest == digest_file(file.fileno(), len(data))
    return temp.name


class TreeStoreContract(ArchiveContract):
    """For an archive in a directory."""

    def tree(self, tier: TreeStore) -> dict[str, bytes]:
        return {path: data for path, data in files_below(tier.root).items() if not path.startswith(".tierfs/")}

    def send(self, tier: TreeStore, data: bytes) -> bytes:
        temp = tier.temporary("2-1")
        fill(temp.fd, data)
        os.fsync(temp.fd)
        temp.close()
        return temp.name

    def another(self, tier: TreeStore) -> TreeStore:
        made = TreeStore(tier.name, tier.root)
        made.prepare()
        return made

    def read(self, tier: TreeStore, path: tuple[bytes, ...]) -> bytes:
        found = set()
        for fd in (tier.open(path), tier.open_first([(b"not there",), path], 0)):
            found.add(os.pread(fd, os.fstat(fd).st_size + 1, 0))
            os.close(fd)
        (data,) = found
        return data

    def test_is_what_lstat_says(self, tier: TreeStore) -> None:
        self.put(tier, (b"a", b"b"))
        tier.symlink(b"b", (b"a", b"l"))
        assert tier.status((b"a", b"b")) == (tier.root / "a" / "b").lstat()
        assert os.readlink(tier.root / "a" / "l") == "b"

    @pytest.mark.parametrize(
        "path", [(b"..", b"x"), (b".",), (b"",), (b"a/b",), (b"a\0",), (RESERVED, b"tmp"), (), (b"a", b"..", b"..")]
    )
    def test_nothing_beside_the_root_changes(self, tier: TreeStore, path: tuple[bytes, ...]) -> None:
        before = files_below(tier.root.parent)
        calls: list[Callable[[], object]] = [lambda: tier.mkdir(path), lambda: tier.symlink(b"x", path)]
        for call in calls:
            with pytest.raises(TierError):
                call()
        assert files_below(tier.root.parent) == before

    @pytest.mark.parametrize("deep", [False, True])
    def test_a_symlink_where_a_directory_should_be_is_not_followed(
        self, tier: TreeStore, tmp_path: Path, deep: bool
    ) -> None:
        outside = tmp_path / "outside"
        (outside / "sub").mkdir(parents=True)
        (outside / "secret").write_bytes(b"secret")
        parent: tuple[bytes, ...] = (b"real", b"link") if deep else (b"link",)
        if deep:
            tier.mkdir((b"real",))
        (tier.root / os.fsdecode(b"/".join(parent))).symlink_to(outside)
        temp = tier.temporary("2-1")
        temp.close()
        for call in (
            lambda: tier.open((*parent, b"secret")),
            lambda: tier.mkdir((*parent, b"new")),
            lambda: tier.publish(temp.name, (*parent, b"secret"), 0o600, 0, 0, MTIME, {}),
            lambda: tier.open_first([(*parent, b"secret")], 6),
        ):
            with pytest.raises(TierError):
                call()
        tier.remove((*parent, b"secret"))
        tier.rename((*parent, b"secret"), (b"stolen",))
        assert tier.size((*parent, b"secret")) is None
        tier.discard(temp.name)
        assert sorted(os.listdir(outside)) == ["secret", "sub"]
        assert not (tier.root / "stolen").exists()

    def test_another_directory_in_its_place_is_left_alone(self, tier: TreeStore) -> None:
        aside = tier.root.with_name("aside")
        tier.root.rename(aside)
        tier.root.mkdir()
        for call in (tier.probe, tier.attach, lambda: tier.temporary("2-1")):
            with pytest.raises(TierError) as failed:
                call()
            assert failed.value.temporary
        assert list(tier.root.iterdir()) == []
        tier.root.rmdir()
        aside.rename(tier.root)
        tier.probe()
        assert [path for path in files_below(tier.root) if path.startswith(".tierfs/tmp/")] == []
