"""Deletes that wait in a circle: no tier has room for a file before the bytes of deleted ones go, and those are the
last good copy until that file is durable (promise 4). Nothing but room from outside, or the deletion of the file that
does not fit, ends this; an operator is told so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from tierfs.catalog import Catalog
from tierfs.fs.open_files import OpenFiles
from tierfs.migrator.evict import Evictor
from tierfs.policy.model import Policy
from tierfs.types import Attributes


class Host(Protocol):
    """What this module needs of the migrator."""

    catalog: Catalog
    policy: Policy
    files: OpenFiles
    evictor: Evictor
    archive_name: str


def stuck_file(host: Host) -> Attributes | None:
    """The file that deletes wait for and that no persistent tier has room for; None when they do not wait in vain."""
    last = host.catalog.last_held()
    if not last:
        return None
    lasting = [tier.name for tier in host.policy.tiers if tier.persistent]
    attributes = next((found for seq, found in _waiting(host, lasting) if seq < last), None)
    if attributes is None or any(_has_room(host, tier, attributes.size) for tier in lasting):
        return None
    return attributes


def _waiting(host: Host, lasting: list[str]) -> Iterator[tuple[int, Attributes]]:
    """(close, file) of what no persistent tier has and what is to be copied to the first of them."""
    if lasting == [host.archive_name]:
        closes = host.catalog.wanted_content_seqs()
    else:
        closes = host.catalog.waiting_closes(lasting)
    for seq, ino, _ in closes:
        if (attributes := host.catalog.attributes(ino)) is not None:
            yield seq, attributes


def _has_room(host: Host, tier: str, size: int) -> bool:
    with contextlib.suppress(OSError):
        if host.files.space.fits([tier], size):
            return True
        return tier != host.archive_name and host.evictor.could_make_room(tier, size)
    return True  # it does not answer: nobody knows
