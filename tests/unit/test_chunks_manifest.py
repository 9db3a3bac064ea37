"""A manifest says again what it was told, restores the file by its document alone, and no other bytes are believed."""

from __future__ import annotations

import io
import json
import re
import stat
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoints import torch_bytes
from tierfs.chunks.frame import LONGEST_HEADER, header, parse
from tierfs.chunks.identity import chunk_id
from tierfs.chunks.manifest import CHUNK_LIMIT, STORED_LIMIT, Base, Chunk, Manifest, Run, decode, encode, runs
from tierfs.chunks.span import NO_KEY, UNKNOWN, Extent, Item, Span
from tierfs.chunks.split import split
from tierfs.errors import ChunkDamaged, ManifestDamaged
from tierfs.tiers.copy import CHUNK, chunk_digest, tree_digest

MODE = stat.S_IFREG | 0o640


def digest(raw: bytes) -> bytes:
    return tree_digest([chunk_digest(raw[at : at + CHUNK]) for at in range(0, len(raw), CHUNK)])


def manifest_of(raw: bytes) -> Manifest:
    """Of a file whose chunks are stored as they are."""
    view = memoryview(raw)
    spans = split(view)
    return Manifest(
        size=len(raw),
        digest=digest(raw),
        mode=MODE,
        uid=1000,
        gid=100,
        mtime_ns=1_700_000_000_123_456_789,
        chunks=tuple(Chunk(chunk_id(s.views(view)), s.length, s.item, s.key, 0, s.length + 12) for s in spans),
        runs=runs(spans),
        xattrs={b"user.note": b"\xff\x00 text"},
        link=b"\x01\x02",
        notes={"version": "7"},
    )


@pytest.fixture(scope="module")
def file() -> bytes:
    torch.manual_seed(2)
    return torch_bytes({**{f"b{i}": torch.randn(900) for i in range(60)}, "large": torch.randn(5 << 20)})


def store(raw: bytes) -> dict[bytes, bytes]:
    """An archive's chunks by id."""
    view = memoryview(raw)
    return {
        chunk_id(span.views(view)): header(0, span.item.size, span.length) + bytes(span.gather(view))
        for span in split(view)
    }


# the document


def restore(manifest: bytes, stored: dict[bytes, bytes]) -> tuple[bytes, dict[str, object]]:
    """Content and attributes of a file. Written from docs/FORMAT.md, and uses nothing of tierfs."""
    first, _, rest = manifest.partition(b"\n")
    name, version, checksum, length = first.decode("ascii").split(" ")
    assert (name, version) == ("tierfs-manifest", "1")
    assert int(length) == len(rest)
    assert checksum == xxhash.xxh3_128(rest).hexdigest()
    line, _, tables = rest.partition(b"\n")
    attributes = json.loads(line)
    stream = io.BytesIO(tables)
    chunks = [struct.unpack("<32s8sIIBBBB", stream.read(52)) for _ in range(attributes["chunks"])]
    bases = [struct.unpack("<32sBI", stream.read(37)) for _ in range(attributes["bases"])]
    table = [struct.unpack("<II", stream.read(8)) for _ in range(attributes["runs"])]
    assert stream.read() == b""
    assert len(bases) == sum(chunk[7] for chunk in chunks)
    contents = []
    for ident, _, size, stored_size, codec, _, _, _ in chunks:
        assert len(stored[ident]) == stored_size
        assert struct.unpack_from("<4sB", stored[ident]) == (b"tfc1", codec) == (b"tfc1", 0)
        assert struct.unpack_from("<BBI", stored[ident], 6) == (0, 0, size)
        payload = stored[ident][12:]
        assert blake3(payload).digest() == ident
        contents.append(io.BytesIO(payload))
    content = b"".join(contents[number].read(count) for number, count in table)
    assert all(part.read() == b"" for part in contents)
    assert len(content) == attributes["size"]
    parts = [content[at : at + (4 << 20)] for at in range(0, len(content), 4 << 20)]
    whole = xxhash.xxh3_128(b"".join(xxhash.xxh3_128(part).digest() for part in parts)).hexdigest()
    assert whole == attributes["digest"]
    return content, attributes


