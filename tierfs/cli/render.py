"""What the commands show: JSON and tables on stdout, progress on stderr (only when that is a terminal).

rich is loaded where it is needed: it takes as long as all else that `tierfs status --json` does, and scripts ask often.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tierfs.units import format_size

if TYPE_CHECKING:
    from rich.console import Console

Json = dict[str, Any]
ProgressCallback = Callable[[int, int, str], None]

_STATE_STYLE = {"ok": "green", "durable": "green", "failing": "red", "down": "red"}


def printable(value: object) -> str:
    """``value`` as text that a terminal cannot misread: file names may hold any byte."""
    text = os.fsencode(str(value)).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def say(text: str) -> None:
    """One line of result on stdout."""
    print(printable(text))


def note(text: str) -> None:
    """One line beside the result, on stderr."""
    print(f"tierfs: {printable(text)}", file=sys.stderr)


@contextlib.contextmanager
def progress(what: str) -> Iterator[ProgressCallback]:
    """A bar on stderr while the block runs; without a terminal nothing at all. ``total`` 0 shows a spinner only."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)

        def show(done: int, total: int, what: str) -> None:
            bars.update(task, completed=done, total=total or None, description=printable(what))

        yield show


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Sequence[str] = ()) -> None:
    """A plain table; the columns named in ``right`` are numbers."""
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        grid.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        cells = [printable("-" if cell is None else cell) for cell in row]
        grid.add_row(*(Text(cell, style=_STATE_STYLE.get(cell, "")) for cell in cells))
    console().print(grid)


def console() -> Console:
    from rich.console import Console

    # Lines are not cut to 80 columns when a program reads them.
    return Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 240)


def size(value: object) -> str:
    return format_size(int(value)) if isinstance(value, int | float) else "-"


def seconds(value: object) -> str:
    if not isinstance(value, int | float):
        return "-"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if value >= 2 * length:
            return f"{value / length:.0f}{unit}"
    return f"{value:.0f}s"


def status_list(mounts: Sequence[Json]) -> None:
    """One line per mount."""
    if not mounts:
        say("no tierfs mounts")
        return
    rows = []
    for mount in mounts:
        drain = mount.get("drain") or {}
        tiers = mount.get("tiers") or []
        failing = [str(tier.get("name")) for tier in tiers if tier.get("state") != "ok"]
        bad = (mount.get("damaged") or {}).get("replicas")
        state = mount.get("error") or ("failing: " + ", ".join(failing) if failing else "damaged" if bad else "ok")
        rows.append(
            [
                mount.get("mountpoint"),
                mount.get("mode"),
                "paused" if mount.get("paused") and state == "ok" else state,
                drain.get("queued_files"),
                size(drain.get("queued_bytes")),
                size(drain.get("unsynced_bytes")),
            ]
        )
    numbers = ("QUEUED FILES", "QUEUED", "UNSYNCED")
    table(("MOUNTPOINT", "MODE", "STATE", *numbers), rows, right=numbers)
    for mount in mounts:
        _damaged(mount)


def status(mount: Json) -> None:
    """Everything about one mount."""
    drain = mount.get("drain") or {}
    pids = f"daemon {mount.get('daemon_pid')}, keeper {mount.get('keeper_pid') or 'none'}"
    say(f"{mount.get('mountpoint')}: {mount.get('mode')} ({mount.get('mode_reason', '')})")
    say(f"processes: {pids}, {mount.get('daemon_restarts', 0)} restarts")
    say(
        f"drain: {'paused, ' if mount.get('paused') else ''}{drain.get('queued_files', 0)} files "
        f"({size(drain.get('queued_bytes'))}) queued, oldest {seconds(drain.get('oldest_age_s'))}, "
        f"{size(drain.get('rate_bytes_s'))}/s"
    )
    say(
        f"durable nowhere yet: {size(drain.get('unsynced_bytes'))} ({size(drain.get('memory_bytes'))} in memory alone, "
        f"{size(drain.get('unsynced_disk_bytes'))} on disks and not synced)"
    )
    if drain.get("unsynced_limit") is not None:
        say(
            f"limit of bytes in memory alone: {size(drain['unsynced_limit'])}; "
            f"{drain.get('waiting', 0)} files wait, {drain.get('spilled_files', 0)} went one tier down"
        )
    if drain.get("late_files"):
        say(
            f"past their deadline: {drain['late_files']} files ({size(drain.get('late_bytes'))}), first "
            + ", ".join(drain.get("late") or [])
        )
    held = mount.get("held_deletes") or {}
    if held.get("files"):
        say(f"held deletes: {held['files']} files ({size(held.get('bytes'))}) until what was closed before is durable")
    if stuck := mount.get("stuck"):
        say(
            f"deletes make no room: what was deleted stays until {stuck.get('path')} ({size(stuck.get('bytes'))}) is "
            "durable, and no tier has room for that; give a tier room, or delete that file"
        )
    rows = [
        [
            tier.get("name"),
            tier.get("kind"),
            tier.get("state"),
            *(size(tier.get(key)) for key in ("capacity", "used", "clean", "dirty", "open")),
            tier.get("last_error") or "",
        ]
        for tier in mount.get("tiers") or []
    ]
    numbers = ("CAPACITY", "USED", "CLEAN", "DIRTY", "OPEN")
    table(("TIER", "KIND", "STATE", *numbers, "LAST ERROR"), rows, right=numbers)
    _damaged(mount)


