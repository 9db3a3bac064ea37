"""What every store of blobs must do, as tests: subclass the contract and give it the fixtures ``blobs``, empty, and
``other``, another handle of the same store as a second process would have.

Run against several servers, so that no quirk of one is relied upon.
"""

from __future__ import annotations

import errno
import mmap
import random
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tierfs.errors import NoSuchBlob, TierError
from tierfs.tiers.blobs import Blobs, escape, unescape

MIB = 1 << 20
PART = 5 * MIB
STRANGE = [
    "a b",
    "a+b",
    "a%b",
    "a%20b",
    "a%2Fb",
    "ümläut/日本",
    "e\u0301",
    "q?x=1&y=2#z",
    "'\"<&>;:@$=,!*()[]{}|^~`",
    "~",
    ".hidden/..x/x..",
    "-",
    "trailing ",
    " leading",
    "UPPER/upper",
    "a" * 250 + "/" + "b" * 250,
    "/".join("deep" for _ in range(60)),
]
NO_KEYS = [
    "",
    "/",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/..",
    "../a",
    "a/./b",
    "a\0",
    "a\nb",
    "\udc80",
    "a\x7f",
    "a\\b",
    ".tierfs/x",
]


@pytest.fixture
def mapped() -> Iterator[memoryview]:
    """12 MiB that cannot be told from one another by chance."""
    with mmap.mmap(-1, 12 * MIB) as memory:
        memory[:] = random.Random(1).randbytes(len(memory))
        view = memoryview(memory)
        yield view
        view.release()


