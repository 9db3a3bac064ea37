"""Composition of one mount: tiers, catalog, filesystem, migrator, FUSE session and control socket."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from tierfs.catalog import Catalog, discard_snapshot
from tierfs.control.protocol import MountRecord, mount_directory
from tierfs.control.server import serve_control
from tierfs.durable import remove_unfinished
from tierfs.errors import CatalogDamaged, MountError, NotDurableInTime, TierError, TierfsError
from tierfs.fs.filesystem import Filesystem
from tierfs.fs.namespace import Namespace
from tierfs.fs.open_files import OpenFiles
from tierfs.fs.settle import settle
from tierfs.fs.space import RemoteProbe, Space
from tierfs.fsck import restore_clean
from tierfs.fuse import adapter
from tierfs.fuse.backing import BackingIds
from tierfs.fuse.device import Device
from tierfs.fuse.handover import KeeperSession, KeeperState
from tierfs.fuse.keeper import mount_number, run_keeper, unmount_fuse
from tierfs.fuse.requests import Requests
from tierfs.migrator.joining import claim, join
from tierfs.migrator.keeping import keep_closed
from tierfs.migrator.recovery import reclaim_orphans
from tierfs.migrator.rollback import recover_lost_memory
from tierfs.operations import UNDRAINED, Operations
from tierfs.points import At, reach
from tierfs.policy.model import Policy
from tierfs.report import Report, keep_report
from tierfs.state import CATALOG, state_lock
from tierfs.tiers.assembly import Tiers
from tierfs.tiers.kinds import Copies, copies_on

log = logging.getLogger("tierfs")

KERNEL_NEEDED = (6, 9)
KEEP_SECONDS = 120.0
"""At the end of a mount an archive that hangs delays it by so much at most."""
COLLECT = 50_000, 20, 50
"""gc.set_threshold: requests make no cycles to speak of, and looking for them every 700 objects takes a tenth of their
time."""


def choose_mode(policy: Policy) -> tuple[str, str]:
    """(mode, why): MountError when the policy demands passthrough and this machine cannot."""
    release = platform.release()
    version = tuple(int(part) for part in release.split("-")[0].split(".")[:2])
    obstacle = None
    if os.geteuid() != 0:
        obstacle = "not root (kernel passthrough needs CAP_SYS_ADMIN)"
    elif version < KERNEL_NEEDED:
        obstacle = f"Linux {release} has no FUSE passthrough (6.9 has)"
    if policy.mode == "userspace":
        return "userspace", "the policy says mode: userspace"
    if obstacle is None:
        return "passthrough", "root on a kernel with FUSE passthrough"
    if policy.mode == "passthrough":
        raise MountError(f"mode: passthrough is not possible here: {obstacle}; use mode: auto")
    return "userspace", obstacle


@dataclass
class Daemon:
    """One daemon process: everything between the FUSE session and the tiers."""

    policy: Policy
    mountpoint: Path
    config: Path
    mode: str
    why: str
    tiers: Tiers
    session: KeeperSession | None
    on_ready: Callable[[], None]
    catalog: Catalog = field(init=False)
    started: float = field(default_factory=time.time)
    report: Report = field(default_factory=Report)
    """What this start found and put right."""

    def __post_init__(self) -> None:
        self._number = mount_number(self.mountpoint)

    async def run(self) -> int:
        """Serve until the mount ends, then drain what is left. Returns the process's exit code."""
        first = self.session is None or self.session.restarts == 0
        remove_unfinished(self.policy.state)
        discard_snapshot(self.policy.state)
        try:
            self.catalog = self._open_catalog(first)
            if first:
                self.tiers.prepare_archive()
                claim(self.catalog, self.policy, self.tiers)
                copies_on(self.tiers.tree).forget_clean()
            else:
                self.tiers.tree.note(self.catalog.logged)
        except TierfsError:
            if first:
                self.tiers.take_back()
            raise
        probes = self.tiers.probes()
        disks = {tier.name: RemoteProbe(probes[tier.name]) for tier in self.policy.tiers if tier.persistent}
        space = Space(self.policy, {**probes, **disks}, self.catalog.tier_bytes)
        backing = BackingIds(self.session.device_fd) if self.session else None
        migrator, files = join(
            self.catalog,
            self.policy,
            self.tiers.stores,
            self.tiers.tree,
            space,
            backing=backing,
            mounts=self.tiers.mounts,
        )
        if first:
            try:
                migrator.archive.finish()
            except (TierError, OSError) as error:
                log.info("%s; the archive continues later", error)
        files.orphans.update(self.catalog.orphans())
        names = Namespace(self.catalog, files)
        operations = Operations(self, names, migrator, space)
        flusher = migrator.flusher
        filesystem = Filesystem(
            self.catalog, names, files, flusher.wait_durable, flusher.wait_settled, operations.virtual_xattrs
        )
        self._take_over(files, names, backing, migrator.archive.storing)
        kernel: Device | adapter.Session
        if self.session:
            kernel = Device(self.session, Requests(filesystem, operations.total_usage))
        else:
            kernel = adapter.Session(
                filesystem, operations.total_usage, self.mountpoint, allow_other=self.policy.allow_other
            )
        try:
            async with trio.open_nursery() as nursery:
                for probe in disks.values():
                    await nursery.start(probe.watch)
                nursery.start_soon(migrator.run)
                nursery.start_soon(files.copies.follow_rules)
                if not self.catalog.was_clean:
                    nursery.start_soon(self._reclaim_orphans, files)
                await nursery.start(serve_control, self._socket(), operations.handlers())
                self._write_record()
                nursery.start_soon(self._await_signal, operations, kernel)
                if self.session:
                    nursery.start_soon(self._watch_keeper, self.session)
                nursery.start_soon(self._announce)
                gc.freeze()
                gc.set_threshold(*COLLECT)
                await kernel.serve()
                log.info("mount %s ended", self.mountpoint)
                await operations.drain_rest()
                nursery.cancel_scope.cancel()
        finally:
            kernel.close()
            if self.session and self.session.keeper_is_gone:
                unmount_fuse(self.mountpoint, self._number)
        reach(At.UMOUNT_DRAINED)
        await migrator.remove_discarded()
        complete = operations.everything_durable()
        if complete:
            for mount in self.tiers.mounts:
                self.catalog.drop_tier(mount.name)
        self.catalog.close()
        reach(At.UMOUNT_FOLDED)
        with trio.move_on_after(KEEP_SECONDS):
            await trio.to_thread.run_sync(self._keep_catalog, migrator.copies, abandon_on_cancel=True)
        reach(At.UMOUNT_KEPT)
        if complete:
            for mount in self.tiers.mounts:
                try:
                    mount.unmount()
                except TierError as error:
                    log.info("%s; the next mount reuses it", error)
        return 0

    def _open_catalog(self, first: bool) -> Catalog:
        """A damaged catalog is replaced by its copy where that is the same catalog: made when it was closed, nothing
        done since. Anything else is for an operator to decide. Raises CatalogError."""
        path = self.policy.state / CATALOG
        try:
            return Catalog(path, verify=first)
        except CatalogDamaged as error:
            aside = restore_clean(self.policy, self.tiers) if first else None
            if aside is None:
                hint = f"make another from the tiers: tierfs fsck --rebuild {self.config}"
                raise CatalogDamaged(f"{error}\n{hint}") from error
            log.warning("%s: restored from the archive as it was closed; what was damaged is in %s", error, aside)
        return Catalog(path, verify=True)

    def _keep_catalog(self, copies: Copies) -> None:
        keep_closed(self.catalog.path, self.catalog.uuid, self.catalog.seq, copies)

    def _take_over(
        self, files: OpenFiles, names: Namespace, backing: BackingIds | None, storing: Callable[[int, int], bool]
    ) -> None:
        """Continue where a former daemon of the same mount stopped, or begin a new connection."""
        if self.session is None or self.session.restarts == 0:
            self.catalog.forget_requests()
            keep = functools.partial(keep_report, self.policy.state)
            self.report = recover_lost_memory(self.catalog, self.policy, self.tiers.stores, files, storing, keep)
            for line in self.report.lines():
                log.error("%s", line)
            files.orphans.clear()
            files.orphans.update(self.catalog.orphans())
            settle(files)
            names.forget(list(files.orphans))
            return
        handles = self.session.handles.handles()
        for handle in handles:
            files.adopt(handle.fh, handle.ino, handle.flags, handle.backing_id)
        if backing is not None:
            backing.reclaim({handle.backing_id for handle in handles}, self.session.handles.last_backing_id)
        settle(files)

    async def _reclaim_orphans(self, files: OpenFiles) -> None:
        self.report.orphans_removed += await reclaim_orphans(self.catalog, self.tiers.stores, files.former_key)
        if self.report:
            try:
                await trio.to_thread.run_sync(keep_report, self.policy.state, self.report)
            except OSError as error:
                log.error("the report of the recovery could not be kept in %s: %s", self.policy.state, error)

    def _socket(self) -> Path:
        return mount_directory(self.mountpoint) / "control.sock"

    def _write_record(self) -> None:
        MountRecord(
            mountpoint=str(self.mountpoint),
            config=str(self.config),
            state=str(self.policy.state),
            keeper_pid=self.session.keeper_pid if self.session else None,
            daemon_pid=os.getpid(),
            mode=self.mode,
        ).write()

    async def _announce(self) -> None:
        """Tell the starter once the mount answers."""
        await trio.to_thread.run_sync(os.stat, self.mountpoint, abandon_on_cancel=True)
        self.on_ready()
        log.info("mounted %s (%s: %s)", self.mountpoint, self.mode, self.why)

    async def _watch_keeper(self, session: KeeperSession) -> None:
        """The mount goes on without its keeper, but a daemon that dies now takes it along."""
        with contextlib.suppress(ProcessLookupError):
            keeper = os.pidfd_open(session.keeper_pid)
            try:
                await trio.lowlevel.wait_readable(keeper)
            finally:
                os.close(keeper)
        log.warning("the keeper was killed; the mount goes on unprotected: umount and mount again when it suits")

    async def _await_signal(self, operations: Operations, kernel: Device | adapter.Session) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                log.info("asked to stop: draining")
                await operations.stop()
                kernel.terminate()
                return


