from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import conftest_disks as disks
from tierfs.errors import TierError
from tierfs.policy.model import TierConfig
from tierfs.tiers.base import ReplicaStore
from tierfs.tiers.memory import MemoryMount, mounted_at, open_store
from tierfs.tiers.tree import TreeStore

MIB = 1 << 20
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def store(disk: Path) -> Iterator[ReplicaStore]:
    with tempfile.TemporaryDirectory(dir=disk) as root:
        made = ReplicaStore("nvme", Path(root) / "store", persistent=True, size=10 * MIB)
        made.prepare()
        yield made
        made.close()


def test_life_of_a_replica(store: ReplicaStore) -> None:
    fd = store.create("1f-2")
    os.write(fd, b"abc")
    os.close(fd)
    with pytest.raises(FileExistsError):
        store.create("1f-2")
    fd = store.open("1f-2")
    os.pwrite(fd, b"X", 3)
    os.close(fd)
    assert store.size("1f-2") == 4
    assert list(store.keys()) == ["1f-2"]
    store.remove("1f-2")
    store.remove("1f-2")
    assert list(store.keys()) == []
    for call in (store.open, store.size):
        with pytest.raises(FileNotFoundError):
            call("1f-2")
        with pytest.raises(FileNotFoundError):
            call("99-99")


def test_temporary_and_publish(store: ReplicaStore) -> None:
    temp = store.temporary("a-1")
    os.write(temp.fd, b"new")
    assert list(store.keys()) == []
    store.publish(temp, "a-1")
    assert store.size("a-1") == 3
    dropped = store.temporary("a-2")
    dropped.discard()
    assert list(store.keys()) == ["a-1"]
    assert os.listdir(store.root / "tmp") == []


