"""Ordinary programs on a mount, each checking its own work."""

from __future__ import annotations

import filecmp
import os
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from . import stressors


def run(*command: object, cwd: Path | None = None, timeout: float = 60) -> str:
    program = str(command[0])
    if shutil.which(program) is None:
        pytest.skip(f"needs {program}")
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
        env={**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"},
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree with what archivers must keep: modes, times, links, holes, odd names."""
    top = tmp_path_factory.mktemp("source") / "tree"
    (top / "a" / "b").mkdir(parents=True)
    for number in range(200):
        (top / "a" / f"{number}.txt").write_bytes(os.urandom(number * 37))
    (top / "a" / "b" / "big").write_bytes(os.urandom(6 << 20))
    (top / "a" / "b" / "linked").hardlink_to(top / "a" / "b" / "big")
    (top / "symlink").symlink_to("a/b/big")
    (top / "name with ü and spaces").write_bytes(b"x")
    with (top / "sparse").open("wb") as file:
        file.seek(8 << 20)
        file.write(b"end")
    (top / "a" / "0.txt").chmod(0o400)
    (top / "a" / "1.txt").chmod(0o755)
    os.utime(top / "a" / "1.txt", ns=(1_500_000_000_123_456_789, 1_500_000_000_123_456_789))
    os.utime(top / "a", (1_400_000_000, 1_400_000_000))
    return top


def same_tree(first: Path, second: Path) -> None:
    def names(top: Path) -> list[Path]:
        return sorted(path.relative_to(top) for path in top.rglob("*"))

    assert names(first) == names(second)
    for name in names(first):
        one, two = (first / name).lstat(), (second / name).lstat()
        assert one.st_mode == two.st_mode, name
        if (first / name).is_file() and not (first / name).is_symlink():
            assert one.st_mtime_ns == two.st_mtime_ns, name
        if (first / name).is_file():
            assert filecmp.cmp(first / name, second / name, shallow=False), name


def test_rsync(here: Path, source: Path) -> None:
    for _ in range(2):  # rsync itself leaves the time of a directory with hard links to the second run
        run("rsync", "-aHX", f"{source}/", here / "copy/")
    same_tree(source, here / "copy")
    assert (here / "copy/a/b/big").samefile(here / "copy/a/b/linked")
    changes = run("rsync", "-aHi", f"{source}/", here / "copy/")
    assert changes.strip() == "", "a second rsync finds something to do"
    assert run("rsync", "-aHic", "--delete", f"{source}/", here / "copy/").strip() == ""


def test_tar(here: Path, source: Path) -> None:
    run("tar", "-C", source, "--format=posix", "-cf", here / "tree.tar", ".")
    (here / "out").mkdir()
    run("tar", "-C", here / "out", "-xpf", here / "tree.tar")
    same_tree(source, here / "out")
    run("tar", "-C", here / "out", "--compare", "-f", here / "tree.tar")


def test_cp(here: Path, source: Path) -> None:
    run("cp", "-a", source, here / "copy")
    same_tree(source, here / "copy")
    run("cp", "--sparse=always", here / "copy/sparse", here / "sparse")
    assert (here / "sparse").stat().st_blocks * 512 <= 1 << 20
    run("cp", "--reflink=auto", here / "sparse", here / "again")
    assert filecmp.cmp(here / "again", source / "sparse", shallow=False)


@pytest.mark.slow
def test_git(here: Path, tmp_path: Path) -> None:
    def git(*args: object, cwd: Path) -> str:
        who = ["-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "gc.auto=0", "-c", "safe.directory=*"]
        return run("git", *who, *args, cwd=cwd)

    origin = tmp_path / "origin"
    origin.mkdir()
    git("init", "-q", "-b", "main", cwd=origin)
    for number in range(10):
        for file in range(20):
            (origin / f"{file}.txt").write_text(f"{number} {file}\n" * 200)
        git("add", ".", cwd=origin)
        git("commit", "-qm", str(number), cwd=origin)
    git("clone", "-q", "--no-hardlinks", origin, here / "clone", cwd=here)
    clone = here / "clone"
    git("checkout", "-q", "-b", "branch", cwd=clone)
    (clone / "0.txt").write_text("changed\n")
    git("commit", "-qam", "change", cwd=clone)
    git("rebase", "-q", "--force-rebase", "HEAD~3", cwd=clone)
    git("gc", "-q", "--prune=now", cwd=clone)
    git("fsck", "--full", "--strict", cwd=clone)
    assert git("status", "--porcelain", cwd=clone) == ""


WRITER = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
for number in range(100):
    db.execute("BEGIN IMMEDIATE")
    (count,) = db.execute("SELECT count(*) FROM t").fetchone()
    db.execute("INSERT INTO t(who, before, data) VALUES (?, ?, zeroblob(3000))", (sys.argv[2], count))
    db.execute("ROLLBACK" if number % 10 == 9 else "COMMIT")
"""


@pytest.mark.parametrize("journal", ["wal", "delete", "truncate", "persist"])
def test_sqlite(here: Path, journal: str) -> None:
    """Two processes write in turns, which locks and (in mode wal) a shared mapping keep apart; a third one reads."""
    path = here / "db"
    with closing(sqlite3.connect(path, isolation_level=None, timeout=60)) as db:
        assert db.execute(f"PRAGMA journal_mode={journal}").fetchone() == (journal,)
        db.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, who TEXT, before INTEGER, data BLOB)")
        writers = [subprocess.Popen([sys.executable, "-c", WRITER, path, str(number)]) for number in range(2)]
        last = 0
        while any(writer.poll() is None for writer in writers):
            (count,) = db.execute("SELECT count(*) FROM t").fetchone()
            assert count >= last
            last = count
            time.sleep(0.01)
        assert [writer.returncode for writer in writers] == [0, 0]
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    with closing(sqlite3.connect(path)) as db:
        rows = db.execute("SELECT before, length(data) FROM t ORDER BY id").fetchall()
    assert rows == [(number, 3000) for number in range(180)]
    assert run("sqlite3", path, "PRAGMA quick_check; SELECT count(*) FROM t").split() == ["ok", "180"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["psync", "mmap", "libaio"])
def test_fio_reads_what_it_wrote(here: Path, engine: str) -> None:
    direct = ["--direct=1"] if engine == "libaio" else []
    run(
        "fio",
        "--name=verify",
        f"--directory={here}",
        f"--ioengine={engine}",
        *direct,
        "--rw=randwrite",
        "--bsrange=4k-256k",
        "--blockalign=4k",
        "--size=48m",
        "--numjobs=2",
        "--iodepth=8",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--do_verify=1",
        "--randseed=20",
        timeout=90,
    )


@pytest.mark.slow
@pytest.mark.parametrize("group", stressors.GROUPS)
def test_stress_ng(here: Path, group: str) -> None:
    command = stressors.command(stressors.GROUPS[group], here)
    if shutil.which("stress-ng") is None:
        pytest.skip("needs stress-ng")
    for _ in range(2):
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90
        )
        if done.returncode not in stressors.AGAIN:  # those say nothing of the filesystem
            break
    assert done.returncode == 0, (done.returncode, stressors.complaints(done.stdout), done.stdout[-1000:])
    assert os.listdir(here) == []
