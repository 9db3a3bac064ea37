"""Everything at once, for ten minutes: programs that save, rewrite, patch, rename, delete, log, read and map in tiers
too small for what they hold, on an archive of which every tenth call fails, which hangs and which is full at times,
while the daemon is killed, restarted, paused, flushed and scrubbed. Nobody sees a wrong byte, nor an error but ENOSPC,
seldom, where such an archive lets every tier fill up; at the end mount and archive are as the programs left them, and
neither daemon nor keeper has grown.

The ordinary suite runs the same for twenty seconds.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from tests.fault.conftest import Switches
from tests.fault.killing import tree
from tests.fault.soak import Measured, Soak
from tests.mount.conftest import loop_disk, make_base, need_mode
from tierfs.catalog.database import CHECKPOINT_BYTES
from tierfs.testing.mounting import TestMount, mounted

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs passthrough and disks of its own")

SHORT, LONG = 20.0, 600.0
"""Seconds."""
PATIENCE = 400.0
"""More than that, on a busy machine, for flushes and what is compared."""
SEED = 20
REFUSED = 0.02
"""Part of the operations that may find every tier full."""
FIRST = 0.2
"""Part of the time after which is measured what must not have grown at the end: a daemon without a death yet. The last
one lives as long."""
GROWN, MORE_MEMORY = 1.25, 16 << 20
"""A process's own memory at the end is below the first figure times this, plus this."""
MORE_DESCRIPTORS = 6
THREADS = 12
"""Of a daemon with nothing to do."""
NOISE = [
    "trying again",
    "nothing came for",
    "does not answer",
    "No space left on device",
    "was killed",
    "daemon .* died",
    "ended with code",
]
RULES = [{"match": "**/*.log", "ack": "nvme"}, {"match": "**/*.ckpt*", "fsync": "nvme"}, {"match": "**"}]
POLICY = {"limits": {"tier_timeout": "2s"}}


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(SHORT, marks=[pytest.mark.slow, pytest.mark.timeout(SHORT + PATIENCE)]),
        pytest.param(LONG, marks=[pytest.mark.nightly, pytest.mark.timeout(LONG + PATIENCE)]),
    ],
    ids=["short", "long"],
)
def test_all_of_it_at_once(switches: Switches, seconds: float) -> None:
    need_mode("passthrough")
    base = make_base("tierfs-soak-")
    try:
        with (
            loop_disk(base, "fast", 112 << 20) as fast,
            loop_disk(base, "slow", 640 << 20) as slow,
            mounted(
                base,
                mode="passthrough",
                nvme=fast / "tier",
                archive=slow / "tier",
                memory="48MiB",
                rules=RULES,
                extra=POLICY,
                allow_log=NOISE,
            ) as mnt,
            mnt.abort_after(seconds + PATIENCE - 60),
        ):
            soak(Soak(mnt, switches, slow, SEED), seconds)
    finally:
        shutil.rmtree(base, ignore_errors=True)


def soak(run: Soak, seconds: float) -> None:
    began, still = time.monotonic(), 0.0
    gentle = (run.hang, run.full, run.scrub, run.flush, run.pause)
    rough = (*gentle, run.kill, run.kill, run.kill, run.restart)
    with run.running():
        run.storm()
        first: Measured | None = None
        while (now := (time.monotonic() - began - still) / seconds) < 1 and not run.stop.is_set():
            if first is None and now >= FIRST:
                paused = time.monotonic()
                with run.quiet():
                    first = run.measure(THREADS)
                run.kill()
                still = time.monotonic() - paused
            run.happen(*(rough if FIRST <= now < 1 - FIRST else gentle))
            run.stop.wait(run.random.uniform(0, seconds / 100))
    run.raise_failures()
    assert first is not None
    with run.quiet():
        check_everything(run)
        last = run.measure(THREADS)
    run.calm()
    operations, size = sum(w.done for w in run.writers), sum(w.bytes for w in run.writers)
    refused = sum(w.refused for w in run.writers)
    print(f"{operations} operations, {size >> 20} MiB, {refused} refused, {run.kills} kills, {run.events}")
    print(f"first {first}\nlast  {last}")
    assert run.kills
    assert refused <= operations * REFUSED
    check_flat(first, last)


def check_everything(run: Soak) -> None:
    expected, mnt = run.expected(), run.mnt
    assert differences(tree(mnt.path), expected) == []
    assert differences(on_archive(mnt), expected) == []
    for tier in ("memory", "nvme"):
        mnt.evict(mnt.path, tier=tier)
    assert differences(tree(mnt.path), expected) == []


def differences(found: dict[str, bytes], expected: dict[str, bytes]) -> list[str]:
    """Paths that are there or not, or hold what they should not."""
    return sorted(path for path in found.keys() | expected.keys() if found.get(path) != expected.get(path))


def on_archive(mnt: TestMount) -> dict[str, bytes]:
    return {path: data for path, data in tree(mnt.archive).items() if Path(path).parts[0] != ".tierfs"}


def check_flat(first: Measured, last: Measured) -> None:
    for former, now in ((first.daemon, last.daemon), (first.keeper, last.keeper)):
        assert now.memory <= former.memory * GROWN + MORE_MEMORY
        assert now.descriptors <= former.descriptors + MORE_DESCRIPTORS
        assert now.deleted == 0
        assert now.threads <= THREADS
    assert max(first.wal, last.wal) <= 2 * CHECKPOINT_BYTES
