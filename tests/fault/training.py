"""A small training run with real saves: training.py DIR STEPS. Keeps the last three checkpoints, writes a pointer after
each, logs, and reads back what it saved. Any error ends it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"layer{n}": torch.randn((300, 701), generator=generator) for n in range(3)} | {"step": torch.tensor(step)}


def check(top: Path, step: int) -> None:
    found = torch.load(top / f"step-{step}" / "model.pt", weights_only=True)
    expected = state(step)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items()), step
    assert (top / f"step-{step}" / "meta.json").read_text() == f'{{"step": {step}}}'


def train(top: Path, steps: int) -> None:
    for step in range(1, steps + 1):
        where = top / f"step-{step}"
        where.mkdir()
        torch.save(state(step), where / "model.pt")
        (where / "meta.tmp").write_text(f'{{"step": {step}}}')
        (where / "meta.tmp").rename(where / "meta.json")
        with (top / "train.log").open("a") as log:
            log.write(f"step {step}\n")
        (top / "latest.tmp").write_text(str(step))
        (top / "latest.tmp").rename(top / "latest")
        if step > 3:
            shutil.rmtree(top / f"step-{step - 3}")
        check(top, step)


def kept(steps: int) -> list[int]:
    return list(range(max(1, steps - 2), steps + 1))


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, where, count = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if what == "train":
        train(where, count)
    else:
        assert sorted(p.name for p in where.glob("step-*")) == sorted(f"step-{n}" for n in kept(count))
        for number in kept(count):
            check(where, number)
        assert (where / "latest").read_text() == str(count)
        assert (where / "train.log").read_text() == "".join(f"step {n}\n" for n in range(1, count + 1))
