"""Commands that begin and end a mount: mount, umount, restart."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierfs.cli import render
from tierfs.cli.inspect import ANSWER_SECONDS, Mountpoint, mount_at
from tierfs.cli.moving import Duration, flush_one, lost_files
from tierfs.cli.recovering import show
from tierfs.control.client import call
from tierfs.control.protocol import MountRecord, list_mounts, mount_table, pid_alive
from tierfs.errors import MountError, NotDurableInTime, TierfsError, UsageError
from tierfs.report import read_reports

if TYPE_CHECKING:
    from tierfs.policy.model import Policy

RESTART_SECONDS = 30.0
_UMOUNT_NOFOLLOW = 8

# mount


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("mountpoint", required=False, type=click.Path(path_type=Path))
@click.option("--foreground", "-f", is_flag=True, help="Stay and log to stderr (systemd, containers).")
@click.option("--resume", type=int, hidden=True, help="Go on with this process's mount; used by `tierfs restart`.")
def mount(config: Path, mountpoint: Path | None, foreground: bool, resume: int | None) -> int:
    """Mount the filesystem that a policy file describes; returns once it answers.

    MOUNTPOINT wins over the policy's `mount`. The log is tierfs.log in the state directory.

    \b
    Examples:
      tierfs mount /etc/tierfs/ckpt.yaml
      tierfs mount ckpt.yaml /mnt/ckpt
      tierfs mount --foreground ckpt.yaml /mnt/ckpt
    """
    from tierfs.policy.load import check_paths, load_policy
    from tierfs.policy.machine import Machine, check_machine

    config = Path(os.path.realpath(config))
    chosen = None if mountpoint is None else Path(os.path.realpath(mountpoint))
    policy = load_policy(config, mountpoint=chosen)
    if policy.mount is None:
        raise UsageError(f"no mountpoint: give one after {config}, or write `mount:` in it")
    target = Path(os.path.realpath(policy.mount))
    if resume is not None:
        return _resume(policy, target, config, resume)
    check_not_mounted(target)
    check_paths(policy)
    check_machine(policy, Machine.this())
    check_empty(target)
    return _in_foreground(policy, target, config) if foreground else _in_background(policy, target, config)


def check_not_mounted(mountpoint: Path) -> None:
    """UsageError when a tierfs is mounted on ``mountpoint``; asks the mount itself nothing."""
    for record in list_mounts():
        if record.mountpoint == str(mountpoint):
            raise UsageError(f"{mountpoint} is already mounted, from {record.config}; `tierfs umount` ends it")
    if mount_table().get(str(mountpoint)) == "fuse.tierfs":
        raise UsageError(f"{mountpoint} is already a tierfs mount; `umount` it first")


def check_empty(mountpoint: Path) -> None:
    """UsageError unless the directory ``mountpoint`` is empty."""
    try:
        with os.scandir(mountpoint) as entries:
            if next(entries, None) is not None:
                raise UsageError(f"mountpoint {mountpoint} is not empty; the mount would hide what is in it")
    except OSError as error:
        raise UsageError(f"mountpoint {mountpoint}: {error.strerror}") from None


def _resume(policy: Policy, mountpoint: Path, config: Path, state_fd: int) -> int:
    _log_to_stderr(with_time="JOURNAL_STREAM" not in os.environ)
    from tierfs.daemon import run_mount
    from tierfs.fuse.handover import KeeperState

    return run_mount(policy, mountpoint, config, None, KeeperState.load(state_fd))


def _in_foreground(policy: Policy, mountpoint: Path, config: Path) -> int:
    _log_to_stderr(with_time="JOURNAL_STREAM" not in os.environ)
    read_fd, write_fd = os.pipe()

    def wait() -> None:
        with open(read_fd, "rb") as pipe:
            if pipe.readline() == b"ok\n":
                sd_notify("READY=1")

    threading.Thread(target=wait, name="ready", daemon=True).start()
    from tierfs.daemon import run_mount

    return run_mount(policy, mountpoint, config, write_fd)


def sd_notify(state: str) -> None:
    """Tell systemd, when it started us. Never fails: the mount works without it."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
        out.connect("\0" + address[1:] if address.startswith("@") else address)
        out.send(state.encode())


