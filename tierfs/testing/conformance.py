"""What every tier must do, as tests: subclass a contract, give it the fixture ``tier``, and pytest runs it.

The contracts look at what stands in the tier's directory, not only at what the tier says of itself, so that a wrapper
or another kind of store cannot pass by agreeing with itself.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tierfs.errors import TierError
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.root import RESERVED
from tierfs.tiers.tree import TreeStore

DATA = b"checkpoint" * 1000
MTIME = 1_700_000_000_123_456_789


def files_below(root: Path) -> dict[str, bytes]:
    """Path → content of every regular file."""
    found = {}
    for where, _, names in os.walk(root):
        for name in names:
            path = Path(where) / name
            if not path.is_symlink():
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


class TreeStoreContract:
    """For a prepared archive, empty."""

    def tree(self, tier: TreeStore) -> dict[str, bytes]:
        return {path: data for path, data in files_below(tier.root).items() if not path.startswith(".tierfs/")}

    def put(self, tier: TreeStore, path: tuple[bytes, ...], data: bytes = DATA, mode: int = 0o640) -> bytes:
        temp = tier.temporary("2-1")
        fill(temp.fd, data)
        os.fsync(temp.fd)
        temp.close()
        assert tier.publish(temp.name, path, mode, os.geteuid(), os.getegid(), MTIME, {b"user.a": b"1"})
        return temp.name

    def test_published_at_once_whole_and_with_its_attributes(self, tier: TreeStore) -> None:
        temp = tier.temporary("2-1")
        fill(temp.fd, DATA)
        assert self.tree(tier) == {}
        temp.close()
        assert tier.publish(temp.name, (b"a", b"b"), 0o640, os.geteuid(), os.getegid(), MTIME, {})
        assert self.tree(tier) == {"a/b": DATA}
        status = (tier.root / "a" / "b").stat()
        assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o640, MTIME)
        assert not tier.publish(temp.name, (b"a", b"b"), 0o640, 0, 0, MTIME, {}), "it is there already"

    def test_every_step_may_be_taken_twice(self, tier: TreeStore) -> None:
        self.put(tier, (b"f",))
        twice: list[Callable[[], object]] = [
            lambda: tier.mkdir((b"d",)),
            lambda: tier.symlink(b"f", (b"l",)),
            lambda: tier.link((b"f",), (b"h",)),
            lambda: tier.rename((b"f",), (b"d", b"g")),
            lambda: tier.set_attributes((b"h",), 0o600, os.geteuid(), os.getegid(), MTIME, {}),
            lambda: tier.sync_directories([(), (b"d",)]),
        ]
        for step in twice:
            step()
            step()
        assert self.tree(tier) == {"d/g": DATA, "h": DATA}
        assert os.readlink(tier.root / "l") == "f"
        for step in (lambda: tier.remove((b"h",)), lambda: tier.remove((b"d", b"g")), lambda: tier.rmdir((b"d",))):
            step()
            step()
        assert self.tree(tier) == {}

    def test_two_names_change_places_once(self, tier: TreeStore) -> None:
        self.put(tier, (b"a",), b"1")
        self.put(tier, (b"b",), b"2")
        for _ in range(2):
            tier.exchange((b"a",), (b"b",), "7")
        assert self.tree(tier) == {"a": b"2", "b": b"1"}
        tier.forget_exchange("7")
        tier.forget_exchange("7")

    def test_read_back(self, tier: TreeStore) -> None:
        self.put(tier, (b"a", b"b"))
        for fd in (tier.open((b"a", b"b")), tier.open_first([(b"gone",), (b"a", b"b")], len(DATA))):
            assert os.pread(fd, len(DATA) + 1, 0) == DATA
            os.close(fd)
        assert (tier.size((b"a", b"b")), tier.size((b"gone",)), tier.size((b"a",))) == (len(DATA), None, None)
        with pytest.raises(TierError) as missing:
            tier.open((b"gone",))
        assert missing.value.errno == errno.ENOENT

    @pytest.mark.parametrize(
        "path", [(b"..", b"x"), (b".",), (b"",), (b"a/b",), (b"a\0",), (RESERVED, b"tmp"), (), (b"a", b"..", b"..")]
    )
    def test_no_path_leads_out(self, tier: TreeStore, path: tuple[bytes, ...]) -> None:
        before = files_below(tier.root.parent)
        temp = tier.temporary("2-1")
        temp.close()
        calls: list[Callable[[], Any]] = [
            lambda: tier.mkdir(path),
            lambda: tier.symlink(b"x", path),
            lambda: tier.rename((b"a",), path) if not self.tree(tier) else None,
            lambda: tier.publish(temp.name, path, 0o600, 0, 0, MTIME, {}),
            lambda: tier.open(path),
        ]
        for number, call in enumerate(calls):
            if number == 2:
                continue  # nothing to rename: no error, and nothing done
            with pytest.raises(TierError):
                call()
        tier.discard(temp.name)
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

    def test_space(self, tier: TreeStore) -> None:
        usage = tier.usage(5)
        assert usage.used == 5
        assert 0 <= usage.available <= usage.capacity
