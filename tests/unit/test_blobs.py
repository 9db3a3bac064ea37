"""Every store of blobs keeps the contract of tierfs.testing.blobs_conformance: directories on each filesystem, and
object stores on two servers."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import BUCKET, KEY, SECRET, SERVERS, Server, program
from tierfs.errors import NoSuchBlob, TierError
from tierfs.testing.blobs_conformance import PART, BlobsContract, mapped
from tierfs.tiers.blobs import Blobs
from tierfs.tiers.directory_blobs import DirectoryBlobs
from tierfs.tiers.objects import ObjectBlobs
from tierfs.tiers.tree import TreeStore

__all__ = ["mapped"]


def directory_blobs(root: Path) -> DirectoryBlobs:
    tree = TreeStore("archive", root)
    tree.prepare()
    return DirectoryBlobs(tree)


class TestDirectoryBlobs(BlobsContract):
    @pytest.fixture
    def blobs(self, disk: Path) -> Iterator[Blobs]:
        made = directory_blobs(disk / "blobs")
        yield made
        made.close()
        shutil.rmtree(disk / "blobs")

    @pytest.fixture
    def other(self, disk: Path, blobs: Blobs) -> Iterator[Blobs]:
        made = directory_blobs(disk / "blobs")
        yield made
        made.close()


@pytest.fixture(scope="session", params=SERVERS)
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


class TestObjectBlobs(BlobsContract):
    @pytest.fixture
    def url(self) -> str:
        return f"s3://{BUCKET}/pre fix/{secrets.token_hex(4)}"

    @pytest.fixture
    def blobs(self, url: str, s3: Server, credentials: None) -> Iterator[Blobs]:
        made = ObjectBlobs.open("archive", url, endpoint=s3.endpoint)
        yield made
        made.delete(blob.key for blob in made.scan())
        made.close()

    @pytest.fixture
    def other(self, url: str, s3: Server, blobs: Blobs) -> Blobs:
        return ObjectBlobs.open("archive", url, endpoint=s3.endpoint)

    def test_nothing_beside_the_prefix_is_seen_or_touched(self, blobs: Blobs, url: str, s3: Server) -> None:
        beside = ObjectBlobs.open("archive", url + "x", endpoint=s3.endpoint)
        above = ObjectBlobs.open("archive", url.rpartition("/")[0], endpoint=s3.endpoint)
        beside.put("a", b"beside")
        blobs.put("a", b"inside")
        prefix = url.rpartition("/")[2]
        assert [blob.key for blob in blobs.scan()] == ["a"]
        assert {f"{prefix}/a", f"{prefix}x/a"} <= {blob.key for blob in above.scan()}
        blobs.delete(["a"])
        assert bytes(beside.get("a")) == b"beside"
        beside.delete(["a"])

    @pytest.mark.parametrize("wrong", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
    def test_wrong_credentials_are_named(
        self, blobs: Blobs, url: str, s3: Server, monkeypatch: pytest.MonkeyPatch, wrong: str
    ) -> None:
        if "moto" in s3.command[0]:
            pytest.skip("moto takes any")
        monkeypatch.setenv(wrong, "WRONGWRONGWRONG")
        stranger = ObjectBlobs.open("archive", url, endpoint=s3.endpoint)
        for call in (stranger.probe, lambda: stranger.put("a", b"x"), lambda: stranger.head("a"), stranger.children):
            with pytest.raises(TierError, match="the credentials are not accepted; check AWS_ACCESS_KEY_ID") as refused:
                call()
            assert refused.value.errno == errno.EACCES
            assert not isinstance(refused.value, NoSuchBlob)
        with pytest.raises(TierError):
            stranger.abort_stale(0)
        assert list(blobs.scan()) == []

    def test_a_missing_bucket_is_named(self, s3: Server, credentials: None) -> None:
        if "weed" in s3.command[0]:
            pytest.skip("SeaweedFS makes buckets as they are named")
        stranger = ObjectBlobs.open("archive", "s3://no-such-bucket/x", endpoint=s3.endpoint)
        for call in (
            stranger.probe,
            lambda: stranger.put("a", b"x"),
            lambda: stranger.head("a"),
            lambda: stranger.get("a"),
            lambda: list(stranger.scan()),
            lambda: stranger.delete(["a"]),
            lambda: stranger.abort_stale(0),
        ):
            with pytest.raises(TierError, match="there is no bucket no-such-bucket at http") as missing:
                call()
            assert missing.value.errno == errno.ENOENT
            assert not isinstance(missing.value, NoSuchBlob)

    def test_young_uploads_are_left_alone(self, blobs: Blobs, other: Blobs, s3: Server, mapped: memoryview) -> None:
        if "moto" in s3.command[0]:
            pytest.skip("moto says that every upload began in 2010")
        upload = other.begin("a", PART)
        upload.part(0, mapped[:PART])
        assert blobs.abort_stale(3600) == 0
        upload.complete()
        assert blobs.get("a") == mapped[:PART]

    def test_a_large_object_is_copied_in_parts(
        self, blobs: Blobs, mapped: memoryview, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tierfs.tiers.objects.COPIED_AT_ONCE", 1 << 20)
        monkeypatch.setattr("tierfs.tiers.objects.PART", 5 << 20)
        blobs.put("a", mapped)
        blobs.copy("a", "b")
        assert blobs.get("b") == mapped


# directories only


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[DirectoryBlobs]:
    made = directory_blobs(tmp_path / "blobs")
    yield made
    made.close()


def test_no_symlink_in_a_directory_leads_out(plain: DirectoryBlobs, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    (plain.root / "link").symlink_to(outside)
    (plain.root / "file").symlink_to(outside / "secret")
    assert plain.head("link/secret") is None
    assert plain.head("file") is None
    for call in (lambda: plain.get("link/secret"), lambda: plain.get("file"), lambda: plain.copy("file", "a")):
        with pytest.raises(NoSuchBlob):
            call()
    with pytest.raises(TierError):
        plain.put("link/new", b"x")
    plain.put("file", b"mine")
    plain.delete(["link/secret", "file"])
    assert list(plain.scan()) == []
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == {"secret": b"secret"}


def test_a_key_is_no_directory(plain: DirectoryBlobs) -> None:
    plain.put("a", b"x")
    plain.put("b/c", b"x")
    for key in ("a/b", "b"):
        for write in (plain.put, plain.put_if_absent):
            with pytest.raises(TierError):
                write(key, b"y")
    assert {blob.key for blob in plain.scan()} == {"a", "b/c"}


def test_directories_that_are_left_empty_go(plain: DirectoryBlobs) -> None:
    plain.put("a/b/c/1", b"x")
    plain.put("a/2", b"x")
    plain.delete(["a/b/c/1"])
    assert sorted(path.name for path in (plain.root / "a").iterdir()) == ["2"]
    plain.delete(["a/2"])
    assert [path.name for path in plain.root.iterdir()] == [".tierfs"]


def test_a_directory_that_is_away_is_no_empty_store(plain: DirectoryBlobs, tmp_path: Path) -> None:
    plain.put("a", b"x")
    plain.root.rename(tmp_path / "aside")
    plain.root.mkdir()
    for call in (
        lambda: plain.head("b"),
        lambda: plain.get("b"),
        lambda: list(plain.scan()),
        lambda: plain.children(),
        lambda: plain.put("b", b""),
        plain.probe,
    ):
        with pytest.raises(TierError) as away:
            call()
        assert away.value.temporary
        assert not isinstance(away.value, NoSuchBlob)
    assert list(plain.root.iterdir()) == []


def test_what_a_killed_process_left_in_a_directory_is_removed_when_it_is_old(
    plain: DirectoryBlobs, tmp_path: Path
) -> None:
    former = directory_blobs(tmp_path / "blobs")
    upload = former.begin("a")
    upload.part(0, b"x")
    own = plain.begin("b")
    own.part(0, b"y")
    tmp = tmp_path / "blobs" / ".tierfs" / "tmp"
    (tmp / "somebody.elses").touch()
    for path in tmp.iterdir():
        os.utime(path, (1, 1))
    fresh = directory_blobs(tmp_path / "blobs").begin("c")
    assert plain.abort_stale(60) == 1
    assert plain.abort_stale(60) == 0
    own.complete()
    fresh.complete()
    assert {blob.key for blob in plain.scan()} == {"b", "c"}
    assert [path.name for path in tmp.iterdir()] == ["somebody.elses"]


def test_where_there_are_no_links_a_blob_is_created_without(
    plain: DirectoryBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    assert plain.put_if_absent("a", b"1")
    assert not plain.put_if_absent("a", b"2")
    assert bytes(plain.get("a")) == b"1"
    assert not plain.atomic_create


def test_a_mount_without_object_tiers_never_imports_obstore() -> None:
    code = "import sys, tierfs.cli, tierfs.daemon, tierfs.tiers.objects; sys.exit('obstore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
