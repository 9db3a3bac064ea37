"""Exact bytes of the packets that the keeper reads and changes."""

from __future__ import annotations

import struct

import pytest

from tierfs.fuse import wire


def request(opcode: int, unique: int, nodeid: int = 1, body: bytes = b"", pid: int = 4242) -> bytearray:
    header = struct.pack("<IIQQIIIHH", 40 + len(body), opcode, unique, nodeid, 1000, 100, pid, 0, 0)
    return bytearray(header + body)


def test_sizes() -> None:
    assert wire.IN_HEADER.size == wire.IN_BODY == 40
    assert wire.OUT_HEADER.size == wire.OUT_BODY == 16
    assert wire.OPEN_OUT.size == 16
    assert wire.CREATE_OPEN_OUT == 144


def test_parse_header() -> None:
    assert wire.parse_header(request(wire.CREATE, 1 << 63 | 6, nodeid=7)) == (35, 1 << 63 | 6, 7)


@pytest.mark.parametrize(
    ("unique", "stamp"),
    [
        (2, 1),
        (0x1234, 0x91A),
        (1 << 63 | 2, 1 << 30 | 1),
        (0x7FFFFFFE, 0x3FFFFFFF),
        (0x80000000, 0),
        ((1 << 63) - 2, 0x3FFFFFFF),
        ((1 << 64) - 1, 0x7FFFFFFF),
    ],
)
def test_stamp_changes_the_pid_only(unique: int, stamp: int) -> None:
    packet = request(wire.OPEN, unique, body=b"body")
    wire.stamp_request_id(packet)
    assert packet == request(wire.OPEN, unique, body=b"body", pid=stamp)
    assert stamp == wire.request_stamp(unique)
    assert stamp == (unique >> 1) & 0x3FFFFFFF | (unique >> 33) & 0x40000000, "the form the keeper's loop uses"


def test_resend_notification() -> None:
    assert bytes.fromhex("10000000 07000000 0000000000000000") == wire.NOTIFY_RESEND


def init_request(flags: int, flags2: int) -> bytearray:
    return request(wire.INIT, 2, body=struct.pack("<IIIII44x", 7, 44, 131072, flags, flags2))


def test_missing_features() -> None:
    assert wire.missing_features(init_request(1 << 30, 1 << 5 | 1 << 7)) == []
    assert wire.missing_features(init_request(1 << 30, 1 << 5)) == ["resend"]
    assert wire.missing_features(init_request(1 << 30, 1 << 7)) == ["passthrough"]
    assert wire.missing_features(init_request(0, 1 << 5 | 1 << 7)) == ["passthrough", "resend"]
    assert wire.missing_features(request(wire.INIT, 2, body=bytes(16))) == ["passthrough", "resend"]


def init_reply(flags: int, flags2: int, depth: int) -> bytearray:
    body = struct.pack("<IIIIHHIIHHII24x", 7, 38, 131072, flags, 12, 9, 1 << 20, 1, 256, 0, flags2, depth)
    return bytearray(struct.pack("<IiQ", 16 + len(body), 0, 2) + body)


def test_patch_init() -> None:
    reply = init_reply(1 << 30 | 1 << 16 | 1 << 5, 1 << 2, 0)
    wire.patch_init(reply)
    assert reply == init_reply(1 << 30 | 1 << 28 | 1 << 5, 1 << 2 | 1 << 5 | 1 << 7, 2)


def test_patch_init_without_extension() -> None:
    reply = init_reply(1 << 5, 0xFFFFFFFF, 0)
    wire.patch_init(reply)
    assert reply == init_reply(1 << 30 | 1 << 28 | 1 << 5, 1 << 5 | 1 << 7, 2)


@pytest.mark.parametrize("offset", [wire.OUT_BODY, wire.CREATE_OPEN_OUT])
@pytest.mark.parametrize(
    ("fh", "flags", "patched_flags", "backing_id"),
    [
        (5 << 32 | 17, 0, 1 << 7, 17),
        (5 << 32 | 17, 1 << 0 | 1 << 1 | 1 << 4, 1 << 7 | 1 << 4, 17),
        (1 << 63 | 17, 0, 1 << 7 | 1 << 5, 17),
        (5 << 32, 1 << 0 | 1 << 1, 1 << 0 | 1 << 1, 0),
        (1 << 63, 1 << 1, 1 << 1 | 1 << 5, 0),
    ],
)
def test_patch_open(offset: int, fh: int, flags: int, patched_flags: int, backing_id: int) -> None:
    before = bytes(range(offset))
    reply = bytearray(before + struct.pack("<QII", fh, flags, 0))
    assert wire.patch_open(reply, offset) == fh
    assert reply == before + struct.pack("<QII", fh, patched_flags, backing_id)
