"""Where checkpoints are cut: what did not change is not sent again, and no content whatever leaves a byte out."""

from __future__ import annotations

import io
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.checkpoints import (
    Archive,
    State,
    Training,
    assert_covers,
    changed_bytes,
    distcp_bytes,
    safetensors_bytes,
    torch_bytes,
    torch_file,
)
from tierfs.chunks import gather
from tierfs.chunks.formats import archived
from tierfs.chunks.identity import chunk_id
from tierfs.chunks.span import MOST, NO_KEY, UNKNOWN, Extent, Item, Span
from tierfs.chunks.split import split

FLOAT = Item(4, True)


@pytest.fixture(scope="module")
def states() -> tuple[State, State]:
    """Two checkpoints one step apart of a fine-tuning that trains one layer of eight."""
    training = Training(layers=1)
    before = training.state()
    training.step()
    return before, training.state()


def cut(raw: bytes) -> list[Span]:
    spans = split(memoryview(raw))
    assert_covers(spans, len(raw))
    assert all(span.length <= MOST for span in spans)
    assert spans == sorted(spans)
    return spans


def resent(first: bytes, second: bytes) -> int:
    """Bytes sent for the second file when the first is archived."""
    archive = Archive()
    archive.send(first, cut(first))
    return archive.send(second, cut(second))


def renamed(state: State, old: str, new: str) -> State:
    return {**state, "model": {new if name == old else name: tensor for name, tensor in state["model"].items()}}


# what is sent for the second checkpoint


def test_of_a_model_frozen_for_the_most_part_only_the_trained_tensors_are_sent(states: tuple[State, State]) -> None:
    before, after = states
    changed = changed_bytes(before, after)
    first, second = torch_bytes(before), torch_bytes(after)
    assert 0.2 < changed / len(second) < 0.3  # weights and two moments of a ninth of the parameters
    assert resent(first, second) <= changed * 1.02


def test_of_frozen_weights_as_safetensors_only_the_trained_tensors_are_sent(states: tuple[State, State]) -> None:
    before, after = (state["model"] for state in states)
    changed = changed_bytes(before, after)
    assert resent(safetensors_bytes(before), safetensors_bytes(after)) <= changed * 1.02


def test_of_a_frozen_distributed_checkpoint_only_the_trained_items_are_sent(
    states: tuple[State, State], tmp_path: Path
) -> None:
    before, after = states
    changed = changed_bytes(before, after)
    first, second = distcp_bytes(before, tmp_path / "1"), distcp_bytes(after, tmp_path / "2")
    items = sum(1 for region in archived.regions(memoryview(second)) or () if region.item)
    overhead = 2048 * items  # of each item: six headers, a pickle, a directory; compressed to a tenth of that
    assert resent(first, second) <= changed * 1.02 + overhead


@pytest.mark.parametrize("save", [torch_bytes, lambda state: safetensors_bytes(state["model"])])
def test_the_same_state_saved_again_sends_nothing(states: tuple[State, State], save: object) -> None:
    assert callable(save)
    assert resent(save(states[0]), save(states[0])) == 0


def test_the_same_state_under_another_file_name_sends_headers_only(states: tuple[State, State], tmp_path: Path) -> None:
    first, second = (torch_file(states[0], tmp_path / name) for name in ("step-9.pt", "checkpoint-100000.pt"))
    archive = Archive()
    archive.send(first, cut(first))
    headers = [span for span in cut(second) if span.item == UNKNOWN]
    assert archive.send(second, cut(second)) == sum(span.length for span in headers) < len(second) / 500


@pytest.mark.parametrize("name", ["body.layers.3.linear1.weight", "body.layers.3.norm1.weight"])
def test_a_renamed_tensor_sends_next_to_nothing(states: tuple[State, State], name: str) -> None:
    before = states[0]
    after = renamed(before, name, "a.new.name")
    for save in (torch_bytes, lambda state: safetensors_bytes(state["model"])):
        first, second = save(before), save(after)
        assert resent(first, second) < len(second) * 0.01


@pytest.mark.parametrize("rows", [1, 1000])
def test_a_tensor_inserted_before_the_others_shifts_nothing(
    states: tuple[State, State], rows: int, tmp_path: Path
) -> None:
    before = states[0]
    new = torch.randn(rows, 256)
    after = {**before, "model": {"a.first": new, **before["model"]}}
    for save in (torch_bytes, lambda state: safetensors_bytes(state["model"])):
        first, second = save(before), save(after)
        assert resent(first, second) <= new.nbytes + len(second) * 0.01
    first, second = distcp_bytes(before, tmp_path / "1"), distcp_bytes(after, tmp_path / "2")
    assert resent(first, second) <= new.nbytes + len(second) * 0.02


