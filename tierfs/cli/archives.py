"""Commands for archives: ls and export, which need the archive's directory alone, and gc."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import click

from tierfs.cli import render
from tierfs.cli.inspect import json_option

archive_argument = click.argument("archive")
endpoint_option = click.option("--endpoint", help="Of an object store: URL of a server that is not the provider's own.")


@click.command()
@archive_argument
@click.argument("path", default="")
@click.option("-r", "--recursive", is_flag=True, help="Also what is in the directories below.")
@endpoint_option
@json_option
def ls(archive: str, path: str, recursive: bool, endpoint: str | None, as_json: bool) -> None:
    """List what is in an archive, from its directory, or its URL in an object store, alone: no mount, no policy file.
    PATH is relative to ARCHIVE.

    \b
    Examples:
      tierfs ls /archive/ckpt
      tierfs ls /archive/ckpt run42 --recursive --json
      tierfs ls s3://bucket/run42 --endpoint http://seaweed:8333
    """
    from tierfs.tiers.export import archive_at, listing, names_of, shown

    with archive_at(archive, endpoint) as store:
        found = listing(store, names_of(path), deep=recursive)
    if as_json:
        render.print_json(
            [
                {
                    "path": shown(item.path),
                    "kind": _KINDS.get(stat.S_IFMT(item.status.st_mode), "other"),
                    "mode": stat.S_IMODE(item.status.st_mode),
                    "size": item.status.st_size if stat.S_ISREG(item.status.st_mode) else None,
                    "mtime_ns": item.status.st_mtime_ns,
                    "target": None if item.target is None else os.fsdecode(item.target),
                }
                for item in found
            ]
        )
        return
    rows = [
        [
            stat.filemode(item.status.st_mode),
            render.size(item.status.st_size) if stat.S_ISREG(item.status.st_mode) else "",
            render.when(item.status.st_mtime_ns / 1e9),
            shown(item.path) + ("" if item.target is None else f" -> {os.fsdecode(item.target)}"),
        ]
        for item in found
    ]
    render.table(("MODE", "SIZE", "MODIFIED", "PATH"), rows, right=("SIZE",))


_KINDS = {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}


@click.command()
@archive_argument
@click.argument("path")
@click.argument("dest", type=click.Path(path_type=Path))
@endpoint_option
@json_option
def export(archive: str, path: str, dest: Path, endpoint: str | None, as_json: bool) -> int:
    """Restore a file, or a directory with all below it, from an archive's directory, or its URL in an object store,
    alone: on any machine, without mount, policy file or catalog. PATH is relative to ARCHIVE; "." is all of it.

    Nothing is overwritten: DEST must not exist, or be an empty directory (for a file: a directory to put it in). With
    layout chunks every file is compared with its digest; one that is damaged is left out and told, and the exit code
    is 1. Run as root it restores owners, too.

    \b
    Examples:
      tierfs export /archive/ckpt run42/step-1000.pt /tmp
      tierfs export /archive/ckpt . /restore
      tierfs export s3://bucket/run42 step-1000 /restore
    """
    from tierfs.tiers.export import Export, archive_at, names_of

    with archive_at(archive, endpoint) as store, render.progress("exporting") as progress:
        done = Export(store, names_of(path), dest, progress).run()
    if as_json:
        render.print_json({"files": done.files, "bytes": done.bytes, "failed": done.failed})
    else:
        for failure in done.failed:
            render.note(failure)
        render.say(f"{done.files} files, {render.size(done.bytes)}" + (", not all" if done.failed else ""))
    return 1 if done.failed else 0


@click.command()
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Only tell what would be removed.")
@json_option
def gc(config: Path, dry_run: bool, as_json: bool) -> None:
    """Remove the chunks that no file of an archive with layout chunks has any more. What was deleted or overwritten
    occupies the archive until then. May be run at any time, also while the policy is mounted: copies to the archive
    wait for a moment.

    \b
    Examples:
      tierfs gc /etc/tierfs/ckpt.yaml
      tierfs gc /etc/tierfs/ckpt.yaml --dry-run --json
    """
    from tierfs.policy.load import check_paths, load_policy
    from tierfs.tiers.assembly import chunked_store

    policy = load_policy(config)
    check_paths(policy)
    chunked_store()
    from tierfs.fsck.collect import collect

    with render.progress("collecting") as progress:
        done = collect(policy, progress, dry=dry_run)
    if as_json:
        render.print_json(
            {"manifests": done.manifests, "chunks": done.chunks, "removed": done.removed, "bytes": done.bytes}
        )
        return
    what = "would be removed" if dry_run else "removed"
    render.say(f"{done.removed} chunks {what}, {render.size(done.bytes)}; {done.chunks} are in use")


COMMANDS: tuple[click.Command, ...] = (ls, export, gc)
