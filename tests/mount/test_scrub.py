"""`tierfs scrub`, and what status says of damage, on a real mount."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.mount.conftest import MODES, TEST_LIMIT, Mounter
from tierfs.testing.mounting import TestMount

SIZE = 3 << 20
NOISE = [r"tier (nvme|archive): (one|both).* replaced from tier", r"tier archive: one.*reading it gives EIO"]


def damage(path: Path) -> None:
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(SIZE // 2)
        file.write(b"damaged")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def damaged(mnt: TestMount) -> list[tuple[object, object]]:
    found = mnt.status()["damaged"]
    assert isinstance(found, dict)
    assert len(found["list"]) == found["replicas"]
    return [(entry["path"], entry["tier"]) for entry in found["list"]]


@pytest.mark.parametrize("mode", MODES)
def test_scrub_replaces_what_it_can_and_lists_the_rest(mounter: Mounter, mode: str) -> None:
    with mounter(mode, allow_log=NOISE) as mnt, mnt.abort_after(TEST_LIMIT):
        both, one = mnt.path / "both", mnt.path / "one"
        both.write_bytes(b"b" * SIZE)
        one.write_bytes(b"o" * SIZE)
        mnt.flush()
        assert mnt.cli("scrub", mnt.path, "--rate", "1GiB/s").out.startswith("4 copies")
        mnt.evict(one, both, tier="memory")
        mnt.evict(one, tier="nvme")
        for path in (both, one):
            damage(mnt.archive / path.name)
        result = mnt.cli("scrub", mnt.path, "--json", check=False)
        found = json.loads(result.out)
        assert (result.code, found["replaced"], found["damaged"]) == (1, ["both"], ["one"])
        assert damaged(mnt) == [("one", "archive")]
        assert "one" in mnt.cli("status", mnt.path).out
        with pytest.raises(OSError, match="Input/output error"):
            one.read_bytes()
        mnt.flush()
        assert (mnt.archive / "both").read_bytes() == both.read_bytes() == b"b" * SIZE
        one.write_bytes(b"new" * 1000)
        assert damaged(mnt) == []
        mnt.flush()
        assert mnt.cli("scrub", mnt.path, "--tier", "archive", "--json").json()["damaged"] == []
        wrong = mnt.cli("scrub", mnt.path, "--tier", "memory", check=False)
        assert (wrong.code, "memory" in wrong.err) == (2, True)
