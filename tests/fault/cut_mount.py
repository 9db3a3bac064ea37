"""A mount in a process forked from one that has everything imported, for tests that mount hundreds of times.

Imports nothing of pytest: the new process imports this module."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tierfs.daemon", "tierfs.migrator.recovery", "tierfs.policy.load"])


def _serve(config: Path, mountpoint: Path, log: Path, ready: Connection) -> None:
    import logging

    from tierfs.catalog import database
    from tierfs.daemon import run_mount
    from tierfs.policy.load import load_policy

    database.boot_id = lambda: "after the cut"
    os.setsid()
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(fd, 2)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s", force=True)
    os._exit(run_mount(load_policy(config, mountpoint=mountpoint), mountpoint, config, os.dup(ready.fileno())))


def start(config: Path, mountpoint: Path, log: Path) -> tuple[BaseProcess, str]:
    """The process that serves the mount, as if the machine had booted meanwhile, and what it answered: "ok" when the
    mount is there. Its log is appended to ``log``."""
    ours, theirs = _CONTEXT.Pipe()
    process = _CONTEXT.Process(target=_serve, args=(config, mountpoint, log, theirs))
    process.start()
    theirs.close()
    try:
        return process, os.read(ours.fileno(), 4096).decode()
    finally:
        ours.close()
