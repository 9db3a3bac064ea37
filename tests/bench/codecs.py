"""What the codecs make of real training state, per core: how small it gets, and how fast it is written and read.

The state is that of a transformer trained with AdamW on the source text of Python's standard library, saved twice:
float weights, their bf16 copy, both moments. Cut into chunks of 8 MiB, as tensors are for the archive. Speeds are bytes
of the state per second of one thread's CPU time, of the fastest pass of several: what else runs only adds.
"""

from __future__ import annotations

import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from tests.bench.measuring import Row, seconds
from tierfs.chunks.codec import Codec, decode_into, encode

WIDTH, LAYERS, CONTEXT, BATCH = 384, 4, 64, 4
STEPS = (60, 80)
"""After how many the two checkpoints are saved."""
PEAK_RATE = 3e-4
CHUNK = 8 << 20
MEMORY_PASSES = 8

WANTED = {  # of bf16 weights: stored / original, GB/s written, GB/s read
    Codec.BITSHUFFLE_LZ4: (0.78, 1.2, 2.0),
    Codec.SHUFFLE_ZSTD: (0.70, 0.35, 0.8),
    Codec.DELTA: (0.56, 0.35, 0.6),
}
ITEMS = {"bf16 weights": 2, "fp32 weights": 4, "Adam, first moment": 4, "Adam, second moment": 4}


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.places = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 8, 4 * WIDTH, dropout=0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.out(self.layers(self.bytes(text) + self.places, mask=self.mask, is_causal=True))
        return hidden


State = dict[str, bytes]
Result = TypeVar("Result")


def checkpoints() -> Iterator[State]:
    """The state after each number of `STEPS`, every part of it as the bytes of its tensors one after the other. Takes
    half a minute of one core; several would wait for each other on a busy machine."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_RATE, total_steps=100, pct_start=0.1)
    for step in range(1, max(STEPS) + 1):
        starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,))
        batch = torch.stack([text[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
        loss = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step in STEPS:
            yield _state(list(model.parameters()), optimizer)


def _state(weights: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> State:
    parts = {
        "bf16 weights": [weight.detach().bfloat16() for weight in weights],
        "fp32 weights": [weight.detach() for weight in weights],
        "Adam, first moment": [optimizer.state[weight]["exp_avg"] for weight in weights],
        "Adam, second moment": [optimizer.state[weight]["exp_avg_sq"] for weight in weights],
    }
    return {
        name: b"".join(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
        for name, tensors in parts.items()
    }


class Measured(NamedTuple):
    stored: int
    """Bytes."""
    encoding: float
    """Seconds of CPU time."""
    decoding: float


def measure(codec: Codec, data: bytes, base: bytes | None, item: int, repeat: int) -> Measured:
    """The fastest of ``repeat`` passes over all chunks of ``data``."""
    place = memoryview(bytearray(CHUNK))
    whole, before = memoryview(data), memoryview(base or b"")
    cuts = [slice(start, start + CHUNK) for start in range(0, len(data), CHUNK)]
    stored, encoding, decoding = 0, [], []
    for _ in range(repeat):
        stored, spent, reading = 0, 0.0, 0.0
        for cut in cuts:
            chunk, against = whole[cut], before[cut] if base else None
            taken, encoded = _cpu(lambda c=chunk, a=against: encode(codec, c, item, a))  # type: ignore[misc]
            spent += taken
            stored += encoded.payload.nbytes
            out = place[: chunk.nbytes]
            reading += _cpu(lambda e=encoded, o=out, a=against: decode_into(e.codec, e.payload, o, item, a))[0]  # type: ignore[misc]
            assert out == chunk
        encoding.append(spent)
        decoding.append(reading)
    return Measured(stored, min(encoding), min(decoding))


def _cpu(work: Callable[[], Result]) -> tuple[float, Result]:
    started = time.thread_time()
    result = work()
    return time.thread_time() - started, result


def codec_rows(name: str, codec: Codec, data: bytes, base: bytes | None, repeat: int) -> list[Row]:
    found = measure(codec, data, base, ITEMS[name], repeat)
    what = f"{codec.label}, {name}"
    ratio, write, read = "", "", ""
    if name == "bf16 weights" and codec in WANTED:
        ratio, write, read = (f"{sign} {value}" for sign, value in zip(("<=", ">=", ">="), WANTED[codec], strict=True))
    return [
        Row(f"{what}: stored", "MB", found.stored / 1e6, len(data) / 1e6, "original", ratio),
        Row(f"{what}: encode", "GB/s", len(data) / found.encoding / 1e9, None, "", write),
        Row(f"{what}: decode", "GB/s", len(data) / found.decoding / 1e9, None, "", read),
    ]


def two_threads(codec: Codec, data: bytes, base: bytes, item: int, repeat: int) -> Row:
    """Twice the work in two threads, against one of them alone: 2 when neither waits for the other."""
    cuts = [slice(start, start + CHUNK) for start in range(0, len(data), CHUNK)]

    def work() -> None:
        for cut in cuts:
            encode(codec, memoryview(data)[cut], item, memoryview(base)[cut])

    def both() -> None:
        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    one, two = (min(seconds(each) for _ in range(repeat)) for each in (work, both))
    rate = len(data) / 1e9
    return Row(f"{codec.label}, encode in two threads", "GB/s", 2 * rate / two, rate / one, "one thread", "~ 2")


def codecs(repeat: int) -> list[Row]:
    before, after = checkpoints()
    data = after["bf16 weights"]
    copy = min(_cpu(lambda: bytearray(memoryview(data)[:CHUNK]))[0] for _ in range(MEMORY_PASSES))
    rows = [Row("memory copy, for comparison", "GB/s", CHUNK / copy / 1e9, None, "")]
    for name in ITEMS:
        for codec in WANTED:
            rows += codec_rows(name, codec, after[name], before[name], max(repeat, 5))
    return rows + [two_threads(codec, data, before["bf16 weights"], 2, max(repeat, 5)) for codec in WANTED]
