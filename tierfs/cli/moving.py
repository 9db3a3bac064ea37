"""Commands that move data: flush, warmup, evict, pause, resume."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from tierfs.cli import render
from tierfs.cli.inspect import ANSWER_SECONDS, Mountpoint, json_option, mount_at
from tierfs.control.client import call, find_mount
from tierfs.control.protocol import Json, MountRecord, list_mounts
from tierfs.errors import TierfsError
from tierfs.units import parse_duration


class Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return parse_duration(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("path", required=False, type=click.Path())
@click.option("--to", metavar="TIER", help="Until durable on this tier.  [default: the last]")
@click.option("--timeout", type=Duration(), help="Give up after this time, such as 5m, with exit code 3.")
@json_option
def flush(path: str | None, to: str | None, timeout: float | None, as_json: bool) -> None:
    """Wait until a file, a directory or all mounts are durable. Exit code 0 means that they are.

    \b
    Examples:
      tierfs flush /mnt/ckpt/run42/step-1000
      tierfs flush /mnt/ckpt --to nvme
      tierfs flush --timeout 5m
    """
    if path is not None:
        answer = flush_one(*find_mount(path), to, timeout)
        if as_json:
            render.print_json(answer)
        refuse_lost(answer)
        if not as_json:
            _say_flushed(path, answer)
        return
    deadline = None if timeout is None else time.monotonic() + timeout
    answers = []
    for record in list_mounts():
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        answers.append(flush_one(record, "", to, left))
        if not as_json:
            refuse_lost(answers[-1])
            _say_flushed(record.mountpoint, answers[-1])
    if as_json:
        render.print_json(answers)
        for answer in answers:
            refuse_lost(answer)
    elif not answers:
        render.say("no tierfs mounts")


def flush_one(record: MountRecord, relative: str, to: str | None, timeout: float | None) -> Json:
    """Flush with a progress bar. NotDurableInTime names what is missing; what is lost is in the answer."""
    args: Json = {"path": relative}
    if to is not None:
        args["to"] = to
    if timeout is not None:
        args["timeout"] = timeout
    with render.progress("draining") as progress:
        limit = None if timeout is None else timeout + ANSWER_SECONDS
        return call(record, "flush", args, on_progress=progress, timeout=limit)


def refuse_lost(answer: Json) -> None:
    """TierfsError when files cannot become durable, because their bytes are on no tier."""
    if lost := answer.get("lost"):
        raise TierfsError(f"{lost_files(lost)}; write or delete them")


def lost_files(lost: list[str]) -> str:
    more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
    return f"lost with the memory of a former boot: {', '.join(lost[:10])}{more}"


def _say_flushed(path: str, answer: Json) -> None:
    render.say(
        f"{path}: {answer.get('files')} files ({render.size(answer.get('bytes'))}) durable on {answer.get('tier')}"
    )


def _paths(help: str) -> Callable[[Callable[..., None]], click.Command]:
    """A command that takes paths and prints one answer; ``help`` ends with its examples."""

    def decorate(function: Callable[..., None]) -> click.Command:
        paths = click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path())
        return click.command(help=help)(paths(json_option(function)))

    return decorate


@_paths(
    """Copy files up to the fastest tiers ahead of need; directories with all that is in them.

    \b
    Example:
      tierfs warmup /mnt/ckpt/run42/step-1000
    """
)
def warmup(paths: tuple[str, ...], as_json: bool) -> None:
    answer = _on_paths("warmup", "recalling", paths, {})
    if as_json:
        render.print_json(answer)
    else:
        render.say(
            f"{answer.get('recalled', 0)} of {answer.get('files', 0)} files recalled "
            f"({render.size(answer.get('bytes', 0))} are now in the upper tiers)"
        )


@_paths(
    """Drop copies that a tier further down holds durably; what is open or not durable yet stays.

    \b
    Examples:
      tierfs evict /mnt/ckpt/run41
      tierfs evict /mnt/ckpt/run42/step-1000.pt --from memory
    """
)
@click.option("--from", "tier", metavar="TIER", help="Only this tier's copies.  [default: all but the last tier's]")
def evict(paths: tuple[str, ...], tier: str | None, as_json: bool) -> None:
    answer = _on_paths("evict", "evicting", paths, {} if tier is None else {"from": tier})
    if as_json:
        render.print_json(answer)
    else:
        kept = f", {answer['kept']} kept (open, or not durable yet)" if answer.get("kept") else ""
        render.say(f"{answer.get('evicted', 0)} copies evicted ({render.size(answer.get('bytes', 0))}){kept}")


def _on_paths(op: str, what: str, paths: tuple[str, ...], args: Json) -> Json:
    """Ask each mount for its own paths and add the answers' numbers up."""
    by_mount: dict[str, tuple[MountRecord, list[str]]] = {}
    for path in paths:
        record, relative = find_mount(path)
        by_mount.setdefault(record.mountpoint, (record, []))[1].append(relative)
    total: Json = {}
    for record, relatives in by_mount.values():
        with render.progress(what) as progress:
            answer = call(record, op, {"paths": relatives, **args}, on_progress=progress)
        for key, value in answer.items():
            total[key] = total[key] + value if key in total and isinstance(value, int) else value
    return total


def _switch(op: str, result: str, help: str) -> click.Command:
    """A command that asks one mount for ``op`` and says ``result``."""

    @click.command(op, help=f"{help}\n\n\b\nExample:\n  tierfs {op} /mnt/ckpt")
    @click.argument("mountpoint", type=Mountpoint())
    def command(mountpoint: str) -> None:
        record = mount_at(mountpoint)
        call(record, op, timeout=ANSWER_SECONDS)
        render.say(f"{record.mountpoint}: {result}")

    return command


pause = _switch(
    "pause",
    "drains are paused; fsync() and close() that wait for a tier wait for `tierfs resume`",
    "Stop draining until `tierfs resume` or a restart of the daemon; files are still read and written. An fsync() or"
    " close() that waits for a tier, by its rule, then waits for the resume, and cannot be killed.",
)
resume = _switch("resume", "drains go on", "Go on draining after `tierfs pause`.")

COMMANDS: tuple[click.Command, ...] = (flush, warmup, evict, pause, resume)
