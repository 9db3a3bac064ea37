"""Commands that move data: flush, warmup, evict, pause, resume."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import click

from tierfs.cli import render
from tierfs.cli.inspect import ANSWER_SECONDS, MountedPath, Mountpoint, json_option, mount_at
from tierfs.control.client import call, find_mount
from tierfs.control.protocol import Json, MountRecord, list_mounts
from tierfs.errors import TierfsError, UsageError
from tierfs.units import parse_duration, parse_rate

PAUSED = "drains are paused"
"""What the daemon reports instead of its progress: who waits without a limit should know."""


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
@click.argument("path", metavar="PATH|MOUNTPOINT", required=False, type=MountedPath())
@click.option("--all", "every", is_flag=True, help="Every mount at once, the nearest persistent tier first.")
@click.option("--to", metavar="TIER", help="Until durable on this tier.  [default: the last]")
@click.option("--timeout", type=Duration(), help="Give up after this time, such as 5m, with exit code 3.")
@json_option
def flush(path: str | None, every: bool, to: str | None, timeout: float | None, as_json: bool) -> None:
    """Wait until a file, a directory, a mount or all mounts are durable. Exit code 0 means that they are.

    PATH is on a mount, or a mountpoint: then everything below it. Without --timeout it waits for as long as it takes.

    With --all, which is for the minute before a machine goes down, what cannot reach the last tier in time is at least
    on the nearest one that a reboot leaves alone. What is not durable in time is listed by path, with --json all of it
    in "missing", each with the tier on which it is durable, if there is one.

    \b
    Examples:
      tierfs flush /mnt/ckpt/run42/step-1000
      tierfs flush /mnt/ckpt --to nvme
      tierfs flush --all --timeout 25s --json
    """
    if every and path is not None:
        raise UsageError("give a path or --all, not both")
    if every:
        _flush_all(to, timeout, as_json)
        return
    if path is None:
        raise click.UsageError("give a PATH on a mount, a MOUNTPOINT, or --all for every mount of this machine")
    record, relative = find_mount(path)
    try:
        answer = flush_one(record, relative, to, timeout)
    except TierfsError as error:
        if as_json and error.details is not None:
            render.print_json(_failed(error))
        raise
    if as_json:
        render.print_json(answer)
    refuse_lost(answer)
    if not as_json:
        _say_flushed(path, answer)


def _failed(error: TierfsError) -> Json:
    return {"error": str(error), "exit_code": error.exit_code, **(error.details or {})}


def _flush_all(to: str | None, timeout: float | None, as_json: bool) -> None:
    """All mounts at the same time: one that cannot be drained keeps no other from it. Raises the first error."""
    records = list_mounts()
    if not records and not as_json:
        render.say("no tierfs mounts")
    with render.progress("draining") as progress, ThreadPoolExecutor(max(1, len(records))) as threads:
        done: dict[str, tuple[int, int]] = {}

        def ask(record: MountRecord) -> Json | TierfsError:
            def show(now: int, total: int, what: str) -> None:
                done[record.mountpoint] = now, total
                progress(sum(n for n, _ in done.values()), sum(t for _, t in done.values()), what)

            try:
                return _ask_flush(record, "", to, timeout, show, emergency=True)
            except TierfsError as error:
                return error

        answers = list(threads.map(ask, records))
    if as_json:
        render.print_json([_failed(a) if isinstance(a, TierfsError) else a for a in answers])
    errors = []
    for record, answer in zip(records, answers, strict=True):
        if isinstance(answer, TierfsError):
            errors.append((record, answer))
            continue
        try:
            refuse_lost(answer)
        except TierfsError as lost:
            errors.append((record, lost))
        else:
            if not as_json:
                _say_flushed(record.mountpoint, answer)
    for record, error in errors[1:]:
        render.note(f"{record.mountpoint}: {error}")
    if errors:
        raise errors[0][1]


def flush_one(record: MountRecord, relative: str, to: str | None, timeout: float | None) -> Json:
    """Flush with a progress bar. NotDurableInTime names what is missing; what is lost is in the answer."""
    with render.progress("draining") as progress:
        return _ask_flush(record, relative, to, timeout, progress)


def _ask_flush(
    record: MountRecord,
    relative: str,
    to: str | None,
    timeout: float | None,
    progress: render.ProgressCallback,
    *,
    emergency: bool = False,
) -> Json:
    args: Json = {"path": relative}
    if to is not None:
        args["to"] = to
    if timeout is not None:
        args["timeout"] = timeout
    if emergency:
        args["emergency"] = True
    limit = None if timeout is None else timeout + ANSWER_SECONDS
    told = False

    def show(done: int, total: int, what: str) -> None:
        nonlocal told
        if what == PAUSED and not told:
            told = True
            render.note(f"{record.mountpoint}: drains are paused; `tierfs resume {record.mountpoint}` lets them go on")
        progress(done, total, what)

    return call(record, "flush", args, on_progress=show if timeout is None else progress, timeout=limit)


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
        paths = click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=MountedPath())
        return click.command(help=help)(paths(json_option(function)))

    return decorate


@_paths(
    """Bring files that are on the archive only up to the fast tiers, ahead of need; directories with all in them.

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
    " close() that waits for a tier, by its rule, then waits for the resume; ending the program ends that, too.",
)
resume = _switch("resume", "drains go on", "Go on draining after `tierfs pause`.")

class Rate(click.ParamType[int]):
    name = "rate"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        try:
            return parse_rate(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("mountpoint", type=Mountpoint())
@click.option("--tier", metavar="TIER", help="Only this tier.  [default: all but memory]")
@click.option("--rate", type=Rate(), metavar="SIZE/s", help="Read at most this much, such as 100MiB/s.")
@json_option
def scrub(mountpoint: str, tier: str | None, rate: int | None, as_json: bool) -> int:
    """Read every durable copy and compare it with its digest. A bad one is replaced from a good one.

    The policy's `scrub:` does so regularly; this does it now. Exits 1 when files are damaged, because no tier has the
    right bytes, or a tier does not answer.

    \b
    Examples:
      tierfs scrub /mnt/ckpt
      tierfs scrub /mnt/ckpt --tier archive --rate 100MiB/s
    """
    record = mount_at(mountpoint)
    args: Json = {key: value for key, value in (("tier", tier), ("rate", rate)) if value is not None}
    with render.progress("scrubbing") as progress:
        answer = call(record, "scrub", args, on_progress=progress)
    render.print_json(answer) if as_json else render.scrubbed(answer)
    return 1 if answer.get("damaged") or answer.get("skipped") else 0


COMMANDS: tuple[click.Command, ...] = (flush, warmup, evict, pause, resume, scrub)