def _in_background(policy: Policy, mountpoint: Path, config: Path) -> int:
    log_path = policy.state / "tierfs.log"
    known = {report.at for report in read_reports(policy.state)}
    try:
        policy.state.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MountError(f"{log_path}: {error.strerror}") from error
    read_fd, write_fd = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(read_fd)
            os.setsid()
            code = 0 if os.fork() else _become_daemon(policy, mountpoint, config, log_fd, write_fd)
        except BaseException:
            logging.getLogger("tierfs").exception("the mount failed")
        finally:
            os._exit(code)
    os.close(write_fd)
    os.close(log_fd)
    os.waitpid(child, 0)
    with open(read_fd, "rb") as pipe, render.progress(f"mounting {mountpoint}"):
        pid = int(pipe.readline() or b"0")
        try:
            line = pipe.readline()
        except KeyboardInterrupt:
            if pid:
                os.kill(pid, signal.SIGTERM)
            raise
    code = _result(line, log_path)
    for report in read_reports(policy.state):
        if report.at not in known:
            render.say(f"mounted {mountpoint} after a recovery; `tierfs recover {config}` shows this again:")
            show(report)
    return code


def _become_daemon(policy: Policy, mountpoint: Path, config: Path, log_fd: int, ready_fd: int) -> int:
    """In the grandchild: run the mount with its output in the log. Says its pid first."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log_fd, 1), (log_fd, 2)):
        os.dup2(source, target)
    for fd in (null, log_fd):
        if fd > 2:
            os.close(fd)
    _log_to_stderr(with_time=True)
    logging.raiseExceptions = False  # a full disk below the log is no reason for tracebacks in it
    os.write(ready_fd, b"%d\n" % os.getpid())
    try:
        from tierfs.daemon import run_mount
    except ImportError as error:
        message = f"cannot load the daemon: {error}"
        os.write(ready_fd, json.dumps({"message": message, "exit_code": 1}).encode() + b"\n")
        return 1
    return run_mount(policy, mountpoint, config, ready_fd)


def _result(line: bytes, log_path: Path) -> int:
    """Read what the daemon wrote to the ready pipe."""
    if line == b"ok\n":
        return 0
    try:
        answer = json.loads(line)
        message, exit_code = str(answer["message"]), int(answer["exit_code"])
    except (ValueError, TypeError, KeyError):
        raise MountError(f"the mount ended before it answered; see {log_path}") from None
    error = MountError(message)
    error.exit_code = exit_code
    raise error


def _log_to_stderr(*, with_time: bool) -> None:
    form = "%(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s {form}" if with_time else form)


# umount


@click.command()
@click.argument("mountpoint", metavar="MOUNTPOINT|CONFIG", type=Mountpoint())
@click.option("--no-drain", is_flag=True, help="Leave what is not durable yet in memory for the next mount.")
@click.option("--timeout", type=Duration(), help="Stay mounted when draining takes longer, with exit code 3.")
def umount(mountpoint: str, no_drain: bool, timeout: float | None) -> None:
    """Drain, unmount and wait until the mount's processes have ended.

    With --no-drain a reboot loses what is only in memory.

    \b
    Examples:
      tierfs umount /mnt/ckpt
      tierfs umount /mnt/ckpt --timeout 10m
      tierfs umount /etc/tierfs/ckpt.yaml
    """
    record = _mount_of(mountpoint)
    alive = any(pid_alive(pid) for pid in record.pids)
    if not alive:
        render.note(f"{record.mountpoint}: its processes have ended already; the next mount drains what is left")
    elif no_drain:
        # Whatever state the daemon is in, its user wants it gone; what is in memory stays there anyhow.
        try:
            call(record, "detach", {"drain": False}, timeout=ANSWER_SECONDS)
        except TierfsError as error:
            render.note(str(error))
    else:
        try:
            if lost := flush_one(record, "", None, timeout).get("lost"):
                render.note(lost_files(lost))
        except NotDurableInTime as error:
            raise NotDurableInTime(f"{record.mountpoint} stays mounted: {error}") from None
        call(record, "detach", {"drain": True}, timeout=ANSWER_SECONDS)
    # A daemon that was restarted while it drained has a new pid.
    record = next((now for now in list_mounts() if now.mountpoint == record.mountpoint), record)
    if record.mountpoint in mount_table():
        unmount(record.mountpoint)
    _wait_until_gone(record)
    record.remove()


def _mount_of(argument: str) -> MountRecord:
    """The mount at a mountpoint, or the one that was made from a policy file."""
    if not os.path.isfile(argument):
        return mount_at(argument)
    found = [record for record in list_mounts() if record.config == os.path.realpath(argument)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(f"{argument} is mounted on {', '.join(r.mountpoint for r in found)}; name one")
    raise UsageError(f"{argument} is not mounted; `tierfs status` lists the mounts")


def unmount(mountpoint: str) -> None:
    """Take the mount out of the tree. MountError names the processes that hold it busy."""
    if os.geteuid() == 0:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.umount2(os.fsencode(mountpoint), _UMOUNT_NOFOLLOW) == 0:
            return
        code = ctypes.get_errno()
        busy, reason = code == errno.EBUSY, os.strerror(code)
    else:
        program = shutil.which("fusermount3") or shutil.which("fusermount")
        if program is None:
            raise MountError(f"cannot unmount {mountpoint}: fusermount3 is not installed")
        done = subprocess.run([program, "-u", "--", mountpoint], capture_output=True, text=True, errors="replace")
        if done.returncode == 0:
            return
        busy, reason = "busy" in done.stderr.lower(), done.stderr.strip()
    if busy:
        users = ", ".join(processes_using(mountpoint)[:10])
        raise MountError(f"{mountpoint} is in use{f' by {users}' if users else ''}; end that and run umount again")
    raise MountError(f"cannot unmount {mountpoint}: {reason}")


def processes_using(mountpoint: str) -> list[str]:
    """Processes with a file or working directory in ``mountpoint``, as ``name (pid)``; those that we may look at.

    Only links are read, so that a filesystem that does not answer cannot hang this.
    """
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        process = Path("/proc", entry)
        links = [process / "cwd", process / "root", process / "exe"]
        with contextlib.suppress(OSError):
            links += [process / "fd" / name for name in os.listdir(process / "fd")]
        if any(_points_into(link, mountpoint) for link in links):
            name = "?"
            with contextlib.suppress(OSError):
                name = (process / "comm").read_text(errors="replace").strip()
            found.append(f"{name} ({entry})")
    return found


def _points_into(link: Path, mountpoint: str) -> bool:
    try:
        target = os.readlink(link)
    except OSError:
        return False
    return target == mountpoint or target.startswith(mountpoint.rstrip("/") + "/")


def _wait_until_gone(record: MountRecord) -> None:
    """The daemon closes its catalog, and drains what was closed last, after the mount is gone."""
    with render.progress(f"waiting for the processes of {record.mountpoint}"):
        while any(pid_alive(pid) for pid in record.pids):
            time.sleep(0.05)


# restart


@click.command()
@click.argument("mountpoint", metavar="MOUNTPOINT|CONFIG", type=Mountpoint())
def restart(mountpoint: str) -> None:
    """Go on with tierfs as it is installed now and with the rules as the policy file has them now.

    Programs that use the mount do not notice, apart from a pause of a second. Tiers, state and mode stay as
    they were mounted: to change those, umount and mount.

    \b
    Examples:
      tierfs restart /mnt/ckpt
      tierfs restart /etc/tierfs/ckpt.yaml
    """
    record = _mount_of(mountpoint)
    before = call(record, "status", timeout=ANSWER_SECONDS).get("daemon_pid")
    call(record, "restart", timeout=ANSWER_SECONDS)
    deadline = time.monotonic() + RESTART_SECONDS
    with render.progress("restarting"):
        while time.monotonic() < deadline:
            with contextlib.suppress(MountError):
                now = call(record, "status", timeout=ANSWER_SECONDS).get("daemon_pid")
                if now != before:
                    break
            time.sleep(0.1)
        else:
            raise MountError(f"{record.mountpoint}: no new daemon answered within {RESTART_SECONDS:g} s")
    render.say(f"{record.mountpoint}: daemon {before} was replaced by {now}")


COMMANDS: tuple[click.Command, ...] = (mount, umount, restart)
