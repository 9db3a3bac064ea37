"""What is the same for every kind of tier and therefore in none: wrappers around a store, which look like the store.

`retrying` asks once more where a single answer was wrong: a server that drops one request in a thousand is no outage,
and a program must not see its EIO. Only what may be done twice, and takes no time when it fails, is done again here;
copies are repeated by the migrator, with back-off.
"""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from tierfs.tiers.base import ReplicaStore

S = TypeVar("S")

TRIES = 5
PASSING = frozenset(
    {
        errno.EIO,
        errno.ESTALE,
        errno.EAGAIN,
        errno.EINTR,
        errno.EREMOTEIO,
        errno.ETIMEDOUT,
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
    }
)
"""Errors that another try may cure at once, and that cost little more when it does not."""
REPEATABLE = frozenset({"open", "create", "size", "remove", "is_written", "usage"})
"""Methods of a store that may be called twice."""


class Wrapper:
    """Stands for ``inner``; each call of one of its public methods goes through ``around``."""

    def __init__(self, inner: object, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
        self._inner = inner
        self._around = around

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if name.startswith("_") or not callable(value):
            return value
        return self._around(name, value)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._inner!r})"


def wrap(store: S, around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> S:
    """Something that behaves like ``store``, with ``around(name, method)`` called in place of its methods."""
    return cast(S, Wrapper(store, around))


def retrying(store: ReplicaStore) -> ReplicaStore:
    """Looks like ``store``; what failed by an error that may pass is tried again at once."""

    def around(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        if name not in REPEATABLE:
            return method

        @functools.wraps(method)
        def again(*args: Any, **kwargs: Any) -> Any:
            failed = False
            for left in reversed(range(TRIES)):
                try:
                    return method(*args, **kwargs)
                except FileExistsError:
                    if name != "create" or not failed:
                        raise
                    return store.open(*args)  # made by the try that failed: the key was never given out before
                except OSError as error:
                    failed = True
                    if not left or error.errno not in PASSING:
                        raise
            raise AssertionError("not reached")

        return again

    return wrap(store, around)
