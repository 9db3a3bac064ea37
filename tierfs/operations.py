"""What the control socket and the user.tierfs.* attributes answer: status, info, flush and the rest."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import signal
import stat
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import trio

from tierfs.catalog import Catalog
from tierfs.catalog.damage import Damage
from tierfs.durable import write_whole
from tierfs.errors import NotDurableInTime, UsageError
from tierfs.fs.namespace import Namespace
from tierfs.fs.space import DoesNotAnswer, Space
from tierfs.fuse.handover import KeeperSession
from tierfs.migrator.circle import stuck_file
from tierfs.migrator.migrator import Migrator
from tierfs.policy.load import load_policy
from tierfs.policy.model import Policy
from tierfs.types import ROOT_INO, Attributes, Ino, ReplicaState, Usage

log = logging.getLogger("tierfs")

UNDRAINED = "undrained.json"
"""In the state directory: what the last mount that ran out of time left in memory."""
FOREVER = 100 * 365 * 86400
"""Seconds: the longest timeout."""
DAMAGED_SHOWN = 100
"""Damaged replicas that status names."""
LATE_SHOWN = 10
"""Late files that status names."""

Json = dict[str, Any]
Progress = Callable[[int, int, str], Awaitable[None]]
Handler = Callable[[Json, Progress], Awaitable[Json]]


class Host(Protocol):
    """What this module needs to know of the daemon."""

    policy: Policy
    mountpoint: Path
    config: Path
    mode: str
    why: str
    session: KeeperSession | None
    catalog: Catalog


class Operations:
    def __init__(self, host: Host, names: Namespace, migrator: Migrator, space: Space) -> None:
        self._host = host
        self._names = names
        self._migrator = migrator
        self._space = space
        self._keep_memory = False
        self._stop_at: float | None = None
        self._reported = False
        self.complete = True
        """Everything was drained that was to be."""

    def handlers(self) -> dict[str, Handler]:
        return {
            "status": self.status,
            "info": self.info,
            "flush": self.flush,
            "warmup": self.warmup,
            "evict": self.evict,
            "pause": self.pause,
            "resume": self.resume,
            "restart": self.restart,
            "detach": self.detach,
            "scrub": self.scrub,
        }

    # space

    def total_usage(self) -> Usage:
        """All tiers together, for statfs: clean copies that eviction frees at once count as available."""
        capacity = used = available = 0
        for config in self._host.policy.tiers:
            try:
                usage = self._space.usage(config.name)
            except OSError:
                continue
            capacity += usage.capacity
            used += usage.used
            available += usage.available
        return Usage(capacity, used, available)

    def _tier(self, name: str, opened: int) -> Json:
        """``clean``: closed and durable on a persistent tier (this one, maybe); ``dirty``: closed and nowhere durable;
        ``open``: in files being written, ``opened`` bytes. ``used`` is their sum and what a recall has reserved."""
        config = self._host.policy.tier(name)
        sums = self._host.catalog.tier_sums(name)
        outages = self._migrator.outages
        outage = outages.get(name)
        error, silent = (outage.error, outage.silent) if outage else (None, self._migrator.lanes[name].hangs)
        try:
            usage = self._space.usage(name)
        except OSError as failure:
            usage = Usage(0, 0, 0)
            error = error or str(failure)
            silent = silent or isinstance(failure, DoesNotAnswer)
        closed = sums.get(ReplicaState.DURABLE, 0) + sums.get(ReplicaState.WRITTEN, 0)
        persistent = [tier.name for tier in self._host.policy.tiers if tier.persistent]
        clean = self._host.catalog.clean_bytes(name, persistent)
        return {
            "name": name,
            "kind": config.kind,
            "capacity": usage.capacity,
            "used": usage.used,
            "clean": clean,
            "dirty": closed - clean,
            "open": opened,
            "state": "down" if silent else "failing" if error else "ok",
            "last_error": error,
            "breaker": outages.state(name).value,
            "retry_in_s": max(0.0, outage.retry_at - trio.current_time()) if outage else None,
            "hung_calls": self._migrator.lanes[name].given_up,
        }

    def _local(self) -> list[str]:
        return list(self._names.files.stores)

    def _unsynced(self, opened: Mapping[str, int], *, persistent: bool) -> int:
        """Bytes that are durable nowhere and lie in memory, or on disks, ``opened`` by tier in files being written."""
        tiers = [name for name in self._local() if self._host.policy.tier(name).persistent == persistent]
        return self._host.catalog.unsynced_bytes(tiers) + sum(opened.get(tier, 0) for tier in tiers)

    # control operations

    async def status(self, args: Json, progress: Progress) -> Json:
        files, size, oldest = self._host.catalog.backlog()
        session = self._host.session
        opened = self._names.files.measure()
        memory, disks = (self._unsynced(opened, persistent=persistent) for persistent in (False, True))
        late_files, late_bytes = self._host.catalog.late(time.time_ns())
        return {
            "mountpoint": str(self._host.mountpoint),
            "mode": self._host.mode,
            "mode_reason": self._host.why,
            "keeper_pid": session.keeper_pid if session and not session.keeper_is_gone else None,
            "daemon_pid": os.getpid(),
            "daemon_restarts": session.restarts if session else 0,
            "paused": self._migrator.paused,
            "tiers": [self._tier(tier.name, opened.get(tier.name, 0)) for tier in self._host.policy.tiers],
            "drain": {
                "queued_files": files,
                "queued_bytes": size,
                "unsynced_bytes": memory + disks,
                "memory_bytes": memory,
                "unsynced_disk_bytes": disks,
                "oldest_age_s": max(0.0, (time.time_ns() - oldest) / 1e9) if oldest else 0.0,
                "rate_bytes_s": self._migrator.pace.rate,
                "unsynced_limit": self._host.policy.limits.unsynced,
                "spilled_files": self._names.files.admission.spilled,
                "waiting": self._names.files.admission.waiting,
                "late_files": late_files,
                "late_bytes": late_bytes,
                "late": self._late_paths(),
            },
            "damaged": self._damaged(),
            "scrub": [self._scrub_of(tier.name) for tier in self._host.policy.tiers if tier.persistent],
            "held_deletes": dict(zip(("files", "bytes"), self._migrator.held.sums(), strict=True)),
            "stuck": self._stuck(),
        }

    def _stuck(self) -> Json | None:
        """The file that held deletes wait for while no tier has room for it before they are done."""
        stuck = stuck_file(self._migrator)
        return {"path": self._migrator.flusher.path(stuck.ino), "bytes": stuck.size} if stuck else None

    def _damaged(self) -> Json:
        """Replicas that do not have their bytes and could not be replaced."""
        catalog = self._host.catalog
        listed = [
            {"path": self._migrator.flusher.path(found.ino), **_damage(found)}
            for found in catalog.damaged(DAMAGED_SHOWN)
        ]
        return {"replicas": catalog.count_damaged(), "list": listed}

    def _scrub_of(self, tier: str) -> Json:
        known = self._host.catalog.scrub_of(tier)
        done, total = self._migrator.scrubber.running.get(tier, (None, None))
        return {
            "tier": tier,
            "finished": known.finished_ns / 1e9 if known and known.began_ns else None,
            "done_bytes": done,
            "total_bytes": total,
        }

    async def scrub(self, args: Json, progress: Progress) -> Json:
        tiers = [tier.name for tier in self._host.policy.tiers if tier.persistent]
        if args.get("tier") is not None:
            tiers = [self._tier_name(args["tier"])]
        rate = args.get("rate")
        if rate is not None and (not isinstance(rate, int) or isinstance(rate, bool) or rate < 1):
            raise UsageError(f"rate {rate!r} is no number of bytes per second")
        report = await self._migrator.scrubber.scrub(tiers, rate, lambda d, t: progress(d, t, "scrubbing"))
        return dataclasses.asdict(report) | {"tiers": tiers}

    def _late_paths(self) -> list[str]:
        """The first of the files past their deadline."""
        late = self._host.catalog.late_files(time.time_ns(), LATE_SHOWN)
        return [self._migrator.flusher.path(Ino(ino)) for ino in late]

    def _find(self, path: str) -> Attributes:
        try:
            raw = os.fsencode(path)
        except UnicodeEncodeError:
            raise UsageError(f"{path!r} is no path") from None
        names = tuple(part for part in raw.split(b"/") if part not in (b"", b"."))
        found = self._host.catalog.resolve(names)
        if found is None:
            raise UsageError(f"{self._host.mountpoint}/{path}: no such file")
        return self._names.current(found)

    async def info(self, args: Json, progress: Progress) -> Json:
        attributes = self._find(str(args.get("path", "")))
        if not stat.S_ISREG(attributes.mode):
            raise UsageError(f"{args.get('path') or '/'}: only regular files have replicas")
        replicas = [
            {
                "tier": replica.tier,
                "version": replica.version,
                "state": replica.state.name.lower(),
                "bytes": replica.size,
                "key": replica.key or None,
                "digest": replica.digest.hex() if replica.digest else None,
            }
            for replica in self._host.catalog.replicas(attributes.ino)
        ]
        return {
            "path": args.get("path", ""),
            "size": attributes.size,
            "version": attributes.version,
            "replicas": replicas,
            "durable": self._durable_at(attributes),
            "lost": self._migrator.flusher.is_lost(attributes),
            "damaged": [_damage(found) for found in self._host.catalog.damage_of(attributes.ino)],
        }

    def _durable_at(self, attributes: Attributes) -> str | None:
        """The lowest tier on which the current version is durable; a replica that is known to be bad is none."""
        bad = {found.tier for found in self._host.catalog.damage_of(attributes.ino)}
        return self._migrator.flusher.safe_on(attributes, bad)

    async def flush(self, args: Json, progress: Progress) -> Json:
        top = self._find(str(args.get("path") or "")).ino
        tier = self._tier_name(args.get("to"))
        timeout = args.get("timeout")
        if timeout is None:
            timeout = math.inf
        elif not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 <= timeout <= FOREVER:
            raise UsageError(f"timeout {timeout!r} is no number of seconds")

        def report(done: int, total: int) -> None:
            progress(done, total, "drains are paused" if self._migrator.paused else "draining")

        emergency = args.get("emergency") is True
        files, size, lost = await self._migrator.flusher.flush(top, tier, timeout, report, emergency=emergency)
        return {"files": files, "bytes": size, "tier": tier, **({"lost": lost} if lost else {})}

    def _tier_name(self, name: object) -> str:
        tiers = [tier.name for tier in self._host.policy.tiers]
        if name is None:
            return tiers[-1]
        if name not in tiers:
            raise UsageError(f"no tier is called {name}; there are {', '.join(tiers)}")
        if not self._host.policy.tier(str(name)).persistent:
            raise UsageError(f"tier {name} is memory: nothing is durable there")
        return str(name)

    async def warmup(self, args: Json, progress: Progress) -> Json:
        wanted = self._files(args)
        total = sum(a.size for a in wanted)
        done = recalled = 0
        for attributes in wanted:
            recalled += await self._migrator.recaller.warmup(attributes)
            done += attributes.size
            await progress(done, total, "recalling")
        return {"files": len(wanted), "recalled": recalled, "bytes": total}

    def _files(self, args: Json) -> list[Attributes]:
        paths = args.get("paths", [])
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UsageError("paths must be a list of paths")
        return [a for path in paths for a in self._host.catalog.subtree(self._find(path).ino)]

    async def evict(self, args: Json, progress: Progress) -> Json:
        local = list(self._names.files.stores)
        tiers = [str(args["from"])] if args.get("from") else local
        if any(tier not in local for tier in tiers):
            raise UsageError(f"cannot evict from {tiers[0]}; tiers with evictable copies: {', '.join(local)}")
        evicted = kept = size = 0
        wanted = self._files(args)
        for index, attributes in enumerate(wanted):
            for tier in tiers:
                if self._host.catalog.replica(attributes.ino, attributes.version, tier) is None:
                    continue
                if self._migrator.evictor.evict(attributes.ino, attributes.version, tier):
                    evicted += 1
                    size += attributes.size
                else:
                    kept += 1
            if index % 256 == 0:
                await progress(index, len(wanted), "evicting")
        return {"evicted": evicted, "kept": kept, "bytes": size}

    async def pause(self, args: Json, progress: Progress) -> Json:
        self._migrator.paused = True
        return {"paused": True}

    async def resume(self, args: Json, progress: Progress) -> Json:
        self._migrator.paused = False
        self._migrator.changed()
        return {"paused": False}

    async def restart(self, args: Json, progress: Progress) -> Json:
        session = self._host.session
        if session is None:
            raise UsageError("mode userspace has no keeper that could restart the daemon; umount and mount instead")
        if session.keeper_is_gone:
            raise UsageError("the keeper of this mount was killed; umount and mount instead")
        await self._check_successor()
        os.kill(session.keeper_pid, signal.SIGHUP)
        return {"daemon_pid": os.getpid()}

    async def _check_successor(self) -> None:
        """Before the point of no return: the program on disk starts, likes the policy file, and finds this mount in it.
        Raises UsageError."""
        host = self._host
        command = [sys.executable, "-m", "tierfs", "check", str(host.config)]
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        if done.returncode:
            raise UsageError(f"not restarted, the mount goes on as it was: {done.stderr.decode().strip()}")
        new = load_policy(host.config, mountpoint=host.mountpoint)
        for key in ("tiers", "state", "mode", "allow_other"):
            if getattr(new, key) != getattr(host.policy, key):
                raise UsageError(f"not restarted: {key} changed in {host.config}, which takes umount and mount")

    async def detach(self, args: Json, progress: Progress) -> Json:
        """Called before umount; ``drain: false`` leaves undrained files in memory for the next mount."""
        self._keep_memory = not args.get("drain", True)
        return {"detached": True}

    # the end of a mount

    async def stop(self) -> None:
        """The machine or the service manager wants the mount to end: drain what can be drained in ``limits.stop``,
        the nearest persistent tier first."""
        if self._stop_at is None:
            self._stop_at = trio.current_time() + (self._host.policy.limits.stop or math.inf)
        await self.drain_rest()

    async def drain_rest(self) -> None:
        """Drain what is left, unless the umount asked not to; without a limit of time, except after `stop`. What is not
        durable then is listed by path in the log and beside it: it is still in memory, for the next mount."""
        if self._keep_memory:
            return
        self._migrator.paused = False
        left = math.inf if self._stop_at is None else max(0.0, self._stop_at - trio.current_time())
        tier = self._host.policy.tiers[-1].name
        try:
            await self._migrator.flusher.flush(ROOT_INO, tier, left, emergency=self._stop_at is not None)
        except NotDurableInTime as error:
            self.complete = False
            if not self._reported:
                self._reported = True
                self._report(error)
            self._migrator.give_up()

    def _report(self, error: NotDurableInTime) -> None:
        details = error.details or {}
        path = self._host.policy.state / UNDRAINED
        write_whole(path.parent, path.name, json.dumps({"at": time.time(), **details}, indent=2) + "\n")
        log.error("ended before everything was durable: %s; all of it is listed in %s", error, path)

    def everything_durable(self) -> bool:
        """Whether the memory tiers hold nothing that a persistent tier lacks."""
        return self.complete and not self._keep_memory and self._host.catalog.unsynced_bytes(self._local()) == 0

    # attributes for programs without the CLI

    def virtual_xattrs(self, attributes: Attributes) -> dict[bytes, bytes]:
        if not stat.S_ISREG(attributes.mode):
            return {}
        local = self._names.files.local_replica(attributes)
        tier = local.tier if local else self._migrator.flusher.safe_on(attributes)
        return {
            b"user.tierfs.tier": (tier or "").encode(),
            b"user.tierfs.durable": (self._durable_at(attributes) or "none").encode(),
            b"user.tierfs.version": str(attributes.version).encode(),
        }


def _damage(found: Damage) -> Json:
    return {
        "tier": found.tier,
        "version": found.version,
        "what": found.what,
        "since": found.since_ns / 1e9,
        "elsewhere": found.elsewhere,
        "remedy": found.remedy,
    }
