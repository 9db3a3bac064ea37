"""The keeper alone, with a small loopback daemon of its own (this file run as a program)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tierfs.fuse.backing import BackingIds
from tierfs.fuse.keeper import MAX_CRASHES, mount_number, run_keeper
from tierfs.fuse.session import KeeperSession

pytestmark = pytest.mark.timeout(60)

ROOT_INO = 1
RESENT = 1 << 30


# --- the program: keeper.py's run_keeper with a loopback daemon -----------------------------------------------------


def loopback(session: KeeperSession, root: str, events_path: str) -> int:
    import pyfuse3
    import trio

    from tierfs.fuse.adapter import serve_kernel

    backing = BackingIds(session.device_fd)
    events_fd = os.open(events_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def event(*words: object) -> None:
        os.write(events_fd, " ".join(map(str, words)).encode() + b"\n")

    class Loopback(pyfuse3.Operations):
        enable_writeback_cache = False

        def __init__(self) -> None:
            super().__init__()
            self.paths = {ROOT_INO: root}
            for directory, names, files in os.walk(root):
                for name in names + files:
                    self.remember(os.path.join(directory, name))
            self.serial = 1
            self.open_inodes: dict[int, list[int]] = {}  # ino → [backing id, opens]
            self.handles: dict[int, int] = {}
            for handle in session.handles:
                self.handles[handle.fh] = handle.ino
                self.open_inodes.setdefault(handle.ino, [handle.backing_id, 0])[1] += 1
                self.serial = max(self.serial, handle.fh >> 32)
            if session.restarts:
                backing.reclaim({handle.backing_id for handle in session.handles}, session.highest_backing_id)

        def remember(self, path: str) -> None:
            self.paths[os.lstat(path).st_ino] = path

        def attributes(self, path: str) -> pyfuse3.EntryAttributes:
            try:
                status = os.lstat(path)
            except OSError as error:
                raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
            entry = pyfuse3.EntryAttributes()
            for name in ("mode", "nlink", "uid", "gid", "size", "atime_ns", "mtime_ns", "ctime_ns"):
                setattr(entry, f"st_{name}", getattr(status, f"st_{name}"))
            entry.st_ino = ROOT_INO if path == root else status.st_ino
            entry.entry_timeout = entry.attr_timeout = 0
            self.paths[entry.st_ino] = path
            return entry

        def child(self, parent: int, name: bytes) -> str:
            return os.path.join(self.paths[parent], os.fsdecode(name))

        def attach(self, ino: int) -> pyfuse3.FileInfo:
            if ino not in self.open_inodes:
                fd = os.open(self.paths[ino], os.O_RDWR)
                self.open_inodes[ino] = [backing.open(fd), 0]
                os.close(fd)
            self.open_inodes[ino][1] += 1
            self.serial += 1
            fh = self.serial << 32 | self.open_inodes[ino][0]
            self.handles[fh] = ino
            event("open", self.open_inodes[ino][0])
            return pyfuse3.FileInfo(fh=fh)

        async def lookup(self, parent, name, ctx):  # type: ignore[no-untyped-def]
            return self.attributes(self.child(parent, name))

        async def getattr(self, ino, ctx):  # type: ignore[no-untyped-def]
            return self.attributes(self.paths[ino])

        async def setattr(self, ino, attr, fields, fh, ctx):  # type: ignore[no-untyped-def]
            if fields.update_size:
                os.truncate(self.paths[ino], attr.st_size)
            return self.attributes(self.paths[ino])

        async def create(self, parent, name, mode, flags, ctx):  # type: ignore[no-untyped-def]
            path = self.child(parent, name)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, mode))
            entry = self.attributes(path)
            return self.attach(entry.st_ino), entry

        async def open(self, ino, flags, ctx):  # type: ignore[no-untyped-def]
            return self.attach(ino)

        async def release(self, fh):  # type: ignore[no-untyped-def]
            ino = self.handles.pop(fh, None)
            if ino is not None:
                self.open_inodes[ino][1] -= 1
                if not self.open_inodes[ino][1]:
                    backing.close(self.open_inodes.pop(ino)[0])

        async def flush(self, fh):  # type: ignore[no-untyped-def]
            pass

        async def mkdir(self, parent, name, mode, ctx):  # type: ignore[no-untyped-def]
            path = self.child(parent, name)
            event("mkdir", os.fsdecode(name), ctx.pid)
            try:
                os.mkdir(path, mode)
            except FileExistsError:
                if not ctx.pid & RESENT:
                    raise pyfuse3.FUSEError(errno.EEXIST) from None
            if name == b"wait":
                await trio.to_thread.run_sync(Path(f"{root}.removed/go").read_bytes)
            if name.startswith(b"die-once") and not ctx.pid & RESENT:
                os._exit(9)
            return self.attributes(path)

        async def rmdir(self, parent, name, ctx):  # type: ignore[no-untyped-def]
            path = self.child(parent, name)
            try:
                # Kept aside, lest its inode number names another directory while the kernel awaits this reply.
                os.rename(path, f"{root}.removed/{os.lstat(path).st_ino}")
            except FileNotFoundError:
                if not ctx.pid & RESENT:
                    raise pyfuse3.FUSEError(errno.ENOENT) from None

        async def unlink(self, parent, name, ctx):  # type: ignore[no-untyped-def]
            if name == b"die-always":
                os._exit(9)
            os.unlink(self.child(parent, name))

        async def opendir(self, ino, ctx):  # type: ignore[no-untyped-def]
            return ino

        async def readdir(self, fh, start, token):  # type: ignore[no-untyped-def]
            for number, name in enumerate(sorted(os.listdir(self.paths[fh]))[start:], start + 1):
                entry = self.attributes(os.path.join(self.paths[fh], name))
                if not pyfuse3.readdir_reply(token, os.fsencode(name), entry, number):
                    return

    pyfuse3.init(Loopback(), f"/dev/fd/{session.channel_fd}", {"default_permissions"})
    directories = ",".join(str(handle.ino) for handle in session.directories)
    event("start", os.getpid(), session.restarts, len(session.handles), f"[{directories}]")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_stopped)
            await serve_kernel()
            nursery.cancel_scope.cancel()

    async def until_stopped() -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            async for _ in signals:
                pyfuse3.terminate()
                return

    trio.run(main)
    event("end", os.getpid())
    return 0


def program(root: str, mountpoint: str, events_path: str) -> int:
    import pyfuse3  # noqa: F401  so that forked daemons start fast
    import trio  # noqa: F401

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    return run_keeper(
        Path(mountpoint),
        allow_other=False,
        serve=lambda session: loopback(session, root, events_path),
        log=logging.getLogger("keeper"),
        on_ready=lambda: print("ready", flush=True),
    )


# --- the tests ------------------------------------------------------------------------------------------------------


@dataclass
class Mounted:
    path: Path
    root: Path
    events_path: Path
    log_path: Path
    process: subprocess.Popen[bytes]
    connection: str = ""
    daemons: set[int] = field(default_factory=set)

    def events(self, kind: str) -> list[list[str]]:
        lines = self.events_path.read_text().splitlines() if self.events_path.exists() else []
        return [line.split()[1:] for line in lines if line.split()[0] == kind]

    def daemon(self) -> int:
        self.daemons |= {int(words[0]) for words in self.events("start")}
        return int(self.events("start")[-1][0])

    def kill(self) -> float:
        """Kill the daemon and wait for the next one; seconds until that answered."""
        starts = len(self.events("start"))
        begin = time.perf_counter()
        os.kill(self.daemon(), signal.SIGKILL)
        wait_for(lambda: len(self.events("start")) > starts)
        os.stat(self.path)
        return time.perf_counter() - begin

    def log(self) -> str:
        return self.log_path.read_text()


def wait_for(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture
def mnt(tmp_path: Path) -> Iterator[Mounted]:
    if os.geteuid() != 0 or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("needs root and /dev/fuse")
    path, root = tmp_path / "mnt", tmp_path / "root"
    path.mkdir()
    root.mkdir()
    (tmp_path / "root.removed").mkdir()
    log_path, events_path = tmp_path / "log", tmp_path / "events"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, str(root), str(path), str(events_path)], stdout=log, stderr=log
        )
    mounted = Mounted(path, root, events_path, log_path, process)
    watchdog = threading.Timer(45, lambda: release(mounted))
    watchdog.start()
    try:
        wait_for(lambda: "ready" in mounted.log() or process.poll() is not None)
        number = mount_number(path)
        assert number, mounted.log()
        mounted.connection = number.split(":")[1]
        yield mounted
    finally:
        watchdog.cancel()
        release(mounted)
        process.wait(10)
    assert "Traceback" not in mounted.log(), mounted.log()


def release(mounted: Mounted) -> None:
    if mount_number(mounted.path):
        if mounted.connection:
            with contextlib.suppress(OSError):
                Path(f"/sys/fs/fuse/connections/{mounted.connection}/abort").write_text("1")
        ctypes.CDLL(None).umount2(os.fsencode(mounted.path), 2)
    try:
        mounted.process.wait(5)
    except subprocess.TimeoutExpired:
        for words in mounted.events("start")[-1:]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(words[0]), signal.SIGKILL)
        mounted.process.kill()


def test_round_trip_through_passthrough(mnt: Mounted) -> None:
    data = os.urandom(3 << 20)
    (mnt.path / "file").write_bytes(data)
    assert (mnt.path / "file").read_bytes() == data
    assert (mnt.root / "file").read_bytes() == data
    # The daemon has neither a read nor a write handler, so all of it went past it.
    assert len(mnt.events("open")) == 2


def test_concurrent_opens_share_one_id(mnt: Mounted) -> None:
    with (mnt.path / "file").open("wb", buffering=0) as one, (mnt.path / "file").open("rb", buffering=0) as two:
        one.write(b"hello")
        assert two.read() == b"hello"
        mnt.kill()
        with (mnt.path / "file").open("r+b", buffering=0) as three:
            three.write(b"J")
            assert os.pread(two.fileno(), 5, 0) == b"Jello"
    assert len({words[0] for words in mnt.events("open")}) == 1


def test_open_handles_survive(mnt: Mounted) -> None:
    (mnt.path / "dir").mkdir()
    directory = os.open(mnt.path / "dir", os.O_RDONLY | os.O_DIRECTORY)
    file = os.open(mnt.path / "dir" / "file", os.O_RDWR | os.O_CREAT, 0o600)
    os.write(file, b"before ")
    for restart in (1, 2):
        mnt.kill()
        assert mnt.events("start")[-1][1:] == [str(restart), "1", f"[{os.stat(mnt.path / 'dir').st_ino}]"]
    os.write(file, b"after")
    assert os.listdir(directory) == ["file"]
    assert os.pread(file, 100, 0) == b"before after"
    os.ftruncate(file, 3)
    assert os.fstat(file).st_size == 3
    os.close(file)
    os.close(directory)
    time.sleep(0.2)  # RELEASE comes after close() has returned
    mnt.kill()
    wait_for(lambda: mnt.events("start")[-1][1] == "3")
    assert mnt.events("start")[-1][2:] == ["0", "[]"]


def test_kills_during_writes_go_unnoticed(mnt: Mounted) -> None:
    done = threading.Event()
    failures: list[BaseException] = []
    block = os.urandom(1 << 20)

    def work() -> None:
        try:
            for number in range(10_000):
                path = mnt.path / f"file{number % 4}"
                with path.open("wb") as file:
                    for _ in range(8):
                        file.write(block)
                assert path.read_bytes() == block * 8
                if done.is_set():
                    return
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(5):
        time.sleep(0.15)
        mnt.kill()
    done.set()
    thread.join(30)
    assert not thread.is_alive()
    assert failures == []


def test_kills_during_metadata_go_unnoticed(mnt: Mounted) -> None:
    done = threading.Event()
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for number in range(100_000):
                path = mnt.path / f"d{worker}-{number}"
                path.mkdir()
                (path / "sub").mkdir()
                assert os.listdir(path) == ["sub"]
                (path / "sub").rmdir()
                path.rmdir()
                if done.is_set():
                    return
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(6):
        time.sleep(0.1)
        mnt.kill()
    done.set()
    for thread in threads:
        thread.join(30)
    assert failures == []
    assert os.listdir(mnt.root) == []
    ids = [int(words[1]) for words in mnt.events("mkdir")]
    first = [number for number in ids if not number & RESENT]
    assert len(set(first)) == len(first), "request ids repeat"


def test_resent_request_has_the_bit_and_the_same_id(mnt: Mounted) -> None:
    (mnt.path / "plain").mkdir()
    (mnt.path / "die-once").mkdir()
    (_, plain), (_, first), (_, second) = mnt.events("mkdir")
    assert int(plain) < RESENT
    assert int(first) < RESENT
    assert int(second) == int(first) | RESENT
    with pytest.raises(FileExistsError):
        (mnt.path / "plain").mkdir()


def test_planned_restarts_are_no_crashes(mnt: Mounted) -> None:
    for number in range(1, 13):
        mnt.process.send_signal(signal.SIGHUP)
        wait_for(lambda number=number: len(mnt.events("start")) > number)  # type: ignore[misc]
        (mnt.path / str(number)).mkdir()
    assert "died" not in mnt.log()


def test_kills_from_outside_are_no_crash_loop(mnt: Mounted) -> None:
    for number in range(MAX_CRASHES + 5):
        mnt.kill()
        (mnt.path / str(number)).mkdir()
    assert "died" not in mnt.log()


def test_crash_loop_unmounts(mnt: Mounted) -> None:
    (mnt.path / "die-always").write_bytes(b"")
    with pytest.raises(OSError, match=r".") as caught:
        (mnt.path / "die-always").unlink()
    assert caught.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    assert mnt.process.wait(10) == 1
    assert mount_number(mnt.path) is None
    assert [line for line in mnt.log().splitlines() if line.startswith("ERROR")] == [
        f"ERROR the daemon died 10 times within a minute (last code 9); unmounting {mnt.path}"
    ]


def test_unmount_ends_everything(mnt: Mounted) -> None:
    daemon = mnt.daemon()
    (mnt.path / "file").write_bytes(b"x")
    assert ctypes.CDLL(None).umount2(os.fsencode(mnt.path), 0) == 0
    assert mnt.process.wait(10) == 0
    assert mnt.events("end") == [[str(daemon)]]
    assert not Path(f"/proc/{daemon}").exists()


def test_unmount_with_an_answer_under_way(mnt: Mounted) -> None:
    """The keeper learns of the end before it reads the answer; the daemon ends as after any other unmount."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            (mnt.path / "wait").mkdir()

    go = mnt.root.parent / "root.removed" / "go"
    os.mkfifo(go)
    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_for(lambda: any(words[0] == "wait" for words in mnt.events("mkdir")))
    mnt.process.send_signal(signal.SIGSTOP)
    Path(f"/sys/fs/fuse/connections/{mnt.connection}/abort").write_text("1")
    go.write_bytes(b"")
    time.sleep(0.3)  # the daemon answers, which nothing shows
    mnt.process.send_signal(signal.SIGCONT)
    assert mnt.process.wait(10) == 0, mnt.log()
    assert mnt.events("end") == [[str(mnt.daemon())]]
    waiter.join(10)


def test_terminate_ends_everything(mnt: Mounted) -> None:
    daemon = mnt.daemon()
    mnt.process.send_signal(signal.SIGTERM)
    assert mnt.process.wait(10) == 0
    assert mnt.events("end") == [[str(daemon)]]
    assert mount_number(mnt.path) is None


if __name__ == "__main__":
    sys.exit(program(*sys.argv[1:]))
