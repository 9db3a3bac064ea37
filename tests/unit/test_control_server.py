from __future__ import annotations

import logging
import os
import socket
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
import trio

from tierfs.control import client, server
from tierfs.control.client import call, find_mount
from tierfs.control.protocol import MAX_LINE, MountRecord, mount_directory
from tierfs.control.server import Handler, ProgressCallback, serve_control
from tierfs.errors import MountError, NotDurableInTime, TierfsError, UsageError

Json = dict[str, Any]
T = TypeVar("T")


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MountRecord:
    monkeypatch.setenv("TIERFS_RUNTIME_DIR", str(tmp_path / "run"))
    (tmp_path / "mnt").mkdir()
    found = MountRecord(str(tmp_path / "mnt"), "/c.yaml", str(tmp_path), None, os.getpid(), "userspace")
    found.write()
    return found


async def echo(args: Json, progress: ProgressCallback) -> Json:
    return args


async def report(args: Json, progress: ProgressCallback) -> Json:
    for i in range(3):
        await progress(i, 3, "draining")
        await trio.sleep(0.02)
    progress(3, 3, "draining")  # one that is not awaited is sent too
    return {"files": 3}


async def late(args: Json, progress: ProgressCallback) -> Json:
    raise NotDurableInTime("missing: a.pt")


async def broken(args: Json, progress: ProgressCallback) -> Json:
    raise ZeroDivisionError("secret")


HANDLERS: Mapping[str, Handler] = {"echo": echo, "report": report, "late": late, "broken": broken}


def with_server(record: MountRecord, use: Callable[[], T], handlers: Mapping[str, Handler] = HANDLERS) -> T:
    """Run ``use`` in a thread while a server runs."""

    async def main() -> T:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, record.socket, handlers)
            with trio.fail_after(20):
                result = await trio.to_thread.run_sync(use, abandon_on_cancel=True)
            nursery.cancel_scope.cancel()
        return result

    return trio.run(main)


