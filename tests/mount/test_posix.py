"""POSIX behaviour that training programs and their tools rely on, in both modes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tierfs.testing.mounting import TestMount

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


def renameat2(source: Path, target: Path, flags: int) -> None:
    cwd = -100
    if _libc.renameat2(cwd, os.fsencode(source), cwd, os.fsencode(target), flags) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(source), None, str(target))


def in_child(program: str, *args: object) -> str:
    """What ``program``, run by another process, prints."""
    command = [sys.executable, "-c", program, *map(str, args)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


# links and directories


def test_link_counts_of_directories(here: Path) -> None:
    assert here.stat().st_nlink == 2
    (here / "a").mkdir()
    (here / "b").mkdir()
    (here / "file").touch()
    assert here.stat().st_nlink == 4
    (here / "a").rename(here / "b" / "a")
    assert (here.stat().st_nlink, (here / "b").stat().st_nlink) == (3, 3)
    (here / "b" / "a").rmdir()
    assert (here / "b").stat().st_nlink == 2


def test_hard_links_are_one_file(here: Path) -> None:
    first, second = here / "first", here / "second"
    first.write_bytes(b"one")
    second.hardlink_to(first)
    assert first.stat().st_ino == second.stat().st_ino
    assert first.stat().st_nlink == 2
    with second.open("ab") as file:
        file.write(b" two")
    assert first.read_bytes() == b"one two"
    second.chmod(0o600)
    assert stat.S_IMODE(first.stat().st_mode) == 0o600
    first.unlink()
    assert second.stat().st_nlink == 1
    assert second.read_bytes() == b"one two"


def test_rename_between_links_of_one_file_does_nothing(here: Path) -> None:
    (here / "a").write_bytes(b"x")
    (here / "b").hardlink_to(here / "a")
    (here / "a").rename(here / "b")
    assert sorted(os.listdir(here)) == ["a", "b"]


def test_symlinks(here: Path) -> None:
    (here / "target").write_bytes(b"x")
    link = here / "link"
    link.symlink_to("target")
    assert os.readlink(link) == "target"
    assert link.read_bytes() == b"x"
    assert link.lstat().st_size == len("target")
    (here / "target").unlink()
    assert link.is_symlink()
    assert not link.exists()
    long = here / "long"
    long.symlink_to("d/" * 2000)
    assert os.readlink(long) == "d/" * 2000


def test_not_empty_and_wrong_kinds(here: Path) -> None:
    (here / "d").mkdir()
    (here / "d" / "f").touch()
    (here / "e").mkdir()
    (here / "f").touch()
    for call, code in [
        (lambda: (here / "d").rmdir(), errno.ENOTEMPTY),
        (lambda: (here / "e").rename(here / "d"), errno.ENOTEMPTY),
        (lambda: (here / "f").rename(here / "e"), errno.EISDIR),
        (lambda: (here / "e").rename(here / "f"), errno.ENOTDIR),
        (lambda: (here / "d").rename(here / "d" / "inside"), errno.EINVAL),
        (lambda: (here / "f").rmdir(), errno.ENOTDIR),
        (lambda: (here / "e").mkdir(), errno.EEXIST),
        (lambda: (here / "none").stat(), errno.ENOENT),
        (lambda: os.open(here / "f", os.O_CREAT | os.O_EXCL), errno.EEXIST),
        (lambda: os.stat(here / "f" / "x"), errno.ENOTDIR),
    ]:
        with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught:
            call()
        assert caught.value.errno == code
    (here / "e2").mkdir()
    (here / "e").rename(here / "e2")
    assert sorted(os.listdir(here)) == ["d", "e2", "f"]


# modes, owners, times


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_setgid_directory_gives_its_group(here: Path) -> None:
    shared = here / "shared"
    shared.mkdir()
    os.chown(shared, 0, 4242)
    shared.chmod(0o2775)
    (shared / "file").touch()
    (shared / "sub").mkdir()
    assert (shared / "file").stat().st_gid == 4242
    assert (shared / "sub").stat().st_gid == 4242
    assert (shared / "sub").stat().st_mode & stat.S_ISGID


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_sticky_directory_protects_the_files_of_others(here: Path) -> None:
    here.chmod(0o1777)
    (here / "mine").touch()
    program = """
