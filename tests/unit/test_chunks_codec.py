"""Codecs: lossless for all input, smaller where that pays, an error of ours for whatever is not what they wrote."""

from __future__ import annotations

import errno
import mmap
import os
import random
import struct
import sys
import threading
import tracemalloc
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tierfs.chunks import blosc, planes
from tierfs.chunks.codec import WIDEST, Codec, Encoded, decode, decode_into, encode
from tierfs.chunks.manifest import CHUNK_LIMIT
from tierfs.errors import ChunkDamaged

MIB = 1 << 20
ALL = pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.label)
PACKED = pytest.mark.parametrize("codec", list(Codec)[1:], ids=lambda codec: codec.label)


def weights(size: int, seed: int = 0) -> bytes:
    """bf16 numbers as a layer's weights are: normally distributed around zero."""
    numbers = np.random.default_rng(seed).normal(0, 0.02, size // 2 + 1).astype(np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()[:size]


def trained(before: bytes, seed: int = 1) -> bytes:
    """The same weights a few steps later: most numbers differ in their last bits."""
    numbers = np.frombuffer(before, np.uint16)
    return (numbers + np.random.default_rng(seed).integers(-2, 3, len(numbers)).astype(np.uint16)).tobytes()


def text(size: int) -> bytes:
    words = b" ".join(random.Random(0).choices([b"weight", b"bias", b"layer.12", b"0.5", b"\n"], k=100_000))
    return (words * (size // len(words) + 1))[:size]


def noise(size: int) -> bytes:
    return random.Random(1).randbytes(size)


KINDS: dict[str, Callable[[int], bytes]] = {"weights": weights, "text": text, "noise": noise, "zeros": bytes}


def there_and_back(codec: Codec, data: bytes, item: int, base: bytes | None = None) -> Encoded:
    encoded = encode(codec, data, item, base)
    assert bytes(decode(encoded.codec, encoded.payload, len(data), item, base)) == data
    place = bytearray(os.urandom(len(data)))
    decode_into(encoded.codec, encoded.payload, place, item, base)
    assert place == data
    assert encoded.payload.nbytes <= len(data), "never more than the data itself"
    return encoded


@ALL
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_bytes_come_back(codec: Codec, data: st.DataObject) -> None:
    piece = data.draw(st.binary(max_size=300))
    original = (piece * data.draw(st.integers(1, 40)))[data.draw(st.integers(0, 7)) :]
    item = data.draw(st.integers(1, WIDEST))
    base = data.draw(st.none() | st.just(original[::-1]) | st.just(bytes(len(original))) | st.binary(max_size=50))
    there_and_back(codec, original, item, base)


@PACKED
@pytest.mark.parametrize("item", [1, 2, 7, 8])
def test_lengths_around_items_blocks_and_samples_come_back(codec: Codec, item: int) -> None:
    edges = [1, 128, blosc.BLOCK, 2 * planes.SAMPLE, 2 * planes.SAMPLE * item]
    longest = weights(max(edges) + 10)
    base = trained(longest)
    for length in {edge + more for edge in edges for more in (-1, 0, 1, item)}:
        there_and_back(codec, longest[:length], item, base[:length])


@pytest.mark.parametrize(
    ("codec", "kind", "item", "most"),
    [
        (Codec.LZ4, "text", 1, 0.5),
        (Codec.BITSHUFFLE_LZ4, "weights", 2, 0.8),
        (Codec.SHUFFLE_ZSTD, "weights", 2, 0.7),
        (Codec.SHUFFLE_ZSTD, "text", 1, 0.3),
        (Codec.LZ4, "zeros", 2, 0.01),
        (Codec.BITSHUFFLE_LZ4, "zeros", 4, 0.001),
        (Codec.SHUFFLE_ZSTD, "zeros", 8, 0.001),
    ],
    ids=str,
)
def test_what_it_is_for_gets_smaller_and_is_tagged_with_the_codec(
    codec: Codec, kind: str, item: int, most: float
) -> None:
    encoded = there_and_back(codec, KINDS[kind](MIB + 1), item)
    assert encoded.codec is codec
    assert encoded.payload.nbytes < most * MIB


def test_a_delta_is_much_smaller_than_the_weights_alone() -> None:
    before = weights(MIB)
    after = trained(before)
    delta, alone = there_and_back(Codec.DELTA, after, 2, before), there_and_back(Codec.SHUFFLE_ZSTD, after, 2)
    assert delta.codec is Codec.DELTA
    assert delta.payload.nbytes < 0.7 * alone.payload.nbytes


@pytest.mark.parametrize(
    "base", [None, b"", weights(MIB - 2), noise(MIB)], ids=["none", "empty", "of another length", "of other content"]
)
def test_a_delta_that_does_not_pay_is_stored_without_its_base(base: bytes | None) -> None:
    original = weights(MIB)
    encoded = encode(Codec.DELTA, original, 2, base)
    assert encoded.codec is Codec.SHUFFLE_ZSTD
    assert encoded == encode(Codec.SHUFFLE_ZSTD, original, 2)


@PACKED
@pytest.mark.parametrize("size", [100, 1000, MIB])
def test_the_incompressible_is_stored_as_it_is_without_a_copy(codec: Codec, size: int) -> None:
    original = np.frombuffer(noise(size), np.uint8)
    encoded = encode(codec, original.data, 4, noise(size)[::-1])
    assert encoded.codec is Codec.NONE
    assert np.shares_memory(np.frombuffer(encoded.payload, np.uint8), original)
    assert np.shares_memory(np.frombuffer(decode(Codec.NONE, encoded.payload, size, 4), np.uint8), original)


@PACKED
def test_a_probe_and_not_a_pass_finds_the_incompressible(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []
    for module, name in ((blosc, "pack"), (planes, "_frame")):
        genuine = getattr(module, name)
        counted = lambda data, *more, do=genuine: (looked_at.append(len(data)), do(data, *more))[1]  # noqa: E731
        monkeypatch.setattr(module, name, counted)
    assert encode(codec, noise(8 * MIB), 2).codec is Codec.NONE
    assert sum(looked_at) < MIB


@ALL
def test_what_lies_unaligned_in_a_mapping_comes_back(codec: Codec) -> None:
    original = weights(300_001) if codec is not Codec.LZ4 else text(300_001)
    with mmap.mmap(-1, MIB) as mapping:
        mapping[3 : 3 + len(original)] = original
        with memoryview(mapping) as view, view[3 : 3 + len(original)] as piece:
            encoded = encode(codec, piece, 2, original)
            assert encoded.codec is codec
            assert decode(encoded.codec, encoded.payload, len(original), 2, original) == original
            with memoryview(bytearray(len(original) + 1))[1:] as place:
                decode_into(encoded.codec, encoded.payload, place, 2, piece)
                assert place == original
            del encoded


def test_arrays_of_any_type_and_shape_are_their_bytes() -> None:
    numbers = np.arange(60_000, dtype=np.int32).reshape(100, 600)
    encoded = encode(Codec.BITSHUFFLE_LZ4, numbers, 4)
    back = np.empty_like(numbers)
    decode_into(encoded.codec, encoded.payload, back, 4)
    assert (back == numbers).all()
    assert encode(Codec.LZ4, np.empty((0, 3)), 8) == Encoded(Codec.NONE, memoryview(b""))


def test_scattered_buffers_and_impossible_sizes_are_refused() -> None:
    scattered = np.zeros((100, 100), np.uint8)[:, ::2]
    whole = bytes(5000)
    with pytest.raises(ValueError, match=r"a chunk is not one piece of memory .*shape \(100, 50\)"):
        encode(Codec.LZ4, scattered, 1)
    with pytest.raises(ValueError, match="the base of a delta is not one piece"):
        encode(Codec.DELTA, whole, 1, scattered)
    with pytest.raises(ValueError, match="the place to decode to is not one piece"):
        decode_into(Codec.NONE, whole, scattered, 1)
    with pytest.raises(ValueError, match="read-only"):
        decode_into(Codec.NONE, whole, whole, 1)
    for item in (0, -1, WIDEST + 1):
        with pytest.raises(ValueError, match="an item of"):
            encode(Codec.LZ4, whole, item)
        with pytest.raises(ValueError, match="an item of"):
            decode(Codec.LZ4, whole, 5000, item)
    for length in (-1, CHUNK_LIMIT + 1):
        with pytest.raises(ValueError, match="a chunk of"):
            decode(Codec.LZ4, whole, length, 1)
    with pytest.raises(ValueError, match="without its base"):
        decode(Codec.DELTA, whole, 5000, 1)


def test_names_are_those_of_the_policy_file() -> None:
    assert [codec.label for codec in Codec] == ["none", "lz4", "bitshuffle-lz4", "shuffle-zstd", "delta"]
    assert [Codec.labelled(codec.label) for codec in Codec] == list(Codec)
    with pytest.raises(ValueError, match="no codec 'gzip'; there are none, lz4,"):
        Codec.labelled("gzip")


def test_a_damaged_chunk_is_an_io_error_that_trying_again_does_not_help() -> None:
    error = ChunkDamaged("x")
    assert (error.errno, error.temporary) == (errno.EIO, False)


SIZE = 60_003
ORIGINAL = weights(SIZE)
BASE = weights(SIZE - 1, seed=9)[:30_000] + ORIGINAL[30_000:]
PAYLOADS = {codec: bytes(encode(codec, ORIGINAL, 2, BASE).payload) for codec in Codec if codec is not Codec.LZ4}
PAYLOADS[Codec.LZ4] = bytes(encode(Codec.LZ4, text(SIZE), 2).payload)


def decodes_or_is_refused(codec: Codec, payload: bytes, length: int = SIZE, item: int = 2) -> bool:
    """Whether it decoded; anything but the right number of bytes or our own error fails the test."""
    base = BASE[:length] + bytes(max(0, length - len(BASE)))
    try:
        assert len(decode(codec, payload, length, item, base)) == length
    except ChunkDamaged:
        return False
    return True


@ALL
@given(cut=st.integers(0, SIZE), more=st.binary(max_size=40))
@example(cut=0, more=b"")
@settings(max_examples=50, deadline=None)
def test_a_payload_cut_short_or_continued_is_refused(codec: Codec, cut: int, more: bytes) -> None:
    payload = PAYLOADS[codec]
    changed = payload[: cut % len(payload)] + more
    if len(changed) != len(payload):
        assert not decodes_or_is_refused(codec, changed)
    assert not decodes_or_is_refused(codec, payload + more + b"x")


@ALL
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_changed_bytes_are_an_error_or_other_bytes_never_a_crash(codec: Codec, data: st.DataObject) -> None:
    payload = bytearray(PAYLOADS[codec])
    near = st.integers(0, min(400, len(payload) - 1))
    for place in data.draw(st.lists(near | st.integers(0, len(payload) - 1), min_size=1, max_size=8)):
        payload[place] = data.draw(st.integers(0, 255))
    decodes_or_is_refused(codec, bytes(payload))


@ALL
@given(payload=st.binary(max_size=500), length=st.integers(0, 100_000), item=st.integers(1, WIDEST))
@settings(max_examples=100, deadline=None)
def test_bytes_that_no_codec_wrote_are_an_error_or_other_bytes(
    codec: Codec, payload: bytes, length: int, item: int
) -> None:
    decodes_or_is_refused(codec, payload, length, item)


@PACKED
def test_a_payload_of_another_length_or_item_is_refused(codec: Codec) -> None:
    for length in (0, 1, 64, SIZE - 1, SIZE + 1, 2 * SIZE):
        assert not decodes_or_is_refused(codec, PAYLOADS[codec], length)
    if codec is not Codec.LZ4:  # which knows nothing of items
        assert not decodes_or_is_refused(codec, PAYLOADS[codec], item=4)


def test_a_delta_with_a_base_of_another_length_is_refused() -> None:
    with pytest.raises(ChunkDamaged, match="has a base of"):
        decode(Codec.DELTA, PAYLOADS[Codec.DELTA], SIZE, 2, BASE + b"x")


HEADER = bytes(encode(Codec.BITSHUFFLE_LZ4, ORIGINAL[:-1], 2).payload)
OTHER_BLOSC = {
    "an older format": (0, b"\x02"),
    "stored as it is": (2, b"\x37"),
    "zstd": (2, b"\x95"),
    "a codec from a plug-in": (2, b"\xf5"),
    "a filter from a plug-in": (21, b"\xa0"),
    "another filter before": (16, b"\x03"),
    "another filter's argument": (29, b"\x01"),
    "a registered codec": (22, b"\xa1"),
    "a codec's argument": (23, b"\x01"),
    "blocks of 16 MiB": (8, struct.pack("<i", 16 * MIB)),
    "blocks of nothing": (8, bytes(4)),
    "blocks of less than nothing": (8, b"\xff" * 4),
    "blocks of any length": (30, b"\x01"),
    "a dictionary": (31, b"\x01"),
    "content in a file": (31, b"\x08"),
    "content left as it was": (31, b"\x40"),
    "one value, which is not there": (31, b"\x30"),
    "zeros, with bytes after them": (31, b"\x10"),
}


@pytest.mark.parametrize("what", OTHER_BLOSC)
def test_blosc_chunks_that_are_not_of_ours_never_reach_the_library(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    place, changed = OTHER_BLOSC[what]
    payload = HEADER[:place] + changed + HEADER[place + len(changed) :]
    monkeypatch.setattr(blosc.imagecodecs, "blosc2_decode", lambda *_, **__: pytest.fail("decoded"))
    with pytest.raises(ChunkDamaged):
        decode(Codec.BITSHUFFLE_LZ4, payload, SIZE - 1, 2)


def framed(frame: bytes, count: int) -> bytes:
    """Bytes of which one zstd frame is all there is, as a chunk of one byte plane."""
    assert len(frame) < count
    return struct.pack("<I", len(frame)) + frame


def test_a_frame_that_grows_is_refused_before_memory_is_taken_for_it() -> None:
    bomb = planes._frame(np.zeros(256 * MIB, np.uint8), planes._MATCHES)
    tracemalloc.start()
    try:
        for length in (100_000, MIB):
            with pytest.raises(ChunkDamaged, match="says that it has"):
                decode(Codec.SHUFFLE_ZSTD, framed(bomb, length), length, 1)
        assert tracemalloc.get_traced_memory()[1] < 2 * MIB
    finally:
        tracemalloc.stop()


@PACKED
@pytest.mark.parametrize("item", [1, 2, 4])
def test_encoding_and_decoding_take_less_than_twice_the_memory_of_the_chunk(codec: Codec, item: int) -> None:
    size = 8 * MIB
    original, base = weights(size), trained(weights(size))
    encode(codec, original, item, base)
    tracemalloc.start()
    try:
        encoded = encode(codec, original, item, base)
        assert tracemalloc.get_traced_memory()[1] < 2 * size + MIB
        assert tracemalloc.get_traced_memory()[0] < encoded.payload.nbytes / 0.75 + MIB, "what waits for its upload"
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        decode(encoded.codec, encoded.payload, size, item, base)
        assert tracemalloc.get_traced_memory()[1] - held < 2 * size + MIB
    finally:
        tracemalloc.stop()


@PACKED
def test_the_interpreter_goes_on_while_a_chunk_is_encoded_or_decoded(codec: Codec) -> None:
    original = trained(weights(8 * MIB)) if codec is not Codec.LZ4 else text(8 * MIB)
    base = weights(8 * MIB)
    encoded = encode(codec, original, 2, base)
    assert encoded.codec is codec
    assert goes_on(lambda: encode(codec, original, 2, base))
    assert goes_on(lambda: decode(codec, encoded.payload, len(original), 2, base))


def goes_on(work: Callable[[], object], most: int = 300) -> bool:
    """Whether this thread gets to run while another repeats ``work``, though the interpreter never takes the GIL from a
    thread here: so it was given up. Repeated, as this thread may be slow to wake."""
    interval = sys.getswitchinterval()
    ran, rounds = [], []

    def repeat() -> None:
        while not ran and len(rounds) < most:
            work()
            rounds.append(True)

    thread = threading.Thread(target=repeat)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        ran.append(True)
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    return len(rounds) < most


def test_the_measure_of_going_on_notices_work_that_keeps_the_interpreter() -> None:
    assert not goes_on(lambda: sum(range(1000)))
    assert goes_on(lambda data=bytes(8 * MIB): zlib.crc32(data))


def test_many_threads_at_once_get_the_same_and_no_call_starts_one() -> None:
    before = weights(MIB)
    chunks = [trained(before, seed) for seed in range(8)]
    jobs = [(codec, chunk) for chunk in chunks for codec in Codec]
    expected = [encode(codec, chunk, 2, before) for codec, chunk in jobs]
    threads = len(os.listdir("/proc/self/task"))
    found: list[Encoded | None] = [None] * len(jobs)

    def work(first: int) -> None:
        for number in range(first, len(jobs), 4):
            codec, chunk = jobs[number]
            found[number] = encoded = encode(codec, chunk, 2, before)
            assert decode(encoded.codec, encoded.payload, MIB, 2, before) == chunk

    workers = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == expected
    assert len(os.listdir("/proc/self/task")) <= threads
