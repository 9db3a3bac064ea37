"""Recall of large cold files: open at once, every read right or EIO, whoever does what meanwhile."""

from __future__ import annotations

import concurrent.futures
import errno
import importlib.util
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import MODES, TEST_LIMIT, Mounter, eventually
from tierfs.testing.mounting import TestMount
from tierfs.tiers.copy import CHUNK

SIZE = 25 * CHUNK + 12345
LAST = SIZE // CHUNK
SHORT = {"limits": {"read_timeout": "1s"}}
DAMAGE = r"tier archive: .*(not those that were written|has \d+ bytes|does not have the bytes written)"


class Seam:
    """Holds the daemon's recalls; see seams/sitecustomize.py."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def hold(self) -> None:
        (self.directory / "hold").touch()

    def allow(self, *chunks: int) -> None:
        for chunk in chunks:
            (self.directory / f"allow-{chunk}").touch()

    def release(self) -> None:
        (self.directory / "hold").unlink(missing_ok=True)

    @property
    def order(self) -> list[int]:
        """Chunks in the order in which they were read from the archive."""
        try:
            return [int(line) for line in (self.directory / "order").read_text().splitlines()]
        except FileNotFoundError:
            return []


@pytest.fixture
def seam(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seam:
    path = [str(Path(__file__).parent / "seams"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv("TIERFS_TEST_SEAM", str(tmp_path))
    monkeypatch.setenv("TIERFS_TEST_FROM", "/var/tmp/tierfs-disks-")
    return Seam(tmp_path)


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(9).randbytes(SIZE)


def cold(mnt: TestMount, data: bytes, name: str = "model.pt") -> Path:
    """A large file that only the archive has."""
    path = mnt.path / name
    path.write_bytes(data)
    mnt.flush()
    for tier in ("memory", "nvme"):
        mnt.evict(path, tier=tier)
    assert tiers(mnt, path) == {"archive"}
    return path


def tiers(mnt: TestMount, path: Path) -> set[object]:
    replicas = mnt.info(path)["replicas"]
    assert isinstance(replicas, list)
    return {replica["tier"] for replica in replicas}


def leftovers(mnt: TestMount) -> list[Path]:
    assert mnt.nvme is not None
    return [*(mnt.memory / "tmp").iterdir(), *(mnt.nvme / "tmp").iterdir()]


@pytest.fixture(params=MODES)
def held(request: pytest.FixtureRequest, seam: Seam, mounter: Mounter) -> Iterator[TestMount]:
    with mounter(request.param) as mount, mount.abort_after(TEST_LIMIT):
        yield mount
        seam.release()


def test_a_read_waits_for_its_own_range_only(held: TestMount, seam: Seam, data: bytes) -> None:
    path = cold(held, data)
    seam.hold()
    seam.allow(17)
    with path.open("rb", buffering=0) as file:
        assert os.fstat(file.fileno()).st_size == SIZE
        assert os.pread(file.fileno(), 100, 17 * CHUNK + 7) == data[17 * CHUNK + 7 :][:100]
        assert seam.order == [17], "more than the read asked for was there"
        assert tiers(held, path) == {"archive"}
        seam.release()
        assert file.read() == data
        eventually(lambda: "memory" in tiers(held, path), "the recall never ended")
    assert path.read_bytes() == data
    assert leftovers(held) == []


def test_first_byte_comes_before_the_whole(held: TestMount, seam: Seam, data: bytes) -> None:
    path = cold(held, data)
    seam.hold()
    seam.allow(0, 1)
    with path.open("rb", buffering=0) as file:
        assert file.read(1000) == data[:1000]
        assert LAST not in seam.order
        seam.release()


def test_demand_comes_first(held: TestMount, seam: Seam, data: bytes) -> None:
    path = cold(held, data)
    seam.hold()
    with path.open("rb", buffering=0) as file, concurrent.futures.ThreadPoolExecutor() as pool:
        # Some chunks at the start are being read by now; what is asked for comes next, whatever its place.
        late = pool.submit(os.pread, file.fileno(), 10, 20 * CHUNK)
        time.sleep(0.3)
        seam.release()
        assert late.result(30) == data[20 * CHUNK :][:10]
        eventually(lambda: len(seam.order) == LAST + 1, "the recall never ended")
        assert seam.order.index(20) < 8
        assert sorted(seam.order) == list(range(LAST + 1)), "a chunk was read twice or never"


def test_random_reads(mnt: TestMount, data: bytes) -> None:
    path = cold(mnt, data)
    rng = random.Random(4)
    with path.open("rb", buffering=0) as file:
        for _ in range(200):
            offset, length = rng.randrange(SIZE + 1000), rng.choice([1, 4096, 100_000, 5 * CHUNK])
            assert os.pread(file.fileno(), length, offset) == data[offset : offset + length]


def test_several_readers(mnt: TestMount, data: bytes) -> None:
    path = cold(mnt, data)

    def read(seed: int) -> bool:
        rng = random.Random(seed)
        with path.open("rb", buffering=0) as file:
            for _ in range(30):
                offset = rng.randrange(SIZE)
                if os.pread(file.fileno(), 100_000, offset) != data[offset : offset + 100_000]:
                    return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))


@pytest.mark.parametrize("access", [mmap.ACCESS_READ, mmap.ACCESS_COPY])
def test_mapped(mnt: TestMount, data: bytes, access: int) -> None:
    path = cold(mnt, data)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=access) as mapping:
        for offset in (SIZE - 1, 3 * CHUNK - 5, 0):
            assert mapping[offset : offset + 10] == data[offset : offset + 10]
        assert mapping[:] == data


def test_read_once_here_through_passthrough_again(mnt: TestMount, data: bytes) -> None:
    path = cold(mnt, data)
    with path.open("rb") as file:
        file.read(1)
        eventually(lambda: "memory" in tiers(mnt, path), "the recall never ended")
    assert path.read_bytes() == data
    with path.open("r+b") as file:
        file.seek(5 * CHUNK)
        file.write(b"changed")
    changed = data[: 5 * CHUNK] + b"changed" + data[5 * CHUNK + 7 :]
    assert path.read_bytes() == changed
    mnt.flush()
    assert (mnt.archive / "model.pt").read_bytes() == changed


def test_given_up_when_nobody_reads(held: TestMount, seam: Seam, data: bytes) -> None:
    path = cold(held, data)
    seam.hold()
    seam.allow(0)
    with path.open("rb", buffering=0) as file:
        file.read(10)
    seam.release()
    eventually(lambda: leftovers(held) == [], "the temporary file stays")
    assert tiers(held, path) == {"archive"}
    used = {tier["name"]: tier["used"] for tier in held.status()["tiers"]}
    assert used["memory"] == 0
    assert path.read_bytes() == data


def test_writer_waits_for_the_whole(held: TestMount, seam: Seam, data: bytes) -> None:
    path = cold(held, data)
    seam.hold()
    seam.allow(0)
    with path.open("rb", buffering=0) as reader:
        assert reader.read(10) == data[:10]
        written = threading.Thread(target=write_at, args=(path, 7 * CHUNK, b"new"))
        written.start()
        assert os.pread(reader.fileno(), 10, 100) == data[100:110]
        seam.release()
        written.join(30)
        assert not written.is_alive()
        expected = data[: 7 * CHUNK] + b"new" + data[7 * CHUNK + 3 :]
        assert os.pread(reader.fileno(), 10, 7 * CHUNK - 2) == expected[7 * CHUNK - 2 :][:10]
    assert path.read_bytes() == expected
    held.flush()
    assert (held.archive / "model.pt").read_bytes() == expected


def write_at(path: Path, offset: int, what: bytes) -> None:
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), what, offset)


@pytest.mark.parametrize("how", ["open", "truncate"])
def test_truncated_while_recalled(held: TestMount, seam: Seam, data: bytes, how: str) -> None:
    """Nothing of what is on its way is needed any more: nobody waits for it."""
    path = cold(held, data)
    seam.hold()
    seam.allow(0)
    with path.open("rb", buffering=0) as reader:
        assert reader.read(10) == data[:10]
        if how == "open":
            path.write_bytes(b"short")
        else:
            os.truncate(path, 0)
            write_at(path, 0, b"short")
        assert os.pread(reader.fileno(), 100, 0) == b"short"
        seam.release()
    held.flush()
    assert (held.archive / "model.pt").read_bytes() == path.read_bytes() == b"short"
    eventually(lambda: leftovers(held) == [], "the temporary file stays")


def test_unlinked_and_renamed_while_recalled(held: TestMount, seam: Seam, data: bytes) -> None:
    path, other = cold(held, data), cold(held, data[::-1], "other.pt")
    seam.hold()
    seam.allow(0)
    with path.open("rb", buffering=0) as reader, other.open("rb", buffering=0) as renamed:
        assert reader.read(10) == data[:10]
        path.unlink()
        other.rename(held.path / "renamed.pt")
        held.flush()
        seam.release()
        assert os.pread(reader.fileno(), SIZE, 0) == data
        assert renamed.read() == data[::-1]
    eventually(lambda: leftovers(held) == [], "the temporary file stays")
    assert not path.exists()


@pytest.mark.parametrize("mode", MODES)
def test_damaged_replica_is_never_served(mounter: Mounter, data: bytes, mode: str) -> None:
    with mounter(mode, allow_log=[DAMAGE]) as mnt, mnt.abort_after(TEST_LIMIT):
        path = cold(mnt, data)
        write_at(mnt.archive / "model.pt", 9 * CHUNK + 50, b"damage")
        with path.open("rb", buffering=0) as file:
            with pytest.raises(OSError, match="Input/output error") as caught:
                os.pread(file.fileno(), 10, 9 * CHUNK + 50)
            assert caught.value.errno == errno.EIO
            assert os.pread(file.fileno(), CHUNK, 10 * CHUNK) == data[10 * CHUNK :][:CHUNK], "the rest is right"
            with pytest.raises(OSError, match="Input/output error"):
                file.read()
        assert "tier archive: model.pt: bytes 37748736 and on are not those that were written" in mnt.log
        assert tiers(mnt, path) == {"archive"}
        write_at(mnt.archive / "model.pt", 9 * CHUNK + 50, data[9 * CHUNK + 50 :][:6])
        assert path.read_bytes() == data, "a repaired replica is tried again"


@pytest.mark.parametrize("mode", MODES)
def test_truncated_replica_is_never_served(mounter: Mounter, data: bytes, mode: str) -> None:
    with mounter(mode, allow_log=[DAMAGE]) as mnt, mnt.abort_after(TEST_LIMIT):
        path = cold(mnt, data)
        os.truncate(mnt.archive / "model.pt", SIZE - 1)
        with path.open("rb", buffering=0) as file, pytest.raises(OSError, match="Input/output error"):
            file.read(10)
        assert f"tier archive: model.pt: it has {SIZE - 1} bytes there, not {SIZE}" in mnt.log
        with pytest.raises(OSError, match="Input/output error"):
            write_at(path, 0, b"x")
        os.truncate(mnt.archive / "model.pt", SIZE)
        write_at(mnt.archive / "model.pt", SIZE - 1, data[-1:])
        assert path.read_bytes() == data


@pytest.mark.parametrize("mode", MODES)
def test_archive_that_does_not_answer_gives_eio(
    mounter: Mounter, seam: Seam, data: bytes, mode: str
) -> None:
    with mounter(mode, extra=SHORT, allow_log=["nothing came for 1 s"]) as mnt, mnt.abort_after(TEST_LIMIT):
        path = cold(mnt, data)
        seam.hold()
        with path.open("rb", buffering=0) as file:
            with pytest.raises(OSError, match="Input/output error"):
                file.read(10)
            seam.release()
            assert file.read() == data, "it answers again"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_an_open_that_needs_the_whole_file_gives_up_too(
    mounter: Mounter, seam: Seam, mode: str, flags: int
) -> None:
    with mounter(mode, extra=SHORT, allow_log=["nothing came for 1 s"]) as mnt, mnt.abort_after(TEST_LIMIT):
        path = cold(mnt, b"small" * 1000)
        seam.hold()
        with pytest.raises(OSError, match="Input/output error"):
            os.close(os.open(path, flags))
        mnt.status()
        seam.release()
        eventually(lambda: leftovers(mnt) == [], "the temporary file stays")
        assert tiers(mnt, path) == {"archive"}
        assert path.read_bytes() == b"small" * 1000


@pytest.mark.parametrize("mode", MODES)
def test_absent_archive_gives_eio_then_comes_back(
    mounter: Mounter, seam: Seam, data: bytes, mode: str
) -> None:
    noise = ["nothing came for 1 s .*No such file"]
    with mounter(mode, extra=SHORT, allow_log=noise) as mnt, mnt.abort_after(TEST_LIMIT):
        path = cold(mnt, data)
        (mnt.archive / "model.pt").rename(mnt.archive / "elsewhere")
        with path.open("rb", buffering=0) as file:
            with pytest.raises(OSError, match="Input/output error"):
                file.read(10)
            (mnt.archive / "elsewhere").rename(mnt.archive / "model.pt")
            assert file.read() == data


def test_goes_on_with_a_new_daemon(seam: Seam, mounter: Mounter, data: bytes) -> None:
    with mounter("passthrough") as mnt, mnt.abort_after(TEST_LIMIT):
        path = cold(mnt, data)
        seam.hold()
        seam.allow(0)
        with path.open("rb", buffering=0) as file:
            assert file.read(10) == data[:10]
            mnt.kill_daemon()
            with path.open("rb", buffering=0) as second:
                seam.release()
                assert second.read() == data
            assert os.pread(file.fileno(), SIZE, 0) == data
        assert path.read_bytes() == data
        eventually(lambda: leftovers(mnt) == [], "the temporary file stays")


def test_new_daemon_after_the_recall(mounter: Mounter, data: bytes) -> None:
    with mounter("passthrough") as mnt, mnt.abort_after(TEST_LIMIT):
        path = cold(mnt, data)
        with path.open("rb", buffering=0) as file:
            file.read(10)
            eventually(lambda: "memory" in tiers(mnt, path), "the recall never ended")
            mnt.kill_daemon()
            assert path.read_bytes() == data
            assert os.pread(file.fileno(), SIZE, 0) == data


@pytest.mark.parametrize("mode", MODES)
def test_torch_load_mapped(mounter: Mounter, mode: str) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    script = (
        "import sys, torch\n"
        "path, step = sys.argv[1:]\n"
        "wanted = {f'layer{i}': torch.full((1 << 20,), i, dtype=torch.float32) for i in range(24)}\n"
        "if step == 'save':\n"
        "    torch.save(wanted, path)\n"
        "else:\n"
        "    found = torch.load(path, mmap=True, weights_only=True)\n"
        "    assert all(torch.equal(found[name], wanted[name]) for name in reversed(list(wanted)))\n"
    )
    with mounter(mode) as mnt, mnt.abort_after(TEST_LIMIT):
        path = mnt.path / "model.pt"
        for step in ("save", "load"):
            command = [sys.executable, "-W", "ignore", "-c", script, path, step]
            subprocess.run(command, check=True, timeout=90, env={**os.environ, "OMP_NUM_THREADS": "1"})
            mnt.flush()
            for tier in ("memory", "nvme") if step == "save" else ():
                mnt.evict(path, tier=tier)
