"""`make demo`: training on a tierfs mount beside training straight to disk. Needs no configuration.

Trains a small real model and saves it by plain torch.save: first to a directory on disk with fsync, as careful training
does, then onto a tierfs mount, where the daemon is killed in the middle of one save. Ends with the archive compared
with what was saved, bit for bit, and a line that says whether it all held. Exit code 0 when it did.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

POLICY = """\
state: {base}/state
allow_other: {allow_other}
tiers:
  memory:  {{kind: memory, size: {memory}MiB}}
  nvme:    {{kind: dir, path: {base}/nvme}}
  archive: {{kind: dir, path: {base}/archive}}
rules:
  - match: "**"
    ack: memory
    fsync: nvme
"""

console = Console()


class DemoFailed(Exception):
    """Something did not hold; the message says what."""


def tierfs(*args: str, timeout: float = 120) -> str:
    """Run the command line as a user would; output goes through a file, which the daemon may keep open."""
    with tempfile.TemporaryFile("w+") as output:
        command = [sys.executable, "-m", "tierfs", *args]
        # In a session of its own: Ctrl-C is for this program, which then unmounts.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"tierfs {args[0]} gave no answer within {timeout:g} s") from None
        except KeyboardInterrupt:
            if args[0] == "mount":  # begun, it comes up: only then can it be taken down
                process.wait(timeout)
            raise
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        output.seek(0)
        text = output.read()
    if code != 0:
        raise DemoFailed(f"tierfs {args[0]}: exit {code}: {text.strip()}")
    return text


class Model(torch.nn.Module):
    """A byte-level language model, small in its depth, large in its checkpoint."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(256, width)
        self.mix = torch.nn.GRU(width, width, batch_first=True)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.mix(self.embed(text))
        return self.down(torch.relu(self.up(hidden)))


class Training:
    """A model, its optimizer and its data: this program's own source."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        self.model = Model(width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.text = torch.tensor(list(Path(__file__).read_bytes()))
        self.losses: list[float] = []

    def step(self) -> None:
        starts = torch.randint(len(self.text) - 33, (4,))
        batch = torch.stack([self.text[start : start + 33] for start in starts])
        logits = self.model(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def checkpoint(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": len(self.losses)}


@dataclass
class Saves:
    """The saves of one run: how long training stood still, and what was saved."""

    stalls: list[float] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    size: int = 0


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def train(training: Training, directory: Path, saves: int, *, fsync: bool, before: Callable[[int], None]) -> Saves:
    result = Saves()
    for number in range(saves):
        for _ in range(3):
            training.step()
        path = directory / f"step-{len(training.losses):04}.pt"
        checkpoint = training.checkpoint()
        before(number)
        started = time.perf_counter()
        torch.save(checkpoint, path)
        if fsync:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        result.stalls.append(time.perf_counter() - started)
        result.size = path.stat().st_size
        result.digests[path.name] = digest(path)
    return result


class Killer:
    """Kills the daemon in the middle of one save and remembers which."""

    def __init__(self, mountpoint: Path, at: int, after: float) -> None:
        self.mountpoint = mountpoint
        self.at = at
        self.after = after
        self.killed = False

    def __call__(self, number: int) -> None:
        if number == self.at:
            pid = status(self.mountpoint)["daemon_pid"]
            threading.Timer(self.after, self._kill, [pid]).start()

    def _kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.killed = True
        console.print(f"  [yellow]kill -9 {pid}[/]: the daemon, in the middle of a save")


def status(mountpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(tierfs("status", str(mountpoint), "--json"))
    return found


def show_drain(mountpoint: Path) -> None:
    """Live until nothing is queued."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as progress:
        left = status(mountpoint)["drain"]["queued_bytes"]
        total = max(left, 1)
        task = progress.add_task("  draining to the archive", total=total)
        while left:
            time.sleep(0.2)
            left = status(mountpoint)["drain"]["queued_bytes"]
            total = max(total, left)
            progress.update(task, completed=total - left, total=total)
        progress.update(task, completed=total)
    tierfs("flush", str(mountpoint), "--timeout", "5m", timeout=310)


