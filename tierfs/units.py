"""Sizes, durations, rates and percentages as people write them. Pure; every error is a ValueError with a remedy."""

from __future__ import annotations

import re
from decimal import Decimal

MAX_SIZE = 2**63 - 1
"""Largest size accepted, in bytes: what off_t and SQLite can hold."""

_PREFIXES = "KMGTPE"
_SIZE_UNITS = {"": 1, "B": 1}
_SIZE_UNITS |= {f"{prefix}B": 1000 ** (i + 1) for i, prefix in enumerate(_PREFIXES)}
_SIZE_UNITS |= {f"{prefix}IB": 1024 ** (i + 1) for i, prefix in enumerate(_PREFIXES)}
_SECONDS = {"ms": Decimal("0.001"), "s": Decimal(1), "m": Decimal(60), "h": Decimal(3600), "d": Decimal(86400)}
_LONGEST = Decimal(100 * 365 * 86400)
_NUMBER = re.compile(r"(-?)([0-9]{1,20}(?:\.[0-9]{1,9})?) ?([A-Za-z]*)")
_PERCENT = re.compile(r"(-?)([0-9]{1,20}(?:\.[0-9]{1,9})?) ?%")


def parse_size(text: str) -> int:
    """Bytes meant by ``"64GiB"``, ``"10MB"`` or ``"512"``; KiB… are powers of 1024, KB… of 1000, case is ignored.

    Raises ValueError when it is no size, is negative, or is above ``MAX_SIZE``.
    """
    found = _NUMBER.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{_quote(text)} is not a size; write a number and a unit, such as 64GiB or 10MB")
    sign, number, unit = found.groups()
    if unit.upper() not in _SIZE_UNITS:
        if len(unit) == 1 and unit.upper() in _PREFIXES:
            prefix = unit.upper()
            raise ValueError(
                f"{_quote(text)} is ambiguous; write {number}{prefix}iB (powers of 1024) "
                f"or {number}{prefix}B (powers of 1000)"
            )
        raise ValueError(f"{_quote(text)} has an unknown unit {unit!r}; use B, KiB, MiB, GiB, TiB or KB, MB, GB, TB")
    if sign:
        raise ValueError(f"{_quote(text)} is negative; write a size of zero or more")
    size = int(Decimal(number) * _SIZE_UNITS[unit.upper()])
    if size > MAX_SIZE:
        raise ValueError(f"{_quote(text)} is too large; the largest size is just under 8EiB")
    return size


def format_size(size: int) -> str:
    """``size`` in bytes for a person, in powers of 1024: ``"64GiB"``, ``"1.5MiB"``, ``"512B"``.

    Rounded to one decimal; ``parse_size`` reads it back. Raises nothing.
    """
    if size < 0:
        return "-" + format_size(-size)
    if size < 1024:
        return f"{size}B"
    power = 1
    while power < len(_PREFIXES) and size * 10 + 1024**power // 2 >= 10240 * 1024**power:
        power += 1
    tenths = (size * 10 + 1024**power // 2) // 1024**power
    whole, tenth = divmod(tenths, 10)
    return f"{whole}{f'.{tenth}' if tenth else ''}{_PREFIXES[power - 1]}iB"


def parse_duration(text: str) -> float:
    """Seconds meant by ``"500ms"``, ``"30s"``, ``"5m"``, ``"2h"`` or ``"1d"``.

    Raises ValueError when it is no duration, has no unit, or is negative.
    """
    found = _NUMBER.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{_quote(text)} is not a duration; write a number and a unit, such as 30s, 5m or 2h")
    sign, number, unit = found.groups()
    if not unit:
        raise ValueError(f"{_quote(text)} has no unit; write {number}s for seconds, or use ms, m, h or d")
    if unit.lower() not in _SECONDS:
        raise ValueError(f"{_quote(text)} has an unknown unit {unit!r}; use ms, s, m, h or d")
    if sign:
        raise ValueError(f"{_quote(text)} is negative; write a duration of zero or more")
    seconds = Decimal(number) * _SECONDS[unit.lower()]
    if seconds > _LONGEST:
        raise ValueError(f"{_quote(text)} is longer than a hundred years; write a shorter duration")
    return float(seconds)


def parse_rate(text: str) -> int:
    """Bytes per second meant by ``"2GiB/s"``; the part before ``/s`` is a size (``parse_size``).

    Raises ValueError when it is no rate, or is zero or negative.
    """
    size, slash, per = text.strip().partition("/")
    if not slash or per.strip().lower() != "s":
        raise ValueError(f"{_quote(text)} is not a rate; write a size per second, such as 2GiB/s")
    try:
        rate = parse_size(size)
    except ValueError as error:
        raise ValueError(f"{_quote(text)} is not a rate: {error}, followed by /s") from None
    if rate == 0:
        raise ValueError(f"{_quote(text)} would never move a byte; write at least 1B/s")
    return rate


def parse_percent(text: str) -> float:
    """The fraction (0..1) meant by ``"85%"``.

    Raises ValueError when it is no percentage or is outside 0%..100%.
    """
    found = _PERCENT.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{_quote(text)} is not a percentage; write it with a percent sign, such as 85%")
    sign, number = found.groups()
    if sign or Decimal(number) > 100:
        raise ValueError(f"{_quote(text)} is out of range; write a percentage between 0% and 100%")
    return float(Decimal(number) / 100)


def _quote(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
