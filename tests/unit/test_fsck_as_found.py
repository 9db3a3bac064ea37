"""What somebody changed on the archive is taken by a rebuild, as it may be all there is, and always named."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.unit.rebuilding import World
from tierfs.cli import main
from tierfs.fsck import rebuild_all
from tierfs.fsck.session import Report
from tierfs.report import read_rebuild

NAME = b"run/weights.pt"
SHOWN = NAME.decode()
BYTES = bytes(range(256)) * 400
MINUTE = 60 * 10**9


@pytest.fixture
def world() -> Iterator[World]:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as path:
        made = World(Path(path))
        made.mkdir(b"run")
        made.write(NAME, BYTES)
        made.write(b"run/other", b"other" * 100)
        made.drain()
        yield made
        made.close()


def later(path: Path) -> None:
    mtime = path.stat().st_mtime_ns + MINUTE
    os.utime(path, ns=(mtime, mtime))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")
    later(path)


def cut(path: Path) -> None:
    mtime = path.stat().st_mtime_ns
    os.truncate(path, 1000)
    os.utime(path, ns=(mtime, mtime))


def overwrite(path: Path) -> None:
    path.write_bytes(bytes(reversed(BYTES)))
    later(path)


def older(path: Path) -> None:
    path.write_bytes(bytes(reversed(BYTES)))
    os.utime(path, ns=(MINUTE, MINUTE))


def replace(path: Path) -> None:
    """As an editor does: another file under the name."""
    path.unlink()
    path.write_bytes(b"edited by hand")


def rebuilt(world: World, *lost: str) -> Report:
    world.crash()
    for file in world.policy.state.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    for name in lost:
        shutil.rmtree(world.top / name)
    report = rebuild_all(world.policy, lambda done, total, what: None)
    assert report.problems == []
    world.reopen()
    return report


@pytest.mark.parametrize("known", ["copy", "log"])
@pytest.mark.parametrize("change", [append, cut, overwrite, older, replace])
def test_what_was_changed_on_the_archive_is_taken_as_found_and_named(
    world: World, change: Callable[[Path], None], known: str
) -> None:
    if known == "copy":
        world.copy_catalog()
    before = world.parts.catalog.attributes(world.ino(NAME))
    file = world.top / "archive" / SHOWN
    change(file)
    report = rebuilt(world, "memory", "nvme")
    assert report.as_found == report.as_json()["as_found"] == [SHOWN]
    (deed,) = [deed for deed in report.deeds if deed.path == SHOWN]
    assert deed.what.endswith("taken as found, not verified")
    assert world.look()[NAME][9] == [file.read_bytes()]
    after = world.parts.catalog.attributes(world.ino(NAME))
    assert before is not None
    assert after is not None
    assert after.version > before.version, "other content is another version"
    kept = read_rebuild(world.policy.state)
    assert kept is not None
    assert kept["as_found"] == [SHOWN]


def test_what_is_as_it_was_is_not_named_whatever_its_time(world: World) -> None:
    world.copy_catalog()
    later(world.top / "archive" / SHOWN)
    report = rebuilt(world, "memory", "nvme")
    assert report.as_found == []
    assert world.look()[NAME][9] == [BYTES]


def test_what_no_digest_tells_from_what_was_written_is_named(world: World) -> None:
    """Taken as found once, and touched since."""
    world.copy_catalog()
    overwrite(world.top / "archive" / SHOWN)
    assert rebuilt(world, "memory", "nvme").as_found == [SHOWN]
    world.copy_catalog()
    assert rebuilt(world).as_found == [], "it is what was found then"
    world.copy_catalog()
    later(world.top / "archive" / SHOWN)
    assert rebuilt(world).as_found == [SHOWN]


def test_a_newer_file_on_the_archive_than_on_the_tiers_above_is_named(world: World) -> None:
    world.copy_catalog()
    append(world.top / "archive" / SHOWN)
    report = rebuilt(world, "memory")
    assert report.as_found == [SHOWN]
    world.drain()
    assert (world.top / "archive" / SHOWN).read_bytes() == BYTES + b"more"


def test_a_file_that_somebody_put_there_is_named(world: World) -> None:
    world.copy_catalog()
    (world.top / "archive" / "run" / "new").write_bytes(b"put here")
    report = rebuilt(world, "memory", "nvme")
    assert report.as_found == ["run/new"]
    assert world.look()[b"run/new"][9] == [b"put here"]


def test_of_two_links_one_is_named(world: World) -> None:
    world.link(NAME, b"best.pt")
    world.drain()
    world.copy_catalog()
    append(world.top / "archive" / SHOWN)
    assert len(rebuilt(world, "memory", "nvme").as_found) == 1


def test_where_nothing_is_recorded_the_number_is_told(world: World) -> None:
    """Without a copy and a log every file is as found: there is nothing that it could differ from."""
    shutil.rmtree(world.top / "archive" / ".tierfs" / "catalog")
    report = rebuilt(world, "memory", "nvme")
    assert (report.as_found, report.facts["unverified"]) == ([], 2)


def test_the_command_lists_them(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    config = world.top / "policy.yaml"
    config.write_text(
        f"state: {world.top}/state\ntiers:\n"
        f"  memory: {{kind: memory, size: 64MiB, path: {world.top}/memory}}\n"
        f"  nvme: {{kind: dir, path: {world.top}/nvme}}\n"
        f"  archive: {{kind: dir, path: {world.top}/archive}}\n"
    )
    world.copy_catalog()
    append(world.top / "archive" / SHOWN)

    def run(*options: str) -> str:
        world.crash()
        shutil.rmtree(world.policy.state)
        for tier in ("memory", "nvme"):
            shutil.rmtree(world.top / tier)
            (world.top / tier).mkdir(mode=0o700)
        assert main(["fsck", "--rebuild", *options, str(config)]) == 0
        world.reopen()
        return capsys.readouterr().out

    out = run()
    assert any("as found" in line and "not verified" in line and SHOWN in line for line in out.splitlines())
    assert "taken as found on the archive, not verified: 1" in out
    append(world.top / "archive" / SHOWN)
    assert json.loads(run("--json"))["as_found"] == [SHOWN]
