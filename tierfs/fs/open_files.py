"""Open files: one backing file per open inode, its handles, and the life of a version.

Invariants:
- All handles of an inode share one backing descriptor (and, with passthrough, one backing id):
  the fastest local replica of the current version at the first open. Nothing removes it or adds a faster
  one while the inode is open.
- A large cold file is opened while its bytes are still on their way (`filling`). Passthrough would read the holes of
  its backing file, and the kernel refuses to mix, so such an inode has no backing id until its last close: reads come
  to the daemon and wait for their range. Whoever wants to write waits until the whole file is here.
- While any handle may write, the current version is OPEN: its size and times are the backing file's. So that file
  is given those of the catalog before the first handle that may write is there (`show_times`).
- `close_version` runs once per OPEN version: at the last release of a writer, or when a new daemon
  finds a version OPEN that nobody has open.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial

import trio

from tierfs.catalog import Catalog
from tierfs.errors import FsError, TierError
from tierfs.fs.admission import Admission, MustWait, Ticket
from tierfs.fs.copies import Copies
from tierfs.fs.handles import Handle, OpenInode
from tierfs.fs.inode_lock import InodeLock
from tierfs.fs.lanes import Lanes
from tierfs.fs.local_files import LocalFiles
from tierfs.fs.mover import Mover
from tierfs.fs.ports import Backing, Filling, LocalStore, Recall
from tierfs.fs.space import Space
from tierfs.plan.placement import Role, role_of
from tierfs.points import At, reach
from tierfs.policy.match import RuleMatcher
from tierfs.policy.model import Policy, Rule
from tierfs.types import Attributes, Ino, OpKind, Replica, ReplicaState

GRADUAL = 64 << 20
"""Files above this many bytes are open for reading before they are recalled; smaller ones are here in no time, and
then read through passthrough."""

_LOWER = (errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT, errno.EIO, errno.EROFS, errno.ESTALE)
"""What a tier says that cannot take a new file: the next one does."""

log = logging.getLogger("tierfs.fs")


async def _never(replica: Replica, fd: int | None) -> bool:
    return False


@dataclass
class OpenFiles:
    catalog: Catalog
    policy: Policy
    stores: Mapping[str, LocalStore]
    """Every tier but the archive, fastest first."""
    matcher: RuleMatcher
    space: Space
    backing: Backing | None
    recall: Recall
    preserve: Callable[[Replica], Awaitable[Replica]]
    """Copy a replica to another file of its tier, durably, and return what that is; the catalog is not told."""
    fill: Callable[[Attributes, str], Filling]
    """Like `recall`, but returns at once, with the bytes on their way."""
    changed: Callable[[], None]
    """Called after a close or removal gave the migrator something to do."""
    quiesce: Callable[[int], Awaitable[None]]
    """Wait until no copy reads the inode's bytes, so that they may be cut off."""
    discard: Callable[[str, str], None]
    """(tier, key): remove these bytes soon."""
    lanes: Lanes = field(default_factory=lambda: Lanes(()))
    """Threads of the tiers that are disks, which may hang. What is asked of a tier without is done on the spot."""
    unfit: Callable[[Replica, int | None], Awaitable[bool]] = _never
    """(replica, its descriptor, None if it is gone): whether it does not have the bytes written to it."""
    inodes: dict[int, OpenInode] = field(default_factory=dict)
    handles: dict[int, Handle] = field(default_factory=dict)
    orphans: set[int] = field(default_factory=set)
    """Inodes without a name that the kernel still knows: an open that began before the unlink may still come, so
    bytes and row stay until the kernel forgets them."""
    outdated: list[int] = field(default_factory=list)
    """Inodes whose mode changed without the kernel's knowing; it is told with the next answer."""
    grown: int = 0
    """Bytes by which files open for writing have grown so far, as far as `measure` saw."""
    forgotten: set[int] = field(default_factory=set)
    """Orphans that the kernel forgot while a release of theirs was still on its way."""
    _locks: dict[int, tuple[trio.Lock, list[int]]] = field(default_factory=dict)
    lasting: list[str] = field(init=False)
    """The persistent tiers, fastest first."""
    _serial: int = 0
    _keys: int = field(default_factory=lambda: time.time_ns() >> 10)

    def __post_init__(self) -> None:
        self._first_key = self._keys
        self.lasting = [tier.name for tier in self.policy.tiers if tier.persistent]
        self.local = LocalFiles(self.policy, self.stores, self.lanes)
        self.copies = Copies(self)
        self.admission = Admission(self.policy, self.space, self.catalog)
        self.mover = Mover(self)

    # rules and names

    def rule_of(self, path: tuple[bytes, ...] | None) -> tuple[int, Rule]:
        return self.matcher.rule_for(b"/".join(path or ()))

    def new_key(self, ino: int) -> str:
        """A replica file name never used before on any tier."""
        self._keys += 1
        return f"{ino:x}-{self._keys:x}"

    def former_key(self, key: str) -> bool:
        """Whether a daemon before this one gave out ``key``."""
        return int(key.partition("-")[2], 16) <= self._first_key

    def ack_tiers(self, rule: Rule) -> list[str]:
        """Local tiers a file of this rule may be written to: the ack tier, then slower ones."""
        names = list(self.stores)
        return names[names.index(rule.ack) :] if rule.ack in names else names

    # creating and opening

    def place(self, rule: Rule, role: Role, ticket: Ticket, *, freed: int = 0, precious: bool = False) -> str:
        """The tier for a new file. MustWait: `Admission.wait` first."""
        expected = self.space.learned.expect(role)
        return self.admission.place(self.ack_tiers(rule), expected, ticket, freed=freed, precious=precious)

    def create_replica(self, ino: Ino, version: int, rule: Rule, chosen: str) -> tuple[Replica, int]:
        """A new empty OPEN replica on the ``chosen`` tier, or one lower when that is full: (replica, descriptor)."""
        tiers = self.ack_tiers(rule)
        for tier in tiers[tiers.index(chosen) :]:
            key = self.new_key(ino)
            try:
                fd = self.local.create(tier, key)
            except OSError as error:
                if error.errno in _LOWER and tier != tiers[-1]:
                    continue
                raise
            return Replica(ino, version, tier, ReplicaState.OPEN, key, 0, None), fd
        raise FsError(errno.ENOSPC)

    def attach(self, replica: Replica, fd: int, rule: Rule, role: Role) -> OpenInode:
        """Make ``fd`` the backing file of an inode that nobody has open."""
        backing_id = self.backing.open(fd) if self.backing else 0
        inode = OpenInode(replica.ino, fd, replica, backing_id, rule, role)
        self.inodes[replica.ino] = inode
        return inode

    def add_handle(self, inode: OpenInode, flags: int, uid: int = 0, *, empty: bool = False) -> int:
        """A new handle of an attached inode, opened by ``uid``; ``empty``: the file was made for it."""
        self._serial += 1
        fh = self._serial
        handle = Handle(inode, flags)
        self.handles[fh] = handle
        if handle.writes:
            inode.writers += 1
            inode.unprivileged = inode.unprivileged or uid != 0
            if empty:
                expected = self.space.learned.expect(inode.role)
                self.space.grow(inode.ino, inode.replica.tier, 0, expected)
            elif inode.writers == 1:
                self._measure(inode)
        else:
            inode.readers += 1
        return fh

    async def open(self, ino: int, flags: int, uid: int = 0) -> int:
        """Open for reading or writing, recalling the bytes first when no local tier has them."""
        ticket = Ticket()
        while True:
            try:
                async with self.locked(ino):
                    writes = flags & os.O_ACCMODE != os.O_RDONLY
                    inode = await self._ensure_open(ino, writes, bool(flags & os.O_TRUNC), ticket)
                    return self.add_handle(inode, flags, uid)
            except MustWait as wanted:  # others may use the file meanwhile
                await self.admission.wait(wanted, ticket)

    async def truncate(self, ino: int, size: int, uid: int = 0) -> None:
        """Set the size of a file, open or not, for ``uid``."""
        async with self.locked(ino):
            inode = await self._ensure_open(ino, True, size == 0, Ticket(over=True))
            try:
                self.local.at_once(inode.replica.tier, partial(os.ftruncate, inode.fd, size), "truncate")
            finally:
                inode.writers += 1
                inode.unprivileged = inode.unprivileged or uid != 0
                self._drop(inode, writes=True)

    async def _ensure_open(self, ino: int, writes: bool, truncate: bool, ticket: Ticket) -> OpenInode:
        attributes = self.catalog.attributes(ino)
        if attributes is None:
            raise FsError(errno.ENOENT)
        inode = self.inodes.get(ino)
        if inode is None:
            inode = await self._open_replica(attributes, writes, truncate, ticket)
        elif writes:
            inode.readers += 1  # so that it stays attached when its last handle is released meanwhile
            try:
                if inode.filling is not None:
                    await (inode.filling.cut() if truncate else inode.filling.complete())
                    inode.filling = None
                kept = await self._keep_last(inode.replica, inode.rule)
                await self.quiesce(ino)
                if not inode.writers:
                    self.show_times(ino, inode.replica.tier, inode.fd)
                if inode.replica.state is not ReplicaState.OPEN:
                    self._begin_version(inode, kept)
                if truncate:
                    inode.anew = True
                    self.local.at_once(inode.replica.tier, partial(os.ftruncate, inode.fd, 0), "truncate")
            except BaseException:
                self._drop(inode, writes=False)
                raise
            inode.readers -= 1
        return inode

    async def _open_replica(
        self, attributes: Attributes, writes: bool, truncate: bool, ticket: Ticket
    ) -> OpenInode:
        ino = attributes.ino
        path = self.catalog.path_of(ino)
        number, rule = self.rule_of(path)
        role = role_of(number, path)
        kept: Replica | None = None
        if writes and truncate:
            return self._replace(attributes, rule, role, ticket)
        if self.local_replica(attributes) is None and not writes and attributes.size > GRADUAL:
            return self._attach_filling(attributes, rule, role)
        avoid: set[str] = set()
        while True:
            local = self.local_replica(attributes, avoid)
            if local is None or (
                writes and local.tier not in self.ack_tiers(rule)[:1] and self._must_keep(local, rule)
            ):
                try:
                    local = await self.recall(attributes, rule.ack, avoid, modest=not writes)
                except FsError as error:
                    if writes or error.errno != errno.ENOSPC:
                        raise
                    return self._attach_filling(attributes, rule, role)
            try:
                fd = await self.local.open(local, elsewhere=self._elsewhere(local, avoid))
            except (OSError, TierError) as error:
                if self.catalog.replica(ino, local.version, local.tier) == local:
                    # Not evicted meanwhile: the tier fails. Another one may have the bytes.
                    missing = isinstance(error, FileNotFoundError) and await self.unfit(local, None)
                    if not self._elsewhere(local, avoid):
                        raise (FsError(errno.EIO) if missing else error) from None
                    log.info("tier %s: inode %d cannot be opened: %s; trying other tiers", local.tier, ino, error)
                    avoid.add(local.tier)
                continue
            if await self.unfit(local, fd):
                self.local.close(local.tier, fd)
                if not self._elsewhere(local, avoid):
                    raise FsError(errno.EIO)
                avoid.add(local.tier)
                continue
            if writes:
                try:
                    kept = await self._keep_last(local, rule)
                    await self.quiesce(ino)
                except BaseException:
                    self.local.close(local.tier, fd)
                    raise
            now = self.catalog.replica(ino, local.version, local.tier)
            if now is not None and now.key == local.key:
                local = now
                if not writes:
                    break
                try:
                    below = self._outgrows(local, rule, role, ticket)
                    moved = await self.mover.relocate(local, fd, below) if below else None
                    stands = self.catalog.replica(ino, local.version, local.tier) == local
                    if moved is None and stands:
                        self.show_times(ino, local.tier, fd)
                except BaseException:
                    self.local.close(local.tier, fd)
                    raise
                if moved is not None:
                    self.local.close(local.tier, fd)
                    inode = self.attach(*moved, rule, role)
                    inode.anew = False
                    return inode
                if stands:
                    break
            # A copy ended while we waited, and the replica that it made clean was evicted.
            self.local.close(local.tier, fd)
            if kept is not None:
                self.discard(kept.tier, kept.key)
        inode = self.attach(local, fd, rule, role)
        if writes:
            self._begin_version(inode, kept)
        return inode

    def _elsewhere(self, replica: Replica, avoid: Collection[str]) -> bool:
        """Whether another tier has these bytes, too."""
        return any(
            other.version == replica.version and other.tier != replica.tier and other.tier not in avoid
            for other in self.catalog.replicas(replica.ino)
        )

    def _outgrows(self, local: Replica, rule: Rule, role: Role, ticket: Ticket) -> list[str]:
        """Tiers to one of which the file is to be moved, because it would be written to in place without room to grow;
        none: it stays."""
        tiers = self.ack_tiers(rule)
        below = tiers[tiers.index(local.tier) + 1 :] if local.tier in tiers else []
        replicas = self.catalog.replicas(local.ino)
        safe = any(r.version == local.version and r.state is ReplicaState.DURABLE for r in replicas)
        expected, fresh = self.space.learned.expect(role), local.size if safe else 0
        stays = self.admission.may_stay(local.tier, below, local.size, expected, fresh, ticket)
        return [] if stays else below

    def _attach_filling(self, attributes: Attributes, rule: Rule, role: Role) -> OpenInode:
        filling = self.fill(attributes, rule.ack)
        inode = OpenInode(attributes.ino, filling.fd, filling.replica, 0, rule, role, filling=filling)
        self.inodes[attributes.ino] = inode
        return inode

    def filled(self, filling: Filling, replica: Replica) -> None:
        """The bytes are all here and ``replica`` is in the catalog."""
        inode = self.inodes.get(replica.ino)
        if inode is not None and inode.filling is filling:
            inode.replica = replica
            inode.filling = None

    def refilled(self, filling: Filling, successor: Filling) -> None:
        """There is no room for the bytes: something else takes the place of what should have filled the file."""
        inode = self.inodes.get(successor.replica.ino)
        if inode is not None and inode.filling is filling:
            inode.filling = successor

    def _must_keep(self, local: Replica, rule: Rule) -> bool:
        """Whether writing into this replica would destroy a durable version further down than the ack tier."""
        return (
            self.policy.tier(local.tier).persistent and local.state is ReplicaState.DURABLE and rule.ack != local.tier
        )

    def local_replica(self, attributes: Attributes, avoid: Collection[str] = ()) -> Replica | None:
        """The current version's replica on the fastest local tier that has one."""
        found = {r.tier: r for r in self.catalog.replicas(attributes.ino) if r.version == attributes.version}
        for tier in self.stores:
            if tier in found and tier not in avoid:
                return found[tier]
        return None

    def _replace(self, attributes: Attributes, rule: Rule, role: Role, ticket: Ticket) -> OpenInode:
        """Open for a truncating write: the new version starts in a file of its own."""
        freed = sum(r.size for r in self.catalog.replicas(attributes.ino) if self._goes_with(r))
        tier = self.place(rule, role, ticket, freed=freed, precious=attributes.size > 0)
        replica, fd = self.create_replica(attributes.ino, attributes.version + 1, rule, tier)
        reach(At.REWRITE_UNRECORDED)
        with self.catalog.transaction():
            self.catalog.begin_version(attributes.ino, replica.version, self.lasting)
            self.catalog.put_replica(replica)
            self._drop_superseded(attributes.ino, replica.version)
        reach(At.REWRITE_RECORDED)
        return self.attach(replica, fd, rule, role)

    async def _keep_last(self, replica: Replica, rule: Rule) -> Replica | None:
        """Before a replica turns into the next version in place: a copy of it, if nothing else durable is left then.
        So it is when readers have it open on a disk below the ack tier, or the ack tier has no room."""
        if not self._must_keep(replica, rule) or any(
            r.tier != replica.tier and r.version == replica.version and r.state is ReplicaState.DURABLE
            for r in self.catalog.replicas(replica.ino)
        ):
            return None
        return await self.preserve(replica)

    def show_times(self, ino: int, tier: str, fd: int) -> None:
        """Give the backing file the times that the catalog has, before it is the one to tell them: those that were set
        while nobody wrote are in the catalog alone, and a copy has the time of the copying."""
        attributes = self.catalog.attributes(ino)
        if attributes is not None and attributes.mtime_ns != os.fstat(fd).st_mtime_ns:
            times = attributes.atime_ns, attributes.mtime_ns
            self.local.at_once(tier, lambda: os.utime(fd, ns=times), "set times")

    def _begin_version(self, inode: OpenInode, kept: Replica | None = None) -> None:
        """The open replica turns into the next version in place; ``kept`` stays of it."""
        old = inode.replica
        new = old._replace(version=old.version + 1, state=ReplicaState.OPEN, digest=None)
        with self.catalog.transaction():
            self.catalog.begin_version(old.ino, new.version, self.lasting)
            self.catalog.remove_replica(old)
            self.catalog.put_replica(new)
            if kept is not None:
                self.catalog.put_replica(kept)
        inode.replica = new
        inode.snapshot = None
        inode.anew = False
        reach(At.APPEND_RECORDED)

    def _drop_superseded(self, ino: int, current: int) -> None:
        """Older versions go, except durable ones: those stay until the new one is as durable."""
        for replica in self.catalog.replicas(ino):
            if replica.version < current and self._goes_with(replica):
                self.forget_replica(replica)

    def _goes_with(self, replica: Replica) -> bool:
        """Whether the replica goes as soon as a newer version begins."""
        return replica.state is not ReplicaState.DURABLE or not self.policy.tier(replica.tier).persistent

    def forget_replica(self, replica: Replica) -> None:
        """Drop a local replica's row now and its bytes soon. Inside a transaction of the caller."""
        self.catalog.remove_replica(replica)
        if replica.tier in self.stores:
            self.admission.removed(replica.tier, replica.size)
            self.discard(replica.tier, replica.key)

    def measure(self) -> dict[str, int]:
        """Bytes per tier in files open for writing, as of now, holes left out. Tells ``space`` how much they grew."""
        found: dict[str, int] = {}
        for inode in self.inodes.values():
            if inode.writers:
                before = inode.seen
                size, tier = self._measure(inode), inode.replica.tier
                self.grown += max(0, size - before)
                if inode.replica.state is ReplicaState.OPEN:
                    found[tier] = found.get(tier, 0) + size
        return found

    def _measure(self, inode: OpenInode) -> int:
        """Look at the backing file: its bytes. A size set ahead by ftruncate says what is still to come."""
        status = os.fstat(inode.fd)
        size = min(status.st_size, 512 * status.st_blocks)
        inode.seen = size
        known = inode.replica.size
        expected = self.space.learned.expect(inode.role)
        if status.st_size <= (self.policy.tier(inode.replica.tier).size or status.st_size):
            expected = max(expected, status.st_size)
        coming = max(0, expected - max(size, known))
        self.space.grow(inode.ino, inode.replica.tier, max(0, size - known), coming)
        return size

    # closing

    def release(self, fh: int) -> None:
        """The kernel dropped a handle. Unknown handles are ignored: a resent release was done before."""
        handle = self.handles.pop(fh, None)
        if handle is not None:
            self._drop(handle.inode, writes=handle.writes)

    def _drop(self, inode: OpenInode, *, writes: bool) -> None:
        if writes:
            inode.writers -= 1
            if not inode.writers:
                self._close_version(inode)
        else:
            inode.readers -= 1
        if not inode.writers and not inode.readers:
            self._detach(inode)

    def _detach(self, inode: OpenInode) -> None:
        del self.inodes[inode.ino]
        if self.backing and inode.backing_id:
            self.backing.close(inode.backing_id)
        if inode.filling is not None:
            inode.filling.abandon()
        else:
            self.local.close(inode.replica.tier, inode.fd)
        if inode.ino in self.forgotten:
            self.forgotten.discard(inode.ino)
            self.drop_orphan(inode.ino)

    def drop_orphan(self, ino: int) -> None:
        """Neither a name, a handle nor the kernel knows the inode any more: its bytes and its row go, unless its delete
        is held (migrator.held); then what is not durable goes, of what could come back."""
        with self.catalog.transaction():
            attributes, replicas = self.catalog.attributes(ino), self.catalog.replicas(ino)
            durable = [replica for replica in replicas if replica.state is ReplicaState.DURABLE]
            usable = durable or (attributes is not None and not stat.S_ISREG(attributes.mode))
            if usable and self.catalog.forget_held(ino):
                for replica in replicas:
                    if replica not in durable:
                        self.forget_replica(replica)
            else:
                self.remove_content(ino)
                self.catalog.drop_inodes([ino])
            reach(At.NAME_FORGOTTEN)
        self.orphans.discard(ino)

    def _close_version(self, inode: OpenInode) -> None:
        status = os.fstat(inode.fd)
        if inode.replica.state is not ReplicaState.OPEN and inode.snapshot != (status.st_size, status.st_mtime_ns):
            self._begin_version(inode)
        if inode.replica.state is ReplicaState.OPEN:
            if inode.unprivileged:
                self._clear_privileges(inode, status)
            inode.replica = self.close_version(inode.replica, status, inode.rule)
            self.space.learned.learn(inode.role, inode.replica.size)
            self.changed()
        self.space.settle(inode.ino)
        inode.unprivileged = False

    def _clear_privileges(self, inode: OpenInode, status: os.stat_result) -> None:
        """What somebody else than root wrote is neither setuid nor setgid any more. The kernel leaves that to us
        (fuse.wire.HANDLE_KILLPRIV_V2), and no single write comes by here, so it happens at the close."""
        attributes = self.catalog.attributes(inode.ino)
        if attributes is None or attributes.mtime_ns == status.st_mtime_ns:
            return
        mode = unprivileged(attributes.mode)
        if mode != attributes.mode:
            with self.catalog.transaction():
                self.catalog.set_attributes(attributes._replace(mode=mode))
                self.catalog.log(OpKind.ATTRIBUTES, inode.ino, time.time_ns())
            self.outdated.append(inode.ino)

    def take_snapshot(self, inode: OpenInode) -> int:
        """Close the version of a file that stays open for writing, so that it can be made durable; the
        version's number. What is written after this becomes the next version at the last release."""
        status = os.fstat(inode.fd)
        now = (status.st_size, status.st_mtime_ns)
        if inode.writers and inode.snapshot != now:
            if inode.replica.state is not ReplicaState.OPEN:
                self._begin_version(inode)
            inode.replica = self.close_version(inode.replica, status, inode.rule)
            inode.snapshot = now
            self.changed()
        return inode.replica.version

    def close_version(self, replica: Replica, status: os.stat_result, rule: Rule) -> Replica:
        """The version is complete: record its size and times and queue its copies."""
        closed = replica._replace(state=ReplicaState.WRITTEN, size=status.st_size)
        reach(At.CLOSE_UNRECORDED)
        now = time.time_ns()
        with self.catalog.transaction():
            self.catalog.put_replica(closed)
            named = self.catalog.close_content(replica.ino, status.st_size, status.st_blocks, status.st_mtime_ns)
            if named:
                self.copies.queue(closed, rule, now)
        reach(At.CLOSE_RECORDED)
        return closed

    def renew(self, attributes: Attributes) -> bool:
        """A closed file may have changed since it was copied: its bytes are a version of their own. False while it is
        open."""
        replica = self.local_replica(attributes)
        if attributes.ino in self.inodes:
            return False
        if replica is not None:
            _, rule = self.rule_of(self.catalog.path_of(attributes.ino))
            new = replica._replace(version=replica.version + 1, state=ReplicaState.OPEN, digest=None)
            fd = self.local.open_now(replica)
            try:
                self.show_times(new.ino, new.tier, fd)
                with self.catalog.transaction():
                    self.catalog.begin_version(new.ino, new.version, self.lasting)
                    self.catalog.remove_replica(replica)
                    self.catalog.put_replica(new)
                self.close_version(new, os.fstat(fd), rule)
            finally:
                os.close(fd)
        return True

    def remove_content(self, ino: int) -> None:
        """Drop every local replica and queued copy. Inside a transaction of the caller."""
        self.catalog.end_content(ino)
        for replica in self.catalog.replicas(ino):
            if replica.tier in self.stores:
                self.forget_replica(replica)
        self.changed()

    # taking over from a former daemon

    def adopt(self, fh: int, ino: int, flags: int, backing_id: int) -> None:
        """Take over a handle that the kernel still holds."""
        inode = self.inodes.get(ino)
        if inode is None:
            attributes = self.catalog.attributes(ino)
            replica = self.local_replica(attributes) if attributes else None
            if attributes is None or (replica is None and backing_id):
                raise FsError(errno.ESTALE, f"inode {ino} is open but has no local replica")
            path = self.catalog.path_of(ino)
            number, rule = self.rule_of(path)
            role = role_of(number, path)
            if replica is None:
                inode = self._attach_filling(attributes, rule, role)
            else:
                fd = self.local.open_now(replica)
                inode = OpenInode(attributes.ino, fd, replica, backing_id, rule, role)
                inode.anew = not flags & os.O_APPEND
                self.inodes[ino] = inode
        handle = Handle(inode, flags)
        self.handles[fh] = handle
        self._serial = max(self._serial, fh)
        if handle.writes:
            inode.writers += 1
        else:
            inode.readers += 1

    def locked(self, ino: int) -> InodeLock:
        return InodeLock(self._locks, ino)


def unprivileged(mode: int) -> int:
    """``mode`` as a write or chown leaves it; setgid without group execute permission is no privilege."""
    return mode & ~(stat.S_ISUID | (stat.S_ISGID if mode & stat.S_IXGRP else 0))
