"""Byte layouts of the FUSE kernel protocol, as far as the keeper reads or changes them.

Source: the kernel's include/uapi/linux/fuse.h (protocol 7.40 and later). Offsets are from the start of the packet.
"""

from __future__ import annotations

import struct

Packet = bytearray | memoryview
"""A writable packet, changed in place."""

IN_HEADER = struct.Struct("<IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen, padding"""

OUT_HEADER = struct.Struct("<IiQ")
"""len, error (negative errno; for notifications the positive code), unique"""

OPCODE_UNIQUE_NODE = struct.Struct("<IQQ")
"""opcode, unique, nodeid at offset 4 of a request"""

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")
OPEN_OUT = struct.Struct("<QII")
"""fh, open_flags, backing_id (padding before protocol 7.40)"""

IN_UNIQUE = 8
IN_PID = 32
IN_BODY = 40
OUT_BODY = 16
CREATE_OPEN_OUT = OUT_BODY + 128
"""fuse_create_out is a fuse_entry_out of 128 bytes (nodeid first), then a fuse_open_out."""

FORGET, OPEN, RELEASE, INIT, OPENDIR, RELEASEDIR, CREATE, INTERRUPT, BATCH_FORGET = 2, 14, 18, 26, 27, 29, 35, 36, 42
NO_REPLY = frozenset({FORGET, INTERRUPT, BATCH_FORGET})
HANDLE_OPCODES = frozenset({OPEN, OPENDIR, CREATE, RELEASE, RELEASEDIR})
"""Requests whose replies change the table of open handles. Bodies: OPEN, OPENDIR and CREATE begin with u32 flags
(fuse_open_in, fuse_create_in), RELEASE and RELEASEDIR with u64 fh (fuse_release_in)."""

INIT_IN_FLAGS, INIT_IN_FLAGS2 = IN_BODY + 12, IN_BODY + 16
INIT_OUT_FLAGS, INIT_OUT_FLAGS2, INIT_OUT_STACK_DEPTH = 28, 48, 52

STACK_DEPTH = 2
WRITEBACK_CACHE = 1 << 16
HANDLE_KILLPRIV_V2 = 1 << 28
"""The filesystem clears setuid and setgid bits itself. Without it the kernel asks for ``security.capability`` before
each single write, also with passthrough (file_remove_privs in fs/inode.c; fs/fuse/inode.c sets SB_NOSEC for it)."""
INIT_EXT = 1 << 30
PASSTHROUGH2 = 1 << (37 - 32)
HAS_RESEND2 = 1 << (39 - 32)

FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PASSTHROUGH = 1 << 0, 1 << 1, 1 << 5, 1 << 7

UNIQUE_RESEND = 1 << 63
REQUEST_MASK = 0x3FFFFFFF
RESENT_BIT = 1 << 30

BACKING_MASK = 0xFFFFFFFF
"""Bits of ``fh`` that are the backing id."""
NOFLUSH_BIT = 1 << 63
"""Bit of ``fh`` by which the daemon asks for FOPEN_NOFLUSH."""

NOTIFY_RESEND = OUT_HEADER.pack(16, 7, 0)
"""FUSE_NOTIFY_RESEND: the kernel sends every unanswered request again, with UNIQUE_RESEND set."""


def parse_header(packet: bytes | Packet) -> tuple[int, int, int]:
    """(opcode, unique, nodeid) of a request."""
    opcode, unique, nodeid = OPCODE_UNIQUE_NODE.unpack_from(packet, 4)
    return opcode, unique, nodeid


def request_stamp(unique: int) -> int:
    """What the keeper writes over a request's pid: its id, and whether the kernel sent it before."""
    return (unique >> 1) & REQUEST_MASK | (RESENT_BIT if unique & UNIQUE_RESEND else 0)


def stamp_request_id(packet: Packet) -> None:
    U32.pack_into(packet, IN_PID, request_stamp(U64.unpack_from(packet, IN_UNIQUE)[0]))


def missing_features(init_request: bytes | Packet) -> list[str]:
    """Names of the features the keeper needs that this kernel does not offer in its INIT request."""
    needed = {"passthrough": PASSTHROUGH2, "resend": HAS_RESEND2}
    offered = 0
    if len(init_request) >= INIT_IN_FLAGS2 + 4 and U32.unpack_from(init_request, INIT_IN_FLAGS)[0] & INIT_EXT:
        (offered,) = U32.unpack_from(init_request, INIT_IN_FLAGS2)
    return [name for name, bit in needed.items() if not offered & bit]


def patch_init(reply: Packet) -> None:
    """Switch on passthrough, resend and writes without a question in the daemon's INIT reply; writeback caching
    excludes passthrough."""
    (flags,) = U32.unpack_from(reply, INIT_OUT_FLAGS)
    # Without INIT_EXT the kernel ignores flags2, so what libfuse left there is not to be trusted.
    flags2 = U32.unpack_from(reply, INIT_OUT_FLAGS2)[0] if flags & INIT_EXT else 0
    U32.pack_into(reply, INIT_OUT_FLAGS, (flags | INIT_EXT | HANDLE_KILLPRIV_V2) & ~WRITEBACK_CACHE)
    U32.pack_into(reply, INIT_OUT_FLAGS2, flags2 | PASSTHROUGH2 | HAS_RESEND2)
    U32.pack_into(reply, INIT_OUT_STACK_DEPTH, STACK_DEPTH)


def patch_open(reply: Packet, offset: int) -> int:
    """Turn the fuse_open_out at ``offset`` into a passthrough open if its fh carries a backing id; the fh."""
    fh, flags, _ = OPEN_OUT.unpack_from(reply, offset)
    backing_id = fh & BACKING_MASK
    if backing_id:
        flags = (flags | FOPEN_PASSTHROUGH) & ~(FOPEN_DIRECT_IO | FOPEN_KEEP_CACHE)
    if fh & NOFLUSH_BIT:
        flags |= FOPEN_NOFLUSH
    OPEN_OUT.pack_into(reply, offset, fh, flags, backing_id)
    return int(fh)