import os, sys
os.setgroups([]); os.setgid(12345); os.setuid(12345)
try: os.unlink(sys.argv[1] + "/mine")
except PermissionError: print("refused")
open(sys.argv[1] + "/theirs", "w").close(); os.unlink(sys.argv[1] + "/theirs")
"""
    assert in_child(program, here) == "refused"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_write_and_chown_clear_setuid(here: Path) -> None:
    file = here / "file"
    file.write_bytes(b"x")
    file.chmod(0o6755)
    os.chown(file, 4242, 4242)
    assert stat.S_IMODE(file.stat().st_mode) == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("change", ["write", "truncate", "open(O_TRUNC)"])
def test_a_change_by_somebody_else_than_root_clears_setuid(here: Path, change: str) -> None:
    file, kept = here / "file", here / "kept"
    for path in (file, kept):
        path.write_bytes(b"old")
        path.chmod(0o6777)
    program = f"""
import os, sys
os.setgroups([]); os.setgid(12345); os.setuid(12345)
file, kept = sys.argv[1] + "/file", sys.argv[1] + "/kept"
if "{change}" == "write":
    with open(file, "r+b") as out: out.write(b"new")
elif "{change}" == "truncate": os.truncate(file, 1)
else: os.close(os.open(file, os.O_WRONLY | os.O_TRUNC))
os.close(os.open(kept, os.O_RDWR))
"""
    in_child(program, here)
    deadline = time.monotonic() + 10
    while stat.S_IMODE(file.stat().st_mode) != 0o777 and time.monotonic() < deadline:
        time.sleep(0.01)  # the kernel tells of a close in passing, so the mode may follow it by a moment
    assert stat.S_IMODE(file.stat().st_mode) == 0o777
    assert stat.S_IMODE(kept.stat().st_mode) == 0o6777
    with kept.open("r+b") as out:
        out.write(b"by root")
    assert stat.S_IMODE(kept.stat().st_mode) == 0o6777


def test_umask_and_mode_at_create(here: Path) -> None:
    former = os.umask(0o027)
    try:
        os.close(os.open(here / "file", os.O_CREAT | os.O_WRONLY, 0o666))
        (here / "dir").mkdir()
        os.close(os.open(here / "readonly", os.O_CREAT | os.O_WRONLY, 0o400))
    finally:
        os.umask(former)
    modes = {name: stat.S_IMODE((here / name).stat().st_mode) for name in os.listdir(here)}
    assert modes == {"file": 0o640, "dir": 0o750, "readonly": 0o400}


def test_times_have_nanoseconds(here: Path) -> None:
    file = here / "file"
    file.write_bytes(b"x")
    atime, mtime = 1_600_000_000_123_456_789, 1_600_000_001_987_654_321
    os.utime(file, ns=(atime, mtime))
    found = file.stat()
    assert (found.st_atime_ns, found.st_mtime_ns) == (atime, mtime)
    os.utime(file, ns=(1, -1_000_000_001))
    assert file.stat().st_mtime_ns == -1_000_000_001


def test_mtime_set_while_open_survives_close(here: Path) -> None:
    """cp -p, tar and rsync write, set the time and close, in this order."""
    with (here / "file").open("wb") as file:
        file.write(b"x" * 100_000)
        file.flush()
        os.utime(file.fileno(), ns=(5_000_000_007, 5_000_000_007))
    assert (here / "file").stat().st_mtime_ns == 5_000_000_007


def test_times_set_on_a_closed_file_survive_an_open_for_writing(here: Path) -> None:
    """touch -d, then an open for update: only a write moves the time."""
    file, atime, mtime = here / "file", 1_600_000_000_123_456_789, 1_600_000_001_987_654_321
    file.write_bytes(b"x")
    os.utime(file, ns=(atime, mtime))
    with file.open("r+b", buffering=0) as opened:
        found = os.fstat(opened.fileno())
        assert (found.st_atime_ns, found.st_mtime_ns) == (atime, mtime)
    assert (file.stat().st_atime_ns, file.stat().st_mtime_ns) == (atime, mtime)
    with file.open("r+b", buffering=0) as opened:
        opened.write(b"y")
        assert os.fstat(opened.fileno()).st_mtime_ns > mtime
    assert (file.stat().st_atime_ns, file.read_bytes()) == (atime, b"y")
    assert file.stat().st_mtime_ns > mtime


def test_changes_move_the_times(here: Path) -> None:
    os.utime(here, ns=(0, 0))
    (here / "new").touch()
    assert here.stat().st_mtime_ns > 0
    before = (here / "new").stat()
    (here / "new").write_bytes(b"x")
    after = (here / "new").stat()
    assert after.st_mtime_ns > before.st_mtime_ns
    assert after.st_size == 1
    (here / "new").chmod(0o600)
    assert (here / "new").stat().st_ctime_ns >= after.st_ctime_ns


def test_special_files(here: Path) -> None:
    os.mkfifo(here / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as server:
        former = os.getcwd()
        os.chdir(here)
        try:
            server.bind("socket")
        finally:
            os.chdir(former)
    assert stat.S_ISFIFO((here / "fifo").stat().st_mode)
    assert stat.S_ISSOCK((here / "socket").stat().st_mode)
    reader = os.open(here / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(here / "fifo", os.O_WRONLY)
    os.write(writer, b"through")
    assert os.read(reader, 10) == b"through"
    os.close(reader)
    os.close(writer)


# rename


def test_rename_noreplace(here: Path) -> None:
    (here / "a").write_bytes(b"a")
    (here / "b").write_bytes(b"b")
    with pytest.raises(FileExistsError):
        renameat2(here / "a", here / "b", RENAME_NOREPLACE)
    renameat2(here / "a", here / "c", RENAME_NOREPLACE)
    assert (here / "c").read_bytes() == b"a"
    assert (here / "b").read_bytes() == b"b"


def test_rename_exchange(here: Path) -> None:
    (here / "file").write_bytes(b"file")
    (here / "dir").mkdir()
    (here / "dir" / "inside").touch()
    renameat2(here / "file", here / "dir", RENAME_EXCHANGE)
    assert (here / "dir").read_bytes() == b"file"
    assert os.listdir(here / "file") == ["inside"]
    with pytest.raises(FileNotFoundError):
        renameat2(here / "file", here / "none", RENAME_EXCHANGE)


def test_rename_over_an_open_file(here: Path) -> None:
    (here / "old").write_bytes(b"old" * 1000)
    (here / "new").write_bytes(b"new")
    with (here / "old").open("r+b") as former:
        (here / "new").rename(here / "old")
        assert (here / "old").read_bytes() == b"new"
        assert former.read() == b"old" * 1000
        former.write(b"more")
        former.flush()
        assert os.fstat(former.fileno()).st_size == 3004
        assert os.fstat(former.fileno()).st_nlink == 0
    assert (here / "old").read_bytes() == b"new"


def test_rename_of_a_directory_with_open_files(here: Path) -> None:
    (here / "tmp").mkdir()
    with (here / "tmp" / "file").open("wb") as file:
        file.write(b"first ")
        file.flush()
        (here / "tmp").rename(here / "final")
        file.write(b"second")
    assert (here / "final" / "file").read_bytes() == b"first second"
    assert not (here / "tmp").exists()


# open files


def test_unlinked_open_file_lives_until_close(here: Path) -> None:
    with (here / "file").open("w+b") as file:
        file.write(b"a" * 10_000)
        file.flush()
        (here / "file").unlink()
        assert os.listdir(here) == []
        file.write(b"b" * 10_000)
        file.seek(0)
        assert file.read() == b"a" * 10_000 + b"b" * 10_000
        os.fchmod(file.fileno(), 0o600)
        found = os.fstat(file.fileno())
        assert (found.st_nlink, found.st_size, stat.S_IMODE(found.st_mode)) == (0, 20_000, 0o600)


def test_append_always_writes_at_the_end(here: Path) -> None:
    first = os.open(here / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    second = os.open(here / "log", os.O_WRONLY | os.O_APPEND)
    for number in range(200):
        os.write(first if number % 2 else second, b"%03d\n" % number)
    os.lseek(first, 0, os.SEEK_SET)
    os.write(first, b"end\n")
    os.close(first)
    os.close(second)
    assert (here / "log").read_bytes() == b"".join(b"%03d\n" % n for n in range(200)) + b"end\n"


def test_truncating_open(here: Path) -> None:
    (here / "file").write_bytes(b"x" * 100_000)
    with (here / "file").open("rb") as reader:
        assert len(reader.read(10)) == 10
        os.close(os.open(here / "file", os.O_WRONLY | os.O_TRUNC))
        assert os.fstat(reader.fileno()).st_size == 0
    assert (here / "file").read_bytes() == b""


def test_truncate_down_and_up_reads_zeros(here: Path) -> None:
    path = here / "file"
    with path.open("w+b") as file:
        file.write(b"x" * 10_000)
        file.flush()
        os.ftruncate(file.fileno(), 5_000)
        os.ftruncate(file.fileno(), 20_000)
        assert os.fstat(file.fileno()).st_size == 20_000
    assert path.read_bytes() == b"x" * 5_000 + bytes(15_000)
    os.truncate(path, 3)
    assert path.read_bytes() == b"xxx"
    os.truncate(path, 6)
    assert path.read_bytes() == b"xxx" + bytes(3)


def test_no_file_grows_beyond_the_limit_of_its_writer(here: Path) -> None:
    script = """