def test_a_program_written_from_the_document_restores_a_file(file: bytes) -> None:
    content, attributes = restore(encode(manifest_of(file)), store(file))
    assert content == file
    assert attributes["mode"] == MODE
    assert attributes["mtime_ns"] == 1_700_000_000_123_456_789
    assert {name.encode("latin-1"): value.encode("latin-1") for name, value in attributes["xattrs"].items()} == {  # type: ignore[attr-defined]
        b"user.note": b"\xff\x00 text"
    }
    assert restore(encode(manifest_of(b"")), {})[0] == b""


def test_the_document_names_every_member() -> None:
    document = (Path(__file__).parents[2] / "docs" / "FORMAT.md").read_text(encoding="utf-8")
    members = json.loads(encode(manifest_of(b"")).split(b"\n")[1])
    assert [name for name in members if f"`{name}`" not in document] == []
    named = re.findall(r"\[`(test_\w+)`\]", document)
    assert named
    assert all(name in globals() for name in named)


# what goes in comes out

IDS = st.binary(min_size=32, max_size=32)
LENGTHS = st.integers(1, CHUNK_LIMIT)
ITEMS = st.builds(Item, st.sampled_from((1, 2, 4, 8)), st.booleans())


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    chunks: list[Chunk] = []
    for ident in draw(st.lists(IDS, unique=True, max_size=6)):
        length = draw(LENGTHS)
        codec = draw(st.integers(0, 255))
        bases = st.builds(Base, IDS.filter(lambda base, ident=ident: base != ident), st.integers(0, 255), LENGTHS)  # type: ignore[misc]
        chunks.append(
            Chunk(
                id=ident,
                length=length,
                item=draw(ITEMS),
                key=draw(st.binary(min_size=8, max_size=8)),
                codec=codec,
                stored=draw(LENGTHS) if codec else length + 12,
                bases=tuple(draw(st.lists(bases, max_size=3, unique_by=lambda base: base.id))) if codec else (),
            )
        )
    table: list[Run] = []
    left = [chunk.length for chunk in chunks]
    begun = 0
    while any(left):
        number = draw(st.sampled_from([n for n in range(min(begun + 1, len(left))) if left[n]]))
        length = draw(st.just(left[number]) | st.integers(1, left[number]))
        if len(table) > 30:
            length = left[number]
        table.append(Run(number, length))
        left[number] -= length
        begun += number == begun
    names = st.binary(max_size=9).filter(lambda name: b"\0" not in name and not name.startswith(b"tierfs."))
    return Manifest(
        size=sum(chunk.length for chunk in chunks),
        digest=draw(st.binary(min_size=16, max_size=16)),
        mode=stat.S_IFREG | draw(st.integers(0, 0o7777)),
        uid=draw(st.integers(0, 0xFFFFFFFF)),
        gid=draw(st.integers(0, 0xFFFFFFFF)),
        mtime_ns=draw(st.integers(-(1 << 63) + 1, (1 << 63) - 1)),
        chunks=tuple(chunks),
        runs=tuple(table),
        xattrs=draw(st.dictionaries(names.map(lambda name: b"user." + name), st.binary(max_size=9), max_size=3)),
        link=draw(st.binary(max_size=64)),
        notes=draw(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)),
    )


@settings(max_examples=50, deadline=None)
@given(manifests())
def test_what_is_encoded_is_decoded(manifest: Manifest) -> None:
    raw = encode(manifest)
    assert decode(raw) == manifest
    assert encode(decode(raw)) == raw


def test_it_is_small(file: bytes) -> None:
    """A manifest is written anew for each version, even of a file that did not change."""
    assert len(encode(manifest_of(file))) < len(file) / 2000


def test_its_text_can_be_read(file: bytes) -> None:
    first, second, *_ = encode(manifest_of(file)).split(b"\n")
    assert re.fullmatch(rb"tierfs-manifest 1 [0-9a-f]{32} \d+", first)
    assert b'"mtime_ns":1700000000123456789' in second


# reading by ranges


@settings(max_examples=50, deadline=None)
@given(manifests(), st.data())
def test_parts_of_a_range_are_those_of_the_runs(manifest: Manifest, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, manifest.size + 5))
    length = data.draw(st.integers(0, manifest.size + 5))
    parts = manifest.parts(offset, length)
    position = offset
    extents = manifest.extents()
    for part in parts:
        assert part.offset == position
        assert part.length > 0
        position += part.length
        inside = 0
        for extent in extents[part.chunk]:
            if extent.offset <= part.offset < extent.end:
                assert part.inside == inside + part.offset - extent.offset
                assert part.offset + part.length <= extent.end
                break
            inside += extent.length
        else:
            pytest.fail("not in its chunk")
    assert position == max(offset, min(offset + length, manifest.size)) or not parts


