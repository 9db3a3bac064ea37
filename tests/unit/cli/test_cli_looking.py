"""status and info."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.unit.cli.talking import Capture, FakeDaemon, Json, run


def test_status_lists_and_shows(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    assert run("status") == 0
    out = capsys.readouterr().out
    assert str(mnt) in out
    assert "1.5KiB" in out
    assert "failing: memory" in out
    assert run("status", mnt) == 0
    out = capsys.readouterr().out
    assert "not root" in out
    assert "[red]odd\\x1b[0m" in out
    assert run("status", mnt, "--json") == 0
    assert json.loads(capsys.readouterr().out) == daemon.answers["status"]
    assert run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [daemon.answers["status"]]


def test_status_says_that_deletes_wait_in_a_circle(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    assert run("status", mnt) == 0
    assert "deletes make no room" not in capsys.readouterr().out
    answer = daemon.answers["status"]
    assert isinstance(answer, dict)
    daemon.answers["status"] = answer | {"stuck": {"path": "run/model.pt", "bytes": 3 << 20}}
    assert run("status", mnt) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "what was deleted stays until run/model.pt (3MiB) is durable" in out


def test_what_scripts_ask_often_loads_no_more_than_it_needs(daemon: FakeDaemon) -> None:
    """Each is another second of all the ranks of a training job."""
    script = """
import sys
from tierfs.cli import main
assert main(["status", "--json"]) == 0
sys.exit(" ".join({"rich", "yaml", "trio", "sqlite3", "tierfs.policy.load"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") or done.stderr == "\n"
    assert json.loads(done.stdout) == [daemon.answers["status"]]


def test_status_without_mounts(capsys: Capture) -> None:
    assert run("status", "--json") == 0
    assert json.loads(capsys.readouterr().out) == []
    assert run("status") == 0
    assert capsys.readouterr().out == "no tierfs mounts\n"


def test_info_leaves_names_and_digests_to_programs(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    replica = {"tier": "nvme", "version": 2, "state": "durable", "bytes": 5, "key": "2-1abc", "digest": "d1" * 16}
    daemon.answers["info"] = {"path": "a.pt", "size": 5, "version": 2, "replicas": [replica], "durable": "nvme"}
    assert run("info", mnt / "a.pt") == 0
    out = capsys.readouterr().out
    assert "nvme" in out
    assert "2-1abc" not in out
    assert "d1d1" not in out
    assert run("info", mnt / "a.pt", "--json") == 0
    assert json.loads(capsys.readouterr().out)["replicas"] == [replica]


def test_info_says_that_a_file_is_lost(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    answer: Json = {"path": "a.pt", "size": 5, "version": 2, "replicas": [], "durable": None}
    daemon.answers["info"] = answer | {"lost": True}
    assert run("info", mnt / "a.pt") == 0
    out = capsys.readouterr().out
    assert "lost with the memory of a former boot" in out
    assert "durable" not in out
    daemon.answers["info"] = answer | {"lost": False}
    assert run("info", mnt / "a.pt") == 0
    out = capsys.readouterr().out
    assert "durable on: no tier yet" in out
    assert "lost" not in out
