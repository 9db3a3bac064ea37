from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierfs.units import MAX_SIZE, format_size, parse_duration, parse_percent, parse_rate, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("0", 0),
        ("7B", 7),
        ("10MB", 10_000_000),
        ("10 mb", 10_000_000),
        ("1kB", 1000),
        ("64GiB", 64 << 30),
        ("64gib", 64 << 30),
        ("1.5KiB", 1536),
        (" 2TiB ", 2 << 40),
        ("1PB", 10**15),
        ("7EiB", 7 << 60),
        (str(MAX_SIZE), MAX_SIZE),
    ],
)
def test_size(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "such as 64GiB"),
        ("big", "such as 64GiB"),
        ("1e9", "unknown unit|such as"),
        ("64G", "64GiB .* or 64GB"),
        ("3XB", "unknown unit 'XB'; use"),
        ("-1GiB", "negative"),
        ("8EiB", "too large"),
        ("\u0661KiB", "such as 64GiB"),
        ("9" * 5000, "such as 64GiB"),
    ],
)
def test_size_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_size(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (64 << 30, "64GiB"),
        ((1 << 20) - 1, "1MiB"),
        (MAX_SIZE, "8EiB"),
        (-2048, "-2KiB"),
    ],
)
def test_format(size: int, text: str) -> None:
    assert format_size(size) == text


@given(st.integers(0, 2**62))
def test_format_reads_back(size: int) -> None:
    assert abs(parse_size(format_size(size)) - size) <= size * 0.051


@given(st.integers(1, 1023), st.integers(0, 5))
def test_format_is_exact_for_whole_units(number: int, power: int) -> None:
    assert parse_size(format_size(number * 1024**power)) == number * 1024**power


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30.0), ("5m", 300.0), ("2h", 7200.0), ("1d", 86400.0), ("250ms", 0.25), ("0s", 0.0), ("1.5 m", 90.0)],
)
def test_duration(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("30", "write 30s"),
        ("soon", "such as 30s"),
        ("3w", "unknown unit 'w'"),
        ("-3s", "negative"),
        ("9999999h", "hundred years"),
    ],
)
def test_duration_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_duration(text)


@pytest.mark.parametrize(("text", "rate"), [("2GiB/s", 2 << 30), ("100 MB / s", 100_000_000)])
def test_rate(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    ("text", "says"),
    [("2GiB", "such as 2GiB/s"), ("2GiB/m", "such as 2GiB/s"), ("x/s", "not a size"), ("0/s", "never move")],
)
def test_rate_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_rate(text)


@pytest.mark.parametrize(("text", "fraction"), [("85%", 0.85), ("0%", 0.0), ("100 %", 1.0), ("12.5%", 0.125)])
def test_percent(text: str, fraction: float) -> None:
    assert parse_percent(text) == fraction


@pytest.mark.parametrize(("text", "says"), [("0.85", "such as 85%"), ("101%", "out of range"), ("-5%", "out of range")])
def test_percent_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse_percent(text)


@given(st.text())
def test_only_value_error(text: str) -> None:
    for parse in (parse_size, parse_duration, parse_rate, parse_percent):
        try:
            parse(text)
        except ValueError as error:
            message = str(error)
        else:
            continue
        assert "; " in message
