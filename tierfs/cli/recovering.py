"""The command that shows what starts of a mount found and put right: recover."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from tierfs.cli import render
from tierfs.cli.inspect import json_option, mount_at
from tierfs.policy.load import load_policy
from tierfs.report import Report, read_reports


def show(report: Report) -> None:
    """For people."""
    render.recovery({**asdict(report), "lines": report.lines()})


@click.command()
@click.argument("mount", metavar="CONFIG|MOUNTPOINT", type=click.Path(path_type=Path))
@json_option
def recover(mount: Path, as_json: bool) -> None:
    """Show what was rolled back, lost, undone or removed when the filesystem was mounted after a crash or reboot.

    The same is printed by `tierfs mount` and is in the log; the last reports are kept in the state directory, newest
    last. An empty list: nothing was ever amiss.

    \b
    Examples:
      tierfs recover /mnt/ckpt
      tierfs recover /etc/tierfs/ckpt.yaml --json | jq '.[-1].lost[].path'
    """
    state = load_policy(mount).state if mount.is_file() else Path(mount_at(str(mount)).state)
    reports = read_reports(state)
    if as_json:
        render.print_json([asdict(report) for report in reports])
        return
    if not reports:
        render.say(f"{mount}: nothing to report")
    for report in reports:
        show(report)


COMMANDS: tuple[click.Command, ...] = (recover,)