class BlobsContract:
    def test_written_is_there_whole_and_at_once(self, blobs: Blobs, other: Blobs) -> None:
        blobs.put("a/b", b"one")
        assert bytes(other.get("a/b")) == b"one"
        blobs.put("a/b", [b"tw", bytearray(b"o"), memoryview(b"!")])
        found = other.head("a/b")
        assert found is not None
        assert (bytes(other.get("a/b")), found.key, found.size) == (b"two!", "a/b", 4)
        blobs.put("empty", b"")
        assert bytes(blobs.get("empty")) == b""

    def test_etag_and_time_tell_contents_apart(self, blobs: Blobs) -> None:
        seen = []
        for data in (b"1", b"22"):
            etag = blobs.put("a", data)
            found = blobs.head("a")
            assert found is not None
            assert etag is None or found.etag is None or found.etag.strip('"') == etag.strip('"')
            seen.append(found)
        assert seen[0].etag != seen[1].etag or seen[0].etag is None
        assert 0 < seen[0].modified_ns <= seen[1].modified_ns

    def test_what_is_not_there(self, blobs: Blobs) -> None:
        assert blobs.head("a") is None
        blobs.put("a/b", b"x")
        assert (blobs.head("a"), blobs.head("a/b/c"), blobs.head("a/bc")) == (None, None, None)
        for call in (
            lambda: blobs.get("a"),
            lambda: blobs.get_range("a", 0, 1),
            lambda: blobs.get_ranges("a", [(0, 1)]),
            lambda: blobs.copy("a", "c"),
        ):
            with pytest.raises(NoSuchBlob) as missing:
                call()
            assert (missing.value.errno, missing.value.temporary) == (errno.ENOENT, False)
        blobs.delete(["b", "a/c", "nowhere/at/all"])
        assert [blob.key for blob in blobs.scan()] == ["a/b"]

    def test_ranges_are_exact(self, blobs: Blobs, mapped: memoryview) -> None:
        blobs.put("a", mapped)
        for start, length in ((0, 1), (0, 12 * MIB), (MIB + 1, 3 * MIB + 7), (12 * MIB - 1, 1), (5, 0)):
            assert blobs.get_range("a", start, length) == mapped[start : start + length]
        wanted = [(9 * MIB, 10), (0, 5), (7, 0), (9 * MIB + 11, 4 * 1024), (5 * MIB, MIB), (0, 5)]
        assert blobs.get_ranges("a", wanted) == [mapped[start : start + length] for start, length in wanted]

    @pytest.mark.parametrize(("start", "length"), [(0, 5), (3, 2), (4, 1), (9, 1)])
    def test_a_range_that_is_not_there_is_an_error(self, blobs: Blobs, start: int, length: int) -> None:
        blobs.put("a", b"1234")
        with pytest.raises(TierError):
            blobs.get_range("a", start, length)
        with pytest.raises(TierError):
            blobs.get_ranges("a", [(0, 1), (start, length)])

    @pytest.mark.parametrize("key", STRANGE)
    def test_every_key_is_its_own(self, blobs: Blobs, other: Blobs, key: str) -> None:
        blobs.put(key, key.encode())
        blobs.put("z", b"another")
        assert bytes(other.get(key)) == key.encode()
        assert {blob.key for blob in other.scan()} == {key, "z"}
        blobs.copy(key, key + ".copy")
        blobs.delete([key])
        assert {blob.key for blob in other.scan()} == {key + ".copy", "z"}
        assert bytes(other.get(key + ".copy")) == key.encode()
        blobs.delete([key + ".copy"])
        assert [blob.key for blob in other.scan()] == ["z"]

    def test_every_name_has_a_key(self, blobs: Blobs) -> None:
        names = [bytes([byte]) for byte in range(1, 256) if byte != ord("/")]
        names += [b"..", b"%41", b"\xff\xfe", "ü".encode(), "\x85".encode(), "\uffff".encode(), b"a\nb"]
        keys = [escape(name) for name in names]
        assert len(set(keys)) == len(names)
        assert [unescape(key) for key in keys] == names
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: blobs.put(f"n/{key}", key.encode()), keys))
        assert {blob.key for blob in blobs.scan("n/")} == {f"n/{key}" for key in keys}
        blobs.delete(f"n/{key}" for key in keys)
        assert list(blobs.scan()) == []

    @pytest.mark.parametrize("key", [*NO_KEYS, "k" * 1025])
    def test_what_is_no_key_goes_nowhere(self, blobs: Blobs, key: str) -> None:
        blobs.put("a", b"x")
        calls: list[Any] = [
            lambda: blobs.put(key, b""),
            lambda: blobs.put_if_absent(key, b""),
            lambda: blobs.head(key),
            lambda: blobs.get(key),
            lambda: blobs.get_range(key, 0, 1),
            lambda: blobs.get_ranges(key, [(0, 1)]),
            lambda: blobs.copy("a", key),
            lambda: blobs.copy(key, "a"),
            lambda: blobs.delete(["a", key]) if blobs.head("a") is None else blobs.delete([key]),
            lambda: blobs.begin(key),
        ]
        for call in calls:
            with pytest.raises(TierError) as refused:
                call()
            assert refused.value.errno in (errno.EINVAL, errno.ENAMETOOLONG)
            assert not refused.value.temporary
        assert [blob.key for blob in blobs.scan()] == ["a"]

    def test_what_is_kept_apart_is_listed_only_there(self, blobs: Blobs) -> None:
        blobs.put(".tierfs/kept/x/y", b"1")
        blobs.put("a", b"2")
        assert [blob.key for blob in blobs.scan()] == ["a"]
        assert (blobs.children().prefixes, [blob.key for blob in blobs.children().blobs]) == ([], ["a"])
        assert [blob.key for blob in blobs.scan(".tierfs/kept/")] == [".tierfs/kept/x/y"]
        assert blobs.children(".tierfs/kept/").prefixes == [".tierfs/kept/x/"]
        blobs.delete([".tierfs/kept/x/y"])

    def test_listed_by_prefix(self, blobs: Blobs) -> None:
        keys = ["a", "b-/x", "b/1", "b/2/3", "b/2/4", "b/2.5", "bc"]
        for key in keys:
            blobs.put(key, key.encode())
        assert {blob.key: blob.size for blob in blobs.scan()} == {key: len(key) for key in keys}
        assert {blob.key for blob in blobs.scan("b/")} == {"b/1", "b/2/3", "b/2/4", "b/2.5"}
        assert list(blobs.scan("b/2/3/")) == list(blobs.scan("x/")) == []
        found = blobs.children()
        assert (found.prefixes, [blob.key for blob in found.blobs]) == (["b-/", "b/"], ["a", "bc"])
        found = blobs.children("b/")
        assert (found.prefixes, [(blob.key, blob.size) for blob in found.blobs]) == (
            ["b/2/"],
            [("b/1", 3), ("b/2.5", 5)],
        )
        assert blobs.children("x/") == blobs.children("a/") == type(found)([], [])
        for prefix in ("b", "/", "../", "b//"):
            with pytest.raises(TierError):
                list(blobs.scan(prefix))
            with pytest.raises(TierError):
                blobs.children(prefix)

    def test_more_than_a_page_is_listed_and_removed(self, blobs: Blobs) -> None:
        keys = [f"d{number % 7}/{number:05d}" for number in range(1203)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda key: blobs.put(key, b"x"), keys))
        found = [blob.key for blob in blobs.scan()]
        assert len(found) == len(set(found))
        assert set(found) == set(keys)
        blobs.delete(iter(keys[:1100]))
        assert {blob.key for blob in blobs.scan()} == set(keys[1100:])
        blobs.delete(keys)
        assert list(blobs.scan()) == []
        assert blobs.children().blobs == []

    def test_created_once(self, blobs: Blobs, other: Blobs) -> None:
        assert blobs.put_if_absent("a", b"1")
        assert not other.put_if_absent("a", b"2")
        assert bytes(blobs.get("a")) == b"1"
        blobs.delete(["a"])
        assert other.put_if_absent("a", [b"3", b"4"])
        assert bytes(blobs.get("a")) == b"34"

    def test_of_many_creators_one_succeeds_where_the_store_can_see_to_it(self, blobs: Blobs, other: Blobs) -> None:
        blobs.probe()
        other.probe()
        assert blobs.atomic_create == other.atomic_create
        for number in range(8):
            together = threading.Barrier(6)

            def create(who: int, key: str = f"k{number}", together: threading.Barrier = together) -> bool:
                together.wait()
                return (blobs, other)[who % 2].put_if_absent(key, b"%d" % who)

            with ThreadPoolExecutor(6) as pool:
                wrote = list(pool.map(create, range(6)))
            assert any(wrote)
            if blobs.atomic_create:
                assert wrote.count(True) == 1
                assert bytes(blobs.get(f"k{number}")) == b"%d" % wrote.index(True)

    def test_copied_over_what_was_there(self, blobs: Blobs, mapped: memoryview) -> None:
        blobs.put("a", mapped)
        blobs.put("x/b", b"old")
        blobs.copy("a", "x/b")
        assert blobs.get("x/b") == blobs.get("a") == mapped
        blobs.put("a", b"new")
        assert blobs.get("x/b") == mapped

    def test_readers_see_one_content_or_the_other(self, blobs: Blobs, other: Blobs) -> None:
        contents = [bytes([number]) * (200_000 + number) for number in range(6)]
        blobs.put("a", contents[0])
        done = threading.Event()

        def write() -> None:
            for _ in range(4):
                for data in contents:
                    blobs.put("a", data)
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        while not done.is_set():
            assert bytes(other.get("a")) in contents
        writer.join()

    # uploads in parts

    def test_parts_in_parallel_become_one_blob(self, blobs: Blobs, other: Blobs, mapped: memoryview) -> None:
        blobs.put("a", b"old")
        upload = blobs.begin("a", PART)
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda number: upload.part(number, mapped[number * PART : (number + 1) * PART]), range(3)))
            assert bytes(other.get("a")) == b"old", "visible only when complete"
        upload.complete()
        upload.abort()
        assert other.get("a") == mapped
        found = other.head("a")
        assert found is not None
        assert found.size == len(mapped)

    def test_parts_may_come_in_another_order(self, blobs: Blobs, mapped: memoryview) -> None:
        upload = blobs.begin("a", PART)
        threads = [
            threading.Thread(target=upload.part, args=(number, mapped[number * PART : (number + 1) * PART]))
            for number in (2, 1, 0)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        upload.complete()
        assert blobs.get("a") == mapped

    @pytest.mark.parametrize("sizes", [[], [0], [1], [PART], [PART, 1], [PART, PART, 0]])
    def test_uploads_of_every_shape(self, blobs: Blobs, mapped: memoryview, sizes: list[int]) -> None:
        upload = blobs.begin("a", PART)
        for number, size in enumerate(sizes):
            upload.part(number, mapped[number * PART : number * PART + size])
        upload.complete()
        assert blobs.get("a") == mapped[: sum(sizes)]

    def test_an_aborted_upload_leaves_nothing(self, blobs: Blobs, mapped: memoryview) -> None:
        for parts in range(3):
            upload = blobs.begin("a", PART)
            for number in range(parts):
                upload.part(number, mapped[:PART])
            upload.abort()
            upload.abort()
            with pytest.raises(TierError):
                upload.complete()
        assert list(blobs.scan()) == []

    def test_a_buffer_is_free_once_its_part_returns(self, blobs: Blobs) -> None:
        upload = blobs.begin("a", PART)
        for number in range(3):
            memory = mmap.mmap(-1, PART)
            memory.write(bytes([number]) * PART)
            upload.part(number, memory)
            memory.close()  # BufferError while anybody refers to it
        upload.complete()
        memory = mmap.mmap(-1, PART)
        blobs.put("b", memory)
        assert blobs.put_if_absent("c", memory)
        memory.close()
        assert [blobs.get_range("a", number * PART, 1) for number in range(3)] == [b"\0", b"\1", b"\2"]

    def test_uploads_beside_each_other(self, blobs: Blobs, mapped: memoryview) -> None:
        uploads = [blobs.begin(f"k{number}", PART) for number in range(4)]
        with ThreadPoolExecutor(8) as pool:
            for part in range(2):
                list(pool.map(lambda upload, part=part: upload.part(part, mapped[part * PART :][:PART]), uploads))
        uploads[0].abort()
        for upload in uploads[1:]:
            upload.complete()
        assert {blob.key for blob in blobs.scan()} == {"k1", "k2", "k3"}
        for number in range(1, 4):
            assert blobs.get(f"k{number}") == mapped[: 2 * PART]

    def test_a_part_that_does_not_fit_is_refused(self, blobs: Blobs, mapped: memoryview) -> None:
        upload = blobs.begin("a", PART)
        with pytest.raises(TierError):
            upload.part(0, mapped[: PART + 1])
        upload.part(0, mapped[:PART])
        upload.abort()

    # the rest

    def test_probe_leaves_nothing(self, blobs: Blobs, other: Blobs) -> None:
        blobs.probe()
        assert list(other.scan()) == []
        assert other.children().blobs == []

    def test_space(self, blobs: Blobs) -> None:
        usage = blobs.usage(5)
        assert usage.used == 5
        assert 0 <= usage.available <= usage.capacity

    def test_uploads_that_no_process_goes_on_with_are_discarded(
        self, blobs: Blobs, other: Blobs, mapped: memoryview
    ) -> None:
        left, own = other.begin("a/b ü", PART), blobs.begin("c", PART)
        for upload in (left, own):
            upload.part(0, mapped[:PART])
        assert blobs.abort_stale(-60) == 1
        assert blobs.abort_stale(-60) == 0
        with pytest.raises(TierError):
            left.complete()
        left.abort()
        own.complete()
        assert [blob.key for blob in blobs.scan()] == ["c"]

    def test_reference_counts_stay(self, blobs: Blobs) -> None:
        data = bytes(100_000)
        blobs.put("a", data)
        before = sys.getrefcount(data)
        for _ in range(20):
            blobs.put("a", data)
        assert sys.getrefcount(data) == before
