"""A shared mapping outlives the descriptor, and writes through it reach the tiers below like any other."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tierfs.testing.mounting import TestMount

SIZE = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@contextmanager
def mapped(path: Path) -> Iterator[ctypes.Array[ctypes.c_char]]:
    """The file of zeros at ``path``, mapped shared and closed: Python's own mmap would keep a descriptor."""
    path.write_bytes(bytes(SIZE))
    fd = os.open(path, os.O_RDWR)
    address = _libc.mmap(None, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    assert address not in (None, ctypes.c_void_p(-1).value)
    os.close(fd)
    try:
        yield (ctypes.c_char * SIZE).from_address(address)
    finally:
        assert _libc.munmap(address, SIZE) == 0


def test_writes_through_a_mapping_after_the_close_are_drained(mnt: TestMount) -> None:
    with mapped(mnt.path / "file") as memory:
        memory[100:105] = b"first"
        mnt.flush()
        if mnt.mode == "passthrough":  # else the kernel still has them, as with any page that nobody synced
            assert (mnt.archive / "file").read_bytes()[100:105] == b"first", "a flush takes the bytes of the moment"
        memory[100:105] = b"later"
    mnt.flush()
    deadline = time.monotonic() + 30
    while (mnt.archive / "file").read_bytes()[100:105] != b"later" and time.monotonic() < deadline:
        time.sleep(0.1)  # what follows the flush is drained in passing
    mnt.flush()
    assert (mnt.archive / "file").read_bytes() == bytes(100) + b"later" + bytes(SIZE - 105)
    mnt.evict(mnt.path / "file")
    assert (mnt.path / "file").read_bytes()[100:105] == b"later"


def test_a_mapped_file_is_not_drained_before_the_mapping_goes(mnt: TestMount) -> None:
    with mapped(mnt.path / "file") as memory:
        (mnt.path / "other").write_bytes(b"x")
        mnt.flush(mnt.path / "other", to="nvme")
        memory[0:4] = b"done"
    mnt.flush()
    assert (mnt.archive / "file").read_bytes()[:4] == b"done"


def test_umount_refuses_while_a_mapping_may_change_something(mnt: TestMount) -> None:
    with mapped(mnt.path / "file"):
        refused = mnt.cli("umount", mnt.path, check=False)
        assert refused.code == 1
        assert "in use" in refused.err
