"""One lock per inode, for as long as somebody holds it or waits for it."""

from __future__ import annotations

from dataclasses import dataclass

import trio


@dataclass
class InodeLock:
    """Opens of one inode wait for each other (a recall may be under way); other inodes do not."""

    locks: dict[int, tuple[trio.Lock, list[int]]]
    ino: int

    async def __aenter__(self) -> None:
        lock, users = self.locks.setdefault(self.ino, (trio.Lock(), [0]))
        users[0] += 1
        try:
            lock.acquire_nowait()
        except trio.WouldBlock:
            try:
                await lock.acquire()
            except BaseException:
                self._leave(users)
                raise

    async def __aexit__(self, *_: object) -> None:
        lock, users = self.locks[self.ino]
        lock.release()
        self._leave(users)

    def _leave(self, users: list[int]) -> None:
        users[0] -= 1
        if not users[0]:
            del self.locks[self.ino]
