"""What the parsers find in files is what the libraries that wrote them say; what they find in nonsense does no harm."""

from __future__ import annotations

import collections
import io
import mmap
import os
import pickle
import pickletools
import random
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoints import safetensors_bytes, torch_bytes
from tierfs.chunks.formats import archived, npy, pickled, zips
from tierfs.chunks.formats import safetensors as safetensors_format
from tierfs.chunks.formats.opcodes import opcodes
from tierfs.chunks.span import UNKNOWN, Item, Region

DTYPES = {
    torch.float64: Item(8, True),
    torch.float32: Item(4, True),
    torch.float16: Item(2, True),
    torch.bfloat16: Item(2, True),
    torch.complex64: Item(4, True),
    torch.float8_e4m3fn: Item(1, True),
    torch.float8_e5m2: Item(1, True),
    torch.int64: Item(8),
    torch.int32: Item(4),
    torch.int16: Item(2),
    torch.int8: Item(1),
    torch.uint8: Item(1),
    torch.bool: Item(1),
}


def tensors(regions: list[Region] | None) -> dict[str, Region]:
    assert regions is not None
    found = {region.name: region for region in regions if region.item is not None}
    assert len(found) == sum(region.item is not None for region in regions)
    return found


def content(raw: bytes, region: Region) -> bytes:
    return raw[region.offset : region.end]


def values(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage())  # type: ignore[call-overload, no-any-return]


# torch


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_of_tensor_is_known_in_torch_files_and_safetensors(dtype: torch.dtype) -> None:
    tensor = (torch.rand(77) * 50).to(dtype)
    for raw, parse in (
        (torch_bytes({"a": tensor}), archived.regions),
        (safetensors_bytes({"a": tensor}), safetensors_format.regions),
    ):
        region = tensors(parse(memoryview(raw)))["a"]
        assert region.item == DTYPES[dtype]
        assert content(raw, region) == values(tensor)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_tensors_go_by_the_keys_that_lead_to_them(protocol: int) -> None:
    weight = torch.randn(5, 3)
    state = {
        "model": collections.OrderedDict(weight=weight, tied=weight, view=weight[1:]),
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}}, "groups": [{"extra": (1, torch.ones(2))}]},
        "parameter": torch.nn.Parameter(torch.zeros(4)),
        7: [torch.full((3,), 3), "text", None, True, 1.5, 10**30, {1, 2}, frozenset("a"), b"bytes", bytearray(b"b")],
    }
    file = io.BytesIO()
    torch.save(state, file, pickle_protocol=protocol)
    found = tensors(archived.regions(memoryview(file.getvalue())))
    expected = {
        "model.weight": weight,
        "optimizer.state.0.step": torch.tensor(1.0),
        "optimizer.groups.0.extra": torch.ones(2),
        "parameter": torch.zeros(4),
        "7.0": torch.full((3,), 3),
    }
    assert {name: content(file.getvalue(), region) for name, region in found.items()} == {
        name: values(tensor) for name, tensor in expected.items()
    }


def test_a_whole_module_has_names_too() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    found = tensors(archived.regions(memoryview(torch_bytes(module))))
    assert {region.length for region in found.values()} == {tensor.nbytes for tensor in module.state_dict().values()}
    assert "_modules.0._parameters.weight" in found


def test_a_tensor_alone_has_no_name_but_a_mark() -> None:
    raw = memoryview(torch_bytes(torch.randn(9)))
    (region,) = (region for region in archived.regions(raw) or () if region.item)
    assert region == region._replace(name="", item=Item(4, True), length=36)
    assert region.mark != 0


def test_archives_one_behind_the_other_are_all_found() -> None:
    """What a `.distcp` file is."""
    items = [torch.randn(10 + i) for i in range(20)]
    raw = b"".join(torch_bytes(item) for item in items)
    found = [region for region in archived.regions(memoryview(raw)) or () if region.item]
    assert [content(raw, region) for region in found] == [values(item) for item in items]
    assert archived.regions(memoryview(b"no archive" + raw)) is not None


