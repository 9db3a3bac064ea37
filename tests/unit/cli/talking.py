"""A daemon with canned answers behind a real control server, and what the tests of each command share."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any

import pytest
import trio

from tierfs.cli import main
from tierfs.control.protocol import MountRecord
from tierfs.control.server import Handler, ProgressCallback, serve_control

Json = dict[str, Any]
Capture = pytest.CaptureFixture[str]

STATUS: Json = {
    "mode": "userspace",
    "mode_reason": "not root",
    "keeper_pid": None,
    "daemon_pid": 7,
    "daemon_restarts": 0,
    "paused": False,
    "tiers": [
        {"name": "memory", "kind": "memory", "capacity": 1 << 30, "used": 1 << 20, "clean": 0, "dirty": 1 << 20}
        | {"open": 0, "state": "failing", "last_error": "[red]odd\x1b[0m"}
    ],
    "drain": {"queued_files": 3, "queued_bytes": 1536, "unsynced_bytes": 9, "oldest_age_s": 1.0, "rate_bytes_s": 0.0},
    "held_deletes": {"files": 0, "bytes": 0},
}


class FakeDaemon:
    """Answers on a mount's socket and remembers what it was asked."""

    def __init__(self, record: MountRecord) -> None:
        self.record = record
        self.calls: list[tuple[str, Json]] = []
        self.answers: dict[str, Json | Exception] = {
            "status": {"mountpoint": record.mountpoint} | STATUS,
            "info": {"path": "a.pt", "size": 5, "version": 2, "replicas": [], "durable": None},
            "flush": {"files": 2, "bytes": 2048, "tier": "archive"},
            "warmup": {"files": 2, "recalled": 1, "bytes": 10},
            "evict": {"evicted": 1, "kept": 1, "bytes": 10},
            "pause": {"paused": True},
            "resume": {"paused": False},
            "detach": {"detached": True},
            "restart": {},
        }
        self._started = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._main,), daemon=True)

    def _handler(self, op: str) -> Handler:
        async def handle(args: Json, progress: ProgressCallback) -> Json:
            self.calls.append((op, args))
            await progress(1, 2, "half [odd]\x1b")
            answer = self.answers[op]
            if op == "restart":
                self.answers["status"] = STATUS | {"daemon_pid": 8}
            if isinstance(answer, Exception):
                raise answer
            return answer

        return handle

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        async with trio.open_nursery() as nursery:
            self._scope = nursery.cancel_scope
            await nursery.start(serve_control, self.record.socket, {op: self._handler(op) for op in self.answers})
            self._started.set()

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._token.run_sync_soon(self._scope.cancel)
        self._thread.join(10)


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


def fake_run_mount(monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    fake = types.ModuleType("tierfs.daemon")
    fake.run_mount = body  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tierfs.daemon", fake)
