"""Exact bytes of what goes to and comes from the kernel (include/uapi/linux/fuse.h)."""

from __future__ import annotations

import errno
import os
import stat
import struct

import pytest

from tierfs.fuse import wire
from tierfs.types import Attributes, Ino

FILE = Attributes(Ino(7), 0o100644, 1000, 100, 2, 0, 5000, 1_500_000_000, -500_000_000, 3_000_000_001, 1, 16)


def init_request(flags: int, flags2: int | None, *, major: int = 7, minor: int = 45, opcode: int = 26) -> bytes:
    body = struct.pack("<IIII", major, minor, 65536, flags)
    if flags2 is not None:
        body += struct.pack("<I44x", flags2)
    return struct.pack("<IIQQIIIHH", 40 + len(body), opcode, 2, 0, 0, 0, 0, 0, 0) + body


ALL = wire.PASSTHROUGH2 | wire.HAS_RESEND2


def test_sizes_are_those_of_the_kernel() -> None:
    assert wire.IN_HEADER.size == 40
    assert wire.OUT_HEADER.size == 16
    assert len(wire.attr(FILE)) == 88
    assert len(wire.entry_out(FILE, 1)) == len(wire.absent_entry_out(1)) == 128
    assert len(wire.attr_out(FILE, 1)) == 104
    assert len(wire.open_out(1)) == 16
    assert len(wire.statfs_out(1, 1, 1)) == 80
    assert len(wire.init_reply(wire.parse_init(init_request(wire.INIT_EXT, ALL)))) == 16 + 64
    assert len(wire.attributes_outdated(1)) == 16 + 24
    assert len(wire.NOTIFY_RESEND) == 16


def test_init_takes_what_the_kernel_offers_and_no_writeback() -> None:
    writeback = 1 << 16
    offered = wire.INIT_EXT | wire.ASYNC_READ | wire.HANDLE_KILLPRIV_V2 | writeback
    init = wire.parse_init(init_request(offered, ALL | 1))
    assert wire.missing_features(init) == []
    length, error, unique, major, minor, readahead, flags = struct.unpack_from("<IiQIIII", wire.init_reply(init))
    assert (length, error, unique, major, minor, readahead) == (80, 0, 2, 7, 40, 65536)
    assert flags == wire.INIT_EXT | wire.ASYNC_READ | wire.HANDLE_KILLPRIV_V2
    max_write, granularity, pages, _, flags2, depth = struct.unpack_from("<IIHHII", wire.init_reply(init), 16 + 20)
    assert (max_write, granularity, pages) == (1 << 20, 1, 256)
    assert (flags2, depth) == (ALL, 2)


@pytest.mark.parametrize(
    ("flags", "flags2", "missing"),
    [
        (wire.INIT_EXT, 0, ["passthrough", "resend"]),
        (wire.INIT_EXT, wire.HAS_RESEND2, ["passthrough"]),
        (wire.INIT_EXT, wire.PASSTHROUGH2, ["resend"]),
        (0, ALL, ["passthrough", "resend"]),
        (wire.INIT_EXT, None, ["passthrough", "resend"]),
    ],
    ids=["none", "no passthrough", "no resend", "not extended", "short"],
)
def test_missing_features_are_named(flags: int, flags2: int | None, missing: list[str]) -> None:
    assert wire.missing_features(wire.parse_init(init_request(flags, flags2))) == missing


def test_what_is_no_init_is_refused() -> None:
    with pytest.raises(ValueError, match="protocol 8"):
        wire.parse_init(init_request(0, None, major=8))
    with pytest.raises(ValueError, match="before INIT"):
        wire.parse_init(init_request(0, None, opcode=1))


def test_attributes_before_1970_and_within_a_second() -> None:
    fields = struct.unpack("<QQQqqqIIIIIIIIII", wire.attr(FILE))
    assert fields == (7, 5000, 16, 1, -1, 3, 500_000_000, 500_000_000, 1, 0o100644, 2, 1000, 100, 0, 1 << 20, 0)


