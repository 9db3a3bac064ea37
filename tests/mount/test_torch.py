"""torch, safetensors, distributed checkpoints and the Hugging Face Trainer, unchanged, on a mount."""

from __future__ import annotations

import contextlib
import filecmp
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierfs.testing.mounting import TestMount

from .conftest import MODES, TEST_LIMIT, Mounter

HERE = Path(__file__).parent


def need(*modules: str) -> None:
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")


@contextlib.contextmanager
def running(script: str, *args: object) -> Iterator[subprocess.Popen[str]]:
    """A job beside the block, awaited at its end."""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", HERE / script, *map(str, args)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            yield process
            output, _ = process.communicate(timeout=100)
        except BaseException:
            process.kill()
            raise
    assert process.returncode == 0, output[-4000:]


def job(script: str, *args: object) -> None:
    with running(script, *args):
        pass


def files(top: Path) -> list[Path]:
    return sorted(p.relative_to(top) for p in top.rglob("*") if p.is_file() and ".tierfs" not in p.parts)


def same_on_archive(mnt: TestMount) -> list[Path]:
    """Everything is on the archive, bit for bit; gives the files."""
    mnt.flush()
    found = files(mnt.path)
    assert files(mnt.archive) == found
    for path in found:
        assert filecmp.cmp(mnt.path / path, mnt.archive / path, shallow=False), path
    return found


@pytest.mark.slow
def test_save_and_load(mnt: TestMount) -> None:
    need("torch", "safetensors")
    job("torch_job.py", "save", mnt.path)
    found = same_on_archive(mnt)
    mnt.evict(*(mnt.path / path for path in found))
    if mnt.nvme is not None:
        mnt.evict(*(mnt.path / path for path in found), tier="nvme")
    job("torch_job.py", "load", mnt.path, mnt.archive)


@pytest.mark.slow
def test_distributed_checkpoint(mnt: TestMount) -> None:
    need("torch")
    job("torch_job.py", "dcp-save", mnt.path)
    found = same_on_archive(mnt)
    assert {path.name for path in found} >= {".metadata", "__0_0.distcp", "__1_0.distcp"}
    mnt.evict(*(mnt.path / path for path in found))
    job("torch_job.py", "dcp-load", mnt.path)


@pytest.mark.slow
def test_trainer_rotates_and_resumes(mnt: TestMount) -> None:
    need("torch", "transformers", "accelerate", "tensorboard")
    run = mnt.path / "run"
    with running("trainer_job.py", run) as trainer:
        assert trainer.stdout is not None
        seen: list[str] = []
        while "first part done\n" not in seen:
            seen.append(trainer.stdout.readline())
            assert seen[-1], "".join(seen)[-4000:]
        assert sorted(p.name for p in run.glob("checkpoint-*")) == ["checkpoint-6", "checkpoint-8"]
        found = same_on_archive(mnt)
        mnt.evict(*(mnt.path / path for path in found))
    assert sorted(p.name for p in run.glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-12"]
    same_on_archive(mnt)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_tensorboard_reader_follows_the_writer(mounter: Mounter, mode: str, pauses: list[float]) -> None:
    """Appended with flushes, read at the same time, over kills of the daemon where the mount outlives it."""
    need("torch", "tensorboard")
    program, portions, steps = "tensorboard_job.py", 4, 300
    rules = [{"match": "**/events.out.tfevents.*", "ack": "nvme"}, {"match": "**"}]
    with mounter(mode, rules=rules) as mnt, mnt.abort_after(TEST_LIMIT):
        top = mnt.path / "runs" / "one"
        top.mkdir(parents=True)
        with running(program, "write", top) as writer, running(program, "read", top) as reader:
            for end in range(steps, portions * steps + 1, steps):
                tell(writer, steps)
                if end > steps:  # the file is there: the reader follows what comes now
                    tell(reader, end)
                    if mode == "passthrough":
                        pauses.append(mnt.strike())
                    await_answer(reader, end)
                await_answer(writer, end)
        assert len(same_on_archive(mnt)) == 1


def tell(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()


def await_answer(process: subprocess.Popen[str], number: int) -> None:
    assert process.stdout is not None
    said = []
    while not said or said[-1] != f"{number}\n":
        said.append(process.stdout.readline())
        assert said[-1], "".join(said)[-4000:]