def execute_again(config: Path, mountpoint: Path, state: KeeperState) -> None:
    """Replace this process's program by the one on disk now, with ``config`` as it is now. Returns by OSError only."""
    command = [sys.executable, "-m", "tierfs", "mount", "--resume", str(state.store()), str(config), str(mountpoint)]
    search = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": os.pathsep.join(dict.fromkeys(search))})


def run_mount(
    policy: Policy, mountpoint: Path, config: Path, ready_fd: int | None, resume: KeeperState | None = None
) -> int:
    """Mount and serve until unmounted. Writes ``ok`` or an error as JSON to ``ready_fd`` once decided.
    With ``resume`` go on with the mount of this process's former program."""

    def report(line: str) -> None:
        nonlocal ready_fd
        if ready_fd is not None:
            with contextlib.suppress(BrokenPipeError):
                os.write(ready_fd, line.encode() + b"\n")
            os.close(ready_fd)
            ready_fd = None

    sys.setswitchinterval(0.0005)
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # sent when an open meets the lease of ReplicaStore.is_written
    try:
        mode, why = choose_mode(policy)
        with state_lock(policy.state):
            undrained = policy.state / UNDRAINED
            if resume is None:
                undrained.unlink(missing_ok=True)
            tiers = Tiers.open(policy, later=True)

            def serve(session: KeeperSession | None) -> int:
                daemon = Daemon(policy, mountpoint, config, mode, why, tiers, session, lambda: report("ok"))
                try:
                    return trio.run(daemon.run)
                except TierfsError as error:
                    log.error("%s", error)
                    report(json.dumps({"message": str(error), "exit_code": error.exit_code}))
                    return error.exit_code

            if mode == "userspace":
                code = serve(None)
            else:
                code = run_keeper(
                    mountpoint,
                    allow_other=policy.allow_other,
                    serve=serve,
                    log=logging.getLogger("tierfs.keeper"),
                    successor=functools.partial(execute_again, config, mountpoint),
                    resume=resume,
                )
            return NotDurableInTime.exit_code if not code and undrained.exists() else code
    except TierfsError as error:
        log.error("%s", error)
        report(json.dumps({"message": str(error), "exit_code": error.exit_code}))
        return error.exit_code
    except (OSError, RuntimeError) as error:
        log.exception("the mount failed")
        report(json.dumps({"message": f"{mountpoint}: {error}", "exit_code": 1}))
        return 1
