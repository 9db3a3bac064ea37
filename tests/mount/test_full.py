"""Tiers that are full, on a mount: where files go then, who waits, and that nothing breaks when all of them are."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import Mounter, eventually, loop_disk
from tests.mount.test_ladder import drain_status
from tests.mount.test_semantics import MB, in_thread, limited, mode, paused, tier_status, tiers_of
from tierfs.testing.mounting import TestMount

__all__ = ["mode"]

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs a tmpfs of its own")


def content(size: int) -> bytes:
    return b"".join(n.to_bytes(8, "big") for n in range(size // 8))


def save(path: Path, data: bytes) -> None:
    """In pieces, as torch.save does."""
    with path.open("wb", buffering=0) as file:
        for at in range(0, len(data), MB):
            file.write(data[at : at + MB])


def test_a_file_may_outgrow_what_memory_is_planned_with(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode, memory="64MiB") as mnt, paused(mnt):
        data = content(100 * MB)
        save(mnt.path / "model.pt", data)
        assert (mnt.path / "model.pt").read_bytes() == data
        assert tiers_of(mnt, mnt.path / "model.pt") == {"memory"}
        assert tier_status(mnt, "memory")["capacity"] == 64 * MB
        save(mnt.path / "next.pt", data)
        assert tiers_of(mnt, mnt.path / "next.pt") == {"nvme"}, "nothing new is placed there meanwhile"


def test_a_write_that_fills_memory_goes_on_further_down_where_the_daemon_sees_it(mounter: Mounter) -> None:
    with limited(mounter, "userspace", memory="32MiB", memory_max="32MiB") as mnt, paused(mnt):
        data = content(100 * MB)
        save(mnt.path / "model.pt", data)
        assert (mnt.path / "model.pt").read_bytes() == data
        assert tiers_of(mnt, mnt.path / "model.pt") == {"nvme"}
        mnt.cli("resume", mnt.path)
        mnt.flush()
        assert (mnt.archive / "model.pt").read_bytes() == data


def test_after_enospc_in_passthrough_the_next_save_goes_further_down(mounter: Mounter) -> None:
    with limited(mounter, "passthrough", memory="32MiB", memory_max="32MiB") as mnt, paused(mnt):
        data = content(40 * MB)
        with pytest.raises(OSError, match="No space left"):
            save(mnt.path / "model.pt", data)
        assert data.startswith((mnt.path / "model.pt").read_bytes()), "what was accepted is there"
        save(mnt.path / "model.pt", data)
        assert (mnt.path / "model.pt").read_bytes() == data
        assert tiers_of(mnt, mnt.path / "model.pt") == {"nvme"}
        mnt.cli("resume", mnt.path)
        mnt.flush()
        assert (mnt.archive / "model.pt").read_bytes() == data


def test_shards_begun_at_once_do_not_overfill_memory(mounter: Mounter, mode: str) -> None:
    with limited(mounter, mode, memory="64MiB", memory_max="64MiB") as mnt, paused(mnt):
        data = content(20 * MB)
        save(mnt.path / "rank0-step0.distcp", data)
        (mnt.path / "rank0-step0.distcp").unlink()
        eventually(lambda: int(str(tier_status(mnt, "memory")["used"])) < MB)
        with contextlib.ExitStack() as stack:
            files = [
                stack.enter_context((mnt.path / f"rank{rank}-step1.distcp").open("wb", buffering=0))
                for rank in range(6)
            ]
            for at in range(0, len(data), MB):
                for file in files:
                    file.write(data[at : at + MB])
        for rank in range(6):
            path = mnt.path / f"rank{rank}-step1.distcp"
            assert path.read_bytes() == data
            assert tiers_of(mnt, path) == ({"memory"} if rank < 2 else {"nvme"})


# what a reboot would take


def test_no_more_than_the_limit_is_in_memory_alone(mounter: Mounter, mode: str) -> None:
    extra = {"limits": {"unsynced": "32MiB"}}
    with limited(mounter, mode, extra=extra) as mnt:
        with paused(mnt):
            for number in range(4):
                save(mnt.path / f"{number}.pt", content(20 * MB))
                eventually(lambda: not any(tier_status(mnt, tier)["open"] for tier in ("memory", "nvme")))
            found = [tiers_of(mnt, mnt.path / f"{number}.pt") for number in range(4)]
            assert found == [{"memory"}, {"nvme"}, {"nvme"}, {"nvme"}]
            drain = drain_status(mnt)
            assert drain["unsynced_limit"] == 32 * MB
            assert drain["spilled_files"] == 3
        mnt.flush()
        save(mnt.path / "4.pt", content(20 * MB))
        assert "memory" in tiers_of(mnt, mnt.path / "4.pt"), "what is durable does not count"


def test_a_create_that_waits_holds_nobody_else_up(mounter: Mounter, mode: str) -> None:
    extra = {"limits": {"unsynced": "32MiB", "drain": "1MiB/s"}}
    with limited(mounter, mode, extra=extra) as mnt:
        for name in ("a", "b"):
            (mnt.path / name).mkdir()
        first, second = mnt.path / "a" / "1.pt", mnt.path / "a" / "2.pt"
        save(first, content(24 * MB))
        eventually(lambda: tier_status(mnt, "memory")["open"] == 0)  # its release came: its size is known
        began = time.monotonic()
        waiting = in_thread(lambda: save(second, content(24 * MB)))
        eventually(lambda: drain_status(mnt)["waiting"] == 1 or not waiting.is_alive())
        assert waiting.is_alive(), "it should have waited for the drain"
        for number in range(20):
            (mnt.path / "b" / f"{number}").write_bytes(b"x")
            (mnt.path / "b" / f"{number}").rename(mnt.path / "b" / f"{number}.done")
        waiting.join(60)
        assert not waiting.is_alive()
        assert time.monotonic() - began < 60
        assert second.stat().st_size == 24 * MB
        assert tiers_of(mnt, second) == {"nvme"}, "the drain was too slow to wait for it to the end"
        first.unlink()
        second.unlink()


# every tier full


@contextlib.contextmanager
def tiny(mounter: Mounter, mode: str, tmp: Path) -> Iterator[TestMount]:
    """32 MiB of memory, some 50 MiB of nvme, and an archive with room."""
    options: dict[str, object] = {
        "memory": "32MiB",
        "memory_max": "32MiB",
        "rules": [{"match": ["good.pt", "renamed.pt"], "keep": {"nvme": "all"}}],
        "allow_log": ["No space left on device; trying again"],
    }
    with (
        loop_disk(tmp, "small", 64 << 20) as disk,
        limited(mounter, mode, nvme=disk / "data", **options) as mnt,
    ):
        yield mnt


def fill_up(mnt: TestMount) -> list[tuple[Path, int]]:
    """(file, bytes accepted) until nothing more is."""
    made: list[tuple[Path, int]] = []
    data, refused = content(12 * MB), 0
    while refused < 6:
        path, size, piece = mnt.path / f"fill-{len(made)}", 0, MB >> refused
        try:
            with path.open("wb", buffering=0) as file:
                for at in range(0, len(data), piece):
                    size += file.write(data[at : at + piece])
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            refused += 1
        if path.exists():
            made.append((path, size))
        assert len(made) < 40
    return made


def test_full_everywhere_breaks_nothing_and_needs_no_restart(mounter: Mounter, mode: str, tmp_path: Path) -> None:
    with tiny(mounter, mode, tmp_path) as mnt:
        good = content(5 * MB)
        save(mnt.path / "good.pt", good)
        mnt.flush()
        mnt.evict(mnt.path / "good.pt")
        pid = mnt.daemon_pid()
        with paused(mnt):
            made = fill_up(mnt)
            assert sum(size for _, size in made) > 60 * MB, "memory and nvme, to the end"
            for path, size in made:
                data = path.read_bytes()
                assert size <= len(data) < size + MB
                assert content(12 * MB).startswith(data)
            with pytest.raises(OSError, match="No space left"):
                (mnt.path / "good.pt").open("wb").close()
            assert (mnt.path / "good.pt").read_bytes() == good, "what could not be replaced was not thrown away"
            (mnt.path / "good.pt").rename(mnt.path / "renamed.pt")
            for path, _ in made[:4]:
                path.unlink()
            eventually(lambda: _can_save(mnt.path / "after.pt", good))
            assert (mnt.path / "after.pt").read_bytes() == good
        mnt.flush()  # the archive has room: everything gets through, and up there it becomes room
        assert (mnt.archive / "renamed.pt").read_bytes() == good
        assert (mnt.archive / "after.pt").read_bytes() == good
        for path, _ in made[4:]:
            assert (mnt.archive / path.name).read_bytes() == path.read_bytes()
        save(mnt.path / "last.pt", good)
        assert (mnt.path / "last.pt").read_bytes() == good
        assert mnt.daemon_pid() == pid


def _can_save(path: Path, data: bytes) -> bool:
    with contextlib.suppress(OSError):
        save(path, data)
        return True
    return False


def test_a_save_waits_for_room_that_drains_make(mounter: Mounter, mode: str, tmp_path: Path) -> None:
    """More than all local tiers hold, written at once, gets through to the archive without an error."""
    with tiny(mounter, mode, tmp_path) as mnt:
        for number in range(20):
            save(mnt.path / f"{number}.pt", content(10 * MB))
        mnt.flush()
        for number in range(20):
            assert (mnt.archive / f"{number}.pt").read_bytes() == content(10 * MB)


def test_a_cold_file_is_read_while_every_tier_above_the_archive_is_full(
    mounter: Mounter, mode: str, tmp_path: Path
) -> None:
    with tiny(mounter, mode, tmp_path) as mnt:
        data = content(5 * MB)
        path = mnt.path / "cold.pt"
        save(path, data)
        mnt.flush()
        for tier in ("memory", "nvme"):
            mnt.evict(path, tier=tier)
        with paused(mnt):
            made = fill_up(mnt)
            with pytest.raises(OSError, match="No space left"):
                path.open("ab").close()
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
                assert mapped[:] == data
                assert path.read_bytes() == data
                assert tiers_of(mnt, path) == {"archive"}
                if mode == "passthrough":
                    mnt.kill_daemon()
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                    assert file.read() == data, "with a daemon that took the handle over"
            for filled, _ in made:
                filled.unlink()
        eventually(lambda: path.read_bytes() == data and tiers_of(mnt, path) != {"archive"})
