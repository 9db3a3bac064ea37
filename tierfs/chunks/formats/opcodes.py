"""The opcodes of a pickle with their arguments, as `pickletools.genops` gives them, but without what nobody asks for
(floats, bytes, strings of Python 2, very long integers: None). genops decodes these too, and warns of escapes that it
meets there, for the whole process to see."""

from __future__ import annotations

import pickletools
from collections.abc import Iterator
from typing import Final

_LINE, _TWO_LINES, _SHORT, _LONG, _VERY_LONG, _NONE = -1, -2, -3, -4, -5, -6
_PREFIX = {_SHORT: 1, _LONG: 4, _VERY_LONG: 8}
"""Bytes of the length before an argument."""


def _layout(opcode: pickletools.OpcodeInfo) -> int:
    """How its argument lies behind it: in so many bytes, or as the constants say."""
    if opcode.arg is None:
        return 0
    if opcode.arg.n == pickletools.UP_TO_NEWLINE:
        return _TWO_LINES if opcode.arg.name == "stringnl_noescape_pair" else _LINE
    return {
        pickletools.TAKEN_FROM_ARGUMENT1: _SHORT,
        pickletools.TAKEN_FROM_ARGUMENT4: _LONG,
        pickletools.TAKEN_FROM_ARGUMENT4U: _LONG,
        pickletools.TAKEN_FROM_ARGUMENT8U: _VERY_LONG,
    }.get(opcode.arg.n, opcode.arg.n)


_LAYOUTS: Final = [_NONE] * 256
_TEXTS: Final[set[int]] = set()
_NUMBERS: Final[set[int]] = set()
_SIGNED: Final[set[int]] = set()
for _opcode in pickletools.opcodes:
    _LAYOUTS[ord(_opcode.code)] = _layout(_opcode)
    if _opcode.name.endswith(("UNICODE", "UNICODE8")):
        _TEXTS.add(ord(_opcode.code))
    elif _opcode.name in ("LONG1", "LONG4", "INT", "LONG", "GET", "PUT"):
        _NUMBERS.add(ord(_opcode.code))
    if _opcode.arg is not None and _opcode.arg.name == "int4":
        _SIGNED.add(ord(_opcode.code))
_BINFLOAT: Final = ord("G")
_STOP: Final = ord(".")


def opcodes(raw: bytes) -> Iterator[tuple[int, object]]:
    """(code, argument) up to STOP. Raises ValueError where ``raw`` is no pickle or ends before."""
    at, size = 0, len(raw)
    while at < size:
        code = raw[at]
        at += 1
        layout = _LAYOUTS[code]
        if layout == 0:
            yield code, None
            if code == _STOP:
                return
            continue
        if layout > 0:
            stop = at + layout
            value = _fixed(raw[at:stop], code)
        elif layout == _LINE:
            stop, value = _line(raw, at, code)
        elif layout == _TWO_LINES:
            stop, value = _two_lines(raw, at)
        elif layout == _NONE:
            raise ValueError(f"no opcode {code}")
        else:
            start = at + _PREFIX[layout]
            stop = start + int.from_bytes(raw[at:start], "little")
            value = _prefixed(raw, start, stop, code)
        if stop > size:
            raise ValueError("ends too early")
        yield code, value
        at = stop
    raise ValueError("ends before STOP")


def _fixed(argument: bytes, code: int) -> object:
    return None if code == _BINFLOAT else int.from_bytes(argument, "little", signed=code in _SIGNED)


def _prefixed(raw: bytes, start: int, stop: int, code: int) -> object:
    if code in _TEXTS:
        return raw[start:stop].decode("utf-8", "surrogatepass")
    if code in _NUMBERS and stop - start <= 16:
        return int.from_bytes(raw[start:stop], "little", signed=True)
    return None


def _line(raw: bytes, at: int, code: int) -> tuple[int, object]:
    end = raw.index(b"\n", at)
    line = raw[at:end]
    if code in _TEXTS:
        return end + 1, line.decode("latin-1")
    if code in _NUMBERS and len(line) <= 40:
        return end + 1, int(line.removesuffix(b"L"))
    return end + 1, None


def _two_lines(raw: bytes, at: int) -> tuple[int, object]:
    middle = raw.index(b"\n", at)
    end = raw.index(b"\n", middle + 1)
    return end + 1, raw[at:middle].decode() + " " + raw[middle + 1 : end].decode()
