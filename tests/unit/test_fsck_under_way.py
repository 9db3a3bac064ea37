"""fsck between a crash and the next mount, with a batch of the archive under way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.rebuilding import World, drained_world
from tierfs.catalog import Catalog
from tierfs.fsck.session import catalog_path


@pytest.fixture
def world() -> Iterator[World]:
    with drained_world() as made:
        yield made


@pytest.mark.parametrize("taken", [False, True])
def test_what_a_batch_under_way_moves_is_no_damage(world: World, taken: bool) -> None:
    world.write(b"other.pt", b"not touched")
    world.drain()
    world.rename(b"run", b"moved")
    archive = world.parts.migrator.archive
    batch = archive.next_batch(10, {})
    assert batch is not None
    if taken:
        archive.execute(batch)
        assert (world.top / "archive" / "moved").exists()
    world.crash()
    assert world.problems() == []
    (world.top / "archive" / "other.pt").unlink()
    (problem,) = world.problems()
    assert (problem["what"], Path(problem["path"]).name) == ("missing on the archive", "other.pt")


def test_fsck_leaves_it_to_the_next_mount_to_tidy_up_after_a_crash(world: World) -> None:
    """Copies that nothing names are removed by the first mount after a crash, and by no other."""
    world.crash()
    crashed = Catalog(catalog_path(world.policy))
    crashed.commit()
    crashed._db.close()
    crashed._journal.close()
    for _ in range(2):
        assert world.problems() == []
    for was_clean in (False, True):
        catalog = Catalog(catalog_path(world.policy))
        assert catalog.was_clean is was_clean
        catalog.close()
        assert world.problems() == []