def test_a_file_above_four_gigabytes_is_known(tmp_path: Path) -> None:
    """With 64-bit offsets and lengths, as torch writes them; the file is a sparse one."""
    path = tmp_path / "large.pt"
    state = {"small": torch.empty(3), "large": torch.empty(5 << 30, dtype=torch.uint8), "last": torch.empty(100)}
    with torch.serialization.skip_data(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.save(state, path)
    assert os.stat(path).st_size > 5 << 30
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as source,
    ):
        found = tensors(archived.regions(source))
    assert {name: region.length for name, region in found.items()} == {"small": 12, "large": 5 << 30, "last": 400}
    assert found["last"].offset > 5 << 30


def test_storages_of_a_torchscript_archive_are_known() -> None:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(torch.nn.Linear(40, 30), torch.ones(1, 40)), file)
    found = tensors(archived.regions(memoryview(file.getvalue())))
    assert {region.length for region in found.values() if region.item == Item(4, True)} == {40 * 30 * 4, 30 * 4}


# zip


def zip_bytes(entries: dict[str, bytes], method: int = zipfile.ZIP_STORED, comment: bytes = b"") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
        archive.comment = comment
    return file.getvalue()


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("comment", [b"", b"a comment" * 50])
@pytest.mark.parametrize("wide", [False, True])
def test_the_entries_of_an_archive_are_what_zipfile_says(
    method: int, comment: bytes, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wide:
        monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    entries = {f"directory/{i}": bytes([i]) * i * 50 for i in range(9)}
    raw = zip_bytes(entries, method, comment)
    (archive,) = zips.archives(memoryview(raw))
    assert (archive.start, archive.end) == (0, len(raw))
    infos = zipfile.ZipFile(io.BytesIO(raw)).infolist()
    assert [(e.name.decode(), e.method, e.crc, e.length) for e in archive.entries] == [
        (info.filename, info.compress_type, info.CRC, info.compress_size) for info in infos
    ]
    if method == zipfile.ZIP_STORED:
        assert {e.name.decode(): raw[e.offset : e.offset + e.length] for e in archive.entries} == entries


def test_compressed_records_are_no_tensors() -> None:
    array = io.BytesIO()
    np.savez_compressed(array, a=np.zeros(100))
    regions = archived.regions(memoryview(array.getvalue()))
    assert regions is not None
    assert all(region.item is None for region in regions)


def test_entries_that_share_bytes_are_not_believed() -> None:
    raw = bytearray(zip_bytes({"a": b"1" * 100, "b": b"2" * 100}))
    second = raw.rindex(b"PK\1\2")
    raw[second + 42 : second + 46] = bytes(4)  # where the entry's header is: at the first one's
    assert list(zips.archives(memoryview(raw))) == []


def test_more_entries_than_are_looked_at_are_no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = zip_bytes({f"{i}": b"1" for i in range(30)})
    monkeypatch.setattr(zips, "ENTRIES", 20)
    assert list(zips.archives(memoryview(raw))) == []


# numpy


@pytest.mark.parametrize(
    ("dtype", "item"),
    [
        ("<f4", Item(4, True)),
        (">f8", Item(8, True)),
        ("<f2", Item(2, True)),
        ("<i8", Item(8)),
        ("|u1", Item(1)),
        ("|b1", Item(1)),
        ("<c16", Item(8, True)),
        ("<U7", Item(4)),
        ("<M8[s]", UNKNOWN),
        ("<f4,<i2", UNKNOWN),
    ],
)
def test_arrays_of_every_kind_are_known(dtype: str, item: Item) -> None:
    array = np.zeros(50, dtype)
    file = io.BytesIO()
    np.save(file, array)
    assert npy.regions(memoryview(file.getvalue())) == [
        Region(file.tell() - array.nbytes, array.nbytes, item, "array")
    ]


def test_an_array_without_elements_is_no_region() -> None:
    file = io.BytesIO()
    np.save(file, np.zeros(0))
    assert npy.regions(memoryview(file.getvalue())) is None


# safetensors


def test_safetensors_come_in_the_order_of_their_bytes() -> None:
    weights = {"z": torch.ones(3), "a": torch.ones(5, dtype=torch.int64), "empty": torch.ones(0), "m": torch.ones(4)}
    raw = safetensors.torch.save(weights, metadata={"format": "pt"})
    regions = safetensors_format.regions(memoryview(raw))
    assert regions is not None
    assert [region.offset for region in regions] == sorted(region.offset for region in regions)
    assert {r.name: content(raw, r) for r in regions} == {n: values(t) for n, t in weights.items() if t.numel()}


# pickles


class Hostile:
    """What would run a command if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    path = tmp_path / "here"
    assert pickled.storages(memoryview(pickle.dumps({"a": Hostile(path)}))) == {}
    assert not path.exists()


def test_a_pickle_that_ends_too_early_tells_what_it_had() -> None:
    raw = zipfile.ZipFile(io.BytesIO(torch_bytes({f"t{i}": torch.ones(i + 1) for i in range(9)})))
    (name,) = (name for name in raw.namelist() if name.endswith("data.pkl"))
    data = raw.read(name)
    found = pickled.storages(memoryview(data[: len(data) * 2 // 3]))
    assert 3 < len(found) < 9
    assert all(storage.item == Item(4, True) for storage in found.values())


def test_objects_that_contain_themselves_come_to_an_end() -> None:
    ring: list[Any] = []
    ring.append(ring)
    table: dict[Any, Any] = {}
    table["self"] = [table, ring] * 50
    deep: list[Any] = []
    for _ in range(400):
        deep = [deep, deep]
    for thing in (ring, table, deep):
        assert pickled.storages(memoryview(pickle.dumps(thing))) == {}


OPCODES = "".join(opcode.code for opcode in pickletools.opcodes).encode("latin-1")


@settings(max_examples=500, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 60))
def test_no_sequence_of_opcodes_does_harm(choice: random.Random, length: int) -> None:
    reference = b"(X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0" + b"7X\3\0\0\0cpuK\3tQ"
    raw = b""
    for _ in range(length):
        opcode = bytes([choice.choice(OPCODES)])
        raw += choice.choice((opcode, opcode + b"\1\0\0\0", b"}", b"(", reference))
    found = pickled.storages(memoryview(raw + b"."))
    assert set(found) <= {"7"}


THINGS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4),
)


@settings(max_examples=200, deadline=None)
@given(THINGS, st.integers(0, pickle.HIGHEST_PROTOCOL), st.sampled_from((None, collections.OrderedDict, os.path.join)))
def test_opcodes_are_what_pickletools_says(thing: object, protocol: int, function: object) -> None:
    """Each with the argument that it has there, or none where nobody asks for it."""
    raw = pickle.dumps([thing, function], protocol)
    expected = [(opcode, arg) for opcode, arg, _ in pickletools.genops(raw)]
    found = list(opcodes(raw))
    assert [code for code, _ in found] == [ord(opcode.code) for opcode, _ in expected]
    for (_, value), (opcode, arg) in zip(found, expected, strict=True):
        if isinstance(arg, str) and opcode.name == "UNICODE":  # of protocol 0, which torch cannot use
            assert value is not None
        elif isinstance(arg, str) or (isinstance(arg, int) and abs(arg) < 1 << 64):
            assert value == arg
        else:
            assert value in (None, arg)


def test_a_pickle_that_pickletools_warns_of_is_read_without_a_warning() -> None:
    """Warnings are for the whole process, and filters of warnings are no matter of a thread."""
    raw = b"S'\\q'\n."
    with pytest.warns(DeprecationWarning, match="invalid escape"):
        list(pickletools.genops(raw))
    assert pickled.storages(memoryview(raw)) == {}


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_no_bytes_do_harm(raw: bytes) -> None:
    for prefix in (b"", b"PK\5\6", b"\x93NUMPY\1\0", len(raw).to_bytes(8, "little") + b"{", b"\x80\2"):
        view = memoryview(prefix + raw)
        for parse in (archived.regions, npy.regions, safetensors_format.regions, pickled.storages):
            parse(view)
