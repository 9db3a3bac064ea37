"""What a scrub found damaged is named wherever somebody looks for it, with what to do: status, info and fsck."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

from tests.unit.rebuilding import World, drained_world
from tierfs.cli import render
from tierfs.fsck import check_all, repair_all
from tierfs.fsck.session import Report
from tierfs.operations import Json
from tierfs.types import Replica

NAME = b"run/weights.pt"
SHOWN = NAME.decode()
BYTES = bytes(range(256)) * 400
Capture = pytest.CaptureFixture[str]


def quiet(done: int, total: int, what: str) -> None:
    pass


async def silent(done: int, total: int, what: str) -> None:
    pass


@pytest.fixture
def world() -> Iterator[World]:
    with drained_world() as made:
        made.write(NAME, BYTES)
        made.drain()
        yield made
        made.close()


def flip(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(777)
        file.write(b"other")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, 1000)


def remove(path: Path) -> None:
    path.unlink()


def place(world: World, tier: str) -> Path:
    if tier == "archive":
        return world.top / "archive" / SHOWN
    (replica,) = [r for r in world.parts.catalog.replicas(world.ino(NAME)) if r.tier == tier]
    (file,) = (world.top / tier / "data").rglob(replica.key)
    return file


def only_on(world: World, *tiers: str) -> None:
    async def forget() -> None:
        with world.parts.catalog.transaction():
            for replica in world.parts.catalog.replicas(world.ino(NAME)):
                if replica.tier not in tiers:
                    world.parts.files.forget_replica(replica)
        await world.parts.migrator.remove_discarded()

    trio.run(forget)


def scrub(world: World) -> list[str]:
    """Paths that it found damaged."""

    async def run() -> list[str]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.parts.migrator.run)
            report = await world.parts.migrator.scrubber.scrub(["nvme", "archive"], None, lambda done, total: None)
            nursery.cancel_scope.cancel()
        return report.damaged

    return trio.run(run)


def status(world: World) -> Json:
    return trio.run(world.parts.operations().status, {}, silent)


def info(world: World) -> Json:
    return trio.run(world.parts.operations().info, {"path": SHOWN}, silent)


def virtual(world: World, name: bytes) -> bytes:
    attributes = world.parts.catalog.attributes(world.ino(NAME))
    assert attributes is not None
    return world.parts.operations().virtual_xattrs(attributes)[name]


def fsck(world: World, *, data: bool = False) -> list[str]:
    """What it says of the file; the filesystem is closed."""
    return [p["what"] for p in check_all(world.policy, quiet, data=data) if p["path"].endswith(SHOWN)]


def repair(world: World) -> Report:
    return repair_all(world.policy, quiet)


@pytest.mark.parametrize("tier", ["nvme", "archive"])
@pytest.mark.parametrize("harm", [flip, cut, remove])
def test_what_no_tier_has_is_named_with_what_to_do(
    world: World, tier: str, harm: Callable[[Path], None], capsys: Capture
) -> None:
    only_on(world, tier)
    harm(place(world, tier))
    assert scrub(world) == [SHOWN]

    found = status(world)
    (listed,) = found["damaged"]["list"]
    assert (listed["path"], listed["tier"], listed["elsewhere"]) == (SHOWN, tier, False)
    told = info(world)
    assert (told["durable"], [d["tier"] for d in told["damaged"]]) == (None, [tier])
    assert virtual(world, b"user.tierfs.durable") == b"none"
    for entry in (listed, *told["damaged"]):
        assert "write it anew or delete it" in entry["remedy"]
    for show, answer in ((render.status, found), (render.info, told)):
        show(answer)
        assert_named(capsys.readouterr().out, tier, "write it anew or delete it")
    render.status_list([found])
    out = capsys.readouterr().out
    assert_named(out, tier, "write it anew or delete it")
    assert " damaged " in out.splitlines()[1], "in the column STATE"

    world.close()
    assert any(f"on {tier} damaged" in what and "write it anew or delete it" in what for what in fsck(world))
    assert fsck(world, data=True) != []
    world.reopen()


def assert_named(out: str, tier: str, remedy: str) -> None:
    (line,) = [line for line in out.splitlines() if line.startswith("damaged on ")]
    assert line.startswith(f"damaged on {tier}: ")
    assert SHOWN in out
    assert remedy in line


@pytest.mark.parametrize("how", ["rewritten", "deleted", "put back"])
def test_nothing_names_it_once_it_is_gone(world: World, how: str) -> None:
    only_on(world, "archive")
    kept = world.top / "kept"
    shutil.copy2(place(world, "archive"), kept)
    flip(place(world, "archive"))
    assert scrub(world) == [SHOWN]
    if how == "rewritten":
        world.write(NAME, b"new")
    elif how == "deleted":
        world.unlink(NAME)
    else:
        shutil.copy2(kept, place(world, "archive"))
        assert scrub(world) == []
    assert status(world)["damaged"] == {"replicas": 0, "list": []}
    if how != "deleted":
        assert info(world)["damaged"] == []
        assert virtual(world, b"user.tierfs.durable") == (b"none" if how == "rewritten" else b"archive")
    world.drain()
    world.close()
    assert fsck(world) == fsck(world, data=True) == []
    world.reopen()


def listed_though_another_is_right(world: World, tier: str) -> Replica:
    """As a scrub lists what is open, and so could not be replaced."""
    only_on(world, "nvme", "archive")
    flip(place(world, tier))
    (bad,) = [r for r in world.parts.catalog.replicas(world.ino(NAME)) if r.tier == tier]
    with world.parts.catalog.transaction():
        world.parts.catalog.put_damage(bad, "does not have the bytes written to it", 1)
    return bad


@pytest.mark.parametrize("tier", ["nvme", "archive"])
def test_what_another_tier_has_is_named_with_how_it_is_replaced(world: World, tier: str) -> None:
    listed_though_another_is_right(world, tier)
    (listed,) = status(world)["damaged"]["list"]
    assert (listed["tier"], listed["elsewhere"]) == (tier, True)
    assert "`tierfs scrub` replaces" in listed["remedy"]
    told = info(world)
    assert (told["durable"], told["damaged"][0]["remedy"]) == (
        "nvme" if tier == "archive" else "archive",
        listed["remedy"],
    )
    world.close()
    (what,) = fsck(world)
    assert f"on {tier} damaged" in what
    assert "`tierfs fsck --repair` replaces it" in what

    report = repair(world)
    assert (report.problems, report.lost) == ([], [])
    assert fsck(world) == fsck(world, data=True) == []
    world.reopen()
    world.drain()
    assert place(world, "nvme").read_bytes() == place(world, "archive").read_bytes() == BYTES
    assert status(world)["damaged"]["replicas"] == 0


@pytest.mark.parametrize("tier", ["nvme", "archive"])
def test_a_repair_without_data_leaves_what_no_tier_has_listed_and_finds_what_is_right_again(
    world: World, tier: str
) -> None:
    only_on(world, tier)
    kept = world.top / "kept"
    shutil.copy2(place(world, tier), kept)
    flip(place(world, tier))
    assert scrub(world) == [SHOWN]
    world.close()
    report = repair(world)
    assert [problem["path"] for problem in report.problems] == [SHOWN]
    assert report.deeds == []
    world.reopen()
    bad = place(world, tier)
    world.close()
    shutil.copy2(kept, bad)
    report = repair(world)
    assert (report.problems, [deed.path for deed in report.deeds]) == ([], [SHOWN])
    assert fsck(world) == []
    world.reopen()
    assert status(world)["damaged"]["replicas"] == 0
