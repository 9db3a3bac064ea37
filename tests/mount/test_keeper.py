"""The keeper alone, with a small loopback daemon of its own (this file run as a program)."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from tierfs.errors import FsError
from tierfs.fuse import wire
from tierfs.fuse.backing import BackingIds
from tierfs.fuse.device import Answer, Device, Handler, Opened, Request
from tierfs.fuse.handover import HandleTable, KeeperSession, OpenHandle
from tierfs.fuse.keeper import MAX_CRASHES, mount_number, run_keeper
from tierfs.types import Attributes, Ino

pytestmark = pytest.mark.timeout(60)

ROOT_INO = 1


# --- the program: run_keeper with a loopback daemon -----------------------------------------------------------------


class Loopback:
    """The least that answers the kernel: the tree below ``root``, files by passthrough."""

    def __init__(self, session: KeeperSession, root: str, events_path: str) -> None:
        self.root = root
        self.events_fd = os.open(events_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.backing = BackingIds(session.device_fd)
        self.paths = {ROOT_INO: root}
        for directory, names, files in os.walk(root):
            for name in names + files:
                path = os.path.join(directory, name)
                self.paths[os.lstat(path).st_ino] = path
        self.serial = 0
        self.open_inodes: dict[int, list[int]] = {}  # ino → [backing id, opens]
        self.open_handles: dict[int, int] = {}
        former = session.handles.handles()
        for handle in former:
            self.open_handles[handle.fh] = handle.ino
            self.open_inodes.setdefault(handle.ino, [handle.backing_id, 0])[1] += 1
            self.serial = max(self.serial, handle.fh)
        if session.restarts:
            self.backing.reclaim({handle.backing_id for handle in former}, session.handles.last_backing_id)
        op = wire.Op
        self.handlers: dict[int, Handler] = {
            op.LOOKUP: lambda request: self.entry(self.child(request)),
            op.GETATTR: lambda request: wire.attr_out(self.attributes(self.paths[request.ino]), 0),
            op.SETATTR: self.truncate,
            op.CREATE: self.create,
            op.OPEN: lambda request: self.attach(request, request.ino),
            op.RELEASE: self.release,
            op.MKDIR: self.mkdir,
            op.RMDIR: self.rmdir,
            op.UNLINK: self.unlink,
            op.OPENDIR: lambda _: wire.open_out(0),
            op.READDIR: lambda request: self.list(request, wire.dirent),
            op.READDIRPLUS: lambda request: self.list(request, lambda *entry: wire.direntplus(*entry, valid=0)),
            op.RELEASEDIR: lambda _: b"",
        }

    def event(self, *words: object) -> None:
        os.write(self.events_fd, " ".join(map(str, words)).encode() + b"\n")

    def forget(self, inos: list[int]) -> None:
        pass

    def outdated(self) -> list[int]:
        return []

    def child(self, request: Request, offset: int = 0) -> str:
        return os.path.join(self.paths[request.ino], os.fsdecode(wire.name_of(request.body, offset)))

    def attributes(self, path: str) -> Attributes:
        try:
            status = os.lstat(path)
        except OSError as error:
            raise FsError(error.errno or errno.EIO) from None
        ino = Ino(ROOT_INO if path == self.root else status.st_ino)
        self.paths[ino] = path
        times = (status.st_atime_ns, status.st_mtime_ns, status.st_ctime_ns)
        links = status.st_nlink
        return Attributes(ino, status.st_mode, status.st_uid, status.st_gid, links, 0, status.st_size, *times, 0)

    def entry(self, path: str) -> bytes:
        return wire.entry_out(self.attributes(path), 0)

    def truncate(self, request: Request) -> bytes:
        change = wire.parse_setattr(request.body, 0)
        path = self.paths[request.ino]
        if change.size is not None:
            os.truncate(path, change.size)
        return wire.attr_out(self.attributes(path), 0)

    def attach(self, request: Request, ino: int, entry: bytes = b"") -> Opened:
        if request.former is not None:
            fh = request.former.fh
            self.event("again", fh)
        else:
            if ino not in self.open_inodes:
                fd = os.open(self.paths[ino], os.O_RDWR)
                self.open_inodes[ino] = [self.backing.open(fd), 0]
                os.close(fd)
            self.open_inodes[ino][1] += 1
            self.serial += 1
            fh = self.serial
            self.open_handles[fh] = ino
            self.event("open", self.open_inodes[ino][0])
        return Opened(fh, ino, 0, self.open_inodes[ino][0], True, entry)

    def create(self, request: Request) -> Opened:
        _, mode, _, _ = wire.CREATE_IN.unpack_from(request.body)
        path = self.child(request, wire.CREATE_IN.size)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, mode))
        return self.attach(request, self.attributes(path).ino, self.entry(path))

    def closed(self, fh: int) -> None:
        ino = self.open_handles.pop(fh, None)
        if ino is not None:
            self.open_inodes[ino][1] -= 1
            if not self.open_inodes[ino][1]:
                self.backing.close(self.open_inodes.pop(ino)[0])

    def release(self, request: Request) -> bytes:
        self.closed(wire.U64.unpack_from(request.body)[0])
        return b""

    def mkdir(self, request: Request) -> Answer | Coroutine[object, object, Answer]:
        path = self.child(request, wire.MKDIR_IN.size)
        name = os.path.basename(path)
        caller = request.caller
        self.event("mkdir", name, caller.request, int(caller.resent))
        try:
            os.mkdir(path, wire.MKDIR_IN.unpack_from(request.body)[0])
        except FileExistsError:
            if not caller.resent:
                raise FsError(errno.EEXIST) from None
        if name.startswith("die-once") and not caller.resent:
            os._exit(9)
        return self.wait(path) if name == "wait" else self.entry(path)

    async def wait(self, path: str) -> bytes:
        await trio.to_thread.run_sync(Path(f"{self.root}.removed/go").read_bytes)
        return self.entry(path)

    def rmdir(self, request: Request) -> bytes:
        path = self.child(request)
        try:
            # Kept aside, lest its inode number names another directory while the kernel awaits this reply.
            os.rename(path, f"{self.root}.removed/{os.lstat(path).st_ino}")
        except FileNotFoundError:
            if not request.caller.resent:
                raise FsError(errno.ENOENT) from None
        return b""

    def unlink(self, request: Request) -> bytes:
        path = self.child(request)
        if os.path.basename(path) == "die-always":
            os._exit(9)
        os.unlink(path)
        return b""

    def list(self, request: Request, form: Callable[[Attributes, bytes, int], bytes]) -> bytes:
        _, start, _, _ = wire.READ_IN.unpack_from(request.body)
        path = self.paths[request.ino]
        names = sorted(os.listdir(path))[start : start + 8]
        return b"".join(
            form(self.attributes(os.path.join(path, name)), os.fsencode(name), number)
            for number, name in enumerate(names, start + 1)
        )


class DyingTable(HandleTable):
    """Kills its process once ``before`` the kernel learns of an open, so that it asks again."""

    def add(self, handle: OpenHandle) -> None:
        known = handle.fh in {former.fh for former in self.handles()}
        super().add(handle)
        if not known and DIE_AFTER_OPEN.exists():
            DIE_AFTER_OPEN.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


DIE_AFTER_OPEN = Path(sys.argv[1] + ".removed/die-after-open") if __name__ == "__main__" else Path("unused")


def loopback(session: KeeperSession, root: str, events_path: str) -> int:
    session = dataclasses.replace(session, handles=DyingTable(session.handles.fd))
    server = Loopback(session, root, events_path)
    device = Device(session, server)
    server.event("start", os.getpid(), session.restarts, len(session.handles.handles()))

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(until_stopped)
            await device.serve()
            nursery.cancel_scope.cancel()

    async def until_stopped(task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(signal.SIGTERM) as signals:
            task_status.started()
            async for _ in signals:
                device.terminate()
                return

    trio.run(main)
    server.event("end", os.getpid())
    return 0


def program(root: str, mountpoint: str, events_path: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    return run_keeper(
        Path(mountpoint),
        allow_other=False,
        serve=lambda session: loopback(session, root, events_path),
        log=logging.getLogger("keeper"),
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
        wait_for(lambda: mounted.events("start") or process.poll() is not None)
        number = mount_number(path)
        assert number, mounted.log()
        os.stat(path)
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
        assert mnt.events("start")[-1][1:] == [str(restart), "1"]
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
    assert mnt.events("start")[-1][2:] == ["0"]


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
    first = [number for _, number, resent in mnt.events("mkdir") if resent == "0"]
    assert len(set(first)) == len(first), "request ids repeat"


def test_resent_request_has_the_bit_and_the_same_id(mnt: Mounted) -> None:
    (mnt.path / "plain").mkdir()
    (mnt.path / "die-once").mkdir()
    plain, first, second = (words[1:] for words in mnt.events("mkdir"))
    assert plain[1] == first[1] == "0"
    assert second == [first[0], "1"]
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


@pytest.mark.parametrize("way", ["create", "open"])
def test_an_open_whose_answer_a_kill_cut_off_is_answered_with_the_same_handle(mnt: Mounted, way: str) -> None:
    if way == "open":
        (mnt.root / "file").touch()
    (mnt.root.parent / "root.removed" / "die-after-open").touch()
    file = os.open(mnt.path / "file", os.O_RDWR | (os.O_CREAT if way == "create" else 0), 0o600)
    os.write(file, b"written")
    os.close(file)
    assert len(mnt.events("start")) == 2
    assert mnt.events("again") == [["1"]]
    time.sleep(0.2)  # RELEASE comes after close() has returned
    mnt.kill()
    assert mnt.events("start")[-1][2] == "0", "a handle was left over"
    assert (mnt.root / "file").read_bytes() == b"written"


def test_unmount_with_an_answer_under_way(mnt: Mounted) -> None:
    """The answer to a request of a mount that is gone goes nowhere; the daemon ends as after any other unmount."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            (mnt.path / "wait").mkdir()

    go = mnt.root.parent / "root.removed" / "go"
    os.mkfifo(go)
    waiter = threading.Thread(target=wait)
    waiter.start()
    wait_for(lambda: any(words[0] == "wait" for words in mnt.events("mkdir")))
    Path(f"/sys/fs/fuse/connections/{mnt.connection}/abort").write_text("1")
    go.write_bytes(b"")
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
