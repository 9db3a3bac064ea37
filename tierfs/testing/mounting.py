"""A tierfs mount for tests: made, used and ended through the command line, as a user would.

``mounted`` leaves nothing behind, whatever happens: a mount that does not end by ``tierfs umount`` is aborted through
the kernel. After a test that passed, ``fsck`` must be clean and the log free of warnings: noise in the log is a bug.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import yaml

from tierfs.control.protocol import MountRecord, mount_directory

FUSE_CONNECTIONS = Path("/sys/fs/fuse/connections")
UMOUNT_TIMEOUT = 60.0
_NOISE = re.compile(r"\b(WARNING|ERROR|CRITICAL)\b|Traceback \(most recent call last\)")


class MountFailure(AssertionError):
    """The mount broke a promise that every test relies on: it did not start, end, check clean or keep a quiet log."""


@dataclass(frozen=True)
class Result:
    """What one call of the command line gave."""

    code: int
    out: str
    err: str

    def json(self) -> dict[str, object]:
        return cast("dict[str, object]", json.loads(self.out))


def run_cli(*args: str | os.PathLike[str], timeout: float = 60.0) -> Result:
    """``python -m tierfs ARGS``. Output goes through files: what the command leaves in the background may keep them."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [sys.executable, "-m", "tierfs", *(os.fspath(arg) for arg in args)]
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=timeout)
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = -signal.SIGALRM
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    if code == -signal.SIGALRM:
        texts[1] += f"\nno answer within {timeout:g} s: tierfs {' '.join(os.fspath(a) for a in args)}"
    return Result(code, texts[0], texts[1])


