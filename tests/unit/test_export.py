"""ls and export: an archive's directory is enough."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.test_chunked_store import FILES, MTIME, chunks, put, sourced
from tierfs.cli.app import main
from tierfs.tiers.chunked import ChunkedStore
from tierfs.tiers.tree import TreeStore


@pytest.fixture(params=["chunks", "tree"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TreeStore]:
    kind = ChunkedStore if request.param == "chunks" else TreeStore
    made = kind("far", tmp_path / "archive")
    made.prepare()
    for name, data in FILES.items():
        keep(made, (b"run", b"step-1", os.fsencode(name)), data, tmp_path)
    keep(made, (b"top",), b"top", tmp_path)
    made.symlink(b"step-1", (b"run", b"latest"))
    made.link((b"top",), (b"run", b"link"))
    made.mkdir((b"run", b"none"))
    made.set_attributes((b"run", b"step-1"), 0o750, os.geteuid(), os.getegid(), MTIME, {})
    yield made
    made.close()


def keep(store: TreeStore, path: tuple[bytes, ...], data: bytes, tmp_path: Path) -> None:
    if isinstance(store, ChunkedStore):
        put(store, path, sourced(tmp_path, data), codec="lz4")
        return
    temp = store.temporary("1-1")
    with open(temp.fd, "wb", closefd=False) as file:
        file.write(data)
    temp.close()
    store.publish(temp.name, path, 0o640, os.geteuid(), os.getegid(), MTIME, {b"user.a": b"1"})


def files(top: Path) -> dict[str, bytes]:
    return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}


def test_all_of_it_comes_back_with_its_attributes(store: TreeStore, tmp_path: Path) -> None:
    before = sorted(str(path) for path in store.root.rglob("*"))
    assert main(["export", str(store.root), ".", str(tmp_path / "out")]) == 0
    assert files(tmp_path / "out" / "run") == {
        "link": b"top",
        **{f"step-1/{name}": data for name, data in FILES.items()},
    }
    assert os.readlink(tmp_path / "out" / "run" / "latest") == "step-1"
    assert (tmp_path / "out" / "run" / "none").is_dir()
    status = (tmp_path / "out" / "run" / "step-1" / "text").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o640, MTIME)
    assert os.getxattr(tmp_path / "out" / "run" / "step-1" / "text", "user.a") == b"1"
    status = (tmp_path / "out" / "run" / "step-1").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_mtime_ns) == (0o750, MTIME)
    assert os.path.samefile(tmp_path / "out" / "top", tmp_path / "out" / "run" / "link")
    assert sorted(str(path) for path in store.root.rglob("*")) == before, "nothing is written to the archive"


def test_one_file_goes_to_a_name_or_into_a_directory(store: TreeStore, tmp_path: Path) -> None:
    assert main(["export", str(store.root), "run/step-1/checkpoint", str(tmp_path / "c.pt")]) == 0
    (tmp_path / "into").mkdir()
    assert main(["export", str(store.root), "/run/step-1/checkpoint/", str(tmp_path / "into")]) == 0
    for path in (tmp_path / "c.pt", tmp_path / "into" / "checkpoint"):
        assert path.read_bytes() == FILES["checkpoint"]


@pytest.mark.parametrize(
    ("path", "dest", "said"),
    [
        ("nothing", "x", "is not in the archive"),
        ("../x", "x", "no path of a file in the archive"),
        (".tierfs", "x", "no path of a file in the archive"),
        ("top", "source", "nothing is overwritten"),
        ("run", "full", "nothing is overwritten"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    store: TreeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str, dest: str, said: str
) -> None:
    sourced(tmp_path, b"old")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "old").write_bytes(b"old")
    assert main(["export", str(store.root), path, str(tmp_path / dest)]) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "source").read_bytes() == (tmp_path / "full" / "old").read_bytes() == b"old"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", [["ls"], ["export", ".", "out"]])
def test_another_directory_is_no_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    (tmp_path / "plain").mkdir()
    for where in ("plain", "absent"):
        assert main([command[0], str(tmp_path / where), *command[1:]]) == 2
        assert "is no archive of tierfs" in capsys.readouterr().err


def test_a_damaged_file_is_left_out_and_told_and_the_rest_comes_back(
    store: TreeStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not isinstance(store, ChunkedStore):
        pytest.skip("layout tree has no digests beside its files")
    largest = max(chunks(store), key=lambda path: path.stat().st_size)
    largest.unlink()
    assert main(["export", str(store.root), ".", str(tmp_path / "out"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    (failed,) = told["failed"]
    name = failed.split(":")[0]
    assert name in ("run/step-1/long", "run/step-1/zeros")
    assert not (tmp_path / "out" / name).exists()
    assert told["files"] == len(FILES)
    found = files(tmp_path / "out" / "run" / "step-1")
    assert found == {other: data for other, data in FILES.items() if f"run/step-1/{other}" != name}


def test_a_listing_has_the_sizes_of_the_files(
    store: TreeStore, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ls", str(store.root), "--json"]) == 0
    assert [item["path"] for item in json.loads(capsys.readouterr().out)] == ["run", "top"]
    assert main(["ls", str(store.root), "run", "-r", "--json"]) == 0
    found = {item["path"]: item for item in json.loads(capsys.readouterr().out)}
    for name, data in FILES.items():
        assert (found[f"run/step-1/{name}"]["size"], found[f"run/step-1/{name}"]["kind"]) == (len(data), "file")
    assert found["run/latest"]["target"] == "step-1"
    assert found["run/none"]["kind"] == "directory"
    assert main(["ls", str(store.root), "top"]) == 0
    out = capsys.readouterr().out
    assert "top" in out
    assert "-rw-r-----" in out