def _damaged(mount: Json) -> None:
    """By path, with what to do."""
    damaged = mount.get("damaged") or {}
    listed = damaged.get("list") or []
    for found in listed:
        say(f"damaged on {found.get('tier')}: {mount.get('mountpoint')}/{found.get('path')}: {_harm(found)}")
    if (more := damaged.get("replicas", 0) - len(listed)) > 0:
        say(f"damaged: {more} more, which `tierfs info` and `tierfs scrub` name")


def _harm(found: Json) -> str:
    return f"{found.get('what')}; {found.get('remedy')}"


def scrubbed(answer: Json) -> None:
    """What a scrub found."""
    say(f"{answer.get('files')} copies ({size(answer.get('bytes'))}) read on {', '.join(answer.get('tiers') or [])}")
    for what in ("replaced", "damaged"):
        for path in answer.get(what) or []:
            say(f"{what}: {path}")
    if answer.get("damaged"):
        note("`tierfs status MOUNTPOINT` tells what to do about each")
    for why in answer.get("skipped") or []:
        note(f"not all was read: {why}")


def info(answer: Json) -> None:
    """One file's versions and replicas; their names on the tiers and their digests are for programs."""
    say(f"{answer.get('path')}: {size(answer.get('size'))}, version {answer.get('version')}")
    if answer.get("lost"):
        say("lost with the memory of a former boot: no tier has its bytes; write or delete it")
    else:
        say(f"durable on: {answer.get('durable') or 'no tier' + ('' if answer.get('damaged') else ' yet')}")
    for found in answer.get("damaged") or []:
        say(f"damaged on {found.get('tier')}: {_harm(found)}")
    rows = [
        [r.get("tier"), r.get("version"), r.get("state"), size(r.get("bytes"))] for r in answer.get("replicas") or []
    ]
    table(("TIER", "VERSION", "STATE", "SIZE"), rows, right=("VERSION", "SIZE"))


def rebuilt(facts: Mapping[str, object], indent: str = "") -> None:
    """From what another catalog was made."""

    def tell(text: str) -> None:
        say(indent + text)

    tell(f"made another catalog; of the former one: {facts['why']}")
    if facts["kept_aside"] is not None:
        tell(f"the former one is kept in {facts['kept_aside']}")
    copy, batches = facts["copy"], facts["batches_logged"]
    if isinstance(copy, Mapping):
        tell(f"began with copy {copy['number']} of the catalog, made {copy['made']}")
    else:
        tell("no copy of the catalog was of use: began with what lies on the tiers")
    if batches:
        tell(f"followed the archive's log since then: {batches} batches")
    tell(f"files and directories now: {facts['files']}")
    if unverified := facts.get("unverified"):
        tell(f"files on the archive that are taken as found, as nothing says what they should be: {unverified}")


def rebuild(report: Json) -> None:
    """What the last rebuild of the catalog did, told like a recovery."""
    counts = Counter(deed["kind"] for deed in report["done"])
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    say(f"{_when(report)}: the catalog was rebuilt" + (f", {told}" if told else ""))
    rebuilt(report, "  ")
    for deed in report["done"]:
        say(f"  {deed['kind']}: {deed['path'] or 'the catalog'}: {deed['what']}")
    for problem in report["problems"]:
        say(f"  {problem['severity']}: {problem['path']}: {problem['what']}")


def recovery(report: Json) -> None:
    """What one start of a mount found and put right."""
    counts = ", ".join(
        f"{len(report[key])} {what}"
        for key, what in (("rolled_back", "rolled back"), ("lost", "lost"), ("undone", "undone"))
    )
    say(f"{_when(report)}: {counts}, {report['orphans_removed']} orphans removed")
    for line in report["lines"]:
        say(f"  {line}")