def report(direct: Saves, mounted: Saves, mode: str, killed: int | None) -> float:
    table = Table(title="How long training stood still per torch.save")
    for heading in ("save", "disk + fsync", f"tierfs ({mode})", "ratio", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for number, (slow, fast) in enumerate(zip(direct.stalls, mounted.stalls, strict=True)):
        note = "daemon killed in this one" if number == killed else ""
        table.add_row(str(number + 1), f"{slow * 1e3:.0f} ms", f"{fast * 1e3:.0f} ms", f"{slow / fast:.1f}x", note)
    ratio = median(direct.stalls) / median(mounted.stalls)
    middle = (f"{median(direct.stalls) * 1e3:.0f} ms", f"{median(mounted.stalls) * 1e3:.0f} ms", f"{ratio:.1f}x", "")
    table.add_row("median", *middle, style="bold")
    console.print(table)
    return ratio


def force_down(base: Path) -> None:
    """After a failure: end the daemon, which would drain for ever into directories that are gone, and detach whatever
    is still mounted below ``base``."""
    if (base / "mnt").is_mount():
        with contextlib.suppress(DemoFailed):
            tierfs("umount", "--no-drain", str(base / "mnt"), timeout=30)
    with open("/proc/self/mountinfo") as table:
        points = [line.split()[4] for line in table]
    for point in reversed([point for point in points if Path(point).is_relative_to(base)]):
        done = subprocess.run(["umount", "-l", point], capture_output=True)
        if done.returncode != 0:
            subprocess.run(["fusermount3", "-u", "-z", point], capture_output=True)


def demo(base: Path, saves: int, width: int) -> str:
    for name in ("direct", "nvme", "archive", "mnt"):
        (base / name).mkdir()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) - 1))
    training = Training(width)
    size = 12 * sum(p.numel() for p in training.model.parameters())
    root = os.geteuid() == 0
    memory = max(256, (saves + 1) * size * 5 // 4 >> 20)
    (base / "demo.yaml").write_text(POLICY.format(base=base, memory=memory, allow_other=str(root).lower()))

    console.print(f"[bold]1[/] Train, save {saves} checkpoints of {size / 1e6:.0f} MB straight to disk, with fsync")
    direct = train(Training(width), base / "direct", saves, fsync=True, before=lambda number: None)

    mountpoint = base / "mnt"
    console.print("[bold]2[/] The same on tierfs: acknowledged in memory, drained to disk, then to the archive")
    tierfs("mount", str(base / "demo.yaml"), str(mountpoint))
    found = status(mountpoint)
    mode = found["mode"]
    kill_at = saves // 2 if mode == "passthrough" else None
    if kill_at is None:
        console.print(f"  mode {mode}: {found.get('why', '')}; the daemon is not killed in this mode")
    killer = Killer(mountpoint, -1 if kill_at is None else kill_at, after=0.3 * size / 5e9)
    mounted = train(training, mountpoint, saves, fsync=False, before=killer)
    if kill_at is not None and not killer.killed:
        raise DemoFailed("the daemon was not killed")
    ratio = report(direct, mounted, mode, kill_at)

    console.print("[bold]3[/] Training goes on; the files go down the tiers")
    show_drain(mountpoint)
    restarts = status(mountpoint)["daemon_restarts"]
    if kill_at is not None and restarts != 1:
        raise DemoFailed(f"the daemon was killed once and restarted {restarts} times")

    console.print("[bold]4[/] Unmount and compare the archive, plain files now, with what was saved")
    tierfs("umount", str(mountpoint))
    archived = {path.name: digest(path) for path in (base / "archive").glob("*.pt")}
    if archived != mounted.digests:
        wrong = sorted(name for name in mounted.digests if archived.get(name) != mounted.digests[name])
        raise DemoFailed(f"archive differs: {', '.join(wrong) or 'files that were never saved'}")
    last = max((base / "archive").glob("*.pt"))
    loaded = torch.load(last, weights_only=True, mmap=True)
    for name, tensor in training.model.state_dict().items():
        if not torch.equal(loaded["model"][name], tensor):
            raise DemoFailed(f"{last.name}: {name} differs from the model in memory")
    survived = "one kill -9 unnoticed" if kill_at is not None else f"mode {mode}"
    return f"{len(archived)} checkpoints equal bit for bit on the archive, {survived}, {compared(ratio)}"


def compared(ratio: float) -> str:
    """``ratio``: stall of a save straight to disk by that of one through the mount."""
    if ratio >= 1.1:
        return f"stall {ratio:.1f}x shorter"
    took = f"{1 / ratio:.1f}x" if ratio <= 0.9 else "about"
    return (
        f"but the saves took {took} as long as straight to disk: others use this machine, or its memory is "
        "given by the host page by page (policy `huge: never` helps there)"
    )


def interrupt(number: int, frame: object) -> None:
    """SIGTERM and Ctrl-C alike, once: what follows is the clean-up."""
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--saves", type=int, default=6, help="checkpoints per run (default 6)")
    parser.add_argument("--width", type=int, default=1024, help="of the model; 1024 makes 130 MB checkpoints")
    options = parser.parse_args()
    for ending in (signal.SIGTERM, signal.SIGINT):
        signal.signal(ending, interrupt)
    base = Path(tempfile.mkdtemp(prefix="tierfs-demo-", dir="/var/tmp"))
    try:
        summary = demo(base, max(2, options.saves), options.width)
    except KeyboardInterrupt as error:
        console.print("interrupted; everything that it made is taken away", soft_wrap=True)
        return 128 + int(error.args[0])
    except Exception as error:
        console.print(f"[bold red]FAILED[/] {error}", soft_wrap=True)
        log = base / "state" / "tierfs.log"
        if log.exists():
            console.print("\n".join(log.read_text(errors="replace").splitlines()[-15:]), markup=False)
        if not isinstance(error, DemoFailed):
            raise
        return 1
    finally:
        force_down(base)
        shutil.rmtree(base, ignore_errors=True)
    console.print(f"[bold green]OK[/] {summary}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