@dataclass
class TestMount:
    """One running mount. Paths: ``path`` (the mountpoint), ``config``, ``state``, ``archive``, ``nvme``."""

    __test__ = False

    path: Path
    config: Path
    state: Path
    archive: Path
    nvme: Path | None
    mode: str
    allow_log: Sequence[str] = ()
    connection: int | None = None
    pids: set[int] = field(default_factory=set)
    _strikes: int = 0

    @property
    def memory(self) -> Path:
        """Where tierfs mounts the tmpfs of the memory tier."""
        return self.state / "memory" / "memory"

    @property
    def log(self) -> str:
        try:
            return (self.state / "tierfs.log").read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def cli(self, *args: str | os.PathLike[str], timeout: float = 60.0, check: bool = True) -> Result:
        """Run the command line; ``check`` makes any exit code but 0 a failure with the command's own words."""
        result = run_cli(*args, timeout=timeout)
        if check and result.code != 0:
            raise MountFailure(
                f"tierfs {' '.join(os.fspath(a) for a in args)}: exit {result.code}: {result.err}{result.out}"
            )
        return result

    def status(self) -> dict[str, object]:
        status = self.cli("status", self.path, "--json").json()
        self.pids |= {pid for key in ("keeper_pid", "daemon_pid") if isinstance(pid := status.get(key), int)}
        return status

    def info(self, path: Path) -> dict[str, object]:
        return self.cli("info", path, "--json").json()

    def flush(self, path: Path | None = None, *, to: str | None = None, timeout: float = 60.0) -> None:
        """Block until ``path`` (default: everything) is durable on tier ``to`` (default: the archive)."""
        extra = ["--to", to] if to else []
        self.cli("flush", path or self.path, *extra, "--timeout", f"{timeout:g}s", timeout=timeout + 10)

    def evict(self, *paths: Path, tier: str = "memory") -> None:
        self.cli("evict", *paths, "--from", tier)

    def daemon_pid(self) -> int:
        pid = self.status()["daemon_pid"]
        assert isinstance(pid, int)
        return pid

    def strike(self) -> float:
        """SIGKILL the daemon; seconds that an operation which meets the dead daemon takes until it succeeds.

        Costs no command of its own, so that a struck daemon meets whatever the mount is busy with."""
        if self.mode != "passthrough":
            raise MountFailure("only mode passthrough survives a killed daemon")
        # The record is written before the kernel is served, and something was served since the last strike.
        pid = MountRecord.read(mount_directory(self.path)).daemon_pid
        self._strikes += 1
        os.kill(pid, signal.SIGKILL)
        started = time.monotonic()
        probe = self.path / f".strike-{self._strikes}"
        probe.mkdir()
        taken = time.monotonic() - started
        probe.rmdir()
        return taken

    def kill_daemon(self, *, within: float = 20.0) -> int:
        """SIGKILL the daemon, wait until the keeper has another one that answers, and give its pid."""
        if self.mode != "passthrough":
            raise MountFailure("only mode passthrough survives a killed daemon")
        former = self.daemon_pid()
        os.kill(former, signal.SIGKILL)
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            with contextlib.suppress(MountFailure):
                if (pid := self.daemon_pid()) != former:
                    return pid
            time.sleep(0.02)
        raise MountFailure(f"no new daemon within {within:g} s of killing {former}; log:\n{self.log[-4000:]}")

    def umount(self, *args: str, timeout: float = UMOUNT_TIMEOUT) -> None:
        self.cli("umount", self.path, *args, timeout=timeout)

    def mount(self, *, timeout: float = 30.0) -> None:
        """Mount (again, after ``umount``): as in ``mounted``, the configuration stays."""
        self.cli("mount", self.config, self.path, timeout=timeout)
        self.connection = os.minor(os.stat(self.path).st_dev)
        mode = self.status()["mode"]
        if mode != self.mode:
            raise MountFailure(f"asked for mode {self.mode}, mounted in mode {mode}")

    @contextlib.contextmanager
    def abort_after(self, seconds: float) -> Iterator[None]:
        """Abort the kernel connection unless the block ends in time: a hung request ignores every signal but KILL.

        A process of its own waits, because a page fault on a hung mapping stops this one, all threads included.
        """
        if self.connection is None or not _connections_visible():
            yield
            return
        script = 'read -r -t "$1" _; [ $? -gt 128 ] && grep -qF "$2" /proc/self/mountinfo && echo 1 >"$3"; exit 0'
        mine = f" 0:{self.connection} / {os.path.abspath(self.path)} "
        abort = FUSE_CONNECTIONS / str(self.connection) / "abort"
        command = ["bash", "-c", script, "abort_after", f"{seconds:g}", mine, str(abort)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as watchdog:
            try:
                yield
            finally:
                assert watchdog.stdin is not None
                watchdog.stdin.close()
                watchdog.wait()

    def force(self) -> None:
        """End the mount without its help: abort the connection, detach, kill the processes that it had named."""
        if (number := _device_of(self.path)) is not None:
            # The number as of now: that of a mount which ended may have become another mount's.
            if _connections_visible():
                with contextlib.suppress(OSError):
                    (FUSE_CONNECTIONS / number.partition(":")[2] / "abort").write_text("1")
            _quietly("umount", "-l", str(self.path)) or _quietly("fusermount3", "-u", "-z", str(self.path))
        for pid in self.pids:
            with contextlib.suppress(OSError):
                if b"tierfs" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        if is_mounted(self.memory):
            _quietly("umount", "-l", str(self.memory))

    def noise(self) -> list[str]:
        """Lines of the log that a healthy mount does not write."""
        allowed = [re.compile(pattern) for pattern in self.allow_log]
        lines = [line for line in self.log.splitlines() if _NOISE.search(line)]
        return [line for line in lines if not any(pattern.search(line) for pattern in allowed)]

    def verify(self) -> None:
        """After umount: the mount is gone, fsck finds nothing, the log is quiet."""
        if is_mounted(self.path):
            raise MountFailure(f"{self.path} is still mounted after umount")
        fsck = self.cli("fsck", self.config, "--json", timeout=60, check=False)
        if fsck.code != 0:
            raise MountFailure(f"fsck: exit {fsck.code}: {fsck.out}{fsck.err}")
        if noise := self.noise():
            raise MountFailure("the log has warnings:\n" + "\n".join(noise[:40]) + f"\n…\n{self.log[-3000:]}")


@contextlib.contextmanager
def mounted(
    tmp: Path,
    *,
    mode: str,
    archive: Path,
    nvme: Path | None = None,
    memory: str = "512MiB",
    memory_max: str | None = None,
    rules: Sequence[Mapping[str, object]] | None = None,
    extra: Mapping[str, object] | None = None,
    stored: Mapping[str, object] | None = None,
    allow_log: Sequence[str] = (),
) -> Iterator[TestMount]:
    """Mount tiers memory, nvme (when given) and archive at ``tmp/mnt``; state and policy file are in ``tmp`` too.

    ``extra`` are further top-level keys of the policy, ``stored`` further keys of the archive. The block may umount
    itself. MountFailure when the mount does not start or end, fsck is not clean, or the log has lines at WARNING or
    above that no ``allow_log`` pattern matches.
    """
    mount = TestMount(
        path=tmp / "mnt",
        config=tmp / "tierfs.yaml",
        state=tmp / "state",
        archive=archive,
        nvme=nvme,
        mode=mode,
        allow_log=allow_log,
    )
    for directory in (mount.path, archive, *([nvme] if nvme else [])):
        directory.mkdir(parents=True, exist_ok=True)
    mount.config.write_text(_policy_text(mount, memory, memory_max, rules, extra or {}, stored or {}))
    try:
        mount.mount()
        yield mount
        if is_mounted(mount.path):
            mount.umount()
    except BaseException as error:
        if mount.log:
            error.add_note(f"tierfs.log ends:\n{mount.log[-4000:]}")
        raise
    else:
        mount.verify()
    finally:
        if is_mounted(mount.path) or is_mounted(mount.memory):
            mount.force()


def is_mounted(path: Path) -> bool:
    """Whether something is mounted at ``path``, from the mount table: asking ``path`` itself could hang."""
    return _device_of(path) is not None


def _device_of(path: Path) -> str | None:
    """``major:minor`` of what is mounted at ``path``, the topmost if several are."""
    wanted, found = os.path.abspath(path), None
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as table:
        for line in table:
            fields = line.split()
            if fields[4].replace("\\040", " ") == wanted:
                found = fields[2]
    return found


def _policy_text(
    mount: TestMount,
    memory: str,
    memory_max: str | None,
    rules: Sequence[Mapping[str, object]] | None,
    extra: Mapping[str, object],
    stored: Mapping[str, object],
) -> str:
    most = {} if memory_max is None else {"max": memory_max}
    tiers: dict[str, object] = {"memory": {"kind": "memory", "size": memory, **most}}
    if mount.nvme is not None:
        tiers["nvme"] = {"kind": "dir", "path": str(mount.nvme)}
    directory = {} if stored.get("kind") == "object" else {"kind": "dir", "path": str(mount.archive)}
    tiers["archive"] = {**directory, **stored}
    policy: dict[str, object] = {"mode": mount.mode, "state": str(mount.state), "tiers": tiers}
    if os.geteuid() == 0:
        policy["allow_other"] = True
    if rules is not None:
        policy["rules"] = [dict(rule) for rule in rules]
    return yaml.safe_dump({**policy, **extra}, sort_keys=False)


def _connections_visible() -> bool:
    if not any(FUSE_CONNECTIONS.glob("*")) and os.geteuid() == 0:
        _quietly("mount", "-t", "fusectl", "none", str(FUSE_CONNECTIONS))
    return any(FUSE_CONNECTIONS.glob("*"))


def _quietly(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=15).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
