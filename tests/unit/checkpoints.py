"""Real checkpoints for the tests of the layout `chunks`: a transformer, trained for a step, saved by each library."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from tierfs.chunks.identity import chunk_id
from tierfs.chunks.span import Extent, Span

State = dict[Any, Any]


class Transformer(torch.nn.Module):
    """Eight layers with tensors from 1 KiB to 1 MiB: 30 MiB in fp32."""

    def __init__(self, width: int = 256, vocabulary: int = 2048) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True)
        self.embedding = torch.nn.Embedding(vocabulary, width)
        self.body = torch.nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, vocabulary)
        for parameter in self.parameters():  # layers begin as copies of each other, and vectors as ones and zeros
            parameter.data += torch.randn_like(parameter) / 16

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.embedding(tokens)))
        return logits


class Training:
    """Model and optimizer; ``layers`` of the last layers are trained, or everything (None)."""

    def __init__(self, layers: int | None = None, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(5)
        self.model = Transformer().to(dtype)
        trained = list(self.model.parameters())
        if layers is not None:
            self.model.requires_grad_(False)
            trained = [p for layer in list(self.model.body.layers)[-layers:] for p in layer.parameters()]
        for parameter in trained:
            parameter.requires_grad_(True)
        self.optimizer = torch.optim.AdamW(trained, lr=1e-3)
        self.step()

    def step(self) -> None:
        tokens = torch.randint(0, 2048, (2, 16))
        loss = torch.nn.functional.cross_entropy(self.model(tokens).flatten(0, 1).float(), tokens.flatten())
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def state(self) -> State:
        return copy.deepcopy({"model": dict(self.model.state_dict()), "optimizer": self.optimizer.state_dict()})


def tensors(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Every tensor with its path of keys."""
    if isinstance(state, torch.Tensor):
        yield path, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from tensors(value, (*path, key))


def changed_bytes(before: State, after: State) -> int:
    """Bytes of the tensors of ``after`` that are not in ``before`` with the same values."""
    old = dict(tensors(before))
    return sum(
        tensor.nbytes for path, tensor in tensors(after) if path not in old or not torch.equal(tensor, old[path])
    )


def torch_bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def torch_file(state: Any, path: Path) -> bytes:
    """As saved to a path, whose stem goes into the names of all records."""
    torch.save(state, path)
    return path.read_bytes()


def safetensors_bytes(weights: Mapping[str, torch.Tensor]) -> bytes:
    return safetensors.torch.save({name: tensor.contiguous() for name, tensor in weights.items()})


def distcp_bytes(state: State, directory: Path) -> bytes:
    """The one `.distcp` file that a single process writes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=directory, no_dist=True)
    (file,) = directory.glob("*.distcp")
    return file.read_bytes()


def assert_covers(spans: list[Span], size: int) -> None:
    """Every byte of the file in exactly one span."""
    position = 0
    for extent in sorted(extent for span in spans for extent in span.extents):
        assert extent == Extent(position, extent.length)
        assert extent.length > 0
        position = extent.end
    assert position == size


class Archive:
    """Counts what would be sent to an archive that has some chunks already."""

    def __init__(self) -> None:
        self.ids: set[bytes] = set()

    def send(self, raw: bytes, spans: list[Span]) -> int:
        """Bytes of the chunks that were not there."""
        assert_covers(spans, len(raw))
        view, sent = memoryview(raw), 0
        for span in spans:
            ident = chunk_id(span.views(view))
            if ident not in self.ids:
                self.ids.add(ident)
                sent += span.length
        return sent