import errno, os, resource, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGXFSZ])
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
assert os.write(fd, bytes(150_000)) == 100_000
for beyond in (lambda: os.write(fd, b"x"), lambda: os.ftruncate(fd, 100_001)):
    try:
        beyond()
    except OSError as error:
        assert error.errno == errno.EFBIG, error
    else:
        raise AssertionError("went beyond")
    assert signal.sigtimedwait([signal.SIGXFSZ], 0), "no signal"
assert os.fstat(fd).st_size == 100_000
os.ftruncate(fd, 5)
assert os.pwrite(fd, b"x", 99_999) == 1
"""
    subprocess.run([sys.executable, "-c", script, here / "file"], check=True)
    assert (here / "file").read_bytes() == bytes(99_999) + b"x"


def test_read_only_and_write_only_descriptors(here: Path) -> None:
    (here / "file").write_bytes(b"x")
    reader, writer = os.open(here / "file", os.O_RDONLY), os.open(here / "file", os.O_WRONLY)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.write(reader, b"y")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.read(writer, 1)
    os.close(reader)
    os.close(writer)


def test_direct_io_of_the_caller(here: Path) -> None:
    fd = os.open(here / "file", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o644)
    with mmap.mmap(-1, 1 << 20) as buffer:
        buffer.write(os.urandom(1 << 20))
        assert os.pwrite(fd, buffer, 0) == 1 << 20
        os.close(fd)
        assert (here / "file").read_bytes() == bytes(buffer)


def test_stat_is_right_at_once_after_close(here: Path) -> None:
    for size in (0, 1, 4095, 4096, 1 << 20, (1 << 20) + 1):
        (here / "file").write_bytes(b"x" * size)
        assert (here / "file").stat().st_size == size


def test_sparse_file_beyond_4_gib(here: Path) -> None:
    path, end = here / "sparse", 5 << 30
    try:
        with path.open("w+b") as file:
            os.pwrite(file.fileno(), b"start", 0)
            os.pwrite(file.fileno(), b"end", end)
            assert os.pread(file.fileno(), 3, end) == b"end"
            assert os.pread(file.fileno(), 8, 3 << 30) == bytes(8)
            assert os.fstat(file.fileno()).st_size == end + 3
            assert os.fstat(file.fileno()).st_blocks * 512 < 1 << 30
    finally:
        path.unlink()


# extended attributes and names


def test_xattrs(here: Path) -> None:
    path = here / "file"
    path.touch()
    os.setxattr(path, "user.a", b"1")
    os.setxattr(path, "user.binary", bytes(range(256)))
    os.setxattr(path, "user.empty", b"")
    assert os.getxattr(path, "user.binary") == bytes(range(256))
    assert os.getxattr(path, "user.empty") == b""
    assert {"user.a", "user.binary", "user.empty"} <= set(os.listxattr(path))
    with pytest.raises(FileExistsError):
        os.setxattr(path, "user.a", b"2", os.XATTR_CREATE)
    with pytest.raises(OSError, match="No data available"):
        os.setxattr(path, "user.none", b"2", os.XATTR_REPLACE)
    os.setxattr(path, "user.a", b"2", os.XATTR_REPLACE)
    path.rename(here / "renamed")
    assert os.getxattr(here / "renamed", "user.a") == b"2"
    os.removexattr(here / "renamed", "user.a")
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(here / "renamed", "user.a")
    os.setxattr(here, "user.of-a-directory", b"x")
    assert os.getxattr(here, "user.of-a-directory") == b"x"


@pytest.mark.parametrize(
    "name",
    [
        b"n" * 255,
        "é".encode() * 127,
        b"\xff\xfe not utf-8",
        b" leading and trailing ",
        b"new\nline",
        b"-rf",
        b'a\\b:*?"<>|',
    ],
    ids=["255", "255-utf8", "not-utf8", "spaces", "newline", "dash", "punctuation"],
)
def test_names(here: Path, name: bytes) -> None:
    directory = os.fsencode(here)
    path = directory + b"/" + name
    with open(path, "wb") as file:
        file.write(b"content")
    assert os.listdir(directory) == [name]
    os.rename(path, directory + b"/x")
    os.mkdir(path)
    os.rename(directory + b"/x", path + b"/" + name)
    with open(path + b"/" + name, "rb") as file:
        assert file.read() == b"content"


def test_names_over_255_bytes_are_refused(here: Path) -> None:
    for call in (lambda: (here / ("n" * 256)).touch(), lambda: (here / ("n" * 256)).mkdir()):
        with pytest.raises(OSError, match="File name too long"):
            call()


def test_names_differ_in_case(here: Path) -> None:
    (here / "Model.pt").write_bytes(b"1")
    (here / "model.pt").write_bytes(b"2")
    assert sorted(os.listdir(here)) == ["Model.pt", "model.pt"]


@pytest.mark.slow
def test_thousands_of_entries_listed_while_they_change(here: Path) -> None:
    """An entry that is there all the time is listed exactly once, whatever happens to the others."""
    stay = {f"stay-{n:05}" for n in range(2_000)}
    for name in stay:
        os.mknod(here / name)
    for n in range(2_000):
        os.mknod(here / f"go-{n:05}")
    done = threading.Event()

    def change() -> None:
        for n in range(2_000):
            if done.is_set():
                return
            if n % 2:
                os.unlink(here / f"go-{n:05}")
            else:
                os.rename(here / f"go-{n:05}", here / f"gone-{n:05}")
            if n % 5 == 0:
                os.mknod(here / f"come-{n:05}")

    changer = threading.Thread(target=change)
    changer.start()
    try:
        for _ in range(3):
            with os.scandir(here) as entries:
                names = [entry.name for entry in entries]
            assert len([name for name in names if name.startswith("stay")]) == len(stay)
            assert stay <= set(names)
    finally:
        done.set()
        changer.join()


# mappings


def test_shared_mapping_is_the_file(here: Path) -> None:
    path = here / "file"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapping:
        mapping[1000:1005] = b"hello"
        mapping.flush()
        assert os.pread(file.fileno(), 5, 1000) == b"hello"
        os.pwrite(file.fileno(), b"world", 500_000)
        assert mapping[500_000:500_005] == b"world"
    assert path.read_bytes()[1000:1005] == b"hello"


def test_mapping_outlives_descriptor_and_name(here: Path) -> None:
    path = here / "file"
    path.write_bytes(b"x" * 100_000)
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    path.unlink()
    assert mapping[99_990:] == b"x" * 10
    mapping.close()


def test_private_mapping_leaves_the_file_alone(here: Path) -> None:
    path = here / "file"
    path.write_bytes(b"x" * 8192)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapping:
        mapping[:5] = b"other"
        assert mapping[:6] == b"otherx"
    assert path.read_bytes() == b"x" * 8192


# locks


def test_flock_excludes_other_processes(here: Path) -> None:
    program = """
