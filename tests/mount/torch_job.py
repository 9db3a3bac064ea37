"""What a training program does with a mount, as a process of its own: torch_job.py WHAT DIR [OTHERS].

``save`` saves and loads, ``load`` loads from each directory what ``save`` saved there. Both use the same seed, so that
``load`` knows every value. Any difference is an AssertionError.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import load_file, save_file

RANKS = 2


def state() -> dict[str, torch.Tensor]:
    torch.manual_seed(20)
    shapes = {"weights": (1000, 3001), "bias": (7,), "empty": (0, 3), "moments": (2, 500, 501)}
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    return {**tensors, "half": torch.randn(300_001).to(torch.bfloat16), "step": torch.tensor(17)}


def equal(found: dict[str, torch.Tensor]) -> None:
    expected = state()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def save(top: Path) -> None:
    torch.save(state(), top / "model.pt")
    torch.save(state(), top / "legacy.pt", _use_new_zipfile_serialization=False)
    save_file(state(), top / "model.safetensors")
    for _ in range(2):  # a checkpoint that is written over
        torch.save({"model": state(), "epoch": 3}, top / "last.pt")
    load(top)


def load(*tops: Path) -> None:
    for top in tops:
        equal(torch.load(top / "model.pt", weights_only=True))
        equal(torch.load(top / "model.pt", weights_only=True, mmap=True))
        equal(torch.load(top / "legacy.pt", weights_only=True))
        equal(torch.load(top / "last.pt", weights_only=True)["model"])
        equal(load_file(top / "model.safetensors"))
        with safe_open(top / "model.safetensors", framework="pt") as file:
            equal({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118


def rank_state(rank: int, step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {f"rank{rank}.{name}": torch.randn(500, 701, generator=generator) for name in ("weights", "moments")}


def rank_main(rank: int, top: str, saves: bool) -> None:
    store = f"file://{top}.rendezvous-{'save' if saves else 'load'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    if saves:
        dcp.save(rank_state(rank, 1), checkpoint_id=f"{top}/step-1")
        pending = dcp.async_save(rank_state(rank, 2), checkpoint_id=f"{top}/step-2")
        pending.result()
    for step in (1, 2):
        check_step(rank, top, step)
    dist.barrier()
    dist.destroy_process_group()


def rotate_main(rank: int, top: str, end: str) -> None:
    """Save step after step, keeping the last three, until the file ``end`` is there; then load what is left."""
    dist.init_process_group("gloo", init_method=f"file://{top}.rendezvous", rank=rank, world_size=RANKS)
    step, last = 0, torch.zeros(1)
    while not last:
        step += 1
        if step % 2:
            dcp.save(rank_state(rank, step), checkpoint_id=f"{top}/step-{step}")
        else:
            dcp.async_save(rank_state(rank, step), checkpoint_id=f"{top}/step-{step}").result()
        if rank == 0:
            if step > 3:
                shutil.rmtree(f"{top}/step-{step - 3}")
            last.fill_(Path(end).exists())
        dist.broadcast(last, 0)
    for kept in range(max(1, step - 2), step + 1):
        check_step(rank, top, kept)
    dist.barrier()
    dist.destroy_process_group()


def check_step(rank: int, top: str, step: int) -> None:
    found = {name: torch.zeros_like(tensor) for name, tensor in rank_state(rank, step).items()}
    dcp.load(found, checkpoint_id=f"{top}/step-{step}")
    for name, tensor in rank_state(rank, step).items():
        assert torch.equal(found[name], tensor), (step, name)


def ranks(top: Path, saves: bool) -> None:
    top.mkdir(exist_ok=True)
    start_ranks(rank_main, str(top), saves)


def start_ranks(main: Callable[..., None], *args: object) -> None:
    # Forked, because a fresh interpreter imports torch for seconds; no thread has been started yet.
    mp.start_processes(main, args=args, nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    what, where = sys.argv[1], Path(sys.argv[2])
    others = [Path(word) for word in sys.argv[3:]]
    torch.set_num_threads(1)
    {
        "save": save,
        "load": lambda top: load(top, *others),
        "dcp-save": lambda top: ranks(top / "dcp", True),
        "dcp-load": lambda top: ranks(top / "dcp", False),
        "dcp-rotate": lambda top: start_ranks(rotate_main, str(top), str(others[0])),
    }[what](where)
