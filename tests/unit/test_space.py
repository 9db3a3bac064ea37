"""Asking how full a tier is never waits for a server."""

from __future__ import annotations

import errno
import threading

import pytest
import trio
import trio.testing

from tierfs.fs.space import AMPLE, AMPLE_SECONDS, LEAST, PATIENCE_SECONDS, REFRESH_SECONDS, RemoteProbe, Space
from tierfs.policy.load import parse_policy
from tierfs.types import Usage


def test_the_last_answer_is_given_with_what_is_held_now() -> None:
    answers = iter([Usage(100, 0, 60), OSError(errno.ESTALE, "gone"), Usage(100, 0, 90)])

    def ask(held: int) -> Usage:
        assert held == 0
        answer = next(answers)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def main() -> None:
        probe = RemoteProbe(ask)
        async with trio.open_nursery() as nursery:
            await nursery.start(probe.watch)
            assert probe(30) == Usage(100, 30, 60)
            assert probe(70) == Usage(100, 70, 30)
            assert probe(200) == Usage(100, 200, 0)
            await trio.sleep(REFRESH_SECONDS * 1.5)
            with pytest.raises(OSError, match="gone"):
                probe(0)
            await trio.sleep(REFRESH_SECONDS)
            assert probe(0) == Usage(100, 0, 90)
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))


def test_a_server_that_hangs_holds_nobody_up() -> None:
    hangs, asked = threading.Event(), []

    def ask(held: int) -> Usage:
        asked.append(held)
        if len(asked) > 1:
            hangs.wait(60)
        return Usage(100, 0, 60)

    async def main() -> None:
        probe = RemoteProbe(ask)
        with pytest.raises(OSError, match="does not answer"):
            probe(0)
        async with trio.open_nursery() as nursery:
            await nursery.start(probe.watch)
            await trio.sleep(REFRESH_SECONDS * 2)
            assert probe(0) == Usage(100, 0, 60)
            await trio.sleep(PATIENCE_SECONDS)
            with pytest.raises(OSError, match="does not answer"):
                probe(0)
            nursery.cancel_scope.cancel()
        hangs.set()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))


def test_a_mount_begins_although_the_archive_hangs() -> None:
    hangs = threading.Event()

    def ask(held: int) -> Usage:
        hangs.wait(60)
        return Usage(1, 0, 1)

    async def main() -> None:
        probe = RemoteProbe(ask)
        async with trio.open_nursery() as nursery:
            with trio.fail_after(5):
                await nursery.start(probe.watch)
            nursery.cancel_scope.cancel()
        hangs.set()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0.02))


def test_a_tier_with_ample_room_is_not_asked_at_every_create() -> None:
    policy = parse_policy("tiers:\n  memory: {kind: memory, size: 64GiB}\n  archive: {kind: dir, path: /a}\n", "test")
    used, asked, now = [0], [], [0.0]

    def ask(held: int) -> Usage:
        asked.append(now[0])
        return Usage(2 * AMPLE, used[0], 2 * AMPLE - used[0])

    space = Space(policy, {"memory": ask}, lambda tier: 0, clock=lambda: now[0])
    for _ in range(100):
        assert space.takes("memory", 0)
    assert len(asked) == 1
    used[0] = 2 * AMPLE
    now[0] += AMPLE_SECONDS
    assert not space.takes("memory", 0), "what is written meanwhile counts soon"
    used[0] = AMPLE // 2
    now[0] += AMPLE_SECONDS
    spare = int(2 * AMPLE * policy.tier("memory").high) - used[0]
    asked.clear()
    placed = 0
    while not asked[1:]:
        assert space.takes("memory", 4 << 20)
        placed += 4 << 20
    assert AMPLE - (8 << 20) <= spare - placed <= AMPLE, "no more than is to spare is placed without a look"
    used[0] = 2 * AMPLE - LEAST
    now[0] += AMPLE_SECONDS
    for _ in range(3):
        asked.clear()
        assert not space.takes("memory", 0)
        assert asked, "a tier that is nearly full is asked each time"