def _when(report: Json) -> str:
    return when(report["at"])


def when(at: float) -> str:
    """A time in seconds since the epoch, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def policy(summary: Json) -> None:
    """The whole policy with its defaults."""
    say(f"{summary['source']}: valid")
    say(f"mount {summary['mount'] or '(given on the command line)'}, mode {summary['mode']}, state {summary['state']}")
    rows = [
        [
            tier["name"],
            tier["kind"] + (f" (archive, {_layout(tier)})" if tier["archive"] else ""),
            tier["url"] or tier["path"] or "own tmpfs",
            size(tier["size"]) if tier["size"] is not None else "whole file system",
            f"{tier['high']:.0%}",
            f"{tier['low']:.0%}",
        ]
        for tier in summary["tiers"]
    ]
    table(("TIER", "KIND", "PATH", "SIZE", "HIGH", "LOW"), rows, right=("SIZE", "HIGH", "LOW"))
    rules = [
        [i, " ".join(r["match"]), r["ack"], r["close"], r["fsync"], r["drain"], _keep(r["keep"])]
        for i, r in enumerate(summary["rules"])
    ]
    table(("RULE", "MATCH", "ACK", "CLOSE", "FSYNC", "DRAIN", "KEEP"), rules, right=("RULE",))
    for remark in summary["remarks"]:
        note(remark)


def _layout(tier: Json) -> str:
    return f"chunks, {tier['codec']}" if tier["layout"] == "chunks" else str(tier["layout"])


def explanation(answer: Json) -> None:
    """How one path is treated, in sentences."""
    ack, drain = answer["ack"], answer["drain"]
    tiers = list(answer["keep"])
    memory = ack in answer["memory_tiers"]
    further = tiers[tiers.index(ack) + 1 : -1]
    say(f"{answer['path']}: rule {answer['rule']}, pattern {answer['pattern']}")
    full = f", or on {' or '.join(further)} when it is full" if further else ""
    rows = [("ack", ack, f"write() puts the bytes on {ack}{full}")]
    for call in ("close", "fsync"):
        tier = answer[call]
        if tier != "ack":
            meaning = f"{call}() returns once the file is durable on {tier}"
        elif memory:
            takes = "may lose the file" if drain != "none" else "loses what is in memory, as nothing copies it"
            meaning = f"{call}() returns at once; a power cut or reboot {takes}"
        elif call == "fsync":
            meaning = f"fsync() waits for {ack}; a power cut or reboot takes nothing then"
        else:
            meaning = "close() returns at once; until it is synced, in the background, a power cut may lose the file"
        rows.append((call, tier, meaning))
    rows.append(("drain", drain, _drained(answer, bool(further), memory)))
    if answer["durable_within"] is not None:
        within = f"{answer['durable_within']:g}s"
        rows.append(("durable_within", within, "deadline for the last tier: goes first, and status tells when missed"))
    lowest = ack if drain == "none" else drain
    for tier, keep in answer["keep"].items():
        if tiers.index(tier) < tiers.index(ack) or (tier not in further and tiers.index(tier) > tiers.index(lowest)):
            meaning = "the file does not come here"
        elif tiers.index(tier) > tiers.index(lowest):
            meaning = f"the file comes here only when {ack} is full, and does not leave"
        elif tier == lowest != tiers[-1]:
            meaning = "does not leave: no tier further down gets a copy"
        else:
            meaning = _KEEP_MEANS[keep]
        rows.append((f"keep {tier}", keep, meaning))
    table(("KEY", "VALUE", "MEANS"), rows)


def _drained(answer: Json, spills: bool, memory: bool) -> str:
    """Where a file ends and what takes it from there."""
    if answer["drain"] == answer["ack"]:
        return "nothing is copied further down: the file stays there until it is deleted, and is lost with that disk"
    if answer["drain"] != "none":
        return f"copied in the background down to {answer['drain']}"
    where = "where it was written" if spills else f"on {answer['ack']}"
    stays = f"never copied: the file stays {where}"
    if memory:
        return f"{stays} until it is deleted, also over umount and mount; a reboot takes it from memory"
    return f"{stays} until it is deleted, also over umount and reboot, and is lost with that disk"


_KEEP_MEANS = {
    "watermark": "leaves for room, oldest first, once durable further down",
    "all": "never leaves",
    "none": "leaves as soon as it is durable further down",
}


def _keep(keep: Json) -> str:
    return ", ".join(f"{tier}: {value}" for tier, value in keep.items())