def test_ranges_and_extents_restore_a_file(file: bytes) -> None:
    manifest, stored = decode(encode(manifest_of(file))), store(file)
    for offset, length in ((0, len(file)), (100, 5000), (3 << 20, 9 << 20), (len(file) - 7, 99), (0, 0), (-1, 5)):
        parts = manifest.parts(offset, length)
        read = [(parse(memoryview(stored[manifest.chunks[p.chunk].id])).payload, p) for p in parts]
        found = b"".join(payload[p.inside : p.inside + p.length] for payload, p in read)
        assert found == (file[offset : offset + length] if offset >= 0 else b"")
    content = bytearray(len(file))
    for chunk, extents in zip(manifest.chunks, manifest.extents(), strict=True):
        source = io.BytesIO(parse(memoryview(stored[chunk.id])).payload)
        for extent in extents:
            content[extent.offset : extent.end] = source.read(extent.length)
    assert content == file


def test_references_are_all_chunks_and_bases() -> None:
    chunk = Chunk(b"c" * 32, 5, UNKNOWN, NO_KEY, 4, 3, (Base(b"b" * 32, 4, 2), Base(b"a" * 32, 3, 4)))
    manifest = replace(manifest_of(b"hello" * 2), chunks=(chunk, chunk), runs=(Run(0, 5), Run(1, 5)))
    assert decode(encode(manifest)).references() == {b"a" * 32, b"b" * 32, b"c" * 32}
    assert chunk.fetched == 9


# what is not believed


@settings(max_examples=50, deadline=None)
@given(manifests(), st.data())
def test_a_damaged_manifest_is_refused(manifest: Manifest, data: st.DataObject) -> None:
    raw = bytearray(encode(manifest))
    at = data.draw(st.integers(0, len(raw) - 1))
    kind = data.draw(st.sampled_from(("flip", "cut", "grow")))
    if kind == "flip":
        raw[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del raw[at:]
    else:
        raw += data.draw(st.binary(min_size=1, max_size=60))
    with pytest.raises(ManifestDamaged):
        decode(bytes(raw))


def forged(body: bytes, version: int = 1) -> bytes:
    """With a first line that fits."""
    return b"tierfs-manifest %d %s %d\n" % (version, xxhash.xxh3_128_hexdigest(body).encode(), len(body)) + body


def test_a_later_format_is_told_apart_from_damage() -> None:
    with pytest.raises(ManifestDamaged, match="format 2, this tierfs reads format 1"):
        decode(forged(b"{}\n", 2))


@settings(max_examples=50, deadline=None)
@given(manifests(), st.data())
def test_a_forged_manifest_is_refused_or_says_what_can_be(manifest: Manifest, data: st.DataObject) -> None:
    """With the right checksum."""
    body = bytearray(encode(manifest).partition(b"\n")[2])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + 1] = data.draw(st.binary(min_size=1, max_size=1) | st.just(b"\xff\xff\xff\xff") | st.just(b""))
        if not body:
            break
    try:
        found = decode(forged(bytes(body)))
    except ManifestDamaged:
        return
    assert decode(encode(found)) == found
    assert sum(run.length for run in found.runs) == found.size == sum(chunk.length for chunk in found.chunks)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\n",
        b"[]\n",
        b"{}\n",
        b"null\n",
        b"[" * 100_000 + b"\n",
        b"1" * 5000 + b"\n",
        b'{"size":0}\n',
        b"\xff\n",
    ],
    ids=range(9),
)
def test_a_body_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(ManifestDamaged):
        decode(forged(body))


@pytest.mark.parametrize("value", [True, -1, 1.5, "1", None, [], {}, 10**30])
@pytest.mark.parametrize("name", ["size", "mode", "uid", "chunks", "runs", "digest", "link", "xattrs", "notes"])
def test_an_attribute_of_another_type_or_range_is_refused(name: str, value: object) -> None:
    line = json.loads(encode(manifest_of(b"")).split(b"\n")[1])
    if name in ("xattrs", "notes") and value == {}:
        return
    with pytest.raises(ManifestDamaged):
        decode(forged(json.dumps({**line, name: value}).encode() + b"\n"))


