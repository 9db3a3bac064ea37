"""Commands that look: status, info, check, explain, fsck. Those that read policy files load what that takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from tierfs.cli import render
from tierfs.control.client import call, find_mount
from tierfs.control.protocol import MountRecord, list_mounts
from tierfs.errors import CatalogDamaged, TierfsError, UsageError
from tierfs.report import GONE, LOST, ROLLED_BACK, UNDONE

if TYPE_CHECKING:
    from tierfs.fsck import Report
    from tierfs.policy.model import Policy

ANSWER_SECONDS = 10.0
"""A daemon answers status and info at once, or not at all."""

MEMORY_SHARE = 0.8
"""Part of the machine's memory above which a memory tier is worth a remark: training wants the rest."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class Mountpoint(click.ParamType[str]):
    """A mountpoint; the shell completes those of the mounts that are there, then paths."""

    name = "mountpoint"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        found = [record.mountpoint for record in list_mounts() if record.mountpoint.startswith(incomplete)]
        return [CompletionItem(name) for name in found] or [CompletionItem(incomplete, type="file")]


class MountedPath(click.ParamType[str]):
    """A path on a mount, that may be one of which the daemon does not answer: click's own type would look at it."""

    name = "path"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


def mount_at(mountpoint: str) -> MountRecord:
    """The mount whose mountpoint this is; UsageError for a path inside one or outside all."""
    record, relative = find_mount(mountpoint)
    if relative:
        raise UsageError(f"{mountpoint} is not a mountpoint but lies in the mount {record.mountpoint}")
    return record


@click.command()
@click.argument("mountpoint", required=False, type=Mountpoint())
@json_option
def status(mountpoint: str | None, as_json: bool) -> None:
    """Show the tiers and the drain queue of a mount, or list all mounts.

    \b
    Examples:
      tierfs status
      tierfs status /mnt/ckpt
      tierfs status /mnt/ckpt --json | jq .drain.unsynced_bytes
    """
    if mountpoint is not None:
        answer = call(mount_at(mountpoint), "status", timeout=ANSWER_SECONDS)
        render.print_json(answer) if as_json else render.status(answer)
        return
    answers = [_status_or_error(record) for record in list_mounts()]
    render.print_json(answers) if as_json else render.status_list(answers)


def _status_or_error(record: MountRecord) -> dict[str, Any]:
    try:
        return call(record, "status", timeout=ANSWER_SECONDS)
    except TierfsError as error:
        return {
            "mountpoint": record.mountpoint,
            "mode": record.mode,
            "keeper_pid": record.keeper_pid,
            "daemon_pid": record.daemon_pid,
            "error": str(error),
        }


@click.command()
@click.argument("path", type=MountedPath())
@json_option
def info(path: str, as_json: bool) -> None:
    """Show where the versions of a file are and which tier holds it durably.

    \b
    Example:
      tierfs info /mnt/ckpt/run42/step-1000.pt
    """
    record, relative = find_mount(path)
    answer = call(record, "info", {"path": relative}, timeout=ANSWER_SECONDS)
    render.print_json(answer) if as_json else render.info(answer)


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@json_option
def check(config: Path, as_json: bool) -> None:
    """Check a policy file and the directories that it names; nothing is mounted.

    \b
    Example:
      tierfs check /etc/tierfs/ckpt.yaml
    """
    from tierfs.policy.describe import check_summary, remarks
    from tierfs.policy.load import check_paths, load_policy
    from tierfs.policy.machine import Machine, check_machine

    policy = load_policy(config)
    check_paths(policy)
    check_machine(policy, Machine.this())
    summary = check_summary(policy)
    summary["remarks"] = [*remarks(policy), *_remarks_on_this_machine(policy)]
    render.print_json(summary) if as_json else render.policy(summary)