def test_shards_of_different_ranks_share_what_is_the_same(states: tuple[State, State]) -> None:
    weights = states[0]["model"]
    archive = Archive()
    shards = [torch_bytes({"model": weights, "rank": torch.full((40_000,), rank)}) for rank in range(2)]
    sent = [archive.send(raw, cut(raw)) for raw in shards]
    assert sent[1] < 320_000 + sent[0] / 100


# where it is cut


def test_large_tensors_are_cut_at_offsets_of_their_own() -> None:
    """So that a tensor that grows at its end (a larger vocabulary) is only sent from there on."""
    torch.manual_seed(1)
    table = torch.randn(45 << 18)  # 45 MiB
    first, second = torch_bytes({"table": table[: 40 << 18].clone()}), torch_bytes({"a": table[:99], "table": table})
    spans = [span for span in cut(first) if span.item == FLOAT]
    assert [span.length for span in spans] == [8 << 20, 8 << 20, 8 << 20, 16 << 20]
    assert resent(first, second) < (21 << 20) + 10_000


def test_small_tensors_are_gathered_by_element_type_apart_from_the_headers() -> None:
    types = (torch.float32, torch.int64)
    state = {f"layer.{i}.{kind}": torch.zeros(500, dtype=kind) for i in range(200) for kind in types}
    raw = torch_bytes(state)
    spans = cut(raw)
    assert {span.item for span in spans} == {FLOAT, Item(8), UNKNOWN}
    for item, size in ((FLOAT, 400_000), (Item(8), 800_000)):
        lengths = [span.length for span in spans if span.item == item]
        assert sum(lengths) == size
        assert len(lengths) <= size / gather.GROUP_LEAST + 1
        assert max(lengths) < gather.GROUP_MOST + gather.SMALL


def test_keys_are_the_same_in_the_next_checkpoint_whose_values_all_differ(states: tuple[State, State]) -> None:
    before = states[0]
    after = {"model": {name: torch.randn_like(tensor) for name, tensor in before["model"].items()}}
    before = {"model": before["model"]}
    for save in (torch_bytes, lambda state: safetensors_bytes(state["model"])):
        first, second = cut(save(before)), cut(save(after))
        assert [(span.key, span.length) for span in first if span.item == FLOAT] == [
            (span.key, span.length) for span in second if span.item == FLOAT
        ]
        keys = [span.key for span in first if span.key != NO_KEY]
        assert len(set(keys)) == len(keys)


def test_keys_do_not_depend_on_what_lies_before_a_tensor(states: tuple[State, State]) -> None:
    before = states[0]
    after = {**before, "model": {"a.first": torch.randn(70_000), **before["model"]}}
    first = {chunk: span.key for chunk, span in chunks(torch_bytes(before)).items() if span.length >= gather.SMALL}
    second = {chunk: span.key for chunk, span in chunks(torch_bytes(after)).items()}
    assert first.items() <= second.items()


def chunks(raw: bytes) -> dict[bytes, Span]:
    return {chunk_id(span.views(memoryview(raw))): span for span in cut(raw)}


def test_one_tensor_of_many_is_read_from_few_chunks() -> None:
    """Reading 10 MB out of much must not fetch much more."""
    raw = safetensors_bytes({f"w{i}": torch.randn(2_500_000) for i in range(4)})
    start = 8 + int.from_bytes(raw[:8], "little") + 10_000_000
    touched = [s for s in cut(raw) if any(e.offset < start + 10_000_000 and e.end > start for e in s.extents)]
    assert sum(span.length for span in touched) < 11_000_000


def test_arrays_of_numpy_are_recognised_alone_and_in_archives() -> None:
    array = np.random.default_rng(1).normal(size=(1000, 300)).astype(np.float32)
    file = io.BytesIO()
    np.save(file, array)
    assert [span.length for span in cut(file.getvalue()) if span.item == FLOAT] == [array.nbytes]
    file = io.BytesIO()
    np.savez(file, a=array, b=array.astype(np.float64))
    found = {span.item: span.length for span in cut(file.getvalue()) if span.length >= gather.SMALL}
    assert found == {FLOAT: array.nbytes, Item(8, True): 2 * array.nbytes}


