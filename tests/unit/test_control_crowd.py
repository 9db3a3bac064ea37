"""Nobody keeps others off the control socket: not by connecting and sending nothing, not by requests that take long."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from tierfs.control import server
from tierfs.control.server import Handler, ProgressCallback, serve_control

Json = dict[str, Any]
STATUS = b'{"op": "status"}\n'
FLUSH = b'{"op": "flush"}\n'


async def status(args: Json, progress: ProgressCallback) -> Json:
    return {"mode": "test"}


async def forever(args: Json, progress: ProgressCallback) -> Json:
    await trio.sleep_forever()
    raise AssertionError("not reached")


HANDLERS: Mapping[str, Handler] = {"status": status, "flush": forever}


@asynccontextmanager
async def connected(path: Path) -> AsyncIterator[trio.SocketStream]:
    directory = os.open(path.parent, os.O_PATH)
    raw = trio.socket.socket(socket.AF_UNIX)
    try:
        await raw.connect(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
    async with trio.SocketStream(raw) as stream:
        yield stream


async def ask(path: Path, line: bytes = STATUS) -> Json:
    async with connected(path) as stream:
        await stream.send_all(line)
        return await answer(stream)


async def answer(stream: trio.SocketStream) -> Json:
    data = b""
    while part := await stream.receive_some():
        data += part
    found: Json = json.loads(data)
    return found


def serving(tmp_path: Path, main: Callable[[Path], Awaitable[None]]) -> None:
    """On a virtual clock, which stands still while anybody has something to do."""
    path = tmp_path / "run" / "control.sock"

    async def whole() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(serve_control, path, HANDLERS)
            await main(path)
            nursery.cancel_scope.cancel()

    trio.run(whole, clock=trio.testing.MockClock(autojump_threshold=0))


def test_any_number_of_idle_connections_leaves_room_for_a_request(tmp_path: Path) -> None:
    many = 2 * server.MAX_IDLE + 5

    async def main(path: Path) -> None:
        async with AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(connected(path)) for _ in range(many)]
            began = trio.current_time()
            assert await ask(path) == {"ok": {"mode": "test"}}
            assert trio.current_time() == began
            dropped = many + 1 - server.MAX_IDLE
            for stream in idle[:dropped]:
                assert await stream.receive_some() == b""
            assert trio.current_time() == began, "the longest idle ones, at once"
            for stream in idle[dropped:]:
                await stream.send_all(STATUS)
                assert "ok" in await answer(stream)

    serving(tmp_path, main)


@pytest.mark.parametrize("sends", [b"", b'{"op": "sta'])
def test_a_client_that_sends_no_request_is_dropped_in_time(tmp_path: Path, sends: bytes) -> None:
    async def main(path: Path) -> None:
        began = trio.current_time()
        async with connected(path) as stream, trio.open_nursery() as nursery:

            async def trickle() -> None:
                while True:
                    await trio.sleep(0.7)
                    await stream.send_all(b" ")

            if sends:
                await stream.send_all(sends)
                nursery.start_soon(trickle)
            assert await stream.receive_some() == b""
            assert trio.current_time() == began + server.REQUEST_SECONDS
            nursery.cancel_scope.cancel()

    serving(tmp_path, main)


def test_who_has_asked_is_not_dropped_for_those_that_have_not(tmp_path: Path) -> None:
    async def main(path: Path) -> None:
        async with AsyncExitStack() as stack:
            flush = await stack.enter_async_context(connected(path))
            await flush.send_all(FLUSH)
            for _ in range(server.MAX_IDLE + 5):
                await stack.enter_async_context(connected(path))
            with trio.move_on_after(10 * server.REQUEST_SECONDS) as waiting:
                await flush.receive_some()
            assert waiting.cancelled_caught, "it is still under way"

    serving(tmp_path, main)


def test_requests_that_take_long_hold_up_only_their_own_kind(tmp_path: Path) -> None:
    async def main(path: Path) -> None:
        async with AsyncExitStack() as stack:
            flushes = [await stack.enter_async_context(connected(path)) for _ in range(server.MAX_RUNNING + 3)]
            for stream in flushes:
                await stream.send_all(FLUSH)
            await trio.testing.wait_all_tasks_blocked()
            assert await ask(path) == {"ok": {"mode": "test"}}

    serving(tmp_path, main)


def test_requests_without_number_are_refused_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_REQUESTS", 6)

    async def main(path: Path) -> None:
        async with AsyncExitStack() as stack:
            flushes = [await stack.enter_async_context(connected(path)) for _ in range(6)]
            for stream in flushes:
                await stream.send_all(FLUSH)
            await trio.testing.wait_all_tasks_blocked()
            found = await ask(path)
            assert "6 requests are under way" in found["error"]["message"]
            await flushes[0].aclose()
            await trio.testing.wait_all_tasks_blocked()
            assert "ok" in await ask(path), "one was taken back"

    serving(tmp_path, main)