def raw(record: MountRecord, data: bytes) -> bytes:
    """What the server answers to ``data``, whatever that is."""
    fd = os.open(record.directory, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(f"/proc/self/fd/{fd}/control.sock")
        os.close(fd)
        try:
            connection.sendall(data)
            return connection.makefile("rb").read()
        except (BrokenPipeError, ConnectionResetError):
            return b""


def test_answer_and_socket_modes(record: MountRecord) -> None:
    name = os.fsdecode(b"\xff")

    def use() -> tuple[Json, int, int]:
        return (
            call(record, "echo", {"path": name}),
            stat.S_IMODE(record.socket.stat().st_mode),
            stat.S_IMODE(record.directory.stat().st_mode),
        )

    assert with_server(record, use) == ({"path": name}, 0o600, 0o700)
    assert not record.socket.exists()


def test_a_stale_socket_is_replaced(record: MountRecord) -> None:
    record.socket.write_text("")
    assert with_server(record, lambda: call(record.mountpoint, "echo")) == {}


def test_progress_comes_before_the_answer(record: MountRecord) -> None:
    seen: list[tuple[int, int, str]] = []
    answer = with_server(record, lambda: call(record, "report", on_progress=lambda *a: seen.append(a)))
    assert answer == {"files": 3}
    assert seen == sorted(seen)
    assert seen[0] == (0, 3, "draining")
    assert seen[-1] == (3, 3, "draining")


def test_errors_keep_their_exit_code(record: MountRecord) -> None:
    def use(op: str) -> TierfsError:
        with pytest.raises(TierfsError) as caught:
            call(record, op)
        return caught.value

    error = with_server(record, lambda: use("late"))
    assert isinstance(error, NotDurableInTime)
    assert (str(error), error.exit_code) == ("missing: a.pt", 3)
    error = with_server(record, lambda: use("nothing"))
    assert isinstance(error, UsageError)


def test_an_unexpected_error_is_logged_once_and_not_told(record: MountRecord, caplog: pytest.LogCaptureFixture) -> None:
    def use() -> str:
        with pytest.raises(TierfsError) as caught:
            call(record, "broken")
        assert call(record, "echo") == {}
        return str(caught.value)

    with caplog.at_level(logging.INFO):
        message = with_server(record, use)
    assert "internal error" in message
    assert "secret" not in message
    assert len(caplog.records) == 1
    assert "ZeroDivisionError: secret" in caplog.text


@pytest.mark.parametrize("line", [b"nonsense\n", b"{}\n", b'{"op": "none"}\n'])
def test_nonsense_is_answered(record: MountRecord, line: bytes) -> None:
    assert b'"exit_code":2' in with_server(record, lambda: raw(record, line))


def test_an_endless_line_does_not_end_the_server(record: MountRecord) -> None:
    def use() -> Json:
        raw(record, b"x" * (MAX_LINE + (1 << 20)))
        return call(record, "echo")

    assert with_server(record, use) == {}


def test_an_answer_that_is_no_json_is_an_internal_error(record: MountRecord, caplog: pytest.LogCaptureFixture) -> None:
    async def wrong(args: Json, progress: ProgressCallback) -> Json:
        return {"path": b"bytes"}

    def use() -> None:
        with pytest.raises(TierfsError, match="internal error"):
            call(record, "wrong")

    with_server(record, use, {"wrong": wrong})


def test_a_client_that_leaves_cancels_its_handler(record: MountRecord) -> None:
    started, cancelled = threading.Event(), threading.Event()

    async def forever(args: Json, progress: ProgressCallback) -> Json:
        started.set()
        try:
            await trio.sleep_forever()
        finally:
            cancelled.set()

    def use() -> bool:
        with socket.socket(socket.AF_UNIX) as connection:
            fd = os.open(record.directory, os.O_PATH)
            connection.connect(f"/proc/self/fd/{fd}/control.sock")
            os.close(fd)
            connection.sendall(b'{"op": "forever"}\n')
            assert started.wait(5)
            assert not cancelled.is_set()
        return cancelled.wait(5)

    assert with_server(record, use, {"forever": forever})


def test_other_users_are_refused(
    record: MountRecord, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tierfs.control.server.struct.unpack", lambda form, data: (1, 54321, 54321))

    def use() -> None:
        with pytest.raises(TierfsError, match="another user"):
            call(record, "echo")

    with_server(record, use)
    assert "54321" in caplog.text


def test_requests_above_the_limit_wait(record: MountRecord) -> None:
    running = highest = 0

    async def slow(args: Json, progress: ProgressCallback) -> Json:
        nonlocal running, highest
        running += 1
        highest = max(highest, running)
        await trio.sleep(0.05)
        running -= 1
        return {}

    def use() -> int:
        answers: list[Json] = []
        threads = [threading.Thread(target=lambda: answers.append(call(record, "slow"))) for _ in range(80)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(15)
        return len(answers)

    assert with_server(record, use, {"slow": slow}) == 80
    assert highest <= server.MAX_RUNNING


def test_a_daemon_that_does_not_answer(record: MountRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "CONNECT_SECONDS", 0.1)
    with pytest.raises(MountError, match=r"does not answer.*tierfs\.log"):
        call(record, "status")


def test_a_daemon_that_hangs_meets_the_timeout(record: MountRecord) -> None:
    async def hang(args: Json, progress: ProgressCallback) -> Json:
        await trio.sleep_forever()

    def use() -> None:
        with pytest.raises(MountError, match="in time"):
            call(record, "hang", timeout=0.2)

    with_server(record, use, {"hang": hang})


def test_a_call_outlives_a_restart_of_the_daemon(record: MountRecord) -> None:
    results: list[Json] = []
    thread = threading.Thread(target=lambda: results.append(call(record, "flush")))

    async def main() -> None:
        begun = trio.Event()

        async def hang(args: Json, progress: ProgressCallback) -> Json:
            begun.set()
            await trio.sleep_forever()

        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, record.socket, {"flush": hang})
            thread.start()
            with trio.fail_after(5):
                await begun.wait()
            nursery.cancel_scope.cancel()

    async def again() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, record.socket, {"flush": echo})
            await trio.to_thread.run_sync(thread.join, 5.0)
            nursery.cancel_scope.cancel()

    trio.run(main)
    trio.run(again)
    assert results == [{}]


def test_find_mount_walks_up(record: MountRecord, tmp_path: Path) -> None:
    mnt = tmp_path / "mnt"
    (mnt / "d").mkdir()
    (mnt / "link").symlink_to("/etc/passwd")
    (tmp_path / "other").symlink_to(mnt)
    assert find_mount(mnt) == (record, "")
    assert find_mount(mnt / "d" / "new.pt") == (record, "d/new.pt")
    assert find_mount(mnt / "link") == (record, "link")
    assert find_mount(tmp_path / "other" / "d") == (record, "d")
    assert find_mount(tmp_path / "other") == (record, "")
    with pytest.raises(UsageError, match="not on a tierfs mount"):
        find_mount(tmp_path)


def test_find_mount_looks_at_nothing_on_a_mount(
    record: MountRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look would wait for the daemon, and not for the seconds that the command allows it."""
    mnt = tmp_path / "mnt"
    for number in range(client.LINKS_MAX):
        (tmp_path / f"link{number}").symlink_to(f"link{number + 1}")
    (tmp_path / f"link{client.LINKS_MAX}").symlink_to("mnt")
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "deep").symlink_to(f"../{mnt.name}/a/../b")
    real = os.readlink

    def readlink(path: str) -> str:
        assert not Path(path).is_relative_to(mnt), path
        return real(path)

    monkeypatch.setattr(os, "readlink", readlink)
    for look in ("stat", "lstat"):
        monkeypatch.setattr(os, look, lambda *args, **kwargs: pytest.fail("looks"))
    assert find_mount(mnt) == (record, "")
    assert find_mount(mnt / "a" / "b") == (record, "a/b")
    assert find_mount(tmp_path / "link1" / "a") == (record, "a")
    assert find_mount(tmp_path / "up" / "deep" / "c") == (record, "b/c")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="not on a tierfs mount"):
        find_mount(tmp_path / "link0" / "a")


def test_a_long_mountpoint_works(record: MountRecord, tmp_path: Path) -> None:
    long = MountRecord("/" + "m" * 230, "/c", "/s", None, os.getpid(), "userspace")
    long.write()
    assert len(str(mount_directory(long.mountpoint))) > 108
    assert with_server(long, lambda: call(long, "echo", {"n": 1})) == {"n": 1}
