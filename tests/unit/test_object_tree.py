"""An archive in a store of blobs keeps the contract of every archive, on directories and on real servers, and every
step of it, cut short at any write and taken once more, ends as if nothing had happened."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.servers import BUCKET, KEY, SECRET, SERVERS, Server, program
from tierfs.errors import SourceChanged, TierError
from tierfs.testing.conformance import MTIME, ObjectTreeContract, send_all
from tierfs.tiers.blobs import PART
from tierfs.tiers.copy import Reading
from tierfs.tiers.directory_blobs import DirectoryBlobs
from tierfs.tiers.object_content import ObjectTemporary, send_file
from tierfs.tiers.object_names import PRIVATE, TEMPORARY
from tierfs.tiers.object_tree import ObjectTree
from tierfs.tiers.objects import ObjectBlobs
from tierfs.tiers.tree import TreeStore
from tierfs.tiers.walk import walk


def directory_blobs(root: Path) -> DirectoryBlobs:
    tree = TreeStore("archive", root)
    tree.prepare()
    return DirectoryBlobs(tree)


class TestOverDirectories(ObjectTreeContract):
    @pytest.fixture
    def tier(self, disk: Path) -> Iterator[ObjectTree]:
        made = ObjectTree(directory_blobs(disk / "blobs"), "a directory")
        made.prepare()
        yield made
        made.close()
        shutil.rmtree(disk / "blobs")


@pytest.fixture(scope="module", params=SERVERS)
def s3(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    needs, serve = SERVERS[request.param]
    if program(needs) is None:
        pytest.skip(f"needs {needs}")
    with serve(tmp_path_factory.mktemp(request.param) / "server") as server:
        yield server


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)


class TestOverObjectStores(ObjectTreeContract):
    @pytest.fixture
    def tier(self, s3: Server, credentials: None) -> Iterator[ObjectTree]:
        url = f"s3://{BUCKET}/tree {secrets.token_hex(4)}"
        made = ObjectTree(ObjectBlobs.open("archive", url, endpoint=s3.endpoint), url)
        made.prepare()
        yield made
        for prefix in ("", ".tierfs/"):
            made.blobs.delete(
                [blob.key for blob in made.blobs.scan(PRIVATE if prefix else "") if blob.key.startswith(prefix)]
            )
        made.close()


# cut short


class Cut(Exception):
    """The daemon dies here."""


class CutBlobs:
    """Blobs whose process dies at the ``left``th write from now: before it, or once it has happened."""

    def __init__(self, blobs: DirectoryBlobs, left: int, *, done: bool) -> None:
        self._blobs = blobs
        self._left = left
        self._done = done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._blobs, name)

    def _write(self, write: Callable[[], Any]) -> Any:
        self._left -= 1
        if self._left < 0:
            raise Cut
        if self._left == 0:
            if self._done:
                write()
            raise Cut
        return write()

    def put(self, key: str, data: Any) -> Any:
        return self._write(lambda: self._blobs.put(key, data))

    def copy(self, source: str, target: str) -> Any:
        return self._write(lambda: self._blobs.copy(source, target))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._write(lambda key=key: self._blobs.delete([key]))


Look = tuple[object, ...]


def look(tree: ObjectTree) -> dict[tuple[bytes, ...], Look]:
    """All that stands there; names of one file have the same first name."""
    found: dict[tuple[bytes, ...], Look] = {}
    first: dict[int, tuple[bytes, ...]] = {}
    for standing in sorted(walk(tree), key=lambda standing: standing.path):
        status = standing.status
        data = None
        if stat.S_ISREG(status.st_mode):
            content = tree.content(standing.path)
            data = bytes(content.read(0, content.size))
        named = first.setdefault(status.st_ino, standing.path)
        attributes = (status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns, status.st_rdev)
        found[standing.path] = (*attributes, standing.target, standing.xattrs, data, named)
    return found


def put(tree: ObjectTree, path: tuple[bytes, ...], data: bytes, mode: int = 0o640) -> None:
    assert tree.publish(send_all(tree, data), path, mode, 1, 2, MTIME, {b"user.a": data})


def full(tree: ObjectTree) -> None:
    """An archive with one of each."""
    put(tree, (b"f",), b"f")
    put(tree, (b"g",), b"other", 0o600)
    tree.link((b"f",), (b"h",))
    tree.mkdir((b"d",))
    tree.set_attributes((b"d",), 0o700, 3, 4, MTIME, {b"user.d": b"d"})
    tree.mkdir((b"d", b"empty"))
    for number in range(3):
        put(tree, (b"d", b"sub", b"%d" % number), b"%d" % number)
    tree.symlink(b"f", (b"d", b"l"))
    tree.link((b"f",), (b"d", b"linked"))
    put(tree, (b"e", b"sub", b"1"), b"stood")
    tree.symlink(b"nowhere", (b"l",))
    tree.special((b"p",), stat.S_IFIFO | 0o600, 0)


STEPS: dict[str, Callable[[ObjectTree], object]] = {
    "mkdir": lambda tree: tree.mkdir((b"new", b"er")),
    "symlink over a file": lambda tree: tree.symlink(b"target", (b"g",)),
    "special over a link": lambda tree: tree.special((b"h",), stat.S_IFCHR | 0o600, 0x103),
    "link": lambda tree: tree.link((b"g",), (b"d", b"new")),
    "link over a file": lambda tree: tree.link((b"g",), (b"f",)),
    "link over a link": lambda tree: tree.link((b"g",), (b"h",)),
    "link of a symlink": lambda tree: tree.link((b"l",), (b"l2",)),
    "rename": lambda tree: tree.rename((b"f",), (b"new", b"er")),
    "rename over a file": lambda tree: tree.rename((b"f",), (b"g",)),
    "rename over another name": lambda tree: tree.rename((b"f",), (b"h",)),
    "rename over a symlink": lambda tree: tree.rename((b"f",), (b"l",)),
    "rename of a symlink over a file": lambda tree: tree.rename((b"l",), (b"f",)),
    "rename over an empty directory": lambda tree: tree.rename((b"g",), (b"d", b"empty")),
    "rename of a directory": lambda tree: tree.rename((b"d",), (b"x", b"y")),
    "rename of a directory over one": lambda tree: tree.rename((b"d",), (b"e",)),
    "rename of a directory over a file": lambda tree: tree.rename((b"d",), (b"f",)),
    "exchange": lambda tree: tree.exchange((b"f",), (b"g",), "9"),
    "exchange of a directory": lambda tree: tree.exchange((b"d",), (b"g",), "9"),
    "exchange of directories": lambda tree: tree.exchange((b"d",), (b"e",), "9"),
    "remove": lambda tree: tree.remove((b"f",)),
    "remove a symlink": lambda tree: tree.remove((b"l",)),
    "rmdir": lambda tree: tree.rmdir((b"d", b"empty")),
    "attributes": lambda tree: tree.set_attributes((b"g",), 0o606, 7, 8, 9, {b"user.z": b"z"}),
    "attributes of a link": lambda tree: tree.set_attributes((b"f",), 0o606, 7, 8, 9, {b"user.z": b"z"}),
}


@pytest.fixture
def scratch() -> Iterator[Path]:
    shm = Path("/dev/shm")
    where = Path(tempfile.mkdtemp(prefix="tierfs-test-", dir=shm if shm.is_dir() else None))
    yield where
    shutil.rmtree(where)


def opened(blobs: Any) -> ObjectTree:
    tree = ObjectTree(blobs, "a directory")
    tree.prepare()
    return tree


def each_cut(scratch: Path, step: Callable[[ObjectTree], object]) -> Iterator[tuple[ObjectTree, ObjectTree]]:
    """For each write of the step: the archive for a new process, after the old one died there; and after the step."""
    full(opened(directory_blobs(scratch / "before")))
    shutil.copytree(scratch / "before", scratch / "whole")
    whole = opened(directory_blobs(scratch / "whole"))
    step(whole)
    for number in range(1, 1000):
        for done in (False, True):
            where = scratch / f"cut-{number}-{done}"
            shutil.copytree(scratch / "before", where)
            plain = directory_blobs(where)
            tree = opened(plain)
            tree.blobs = CutBlobs(plain, number, done=done)  # type: ignore[assignment]
            try:
                step(tree)
            except Cut:
                yield opened(directory_blobs(where)), whole
            else:
                return
            finally:
                shutil.rmtree(where)


@pytest.mark.parametrize("name", STEPS)
def test_cut_short_and_taken_once_more_it_ends_the_same(scratch: Path, name: str) -> None:
    step = STEPS[name]
    cuts = 0
    for tree, whole in each_cut(scratch, step):
        step(tree)
        assert look(tree) == look(whole)
        step(tree)
        assert look(tree) == look(whole)
        cuts += 1
    assert cuts


@pytest.mark.parametrize("path", [(b"new", b"er"), (b"f",), (b"l",), (b"d", b"empty")])
def test_a_publish_cut_short_is_done_once_more_or_told_to_be_done_again(
    scratch: Path, path: tuple[bytes, ...]
) -> None:
    full(opened(directory_blobs(scratch / "before")))
    for number in range(1, 100):
        for done in (False, True):
            where = scratch / f"cut-{number}-{done}"
            shutil.copytree(scratch / "before", where)
            plain = directory_blobs(where)
            tree = opened(plain)
            temp = send_all(tree, b"published")
            tree.blobs = CutBlobs(plain, number, done=done)  # type: ignore[assignment]
            cut = False
            try:
                tree.publish(temp, path, 0o611, 5, 6, MTIME, {b"user.p": b"p"})
            except Cut:
                cut = True
            again = opened(directory_blobs(where))
            assert again.publish(temp, path, 0o611, 5, 6, MTIME, {b"user.p": b"p"}) or again.stands(path, temp, 9)
            assert again.stands(path, temp, 9)
            attributes = (stat.S_IFREG | 0o611, 5, 6, MTIME, 0, None, {b"user.p": b"p"})
            assert look(again)[path] == (*attributes, b"published", path)
            again.sweep([])
            assert list(again.blobs.scan(TEMPORARY)) == []
            shutil.rmtree(where)
            if not cut:
                return
    raise AssertionError("it never ends")


def test_an_upload_that_was_not_completed_is_lost_with_its_process(scratch: Path) -> None:
    blobs = directory_blobs(scratch / "blobs")
    tree = opened(blobs)
    put(tree, (b"f",), b"x" * (PART + 1))
    temp = send_all(tree, b"y" * (PART + 1), (b"f",))
    again = opened(directory_blobs(scratch / "blobs"))
    assert not again.publish(temp, (b"f",), 0o600, 0, 0, MTIME, {})
    assert not again.stands((b"f",), temp, PART + 1)
    assert bytes(again.content((b"f",)).read(0, 1)) == b"x"
    tree.discard(temp)


def test_a_record_or_marker_that_is_damaged_is_told_of(scratch: Path) -> None:
    tree = opened(directory_blobs(scratch / "blobs"))
    put(tree, (b"f",), b"x")
    (record,) = [blob.key for blob in tree.blobs.scan(f"{PRIVATE}names/")]
    for damage in (b"", b"{", b"[]", b'{"format":1}', b"\xff"):
        tree.blobs.put(record, damage)
        with pytest.raises(TierError, match="damaged") as failed:
            tree.status((b"f",))
        assert not failed.value.temporary
    tree.blobs.put(record, b'{"format":2}')
    with pytest.raises(TierError, match="format 2"):
        tree.status((b"f",))


def test_an_archive_that_was_emptied_or_changed_is_left_alone(scratch: Path) -> None:
    blobs = directory_blobs(scratch / "blobs")
    tree = opened(blobs)
    blobs.delete([f"{PRIVATE}marker"])
    with pytest.raises(TierError, match="no marker") as failed:
        tree.probe()
    assert failed.value.temporary
    other = opened(blobs)
    for call in (tree.probe, lambda: tree.temporary("2-1")):
        tree._looked = -1e9
        with pytest.raises(TierError, match="another archive"):
            call()
    other.probe()


def test_a_daemon_that_starts_again_finds_its_archive_or_makes_none(scratch: Path) -> None:
    put(opened(directory_blobs(scratch / "blobs")), (b"f",), b"x")
    again = ObjectTree(directory_blobs(scratch / "blobs"), "a directory")  # not prepared: the store may be away
    put(again, (b"g",), b"y")
    assert again.uuid
    blobs = directory_blobs(scratch / "empty")
    with pytest.raises(TierError, match="no marker") as failed:
        ObjectTree(blobs, "a directory").temporary("2-1")
    assert failed.value.temporary
    assert list(blobs.scan(PRIVATE)) == []


def test_a_directory_that_moves_gives_signs_of_life(scratch: Path) -> None:
    tree = opened(directory_blobs(scratch / "blobs"))
    full(tree)
    signs: list[int] = []
    with tree.changing(lambda: signs.append(1)):
        tree.rename((b"d",), (b"x",))
    assert len(signs) >= 5
    tree.rename((b"x",), (b"d",))
    assert len(signs) < 10


class HangingUpload:
    """The server answers nothing until the upload is given up."""

    part_size = PART
    key = "f"

    def __init__(self) -> None:
        self.sending = threading.Semaphore(0)
        self.given_up = threading.Event()

    def part(self, number: int, data: object) -> None:
        self.sending.release()
        self.given_up.wait(60)
        raise TierError("it was given up")

    def complete(self) -> None:
        raise AssertionError("not complete")

    def abort(self) -> None:
        self.given_up.set()


class HangingBlobs:
    name = "archive"

    def __init__(self) -> None:
        self.upload = HangingUpload()

    def begin(self, key: str, part_size: int) -> HangingUpload:
        return self.upload

    def delete(self, keys: object) -> None:
        """There is nothing."""


def test_who_cuts_the_source_off_waits_for_no_server(scratch: Path) -> None:
    blobs: Any = HangingBlobs()
    temp = ObjectTemporary(blobs, b"t", "f")
    reading, cancel = Reading(), threading.Event()
    ended: list[BaseException] = []
    with (scratch / "source").open("w+b") as file:
        file.write(os.urandom(3 * PART))
        file.flush()

        def send() -> None:
            try:
                send_file(
                    file.fileno(), temp, 3 * PART, streams=3, stable=True, reading=reading, cancelled=cancel.is_set
                )
            except BaseException as error:
                ended.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        assert blobs.upload.sending.acquire(timeout=60)
        cancel.set()
        assert not reading.end(), "a thread looks at the source"
        temp.stop()
        thread.join(60)
        assert not thread.is_alive()
        assert reading.end()
    assert isinstance(ended[0], SourceChanged)