def _remarks_on_this_machine(policy: Policy) -> list[str]:
    from tierfs.policy.machine import Machine

    memory = Machine.this().memory
    found = [
        f"tier {tier.name} may take {render.size(tier.size)} of this machine's {render.size(memory)} of memory"
        for tier in policy.tiers
        if tier.kind == "memory" and (tier.size or 0) > memory * MEMORY_SHARE
    ]
    devices: dict[int, str] = {}
    for tier in policy.tiers:
        if tier.path is not None:
            first = devices.setdefault(os.stat(tier.path).st_dev, tier.name)
            if first != tier.name:
                found.append(f"tiers {first} and {tier.name} are on one filesystem: they share its room and its fate")
    return found


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.argument("path")
@json_option
def explain(config: Path, path: str, as_json: bool) -> None:
    """Tell which rule of a policy file treats PATH, and how. PATH need not exist.

    It is relative to the mountpoint, or absolute and below the policy's mount.

    \b
    Examples:
      tierfs explain ckpt.yaml run42/step-1000.pt
      tierfs explain ckpt.yaml /mnt/ckpt/run42/step-1000.pt --json
    """
    from tierfs.policy import describe
    from tierfs.policy.load import load_policy

    policy = load_policy(config)
    relative = os.path.normpath(path)
    if os.path.isabs(relative):
        if policy.mount is None or not Path(relative).is_relative_to(policy.mount):
            raise UsageError(f"{path} is not below the mountpoint {policy.mount or '(the policy names none)'}")
        relative = os.path.relpath(relative, policy.mount)
    if relative in ("", ".") or relative.split("/")[0] == "..":
        raise UsageError(f"{path!r} is no path of a file below the mountpoint")
    answer = describe.explain(policy, os.fsencode(relative))
    render.print_json(answer) if as_json else render.explanation(answer)


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--repair", is_flag=True, help="Mend what does not agree; bytes that nothing names go, others never.")
@click.option("--rebuild", is_flag=True, help="Make another catalog, from its copy and what the tiers have.")
@click.option("--data", is_flag=True, help="Read every replica and compare it with its digest.")
@click.option(
    "--gone",
    multiple=True,
    metavar="TIER",
    help="With --repair: the files on this tier are gone for good. Else a tier of which nothing is there is refused.",
)
@json_option
def fsck(config: Path, repair: bool, rebuild: bool, data: bool, gone: tuple[str, ...], as_json: bool) -> int:
    """Compare the catalog of an unmounted filesystem with what its tiers hold.

    Changes nothing without --repair or --rebuild. Exits 1 when something is wrong, was not mended, or when the bytes of
    a file are lost.

    After a reboot and before the mount one line tells what the mount will roll back or miss because the memory tier is
    gone, and --json lists it by path (severity "rolled back", "lost", "undone").

    --rebuild is for a catalog that is damaged or lost, also on a new machine with the archive alone. The damaged one
    stays in the state directory as catalog.damaged-N; `tierfs recover` shows what was done. A file that was changed on
    the archive from outside is taken as it is found there and listed as such ("as found", --json: "as_found").

    \b
    Examples:
      tierfs fsck /etc/tierfs/ckpt.yaml
      tierfs fsck --repair /etc/tierfs/ckpt.yaml
      tierfs fsck --rebuild /etc/tierfs/ckpt.yaml --json
    """
    from tierfs.policy.load import load_policy

    if repair and rebuild:
        raise UsageError("--rebuild repairs, too: give one of --repair and --rebuild")
    if rebuild and data:
        raise UsageError("--data goes with --repair, or alone")
    if gone and not repair:
        raise UsageError("--gone goes with --repair")
    policy = load_policy(config)
    names = [tier.name for tier in policy.tiers]
    if unknown := set(gone).difference(names):
        raise UsageError(f"there is no tier called {min(unknown)}; {config} has {', '.join(names)}")
    for record in list_mounts():
        if os.path.realpath(record.state) == os.path.realpath(policy.state):
            raise UsageError(f"{config} is mounted on {record.mountpoint}; umount it first")
    try:
        if repair or rebuild:
            with render.progress("rebuilding" if rebuild else "repairing") as progress:
                if rebuild:
                    from tierfs.fsck import rebuild_all

                    report = rebuild_all(policy, progress)
                else:
                    from tierfs.fsck import repair_all

                    report = repair_all(policy, progress, data=data, gone=gone)
            render.print_json(report.as_json()) if as_json else _show_report(report)
            return 1 if report.problems or report.lost else 0
        from tierfs.fsck import check_all

        with render.progress("checking") as progress:
            problems = check_all(policy, progress, data=data)
    except CatalogDamaged as error:
        raise CatalogDamaged(f"{error}\nMake another from the tiers: tierfs fsck --rebuild {config}") from error
    if as_json:
        render.print_json(problems)
    else:
        _show_check(problems)
    return 1 if any(problem["severity"] not in (GONE, ROLLED_BACK, UNDONE) for problem in problems) else 0


def _show_check(problems: list[dict[str, str]]) -> None:
    memory = [problem["what"] for problem in problems if problem["severity"] == GONE]
    found = [problem for problem in problems if problem["severity"] not in (GONE, ROLLED_BACK, LOST, UNDONE)]
    for line in memory:
        render.say(line + (" (--json lists them)" if len(problems) > len(found) + len(memory) else ""))
    if found:
        _show_problems(found)
    else:
        render.say("no other problems found" if memory else "no problems found")


def _show_problems(problems: list[dict[str, str]]) -> None:
    render.table(("SEVERITY", "WHAT", "PATH"), [[p.get("severity"), p.get("what"), p.get("path")] for p in problems])


def _show_report(report: Report) -> None:
    if report.facts:
        render.rebuilt(report.facts)
    if report.deeds:
        render.table(("", "WHAT", "PATH"), [[deed.kind, deed.what, deed.path] for deed in report.deeds])
    if report.problems:
        _show_problems(report.problems)
    if report.as_found:
        render.say(f"taken as found on the archive, not verified: {len(report.as_found)}; look at them")
    if report.lost:
        render.say("1 file lost" if len(report.lost) == 1 else f"{len(report.lost)} files lost")
    elif not report.problems:
        render.say("no problems left" if report.deeds or report.facts else "no problems found")


COMMANDS: tuple[click.Command, ...] = (status, info, check, explain, fsck)
