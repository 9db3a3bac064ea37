"""Boundaries that the content sets: local, bounded, and always the same."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyfastcdc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierfs.chunks.content import COARSE, FINE, MIDDLE, cut, scale_of
from tierfs.chunks.span import MOST, Extent

RANDOM = np.random.default_rng(7).bytes(6 << 20)


def parts(raw: bytes) -> list[bytes]:
    return [raw[extent.offset : extent.end] for extent in cut(memoryview(raw), Extent(0, len(raw)), FINE)]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2 << 20), st.integers(0, 100), st.binary(max_size=50))
def test_an_edit_changes_the_chunks_beside_it_only(at: int, removed: int, inserted: bytes) -> None:
    raw = RANDOM[: 2 << 20]
    before = set(parts(raw))
    new = [part for part in parts(raw[:at] + inserted + raw[at + removed :]) if part not in before]
    assert sum(map(len, new)) <= 6 * FINE.most


@pytest.mark.parametrize("raw", [RANDOM, bytes(3 << 20), b"ab" * (1 << 20), b"x", bytes(FINE.least + 1)])
def test_lengths_are_bounded_and_nothing_is_left_out(raw: bytes) -> None:
    found = parts(raw)
    assert b"".join(found) == raw
    assert all(FINE.least <= len(part) <= FINE.most for part in found[:-1])
    assert 0 < len(found[-1]) <= FINE.most


def test_the_mean_is_about_what_the_scale_says() -> None:
    mean = len(RANDOM) / len(parts(RANDOM))
    assert (FINE.least + FINE.mean) / 2 < mean < (FINE.least + FINE.mean) * 2


def test_boundaries_do_not_depend_on_where_the_extent_lies() -> None:
    raw = memoryview(b"12345" + RANDOM)
    moved = cut(raw, Extent(5, len(RANDOM)), FINE)
    assert [(e.offset - 5, e.length) for e in moved] == cut(memoryview(RANDOM), Extent(0, len(RANDOM)), FINE)


def test_scales_grow_with_the_file_and_stay_within_a_chunk() -> None:
    lengths = (1, 4 << 20, 5 << 20, 1 << 30, 2 << 30)
    assert [scale_of(length) for length in lengths] == [FINE, FINE, MIDDLE, MIDDLE, COARSE]
    assert COARSE.most <= MOST


def test_nothing_in_chunks_does_input_or_output_or_unpickles() -> None:
    """Layer 1: values in, values out."""
    forbidden = {"io", "mmap", "os", "pathlib", "pickle", "shutil", "socket", "sqlite3", "subprocess", "trio"}
    modules = list((Path(__file__).parents[2] / "tierfs" / "chunks").rglob("*.py"))
    assert len(modules) > 10
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {name.partition(".")[0] for name in names}, module.name
            assert not (isinstance(node, ast.Name) and node.id == "open"), module.name


def test_the_compiled_scanner_is_there() -> None:
    """Without it the library falls back to Python, at a two-hundredth of the speed."""
    assert pyfastcdc.FastCDC.__module__.startswith("pyfastcdc.cy")


def test_a_mount_without_chunks_imports_none_of_their_libraries() -> None:
    code = """
import sys
import tierfs.cli.app, tierfs.daemon, tierfs.fuse.keeper, tierfs.migrator.migrator
print(*sorted({"blake3", "pyfastcdc", "numpy", "torch", "blosc2"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.split() == []