import fcntl, sys
with open(sys.argv[1]) as file:
    try: fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB); print("got")
    except BlockingIOError: print("busy")
"""
    with (here / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert in_child(program, here / "lock") == "busy"
        fcntl.flock(file, fcntl.LOCK_UN)
        assert in_child(program, here / "lock") == "got"
    assert in_child(program, here / "lock") == "got"


def test_record_locks_exclude_only_their_range(here: Path) -> None:
    program = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    for start in (0, 100):
        try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, start); print("got", end=" ")
        except OSError: print("busy", end=" ")
"""
    (here / "lock").write_bytes(b"x")
    with (here / "lock").open("r+") as file:
        fcntl.lockf(file, fcntl.LOCK_EX, 10, 0)
        assert in_child(program, here / "lock") == "busy got"
    assert in_child(program, here / "lock") == "got got"


def test_statfs(here: Path, shared_mnt: TestMount) -> None:
    found = os.statvfs(here)
    assert found.f_bsize >= 512
    assert found.f_blocks >= found.f_bfree >= found.f_bavail > 0
    assert found.f_namemax == 255
    assert os.path.ismount(shared_mnt.path)


def test_writes_and_reads_pass_the_daemon_by(here: Path, shared_mnt: TestMount) -> None:
    """With passthrough no write asks the daemon anything, not even for ``security.capability``."""
    if shared_mnt.mode != "passthrough":
        pytest.skip("only with passthrough")
    status = Path(f"/proc/{shared_mnt.daemon_pid()}/status")

    def wakeups() -> int:
        lines = [line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt_switches")]
        return int(lines[0].split()[1])

    with (here / "file").open("w+b", buffering=0) as file:
        file.write(b"x")
        before = wakeups()
        for number in range(2000):
            os.pwrite(file.fileno(), b"x", number)
            os.pread(file.fileno(), 1, number)
        assert wakeups() - before < 400
