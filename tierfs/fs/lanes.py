"""The threads of each tier, so that a tier that hangs holds up nothing but what needs that tier.

A call into storage cannot be taken back: the thread that made it stays in the kernel for as long as the server likes.
So nobody waits for it longer than the tier's patience; then the call counts as failed, and the thread as *given up*.
It keeps one of the tier's few places until it comes back, which bounds the threads that a hung tier can hold. Other
tiers have places of their own. What an abandoned call still does is its own affair: it must write to nothing but a
temporary file that nobody else knows, and ``late`` clears that away once it is back.
"""

from __future__ import annotations

import contextlib
import errno
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import trio

from tierfs.errors import NoAnswer, SourceChanged, TierError

THREADS = 12
"""Calls into one tier at a time, beside recalls."""
PATIENCE = 60.0
"""Seconds without a sign of life until a call is given up; the policy's ``limits.tier_timeout``."""
STALL_SECONDS = 10.0
"""The longest that the event loop itself waits for a tier, in the few calls that cannot give way: see `Lane.call`."""
HEARD_SECONDS = 0.2
"""Between two signs of life that the event loop is woken for."""
SLOWEST = 10 << 20
"""Bytes per second below which a sync of that many bytes counts as hung."""

T = TypeVar("T")


class Beat:
    """Signs of life of a call, given by its threads: each puts the end of the patience off. The event loop hears of a
    few a second: a copy gives hundreds."""

    def __init__(self) -> None:
        self._token: trio.lowlevel.TrioToken | None = None
        self._clock: trio.abc.Clock | None = None
        self._scope: trio.CancelScope | None = None
        self._patience = 0.0
        self._heard = -math.inf

    def begin(self, scope: trio.CancelScope, patience: float) -> None:
        self._clock = trio.lowlevel.current_clock()
        self._scope, self._patience = scope, patience
        self._token = trio.lowlevel.current_trio_token()

    def __call__(self, size: int = 0) -> None:
        """From any thread. ``size`` bytes are about to be synced, which takes as long as it takes."""
        if self._token is None or self._clock is None:
            return
        now = self._clock.current_time()
        if size or now - self._heard >= min(HEARD_SECONDS, self._patience / 10):
            self._heard = now
            with contextlib.suppress(trio.RunFinishedError):
                self._token.run_sync_soon(self._extend, size / SLOWEST)

    def missed(self, seconds: float) -> bool:
        """Whether a sign of life has been due for so long. From the event loop."""
        if self._scope is None:
            return False
        return trio.current_time() > self._scope.deadline - self._patience + seconds

    def _extend(self, more: float) -> None:
        if self._scope is not None:
            self._scope.deadline = max(self._scope.deadline, trio.current_time() + self._patience + more)


class _Call(Generic[T]):
    """One call in a thread, and who sees to its result: who waits for it, or else the thread itself."""

    def __init__(self, work: Callable[[], T], late: Callable[[T | None], object] | None, back: Callable[[], object]):
        self._work, self._late, self._back = work, late, back
        self._lock = threading.Lock()
        self._begun = self.ended = False
        self._left = threading.Event()
        self._result: T | None = None

    def __call__(self) -> T:
        with self._lock:
            if self._left.is_set():
                raise SourceChanged("nobody waits for it any more")
            self._begun = True
        try:
            self._result = result = self._work()
            return result
        finally:
            with self._lock:
                self.ended = True
                left = self._left.is_set()
            if left:
                self._clear()
                self._back()

    def outcome(self) -> Callable[[], T]:
        """What gives the result, or raises what the call raised, when it is called, once. With an error that is raised
        through `trio.to_thread.run_sync` what its frames hold would stay until garbage is collected."""
        try:
            result = self()
        except BaseException as error:
            return _raiser(error)
        return lambda: result

    def leave(self) -> bool:
        """Nobody waits any more: whether a thread is in there."""
        with self._lock:
            self._left.set()
            inside = self._begun and not self.ended
            over = self.ended
        if over:
            self._clear()
        return inside

    def _clear(self) -> None:
        if self._late is not None:
            self._late(self._result)


