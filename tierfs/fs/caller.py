"""Who asks, and which request of the kernel it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caller:
    """``request`` is the kernel's number of its request, None without a keeper; ``resent`` says
    that a former daemon may have carried it out already."""

    uid: int
    gid: int
    request: int | None = None
    resent: bool = False
