"""What a call into a tier raised is kept by nobody but who caught it: the frames of an error hold descriptors and
mappings of files, and with them the room of what is deleted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Awaitable, Callable

import pytest
import trio

from tierfs.fs.lanes import Beat, Lane

Way = Callable[[Lane, Callable[[], None]], Awaitable[None]]


class Held:
    """Something that a frame knows."""


async def run(lane: Lane, work: Callable[[], None]) -> None:
    await lane.run(work, "try")


async def endure(lane: Lane, work: Callable[[], None]) -> None:
    await lane.endure(work, "try", lambda error: None, Beat())


async def call(lane: Lane, work: Callable[[], None]) -> None:
    lane.call(work, "try")


@pytest.mark.parametrize("way", [run, endure, call])
def test_an_error_is_gone_once_it_was_handled(way: Way) -> None:
    known: list[weakref.ref[Held]] = []

    def work() -> None:
        held = Held()
        known.append(weakref.ref(held))
        raise OSError("failed")

    async def use() -> None:
        try:
            await way(Lane("nvme"), work)
        except OSError:
            pass
        else:
            raise AssertionError("it should have failed")
        for _ in range(100):  # the thread's own last references
            if known[0]() is None:
                return
            await trio.sleep(0.01)

    gc.collect()
    gc.disable()
    try:
        trio.run(use)
        assert known[0]() is None
    finally:
        gc.enable()
