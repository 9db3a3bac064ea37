"""Where the limit of a tmpfs of tierfs's own should be. Pure: sizes in bytes in, size out."""

from __future__ import annotations

HEADROOM = 1 << 30
"""What open files may write before anybody looks again: with passthrough nobody tells the daemon that they grow."""
STEP = 64
"""The limit moves in parts of the tier's size: a remount is not worth less than one of so many."""


def hard_limit(size: int, maximum: int, used: int, coming: int, spare: int, *, headroom: int = HEADROOM) -> int:
    """The tmpfs's own limit for a tier of ``size``, which is where tierfs stops placing files in it.

    ``used`` is in it, ``coming`` is what open files are still expected to take, ``spare`` is the memory that the
    machine can do without. Above ``size``, by a headroom, so that a file that is being written does not fail where the
    next one would only have been placed elsewhere; further above when it would; never above ``maximum``, and never to
    the last of the machine's memory, but not below ``size`` either, which the policy grants, nor below what is in it.
    """
    wanted = max(size, used + coming) + max(headroom, size // 8)
    step = max(1, size // STEP)
    wanted = -(-wanted // step) * step
    return max(size, used, min(wanted, maximum, used + max(0, spare)))
