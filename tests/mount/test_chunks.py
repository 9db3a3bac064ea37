"""An archive with layout chunks below a real mount: checkpoints go there in parts, and come back whole."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.mount.conftest import MODES, TEST_LIMIT, Mounter
from tests.unit.checkpoints import Training, changed_bytes, tensors, torch_bytes
from tierfs.testing.mounting import TestMount

CHUNKS = {"layout": "chunks", "codec": "none"}
Chunked = Callable[..., contextlib.AbstractContextManager[TestMount]]


@pytest.fixture
def chunked(mounter: Mounter) -> Chunked:
    """A mount whose archive has layout chunks; ``codec`` and what `mounted` takes."""

    @contextlib.contextmanager
    def mount(mode: str = "passthrough", codec: str = "none", **options: object) -> Iterator[TestMount]:
        with mounter(mode, stored={**CHUNKS, "codec": codec}, **options) as made, made.abort_after(TEST_LIMIT):
            yield made

    return mount


def chill(mnt: TestMount, *paths: Path) -> None:
    """The files are on the archive alone."""
    mnt.flush()
    mnt.evict(*paths)
    if mnt.nvme is not None:
        mnt.evict(*paths, tier="nvme")
    for path in paths:
        replicas = mnt.info(path)["replicas"]
        assert isinstance(replicas, list)
        assert [replica["tier"] for replica in replicas] == ["archive"]


def stored(mnt: TestMount) -> int:
    """Bytes of all chunks."""
    return sum(p.stat().st_size for p in (mnt.archive / ".tierfs" / "chunks").glob("*/*"))


def exported(mnt: TestMount, path: Path, to: Path) -> bytes:
    mnt.cli("export", mnt.archive, str(path.relative_to(mnt.path)), to)
    return to.read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_checkpoint_comes_back_bit_for_bit_whatever_its_rule_says(
    chunked: Chunked, tmp_path: Path, mode: str
) -> None:
    state = Training(layers=1, dtype=torch.bfloat16).state()
    codecs = ["none", "lz4", "shuffle-zstd"]
    rules = [{"match": f"*/{codec}.pt", "codec": codec} for codec in codecs]
    grown: dict[str, int] = {}
    with chunked(mode, "bitshuffle-lz4", rules=rules) as mnt:
        (mnt.path / "step-1").mkdir()
        for number, codec in enumerate([*codecs, "bitshuffle-lz4"]):
            path, had = mnt.path / "step-1" / f"{codec}.pt", stored(mnt)
            for _, tensor in tensors(state):
                if tensor.dtype == torch.bfloat16:
                    tensor += number / 1000
            torch.save(state, path)
            want = path.read_bytes()
            chill(mnt, path)
            grown[codec] = stored(mnt) - had
            assert (mnt.archive / "step-1" / path.name).read_bytes().startswith(b"tierfs-manifest 1 ")
            assert path.stat().st_size == len(want)
            assert path.read_bytes() == want
            torch.load(path)
            assert exported(mnt, path, tmp_path / path.name) == want
        assert grown["shuffle-zstd"] < grown["bitshuffle-lz4"] < 0.9 * grown["none"]


def test_the_next_checkpoint_with_frozen_parameters_stores_what_changed(chunked: Chunked, tmp_path: Path) -> None:
    training = Training(layers=1)
    with chunked() as mnt:
        first, second = mnt.path / "step-1.pt", mnt.path / "step-2.pt"
        before = training.state()
        torch.save(before, first)
        mnt.flush()
        had = stored(mnt)
        training.step()
        after = training.state()
        torch.save(after, second)
        mnt.flush()
        grown = stored(mnt) - had
        changed = changed_bytes(before, after)
        assert changed < 0.4 * second.stat().st_size
        assert grown <= 1.03 * changed + 64 * 1024
        torch.save(after, mnt.path / "step-2-again.pt")
        mnt.flush()
        assert stored(mnt) - had - grown < 0.01 * second.stat().st_size
        want = first.read_bytes(), second.read_bytes()
        chill(mnt, first, second)
        assert (first.read_bytes(), second.read_bytes()) == want
        first.unlink()
        mnt.flush()
        mnt.cli("gc", mnt.config)
        chill(mnt, second)
        assert second.read_bytes() == want[1]
        assert exported(mnt, second, tmp_path / "2.pt") == want[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_large_file_is_read_while_it_comes(chunked: Chunked, mode: str) -> None:
    data = random.Random(1).randbytes(100 << 20)
    with chunked(mode, memory="1GiB") as mnt:
        path = mnt.path / "large"
        path.write_bytes(data)
        chill(mnt, path)
        with path.open("rb") as file:
            file.seek(90 << 20)
            assert file.read(1 << 20) == data[90 << 20 : 91 << 20]
            file.seek(0)
            assert file.read() == data
        assert path.read_bytes() == data


def test_a_cold_file_is_read_although_no_tier_has_room(chunked: Chunked) -> None:
    data = random.Random(2).randbytes(24 << 20)
    with chunked(nvme=None, memory="32MiB") as mnt:
        path, full = mnt.path / "cold", mnt.path / "full"
        path.write_bytes(data)
        chill(mnt, path)
        with full.open("wb") as file:
            file.write(bytes(24 << 20))
            file.flush()
            assert path.read_bytes() == data
        full.unlink()


def test_the_daemon_is_killed_while_it_drains(chunked: Chunked, tmp_path: Path) -> None:
    noise = ["ended with code", "daemon .* died", "was killed"]
    state = {str(n): torch.randn(256, 1024) for n in range(64)}
    with chunked(codec="bitshuffle-lz4", allow_log=noise) as mnt:
        for number in range(4):
            torch.save({**state, "step": torch.tensor(number)}, mnt.path / f"{number}.pt")
            mnt.strike()
        want = {path.name: path.read_bytes() for path in mnt.path.iterdir()}
        paths = [mnt.path / name for name in want]
        chill(mnt, *paths)
        assert {path.name: path.read_bytes() for path in paths} == want
        mnt.cli("gc", mnt.config)
        mnt.cli("export", mnt.archive, ".", tmp_path / "out")
        assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == want


def test_the_memory_is_lost_and_the_archive_has_what_was_durable(chunked: Chunked, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs a tmpfs of its own")
    noise = [r"(rolled back|lost|undone): "]
    first, second = torch_bytes({"w": torch.randn(1000, 1000)}), torch_bytes({"w": torch.randn(1000, 1000)})
    with chunked(nvme=None, allow_log=noise) as mnt:
        path = mnt.path / "model.pt"
        path.write_bytes(first)
        mnt.flush()
        mnt.cli("pause", mnt.path)
        path.write_bytes(second)
        mnt.umount("--no-drain")
        subprocess.run(["umount", "-l", mnt.memory], check=True)
        mnt.mount()
        assert path.read_bytes() == first
        path.write_bytes(second)
        chill(mnt, path)
        assert path.read_bytes() == second
        assert exported(mnt, path, tmp_path / "out") == second


def test_what_the_archive_lost_of_a_chunk_is_stored_again(chunked: Chunked) -> None:
    data = random.Random(3).randbytes(30 << 20)
    with chunked(allow_log=["replaced from tier nvme"]) as mnt:
        path = mnt.path / "file"
        path.write_bytes(data)
        mnt.flush()
        mnt.evict(path)
        victim = max((mnt.archive / ".tierfs" / "chunks").glob("*/*"), key=lambda p: p.stat().st_size)
        raw = bytearray(victim.read_bytes())
        raw[1000] ^= 1
        victim.write_bytes(raw)
        mnt.cli("scrub", mnt.path, check=False)
        mnt.flush()
        mnt.umount()
        right = victim.read_bytes()
        victim.write_bytes(raw)
        assert "not have the bytes" in mnt.cli("fsck", "--data", mnt.config, check=False).out
        victim.unlink()
        assert "chunks are missing" in mnt.cli("fsck", mnt.config, check=False).out
        mnt.cli("fsck", "--repair", mnt.config)
        mnt.mount()
        chill(mnt, path)
        assert victim.read_bytes() == right
        assert path.read_bytes() == data


def test_a_lost_catalog_is_made_again_from_the_archive(chunked: Chunked) -> None:
    data = {f"{n}": random.Random(n).randbytes(200_000 * n) for n in range(1, 6)}
    with chunked(nvme=None) as mnt:
        (mnt.path / "d").mkdir()
        for name, content in data.items():
            (mnt.path / "d" / name).write_bytes(content)
        mnt.umount()
        for file in mnt.state.glob("catalog*"):
            file.unlink()
        for file in (mnt.archive / ".tierfs" / "catalog").iterdir():
            file.unlink()
        mnt.cli("fsck", "--rebuild", mnt.config)
        mnt.mount()
        assert {path.name: path.read_bytes() for path in (mnt.path / "d").iterdir()} == data