A, B = (Chunk(bytes([n]) * 32, 10, UNKNOWN, NO_KEY, 0, 10) for n in (1, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {"chunks": (A, A._replace(length=9, stored=9)), "runs": (Run(0, 10), Run(1, 9)), "size": 19},
        {"runs": (Run(0, 10),)},
        {"runs": (Run(0, 10), Run(1, 10), Run(1, 1))},
        {"runs": (Run(0, 10), Run(1, 5), Run(0, 5))},
        {"runs": (Run(1, 10), Run(0, 10))},
        {"runs": (Run(0, 10), Run(2, 10))},
        {"runs": (Run(0, 10), Run(1, 0), Run(1, 10))},
        {"size": 19},
        {"chunks": (A, B._replace(stored=9))},
        {"chunks": (A, B._replace(codec=1, stored=STORED_LIMIT + 1))},
        {"chunks": (A, B._replace(length=0))},
        {"chunks": (A, B._replace(codec=1, stored=0))},
        {"chunks": (A, B._replace(item=Item(3)))},
        {"chunks": (A, B._replace(bases=(Base(A.id, 1, 1),)))},
        {"chunks": (A, B._replace(codec=4, bases=(Base(B.id, 1, 1),)))},
        {"chunks": (A, B._replace(codec=4, bases=(Base(A.id, 1, 1), Base(A.id, 1, 1))))},
        {"chunks": (A, B._replace(codec=4, bases=(Base(A.id, 1, 0),)))},
        {"chunks": (A, B._replace(codec=4, bases=(Base(A.id, 256, 1),)))},
        {"chunks": (A, B._replace(codec=4, bases=(Base(A.id[:-1], 1, 1),)))},
        {"chunks": (A, B._replace(id=b"short"))},
        {"mode": stat.S_IFDIR | 0o755},
        {"digest": b""},
        {"xattrs": {b"security.selinux": b""}},
        {"xattrs": {b"user.tierfs.tier": b""}},
        {"link": bytes(65)},
        {"mtime_ns": 1 << 63},
        {"uid": 1 << 32},
    ],
    ids=range(27),
)
def test_what_cannot_be_is_not_written_either(changes: dict[str, object]) -> None:
    good = replace(manifest_of(b""), size=20, chunks=(A, B), runs=(Run(0, 10), Run(1, 10)))
    assert decode(encode(good)) == good
    with pytest.raises(ManifestDamaged):
        encode(replace(good, **changes))  # type: ignore[arg-type]


def test_spans_become_runs() -> None:
    spans = [
        Span((Extent(0, 3), Extent(5, 2)), UNKNOWN, NO_KEY),
        Span((Extent(3, 2),), UNKNOWN, NO_KEY),
        Span((Extent(7, 1),), UNKNOWN, NO_KEY),
    ]
    assert runs(spans) == (Run(0, 3), Run(1, 2), Run(0, 2), Run(2, 1))


# stored chunks


@given(st.integers(1, 255), st.sampled_from((1, 2, 4, 8)), LENGTHS, st.none() | IDS, st.binary(min_size=1, max_size=50))
def test_a_stored_chunk_says_how_to_decode_it(
    codec: int, item: int, length: int, base: bytes | None, payload: bytes
) -> None:
    start = header(codec, item, length, base)
    assert len(start) <= LONGEST_HEADER <= STORED_LIMIT - CHUNK_LIMIT
    assert parse(memoryview(start + payload)) == (codec, item, length, base, payload)


def test_a_chunk_stored_as_it_is_has_the_length_that_it_says() -> None:
    assert parse(memoryview(header(0, 4, 3) + b"abc")).payload == b"abc"
    for damaged in (header(0, 4, 3) + b"ab", header(0, 4, 3) + b"abcd", header(0, 4, 3, bytes(32)) + b"abc"):
        with pytest.raises(ChunkDamaged):
            parse(memoryview(damaged))


@given(st.binary(max_size=60) | st.binary(max_size=50).map(lambda raw: b"tfc1" + raw))
def test_what_is_no_stored_chunk_is_refused(raw: bytes) -> None:
    try:
        frame = parse(memoryview(raw))
    except ChunkDamaged:
        return
    assert header(frame.codec, frame.item, frame.length, frame.base) + frame.payload == raw


@pytest.mark.parametrize(
    "arguments", [(256, 1, 1), (-1, 1, 1), (0, 3, 1), (0, 1, 0), (0, 1, CHUNK_LIMIT + 1), (4, 1, 1, b"short")]
)
def test_a_chunk_that_cannot_be_gets_no_header(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"no chunk|no id"):
        header(*arguments)