class Lane:
    """The threads of one tier. Used from the event loop."""

    def __init__(self, tier: str, patience: float = PATIENCE, threads: int = THREADS) -> None:
        self.tier = tier
        self.patience = patience
        self.threads = threads
        self._limiter = trio.CapacityLimiter(threads)
        self.silent: Callable[[], bool] = lambda: False
        """Whether the tier is known not to answer."""
        self.given_up = 0
        """Calls that nobody waits for any more and whose threads are still in the tier."""

    @property
    def busy(self) -> int:
        """Threads in the tier, given up or not."""
        return self._limiter.borrowed_tokens

    @property
    def hangs(self) -> bool:
        """Whether a call into the tier has not come back in time, and still has not, or it is known not to answer."""
        return self.given_up > 0 or self.silent()

    async def run(
        self,
        work: Callable[[], T],
        what: str,
        *,
        patience: float | None = None,
        beat: Beat | None = None,
        late: Callable[[T | None], object] | None = None,
    ) -> T:
        """The result of ``work``, done in a thread of this tier. NoAnswer when ``patience`` seconds pass
        without it or a sign of life (``beat``). ``late`` is called in the thread with the result, None if there is
        none, once a call that was given up ends after all."""
        seconds = self.patience if patience is None else patience
        if self.given_up >= self.threads:
            raise self.silence(what, f"{self.given_up} calls have not come back")
        call = _Call(work, late, self._came_back_soon())
        with trio.CancelScope(deadline=trio.current_time() + seconds) as scope:
            if beat is not None:
                beat.begin(scope, seconds)
            try:
                outcome = await trio.to_thread.run_sync(call.outcome, abandon_on_cancel=True, limiter=self._limiter)
            except trio.Cancelled:
                self.given_up += call.leave()
                raise
            return outcome()
        raise self.silence(what, f"no answer for {seconds:g} s")

    async def endure(self, work: Callable[[], T], what: str, complain: Callable[[TierError], object], beat: Beat) -> T:
        """Like `run`, for what must not be begun again while it may still happen: waited for as long as it takes.
        ``complain`` is called once when the patience is over. Cancelled, it leaves the thread behind."""
        outcome: list[Callable[[], T]] = []

        def finish() -> None:
            try:
                result = work()
                outcome.append(lambda: result)
            except BaseException as error:
                outcome.append(_raiser(error))

        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                with trio.CancelScope(deadline=trio.current_time() + self.patience) as scope:
                    beat.begin(scope, self.patience)
                    await trio.sleep_forever()
                self.given_up += 1
                complain(self.silence(what, f"no answer for {self.patience:g} s"))
                try:
                    await trio.sleep_forever()
                finally:
                    self.given_up -= 1

            nursery.start_soon(watch)
            await trio.to_thread.run_sync(finish, abandon_on_cancel=True, limiter=self._limiter)
            nursery.cancel_scope.cancel()
        return outcome[0]()

    def call(self, work: Callable[[], T], what: str, late: Callable[[T | None], object] | None = None) -> T:
        """``work`` done now, while the event loop waits: for what must not give way to other tasks. Raises what that
        raises, OSError (ETIMEDOUT) when it takes longer than `STALL_SECONDS` or the tier hangs already."""
        silence = OSError(errno.ETIMEDOUT, f"tier {self.tier} does not answer: {what}")
        if self.hangs:
            raise silence
        ended = threading.Event()
        call = _Call(work, late, self._came_back_soon())
        outcome: list[Callable[[], T]] = []

        def run() -> None:
            try:
                result = call()
                outcome.append(lambda: result)
            except BaseException as error:
                outcome.append(_raiser(error))
            ended.set()

        trio.lowlevel.start_thread_soon(run, lambda result: None)
        if not ended.wait(STALL_SECONDS):
            self.given_up += call.leave()
            raise silence
        return outcome[0]()

    def silence(self, what: str, why: str) -> NoAnswer:
        return NoAnswer(f"tier {self.tier}: {what}: {why}")

    def _came_back_soon(self) -> Callable[[], None]:
        token = trio.lowlevel.current_trio_token()

        def back() -> None:
            with contextlib.suppress(trio.RunFinishedError):
                token.run_sync_soon(self._came_back)

        return back

    def _came_back(self) -> None:
        self.given_up -= 1


def _raiser(error: BaseException) -> Callable[[], Any]:
    """To be called once: afterwards nothing but who caught the error keeps it, and what its frames hold."""

    def again() -> Any:
        nonlocal error
        try:
            raise error
        finally:
            del error

    return again


class Lanes(dict[str, Lane]):
    """By tier."""

    def __init__(self, tiers: Iterable[str], patience: float = PATIENCE, threads: int = THREADS) -> None:
        super().__init__({tier: Lane(tier, patience, threads) for tier in tiers})
