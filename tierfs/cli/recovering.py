"""The command that shows what starts of a mount, and the last rebuild, found and put right: recover."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tierfs.cli import render
from tierfs.cli.inspect import MountedPath, json_option, mount_at
from tierfs.control.protocol import list_mounts
from tierfs.report import Report, read_rebuild, read_reports


def show(report: Report) -> None:
    """For people."""
    render.recovery({**asdict(report), "lines": report.lines()})


@click.command()
@click.argument("mount", metavar="CONFIG|MOUNTPOINT", type=MountedPath())
@json_option
def recover(mount: str, as_json: bool) -> None:
    """Show what was rolled back, lost, undone or removed when the filesystem was mounted after a crash or reboot, and
    what the last `tierfs fsck --rebuild` did.

    The same is printed by `tierfs mount` and `fsck`; the last reports are kept in the state directory, newest last.
    An empty list: nothing was ever amiss. With --json "kind" is recovery or rebuild.

    \b
    Examples:
      tierfs recover /mnt/ckpt
      tierfs recover /etc/tierfs/ckpt.yaml --json | jq '.[-1].lost[].path'
    """
    state = _state(mount)
    reports: list[Report | dict[str, Any]] = [*read_reports(state)]
    rebuild = read_rebuild(state)
    if rebuild is not None:
        after = [report for report in reports if isinstance(report, Report) and report.at > rebuild["at"]]
        reports.insert(len(reports) - len(after), rebuild)
    if as_json:
        render.print_json([_as_json(report) for report in reports])
        return
    if not reports:
        render.say(f"{mount}: nothing to report")
    for report in reports:
        show(report) if isinstance(report, Report) else render.rebuild(report)


def _as_json(report: Report | dict[str, Any]) -> dict[str, Any]:
    """Of either kind the path of what is lost is at ``.lost[].path``."""
    if isinstance(report, Report):
        return {"kind": "recovery", **asdict(report)}
    return {"kind": "rebuild", **report, "lost": [{"path": path} for path in report["lost"]]}


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
