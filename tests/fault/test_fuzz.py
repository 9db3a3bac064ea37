"""Whatever comes from outside, a policy file, the control socket, the directories of the tiers: only errors of the one
tree come of it, nothing is touched outside of a tier, and no secret is repeated."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import string
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierfs.control.protocol import MountRecord, Request, decode_reply, decode_request
from tierfs.control.server import _Checkpoint
from tierfs.errors import ConfigError, TierError, TierfsError, UsageError
from tierfs.fs.caller import Caller
from tierfs.migrator.recovery import reclaim_orphans
from tierfs.operations import Operations
from tierfs.policy.load import parse_policy
from tierfs.tiers.base import MARKER, OWNER, ReplicaStore
from tierfs.tiers.root import RESERVED
from tierfs.tiers.tree import TreeStore
from tierfs.types import ROOT_INO

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
assemble = importlib.import_module("assembled").assemble

FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
CATALOG = "6f1c1f5e-0000-4000-8000-000000000001"
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


# the control protocol


@settings(max_examples=500, deadline=None)
@given(st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_line_is_a_request_or_refused(line: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with contextlib.suppress(UsageError):
            decode(line)


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"op":' * 50_000, b"1" * 10_000, b"{" + b'"a":1e999,' * 1000])
def test_lines_made_to_hurt(line: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with pytest.raises(UsageError):
            decode(line)


@FEW
@given(data=st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_a_record_is_a_record_or_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "mount.json").write_bytes(data)
    with contextlib.suppress(UsageError):
        MountRecord.read(tmp_path)


ARGUMENTS = ["path", "paths", "to", "from", "timeout", "tier", "rate", "drain", "emergency"]
KEYS = st.sampled_from(ARGUMENTS) | st.text(max_size=5)
PATHS = st.sampled_from(["", "/", "f", "d/f", "../f", "f/..", "\ud800", "f\0", "d" * 5000, "./f//"])
VALUES = JSON | PATHS | st.lists(PATHS, max_size=3) | st.sampled_from(["nvme", "memory", "archive"])
SPARED = {"restart", "detach", "pause"}
"""Ops whose effect would end the world that the others are tried in."""


class Daemon:
    """Everything behind the control socket, with two files."""

    def __init__(self, top: Path) -> None:
        self.parts = assemble(top)
        host = SimpleNamespace(
            policy=self.parts.files.policy,
            mountpoint=Path("/mnt"),
            config=Path("/p.yaml"),
            mode="userspace",
            why="test",
            session=None,
            catalog=self.parts.catalog,
        )
        self.said = ""
        space = self.parts.files.space
        self.operations = Operations(host, self.parts.names, self.parts.migrator, space)  # type: ignore[arg-type]
        self.parts.names.make(ROOT_INO, b"d", 0o40755, Caller(0, 0))
        fh, _ = self.parts.names.create(ROOT_INO, b"f", 0o644, os.O_RDWR, Caller(0, 0))
        self.parts.write(fh, 0, b"x" * 5000)
        self.parts.files.release(fh)

    def ask(self, request: Request) -> None:
        """Like the server does. Anything but a result that is JSON or an error of the tree comes out."""

        def progress(done: int, total: int, what: str) -> _Checkpoint:
            return _Checkpoint()

        async def main() -> None:
            with trio.move_on_after(0.05):
                try:
                    json.dumps(await self.operations.handlers()[request.op](request.args, progress))
                except TierfsError as error:
                    self.said = str(error)

        trio.run(main)


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory() as top:
        made = Daemon(Path(top))
        yield made
        made.parts.close()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_arguments_make_an_operation_fail_but_in_words(daemon: Daemon, data: st.DataObject) -> None:
    op = data.draw(st.sampled_from(sorted(set(daemon.operations.handlers()) - SPARED)))
    args: dict[str, Any] = data.draw(st.dictionaries(KEYS, VALUES, max_size=4))
    daemon.ask(Request(op, args))


# what is read back from tiers


NAMES = st.one_of(
    st.sampled_from(["2-1", "2-1.tmp", "f" * 16 + "-1", "-", "2-", "..x", "\udcff", "0-0", "8" + "0" * 15 + "-1"]),
    st.text(alphabet=string.hexdigits + "-.", min_size=1, max_size=40),
).filter(lambda name: name not in (".", ".."))


@contextlib.contextmanager
def outside(top: Path) -> Iterator[None]:
    """Nothing beside the tier may change."""
    (top / "outside").mkdir()
    (top / "outside" / "secret").write_bytes(b"secret")
    yield
    assert (top / "outside" / "secret").read_bytes() == b"secret"
    assert sorted(path.name for path in (top / "outside").iterdir()) == ["secret"]


@FEW
@given(
    files=st.dictionaries(st.sampled_from([MARKER, OWNER]), st.binary(max_size=200), max_size=2),
    kind=st.sampled_from(["store", "tree"]),
)
def test_marker_and_owner_of_any_content(files: dict[bytes, bytes], kind: str) -> None:
    with tempfile.TemporaryDirectory() as top, outside(Path(top)):
        root = Path(top) / "tier"
        tier: ReplicaStore | TreeStore = (
            ReplicaStore("t", root, persistent=True) if kind == "store" else TreeStore("t", root)
        )
        inside = root if kind == "store" else root / os.fsdecode(RESERVED)
        inside.mkdir(parents=True, mode=0o700)
        for name, content in files.items():
            (inside / os.fsdecode(name)).write_bytes(content)
        refused: TierError | None = None
        try:
            tier.prepare()
            tier.check_catalog(CATALOG, claim=True)
        except TierError as error:
            refused = error
        finally:
            tier.close()
        assert refused is None or not refused.temporary


@FEW
@given(
    names=st.lists(NAMES, max_size=6, unique=True),
    kinds=st.lists(st.sampled_from(["file", "directory", "link", "fifo"]), min_size=6, max_size=6),
)
def test_names_of_any_kind_in_a_tier_of_replicas(names: list[str], kinds: list[str]) -> None:
    with tempfile.TemporaryDirectory() as top, outside(Path(top)):
        (Path(top) / "world").mkdir()
        parts = assemble(Path(top) / "world")
        root = Path(top) / "world" / "nvme"
        for index, (name, kind) in enumerate(zip(names, kinds, strict=False)):
            where = [root / "data", root / "tmp", home(root, name)][index % 3]
            plant(where / name, kind, Path(top) / "outside")
        store = parts.stores["nvme"]
        keys = list(store.keys())
        assert all(key in names for key in keys)
        trio.run(reclaim_orphans, parts.catalog, parts.stores, lambda key: True)
        store.prepare()
        parts.close()


def test_a_key_that_no_catalog_can_hold_is_no_replica(tmp_path: Path) -> None:
    parts = assemble(tmp_path)
    planted = [
        home(tmp_path / "nvme", key) / key
        for key in ("f" * 16 + "-1", "1-" + "f" * 16, "8" + "0" * 15 + "-1", "1" * 40 + "-" + "1" * 40)
    ]
    for path in planted:
        path.touch()
    assert trio.run(reclaim_orphans, parts.catalog, parts.stores, lambda key: True) == 0
    assert all(path.exists() for path in planted), "what is not tierfs's is left alone"
    parts.close()


@pytest.mark.parametrize("content", [b"", b"x", b"1 2", b"\xff" * 40, b"-"])
def test_a_damaged_journal_of_an_exchange_is_an_error_of_the_tier(tmp_path: Path, content: bytes) -> None:
    store = TreeStore("archive", tmp_path)
    store.prepare()
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".tierfs" / "tmp" / "exchange.7").write_bytes(content)
    with pytest.raises(TierError, match=r"exchange .: Structure needs cleaning"):
        store.exchange((b"a",), (b"b",), "7")
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("a", "b")
    store.close()


def home(root: Path, key: str) -> Path:
    """The directory in which a replica of this key would be."""
    found = root / "data" / f"{zlib.crc32(os.fsencode(key)) & 0xFF:02x}"
    found.mkdir(exist_ok=True, mode=0o700)
    return found


def plant(path: Path, kind: str, target: Path) -> None:
    with contextlib.suppress(FileExistsError):
        if kind == "file":
            path.write_bytes(b"planted")
        elif kind == "directory":
            path.mkdir()
        elif kind == "link":
            path.symlink_to(target)
        else:
            os.mkfifo(path)


@FEW
@given(
    names=st.lists(NAMES | st.sampled_from(["exchange.7", "exchanged.7", "aside.7"]), max_size=5, unique=True),
    content=st.binary(max_size=40),
    kinds=st.lists(st.sampled_from(["file", "directory", "link", "fifo"]), min_size=5, max_size=5),
)
def test_names_and_journals_of_any_kind_in_the_archive(names: list[str], content: bytes, kinds: list[str]) -> None:
    with tempfile.TemporaryDirectory() as top, outside(Path(top)):
        store = TreeStore("archive", Path(top) / "archive")
        store.prepare()
        tmp = store.root / os.fsdecode(RESERVED) / "tmp"
        for name, kind in zip(names, kinds, strict=False):
            plant(tmp / name, "file" if kind == "fifo" else kind, Path(top) / "outside")
            if kind == "file":
                (tmp / name).write_bytes(content)
            with contextlib.suppress(OSError):
                plant(store.root / name, kind, Path(top) / "outside")
        for call in (
            lambda: store.exchange((b"2-1",), (b"0-0",), "7"),
            lambda: store.forget_exchange("7"),
            lambda: store.sweep(set()),
            lambda: store.mkdir((b"2-1", b"x")),
            lambda: store.open((b"2-1", b"secret")),
            lambda: store.remove((b"2-1", b"secret")),
        ):
            with contextlib.suppress(TierError):
                result = call()
                if isinstance(result, int):
                    os.close(result)
        store.close()


# secrets


@settings(max_examples=200, deadline=None)
@given(
    key=st.sampled_from(["mount", "state", "mode", "tiers", "limits", "scrub", "url", "size", "path", "match"]),
    shape=st.sampled_from(
        ["{}", "[{}]", "{{a: {}}}", "{{drain: {}}}", "{{every: {}}}", "{{x: {{kind: dir, path: {}}}}}"]
    ),
    user=st.text(string.ascii_letters, min_size=1, max_size=20),
)
def test_no_message_repeats_the_password_of_a_url(key: str, shape: str, user: str) -> None:
    value = f'"s3://{user}:correct-horse-battery@bucket/run42"'
    tiers = "tiers:\n  m: {kind: memory, size: 1GiB}\n  a: {kind: dir, path: /a}\n"
    text = f"{key}: {shape.format(value)}\n" + (tiers if key != "tiers" else "")
    with pytest.raises(ConfigError) as refused:
        parse_policy(text, "p.yaml")
    assert "horse" not in str(refused.value)