def test_layout_and_modes(store: ReplicaStore) -> None:
    for number in range(50):
        os.close(store.create(f"{number:x}-1"))
    assert sorted(store.keys()) == sorted(f"{number:x}-1" for number in range(50))
    for path in (store.root, store.root / "tmp", store.root / "data", *(store.root / "data").iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    marker = json.loads((store.root / "tierfs-tier").read_text())
    assert marker == {"name": "nvme", "uuid": store.uuid, "format": 1}


@pytest.mark.parametrize("key", ["", "..", "../x-1", "a", "A-1", "1-1/..", "a-1\n"])
def test_bad_keys(store: ReplicaStore, key: str) -> None:
    for call in (store.create, store.open, store.size, store.remove):
        with pytest.raises(OSError, match="not a replica key"):
            call(key)


def test_prepare_again(store: ReplicaStore) -> None:
    os.close(store.create("1-1"))
    store.temporary("1-2").close()
    again = ReplicaStore("nvme", store.root, persistent=True)
    again.prepare()
    assert (list(again.keys()), again.uuid) == (["1-1"], store.uuid)
    assert os.listdir(store.root / "tmp") == []
    again.close()
    with pytest.raises(TierError, match="belongs to a tier called nvme"):
        ReplicaStore("other", store.root, persistent=True).prepare()
    (store.root / "tierfs-tier").write_text("{")
    with pytest.raises(TierError, match="damaged"):
        ReplicaStore("nvme", store.root, persistent=True).prepare()
    (store.root / "tierfs-tier").write_text('{"name": "nvme", "uuid": "1", "format": 2}')
    with pytest.raises(TierError, match="format 2"):
        ReplicaStore("nvme", store.root, persistent=True).prepare()


@needs_root
def test_a_removed_directory_for_temporary_files_is_made_again(store: ReplicaStore) -> None:
    def publish() -> None:
        temp = store.temporary("1-1")
        store.publish(temp, "1-1")

    def describe() -> None:
        fd = store.create("2-1")
        try:
            store.describe(fd, "2-1", lambda *_: b"x" * 100_000, None)  # larger than any xattr: by way of tmp
        finally:
            os.close(fd)

    private = store.root / "tmp"
    for again in (store.attach, store.probe, publish, describe):
        shutil.rmtree(private)
        again()
        assert stat.S_IMODE(private.stat().st_mode) == 0o700
        assert list(private.iterdir()) == []
    assert sorted(store.keys()) == ["1-1", "2-1"]
    temp = store.temporary("3-1")
    shutil.rmtree(private)
    with pytest.raises(TierError) as caught:
        store.publish(temp, "3-1")
    assert caught.value.temporary
    temp.discard()
    temp = store.temporary("3-1")
    store.publish(temp, "3-1")
    assert sorted(store.keys()) == ["1-1", "2-1", "3-1"]


def test_no_directory_is_made_where_another_tier_or_none_is(store: ReplicaStore) -> None:
    store.root.rename(store.root.with_name("away"))
    store.root.mkdir(mode=0o700)
    for says in ("still mounted", "another tier"):
        if says == "another tier":
            other = ReplicaStore("nvme", store.root, persistent=True)
            other.prepare()
            other.close()
            (store.root / "tmp").rmdir()
        for attempt in (store.attach, store.probe, lambda: store.temporary("1-1")):
            with pytest.raises(TierError, match=says) as caught:
                attempt()
            assert caught.value.temporary
        assert not (store.root / "tmp").exists()


def test_foreign_or_shared_directories_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "theirs"
    root.mkdir()
    os.chown(root, 1234, 1234)
    with pytest.raises(TierError, match="belongs to user 1234") as caught:
        ReplicaStore("t", root, persistent=True).prepare()
    assert not caught.value.temporary
    os.chown(root, 0, 0)
    root.chmod(0o1777)
    with pytest.raises(TierError, match="shared directory"):
        ReplicaStore("t", root, persistent=True).prepare()
    assert stat.S_IMODE(root.stat().st_mode) == 0o1777


def test_usage(store: ReplicaStore, disk: Path) -> None:
    fs = os.statvfs(disk)
    usage = store.usage(3 * MIB)
    assert (usage.capacity, usage.used, usage.available) == (10 * MIB, 3 * MIB, 7 * MIB)
    assert store.usage(11 * MIB).available == 0
    store.limit = None
    assert store.usage(0).capacity == fs.f_blocks * fs.f_frsize
    assert store.usage(0).available <= store.usage(0).capacity


def test_a_full_disk(store: ReplicaStore, disk: Path) -> None:
    if str(disk).startswith("/dev/shm"):
        pytest.skip("that would fill the machine's memory")
    fd = store.create("1-1")
    with pytest.raises(OSError, match="No space") as caught:
        disks.fill(fd)
    assert caught.value.errno == errno.ENOSPC
    os.close(fd)
    assert store.usage(0).available < MIB
    store.remove("1-1")
    os.close(store.create("1-2"))


def config(**more: object) -> TierConfig:
    fields: dict[str, object] = {"name": "memory", "kind": "memory", "path": None, "size": 64 * MIB}
    return TierConfig(**{**fields, "high": 0.85, "low": 0.6, **more})  # type: ignore[arg-type]


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "with space" / "memory"
    yield path
    MemoryMount("memory", path, 0).unmount()


@needs_root
def test_own_tmpfs_outlives_its_maker(mountpoint: Path) -> None:
    store, mount = open_store(config(), mountpoint)
    assert mount is not None
    store.prepare()
    assert not store.persistent
    assert mounted_at(mountpoint) == ("tmpfs", "tierfs")
    os.close(store.create("1-1"))
    assert store.usage(0).capacity == 64 * MIB
    again, mount = open_store(config(size=32 * MIB), mountpoint)
    assert mount is not None
    again.prepare()
    assert list(again.keys()) == ["1-1"]
    assert again.usage(0).capacity == 32 * MIB
    mount.resize(16 * MIB)
    assert again.usage(0).capacity == 16 * MIB
    fd = again.create("1-2")
    with pytest.raises(OSError, match="No space"):
        disks.fill(fd)
    with pytest.raises(TierError):
        mount.resize(MIB)
    os.close(fd)
    mount.unmount()
    mount.unmount()
    assert mounted_at(mountpoint) is None
    for one in (store, again):
        one.close()


@needs_root
def test_mount_options(mountpoint: Path) -> None:
    with pytest.raises(TierError, match="NUMA node"):
        open_store(config(numa=(1000,)), mountpoint)
    _, mount = open_store(config(numa=(0,), huge="always"), mountpoint)
    assert mount is not None
    lines = [line for line in Path("/proc/self/mounts").read_text().splitlines() if "with\\040space" in line]
    assert "mpol=bind:0" in lines[0] or "mpol=bind=static:0" in lines[0] or "mpol" not in lines[0]
    assert "nosuid,nodev" in lines[0]
    assert stat.S_IMODE(mountpoint.stat().st_mode) == 0o700


@needs_root
def test_an_unknown_huge_option_is_left_out(mountpoint: Path) -> None:
    MemoryMount("memory", mountpoint, MIB, huge="gigantic").mount()
    assert mounted_at(mountpoint) == ("tmpfs", "tierfs")


@needs_root
def test_a_foreign_mount_is_refused(tmp_path: Path) -> None:
    if not disks.can_mount_loops("mkfs.ext4"):
        pytest.skip("needs mkfs")
    with disks.loop_disk(tmp_path, "ext4", 16 * MIB) as there, pytest.raises(TierError, match="ext4"):
        MemoryMount("memory", there, MIB).mount()


def test_a_given_path_is_not_mounted(tmp_path: Path) -> None:
    store, mount = open_store(config(path=tmp_path / "given", size=None), tmp_path / "unused")
    store.prepare()
    assert mount is None
    assert not store.persistent
    assert not (tmp_path / "unused").exists()
    store.close()
    with pytest.raises(TierError, match="needs a size"):
        open_store(config(size=None), tmp_path / "unused")


@pytest.mark.parametrize("kind", ["store", "archive"])
def test_a_tier_with_the_files_of_another_catalog_is_refused(tmp_path: Path, kind: str) -> None:
    """They would be orphans to this one, which removes orphans."""
    made = ReplicaStore("t", tmp_path, persistent=True) if kind == "store" else TreeStore("t", tmp_path)
    made.prepare()
    made.check_catalog("first", claim=False)
    made.check_catalog("first", claim=True)
    made.check_catalog("first", claim=True)
    for claim in (False, True):
        with pytest.raises(TierError, match="belong to another state directory") as caught:
            made.check_catalog("second", claim=claim)
        assert not caught.value.temporary
    made.close()
