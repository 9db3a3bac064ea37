"""Which tiers a file is to be copied to, by the rule that its path has now, and until when."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.fs.handles import OpenInode
from tierfs.policy.model import Policy, Rule
from tierfs.types import Attributes, OpKind, Replica, ReplicaState

RULE_CHUNK, RULE_PAUSE = 128, 0.01
"""Files looked at in one go after the rules changed, and seconds between, so that requests are served meanwhile."""

RENAME_AT_ONCE = 1000
"""Files of a renamed directory whose rules are followed in the rename's own transaction: that one has to fit the
catalog's journal, and requests wait for it."""


class Files(Protocol):
    """What this module needs of fs.open_files.OpenFiles."""

    catalog: Catalog
    policy: Policy

    @property
    def inodes(self) -> Mapping[int, OpenInode]: ...
    @property
    def changed(self) -> Callable[[], None]: ...
    def rule_of(self, path: tuple[bytes, ...] | None) -> tuple[int, Rule]: ...
    def local_replica(self, attributes: Attributes) -> Replica | None: ...


class Copies:
    def __init__(self, files: Files) -> None:
        self._files = files
        self._rules_changed = trio.Event()

    def targets(self, tier: str, rule: Rule) -> list[str]:
        """Persistent tiers that are to hold what was closed on ``tier``, fastest first: itself, also where the rule's
        way ends above it, and a full tier sent the file further down, and those from there to the way's end."""
        names = [config.name for config in self._files.policy.tiers]
        here = names.index(tier)
        wanted = names[here : max(here, names.index(rule.lowest)) + 1]
        return [name for name in wanted if self._files.policy.tier(name).persistent]

    def queue(self, closed: Replica, rule: Rule, now: int, present: Collection[str] = ()) -> None:
        """One queue entry for each tier from the ack tier down to the rule's drain target, but those in ``present``."""
        archive = self._files.policy.tiers[-1].name
        targets = self.targets(closed.tier, rule)
        if closed.version > 1:
            self._files.catalog.drop_overtaken(closed.ino, targets)
        for name in targets:
            if name in present:
                continue
            if name == archive:
                seq = self._files.catalog.log(OpKind.CONTENT, closed.ino, now, arg=closed.version)
                if rule.durable_within is not None:
                    self._files.catalog.set_deadline(closed.ino, closed.version, seq, due(now, rule))
            else:
                self._files.catalog.queue_drain(closed.ino, closed.version, name)

    def renamed(self, top: int) -> None:
        """Files at or below ``top`` have new paths, perhaps of a rule that drains further: queue what that asks for.
        What is queued already stays. Inside the transaction of the rename."""
        if len({(rule.lowest, rule.durable_within) for rule in self._files.policy.rules}) == 1:
            return
        self._files.catalog.forget_paths()
        now = time.time_ns()
        files = list(itertools.islice(self._files.catalog.subtree(top), RENAME_AT_ONCE + 1))
        if len(files) > RENAME_AT_ONCE:
            self._files.catalog.remember_drains("")  # so that a start before it is through begins again
            self._rules_changed.set()
            return
        for attributes in files:
            self._queue_missing(attributes, now)

    def _queue_missing(self, attributes: Attributes, now: int) -> None:
        """Queue the copies of a closed file that its rule, as it is now, wants and nobody has queued."""
        _, rule = self._files.rule_of(self._files.catalog.path_of(attributes.ino))
        inode = self._files.inodes.get(attributes.ino)
        if inode is not None:
            inode.rule = rule
        local = self._files.local_replica(attributes)
        if local is None or local.state is ReplicaState.OPEN:  # on the archive, or queued when it is closed
            return
        present = {
            replica.tier
            for replica in self._files.catalog.replicas(attributes.ino)
            if replica.version == attributes.version and replica.state is ReplicaState.DURABLE
        }
        present |= self._files.catalog.queued(attributes.ino, attributes.version, self._files.policy.tiers[-1].name)
        self.queue(local, rule, now, present)
        self._hasten(attributes, rule, now)

    def _hasten(self, attributes: Attributes, rule: Rule, now: int) -> None:
        """Content that waits for the archive already gets the deadline of the file's new rule, if that is earlier."""
        if rule.durable_within is None:
            return
        seq = self._files.catalog.content_of(attributes.ino, attributes.version)
        former = self._files.catalog.deadline(attributes.ino, attributes.version)
        if seq is not None and (former is None or due(now, rule) < former):
            self._files.catalog.set_deadline(attributes.ino, attributes.version, seq, due(now, rule))

    async def follow_rules(self) -> None:
        """At a start with other rules or tiers than the last one's, and after a large directory was renamed: queue what
        the rules want of every file, a few at a time."""
        while True:
            self._rules_changed = trio.Event()
            await self._follow_rules()
            await self._rules_changed.wait()

    async def _follow_rules(self) -> None:
        drains = drains_of(self._files.policy)
        if self._files.catalog.drains == drains:
            return
        after = 0
        while chunk := self._files.catalog.files_after(after, RULE_CHUNK):
            with self._files.catalog.transaction():
                for attributes in chunk:
                    self._queue_missing(attributes, time.time_ns())
            after = chunk[-1].ino
            self._files.changed()
            await trio.sleep(RULE_PAUSE)
        if not self._rules_changed.is_set():
            with self._files.catalog.transaction():
                self._files.catalog.remember_drains(drains)

    def reachable(self, ino: int, tier: str) -> str | None:
        """``tier``, or the lowest tier above it that the file's rule drains to; None when that is not persistent."""
        _, rule = self._files.rule_of(self._files.catalog.path_of(ino))
        names = [config.name for config in self._files.policy.tiers]
        if names.index(rule.lowest) >= names.index(tier):
            return tier
        return rule.lowest if self._files.policy.tier(rule.lowest).persistent else None


def drains_of(policy: Policy) -> str:
    """What decides which tiers a file is copied to."""
    rules = [(rule.match, rule.ack, rule.lowest) for rule in policy.rules]
    return repr(([tier.name for tier in policy.tiers], rules))


def due(now: int, rule: Rule) -> int:
    """The deadline, in ns, of a file of this rule that is closed ``now``."""
    return now + int((rule.durable_within or 0) * 1e9)