def test_what_is_not_recognised_is_cut_by_content() -> None:
    raw = np.random.default_rng(2).bytes(24 << 20)
    assert all(span.item == UNKNOWN and span.key == NO_KEY for span in cut(raw))
    assert resent(raw, b"inserted" + raw) < len(raw) / 10
    assert resent(raw, raw[: 12 << 20] + raw[(12 << 20) + 1 :]) < len(raw) / 5


def test_a_small_file_is_one_chunk_and_an_empty_one_none() -> None:
    assert cut(b"") == []
    assert cut(b"{}") == [Span((Extent(0, 2),), UNKNOWN, NO_KEY)]
    assert len(cut(torch_bytes({"a": torch.ones(9)}))) == 1


def test_a_mapped_file_can_be_closed_afterwards(tmp_path: Path) -> None:
    """Nothing keeps a view of the bytes."""
    path = tmp_path / "a.pt"
    for raw in (torch_bytes({"a": torch.ones(100_000), "b": torch.ones(9)}), bytes(300_000)):
        path.write_bytes(raw)
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            view = memoryview(mapping)
            assert split(view) == cut(raw)
            view.release()


# nonsense


def sample(kind: str) -> bytes:
    torch.manual_seed(3)
    small = {f"b{i}": torch.randn(50 + i) for i in range(9)}
    state = {"large": torch.randn(40_000), "step": torch.tensor(1.0), **small}
    file = io.BytesIO()
    match kind:
        case "torch":
            return torch_bytes(state)
        case "safetensors":
            return safetensors_bytes(state)
        case "distcp":
            return b"".join(torch_bytes(tensor) for tensor in state.values())
        case "npy":
            np.save(file, state["large"].numpy())
        case "npz":
            np.savez(file, **{name: tensor.numpy() for name, tensor in state.items()})
    return file.getvalue()


SAMPLES = {kind: sample(kind) for kind in ("torch", "safetensors", "distcp", "npy", "npz")}


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A file of some format, changed where its structure is, cut off, or with something before or behind it."""
    raw = bytearray(SAMPLES[draw(st.sampled_from(sorted(SAMPLES)))])
    ends = st.integers(0, 400) | st.integers(len(raw) - 2500, len(raw) - 1) | st.integers(0, len(raw) - 1)
    for at in draw(st.lists(ends, max_size=8)):
        new = draw(st.binary(min_size=1, max_size=8) | st.sampled_from((b"\xff" * 8, bytes(8), b"PK\5\6", b"PK\1\2")))
        raw[at : at + len(new)] = new
    raw = raw[: len(raw) - draw(st.just(0) | st.integers(0, 3000))]
    around = st.just(b"") | st.binary(max_size=40)
    return draw(around) + bytes(raw) + draw(around)


@settings(max_examples=300, deadline=None)
@given(damaged())
def test_damage_of_any_kind_leaves_no_byte_out(raw: bytes) -> None:
    cut(raw)


def safetensors_with(header: bytes, length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + bytes(200_000)


@pytest.mark.parametrize(
    "raw",
    [
        safetensors_with(b'{"a":{"dtype":"I8","data_offsets":[0,9000]},"b":{"dtype":"I8","data_offsets":[5000,9900]}}'),
        safetensors_with(b'{"a":{"dtype":"F32","data_offsets":[0,1000000]}}'),
        safetensors_with(b'{"a":{"dtype":"F32","data_offsets":[-5,9]}}'),
        safetensors_with(b'{"a":{"dtype":"F32","data_offsets":[0,true]}}'),
        safetensors_with(b'{"a":{"dtype":["F32"],"data_offsets":[0]}}'),
        safetensors_with(b'{"a":[]}'),
        safetensors_with(b'{"a":' * 50_000),
        safetensors_with(b"{}", 1 << 63),
        safetensors_with(b"{" + b"9" * 10_000),
        b"\x93NUMPY\x02\x00" + b"\xff" * 4 + bytes(200_000),
        b"\x93NUMPY\x09\x00" + bytes(200_000),
        b"PK\5\6" + bytes(200_000),
        bytes(200_000) + b"PK\5\6" + bytes(18),
        b"PK\5\6" + bytes(18) * 12_000,
        (b"PK\5\6" + bytes(18)) * 12_000,
    ],
    ids=range(15),
)
def test_a_header_that_lies_leaves_no_byte_out(raw: bytes) -> None:
    cut(raw)