def test_entry_is_valid_for_as_long_as_told() -> None:
    node, generation, entry_valid, attr_valid = struct.unpack_from("<QQQQ", wire.entry_out(FILE, 3600))
    assert (node, generation, entry_valid, attr_valid) == (7, 0, 3600, 3600)
    assert struct.unpack_from("<QQQQ", wire.absent_entry_out(60)) == (0, 0, 60, 0)


def setattr_in(valid: int) -> bytes:
    return struct.pack("<IIQQQqqqIIIIIIII", valid, 0, 9, 123, 0, 10, -20, 30, 1, 2, 3, 0o600, 0, 5, 6, 0)


@pytest.mark.parametrize(
    ("valid", "change"),
    [
        (0, (None, None, None, None, None, None)),
        (wire.FATTR_MODE, (0o600, None, None, None, None, None)),
        (wire.FATTR_UID | wire.FATTR_GID, (None, 5, 6, None, None, None)),
        (wire.FATTR_SIZE, (None, None, None, 123, None, None)),
        (wire.FATTR_ATIME | wire.FATTR_MTIME, (None, None, None, None, 10_000_000_001, -19_999_999_998)),
        (wire.FATTR_ATIME | wire.FATTR_ATIME_NOW, (None, None, None, None, 77, None)),
        (wire.FATTR_MTIME | wire.FATTR_MTIME_NOW, (None, None, None, None, None, 77)),
    ],
    ids=["nothing", "mode", "owner", "size", "times", "atime now", "mtime now"],
)
def test_setattr_changes_what_is_valid(valid: int, change: tuple[int | None, ...]) -> None:
    assert wire.parse_setattr(setattr_in(valid), now_ns=77) == change


def test_opened_file_with_a_backing_id_is_passthrough() -> None:
    assert struct.unpack("<QII", wire.open_out(5, wire.FOPEN_NOFLUSH, 9)) == (5, 1 << 5 | 1 << 7, 9)
    assert struct.unpack("<QII", wire.open_out(5)) == (5, 0, 0)


@pytest.mark.parametrize("name", [b"a", b"seven77", b"eight888", b"n" * 255])
def test_directory_entries_end_on_eight_bytes(name: bytes) -> None:
    packed = wire.dirent(FILE, name, 42)
    assert len(packed) % 8 == 0
    assert struct.unpack_from("<QQII", packed) == (7, 42, len(name), stat.S_IFREG >> 12)
    assert packed[24:].rstrip(b"\0") == name
    assert wire.direntplus(FILE, name, 42, 5) == wire.entry_out(FILE, 5) + packed


def test_names_keep_every_byte_but_the_last() -> None:
    assert wire.name_of(b"\xff\n \0") == b"\xff\n "
    assert wire.name_of(b"12345678x\0", 8) == b"x"
    assert wire.two_names(b"from\0to\0") == (b"from", b"to")
    assert wire.two_names(b"12345678a\0b\0", 8) == (b"a", b"b")


def test_forgets_of_a_batch() -> None:
    body = struct.pack("<II", 2, 0) + struct.pack("<QQQQ", 5, 1, 6, 3)
    assert wire.parse_batch_forget(body) == [5, 6]


def test_xattr_tells_its_size_to_who_asks_with_no_room() -> None:
    assert wire.xattr_out(b"value", 0) == struct.pack("<II", 5, 0)
    assert wire.xattr_out(b"value", 5) == b"value"
    with pytest.raises(OSError, match="fit") as caught:
        wire.xattr_out(b"value", 4)
    assert caught.value.errno == errno.ERANGE


def test_statfs_counts_in_blocks() -> None:
    blocks, free, available, files, free_files, size, names, fragment = struct.unpack_from(
        "<QQQQQIII", wire.statfs_out(10 << 20, (3 << 20) + 1, 99)
    )
    assert (blocks, free, available) == (2560, 768, 768)
    assert (files, free_files, size, names, fragment) == (99, 99, 4096, os.pathconf("/", "PC_NAME_MAX"), 4096)


def test_errors_are_negative() -> None:
    assert wire.error_reply(8, errno.ENOENT) == struct.pack("<IiQ", 16, -2, 8)
    assert wire.reply(8, b"xy") == struct.pack("<IiQ", 18, 0, 8) + b"xy"
