"""The command that shows what starts of a mount found and put right: recover."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from tierfs.cli import render
from tierfs.cli.inspect import MountedPath, json_option, mount_at
from tierfs.control.protocol import list_mounts
from tierfs.report import Report, read_reports


def show(report: Report) -> None:
    """For people."""
    render.recovery({**asdict(report), "lines": report.lines()})


@click.command()
@click.argument("mount", metavar="CONFIG|MOUNTPOINT", type=MountedPath())
@json_option
def recover(mount: str, as_json: bool) -> None:
    """Show what was rolled back, lost, undone or removed when the filesystem was mounted after a crash or reboot.

    The same is printed by `tierfs mount` and is in the log; the last reports are kept in the state directory, newest
    last. An empty list: nothing was ever amiss.

    \b
    Examples:
      tierfs recover /mnt/ckpt
      tierfs recover /etc/tierfs/ckpt.yaml --json | jq '.[-1].lost[].path'
    """
    reports = read_reports(_state(mount))
    if as_json:
        render.print_json([asdict(report) for report in reports])
        return
    if not reports:
        render.say(f"{mount}: nothing to report")
    for report in reports:
        show(report)


def _state(mount: str) -> Path:
    """The state directory. A mount need not answer for this: its mountpoint is not looked at."""
    for record in list_mounts():
        if record.mountpoint == os.path.abspath(mount):
            return Path(record.state)
    if not os.path.isfile(mount):
        return Path(mount_at(mount).state)
    from tierfs.policy.load import load_policy

    return load_policy(Path(mount)).state


COMMANDS: tuple[click.Command, ...] = (recover,)
