"""The program's exit codes and messages, against a real control server with canned answers."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from tierfs.cli import main, mounting, render
from tierfs.control.protocol import MountRecord, list_mounts, mount_table
from tierfs.control.server import Handler, ProgressCallback, serve_control
from tierfs.errors import MountError, NotDurableInTime, UsageError
from tierfs.fsck.session import Report as FsckReport
from tierfs.report import Lost, Report, keep_rebuild, keep_report

Json = dict[str, Any]
DEAD = 2**22 + 1

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


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERFS_RUNTIME_DIR", str(tmp_path / "run"))


@pytest.fixture
def mnt(tmp_path: Path) -> Path:
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


@pytest.fixture
def daemon(mnt: Path, tmp_path: Path) -> Iterator[FakeDaemon]:
    record = MountRecord(str(mnt), str(tmp_path / "c.yaml"), str(tmp_path / "s"), None, os.getpid(), "userspace")
    record.write()
    with FakeDaemon(record) as fake:
        yield fake


@pytest.fixture
def config(tmp_path: Path, mnt: Path) -> Path:
    for name in ("memory", "archive"):
        (tmp_path / name).mkdir()
    path = tmp_path / "c.yaml"
    path.write_text(
        f"mount: {mnt}\nmode: userspace\nstate: {tmp_path}/state\ntiers:\n"
        f"  memory: {{kind: memory, path: {tmp_path}/memory, size: 1MiB}}\n"
        f"  archive: {{kind: dir, path: {tmp_path}/archive}}\n"
    )
    return path


Capture = pytest.CaptureFixture[str]


def run(*arguments: object) -> int:
    return main([str(a) for a in arguments])


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


def test_paths_are_sent_relative(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    assert run("info", mnt / "a.pt") == 0
    assert run("flush", mnt / "d", "--to", "nvme", "--timeout", "5m") == 0
    assert run("flush", mnt, "--json") == 0
    assert run("warmup", mnt / "a", mnt / "b") == 0
    assert run("evict", mnt / "a", "--from", "memory") == 0
    assert daemon.calls == [
        ("info", {"path": "a.pt"}),
        ("flush", {"path": "d", "to": "nvme", "timeout": 300.0}),
        ("flush", {"path": ""}),
        ("warmup", {"paths": ["a", "b"]}),
        ("evict", {"paths": ["a"], "from": "memory"}),
    ]
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "1 copies evicted (10B), 1 kept" in captured.out


def test_flush_of_every_mount_has_to_be_asked_for(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    for arguments in ([], ["--json"], ["--timeout", "5s"]):
        assert run("flush", *arguments) == 2
        err = capsys.readouterr().err
        assert "PATH" in err
        assert "MOUNTPOINT" in err
        assert "--all" in err
    assert daemon.calls == []
    assert run("flush", "--all", mnt) == 2
    assert daemon.calls == []
    capsys.readouterr()
    assert run("flush", "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out) == [daemon.answers["flush"]]
    assert daemon.calls == [("flush", {"path": "", "emergency": True})]


def test_flush_in_vain_exits_3_with_the_list(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    daemon.answers["flush"] = NotDurableInTime("not durable on archive after 1 s: a.pt, b.pt")
    assert run("flush", mnt, "--timeout", "1s", "--json") == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "tierfs: not durable on archive after 1 s: a.pt, b.pt\n"


def test_pause_resume_restart(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    assert run("pause", mnt) == run("resume", mnt) == run("restart", mnt) == 0
    assert [op for op, _ in daemon.calls] == ["pause", "resume", "status", "restart", "status"]
    assert "daemon 7 was replaced by 8" in capsys.readouterr().out


def test_restart_by_config(daemon: FakeDaemon, config: Path) -> None:
    assert run("restart", config) == 0
    assert "restart" in [op for op, _ in daemon.calls]


def test_a_path_inside_is_no_mountpoint(daemon: FakeDaemon, mnt: Path, capsys: Capture) -> None:
    (mnt / "d").mkdir()
    for command in ("pause", "umount", "restart", "status"):
        assert run(command, mnt / "d") == 2
        assert f"lies in the mount {mnt}" in capsys.readouterr().err
    assert daemon.calls == []


@pytest.mark.parametrize("command", ["status", "info", "flush", "warmup", "evict", "pause", "umount"])
def test_a_path_on_no_mount(command: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(command, tmp_path / "odd\nname") == 2
    err = capsys.readouterr().err
    assert err.startswith("tierfs: ")
    assert err.count("\n") == 1
    assert "not on a tierfs mount" in err


@pytest.mark.parametrize(
    "arguments",
    [["nothing"], ["flush", "--timeout", "5"], ["info"], ["warmup"], ["completion", "tcsh"], ["info", "-x"]],
)
def test_wrong_usage_exits_2(arguments: list[str], capsys: Capture) -> None:
    assert run(*arguments) == 2
    assert "Usage: tierfs" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell: str, capsys: Capture) -> None:
    assert run("completion", shell) == 0
    assert "_TIERFS_COMPLETE" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_as_the_readme_says(shell: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TIERFS_COMPLETE", f"{shell}_source")
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 0
    script = capsys.readouterr().out
    assert f"_TIERFS_COMPLETE={shell}_complete" in script
    monkeypatch.delenv("_TIERFS_COMPLETE")
    assert run("completion", shell) == 0
    assert capsys.readouterr().out == script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script.encode(), check=True)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fl"], ["plain,flush"]),
        (["flush", "--t"], ["plain,--to", "plain,--timeout"]),
        (["pause", "/"], ["plain,{mnt}"]),
        (["umount", "{mnt}"], ["plain,{mnt}"]),
        (["umount", "/etc"], ["file,/etc"]),
        (["warmup", "/mn"], ["file,/mn"]),
    ],
)
@pytest.mark.usefixtures("daemon")
def test_the_shell_completes(
    mnt: Path, words: list[str], expected: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [word.format(mnt=mnt) for word in words]
    monkeypatch.setenv("_TIERFS_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", " ".join(["tierfs", *words]))
    monkeypatch.setenv("COMP_CWORD", str(len(words)))
    with pytest.raises(SystemExit):
        run()
    assert capsys.readouterr().out.splitlines() == [line.format(mnt=mnt) for line in expected]


def test_every_command_has_an_example(capsys: Capture) -> None:
    from tierfs.cli.app import cli

    for name in cli.commands:
        assert run(name, "--help") == 0
        assert f"tierfs {name}" in capsys.readouterr().out.split("Example", 1)[1]


def test_interrupted(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tierfs.cli.inspect.list_mounts", interrupt)
    assert run("status") == 130


# policies


def test_check_and_explain(config: Path, mnt: Path, capsys: Capture) -> None:
    assert run("check", config) == 0
    assert "archive" in capsys.readouterr().out
    assert run("check", config, "--json") == 0
    assert json.loads(capsys.readouterr().out)["mount"] == str(mnt)
    for path in ("run/a.pt", mnt / "run/a.pt"):
        assert run("explain", config, path, "--json") == 0
        answer = json.loads(capsys.readouterr().out)
        assert (answer["path"], answer["ack"]) == ("run/a.pt", "memory")
    assert run("explain", config, "a.pt") == 0
    out = capsys.readouterr().out
    assert "rule 0" in out
    assert "a power cut or reboot may lose the file" in out
    assert "copied in the background down to archive" in out
    config.write_text(config.read_text() + 'rules:\n  - {match: "**", close: archive, keep: {memory: none}}\n')
    assert run("explain", config, "a.pt") == 0
    out = capsys.readouterr().out
    assert "close() returns once the file is durable on archive" in out
    assert "leaves as soon as it is durable further down" in out
    for path in ("/etc/passwd", "../x", "."):
        assert run("explain", config, path) == 2


EXPLAINED = {
    "ack: memory, drain: none": {
        "ack": "write() puts the bytes on memory, or on ssd or hdd when it is full",
        "close": "close() returns at once; a power cut or reboot loses what is in memory, as nothing copies it",
        "fsync": "fsync() returns at once; a power cut or reboot loses what is in memory, as nothing copies it",
        "drain": "never copied: the file stays where it was written until it is deleted, also over umount and mount; a "
        "reboot takes it from memory",
        "keep memory": "does not leave: no tier further down gets a copy",
        "keep ssd": "the file comes here only when memory is full, and does not leave",
        "keep archive": "the file does not come here",
    },
    "ack: ssd, drain: none": {
        "ack": "write() puts the bytes on ssd, or on hdd when it is full",
        "close": "close() returns at once; until it is synced, in the background, a power cut may lose the file",
        "fsync": "fsync() waits for ssd; a power cut or reboot takes nothing then",
        "drain": "never copied: the file stays where it was written until it is deleted, also over umount and reboot, "
        "and is lost with that disk",
        "keep memory": "the file does not come here",
        "keep ssd": "does not leave: no tier further down gets a copy",
        "keep hdd": "the file comes here only when ssd is full, and does not leave",
        "keep archive": "the file does not come here",
    },
    "ack: hdd, drain: none, close: hdd, keep: {hdd: none}": {
        "ack": "write() puts the bytes on hdd",
        "close": "close() returns once the file is durable on hdd",
        "drain": "never copied: the file stays on hdd until it is deleted, also over umount and reboot, and is lost "
        "with that disk",
        "keep hdd": "does not leave: no tier further down gets a copy",
        "keep archive": "the file does not come here",
    },
    "drain: ssd": {
        "drain": "copied in the background down to ssd",
        "keep memory": "leaves for room, oldest first, once durable further down",
        "keep ssd": "does not leave: no tier further down gets a copy",
        "keep archive": "the file does not come here",
    },
    "drain: archive": {
        "close": "close() returns at once; a power cut or reboot may lose the file",
        "keep ssd": "leaves for room, oldest first, once durable further down",
        "keep archive": "never leaves",
    },
}


@pytest.mark.parametrize(("rule", "sentences"), EXPLAINED.items(), ids=EXPLAINED)
def test_explain_is_true_of_files_that_are_never_drained(
    config: Path, rule: str, sentences: dict[str, str], capsys: Capture
) -> None:
    text = config.read_text()
    disks = "".join(f"  {name}: {{kind: dir, path: {config.parent}/{name}}}\n" for name in ("ssd", "hdd"))
    config.write_text(f'{text.replace("  archive:", disks + "  archive:")}rules:\n  - {{match: "**", {rule}}}\n')
    assert run("explain", config, "a.pt") == 0
    told = {}
    for line in capsys.readouterr().out.splitlines()[2:]:
        key, _, means = re.split(r" {2,}", line.strip(), maxsplit=2)
        told[key] = means
    assert {key: told[key] for key in sentences} == sentences


@pytest.mark.parametrize("command", ["check", "mount"])
def test_memory_that_the_machine_does_not_have_is_refused(config: Path, capsys: Capture, command: str) -> None:
    own = config.read_text().replace(f"path: {config.parent}/memory, size: 1MiB", "size: 64TiB")
    config.write_text(own)
    assert run(command, config) == 2
    err = capsys.readouterr().err
    assert "tiers.memory.size: is more than the" in err
    assert err.count("\n") == 1


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


def test_a_bad_policy_exits_2_with_its_line(config: Path, capsys: Capture) -> None:
    config.write_text(config.read_text().replace("1MiB", "1M"))
    for command in (["check", config], ["mount", config], ["explain", config, "a"], ["mount", "/nowhere.yaml"]):
        assert run(*command) == 2
        err = capsys.readouterr().err
        assert err.startswith("tierfs: /")
        assert err.count("\n") == 1


def test_check_remarks_on_stderr(config: Path, tmp_path: Path, capsys: Capture) -> None:
    config.write_text(config.read_text().replace("size: 1MiB", "size: 64TiB"))
    assert run("check", config) == 0
    err = capsys.readouterr().err
    assert "fsync() makes nothing durable" in err
    assert "tier memory may take 64TiB of this machine's" in err
    if os.stat(tmp_path / "memory").st_dev == os.stat(tmp_path / "archive").st_dev:
        assert "tiers memory and archive are on one filesystem" in err
    assert run("check", config, "--json") == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert len(json.loads(captured.out)["remarks"]) >= 2


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_commands_show_a_bar_on_a_terminal(
    daemon: FakeDaemon, mnt: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """flush, umount, warmup, evict, fsck and mount all use the same one."""
    for command in ("flush", "warmup", "evict"):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        assert run(command, mnt / "a.pt") == 0
        assert "half [odd]\\x1b" in terminal.getvalue()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert run("flush", mnt / "a.pt") == 0
    assert sys.stderr.getvalue() == ""  # type: ignore[attr-defined]


def broken(text: str, base: Path) -> Iterator[tuple[str, str, str]]:
    """Policies with one mistake each: (text, line and key, part of the message)."""

    def changed(old: str, new: str) -> str:
        assert text.count(old) == 1
        return text.replace(old, new)

    rules = text + 'rules:\n  - match: "**"\n'
    tier = f"  nvme: {{kind: dir, path: {base}/"
    yield changed("mode: userspace", "moed: auto"), ":2: moed: ", "did you mean 'mode'?"
    yield changed("mode: userspace", "state: /x"), ":3: state: ", "duplicate key, first given on line 2"
    yield changed("size: 1MiB", "sise: 1MiB"), ":5: tiers.memory.sise: ", "did you mean 'size'?"
    yield changed("size: 1MiB", "size: 1MiB, size: 1MiB"), ":5: tiers.memory.size: ", "duplicate key"
    yield changed("size: 1MiB", "size: 1Mb/s"), ":5: tiers.memory.size: ", "is not a size"
    for small in ("512", "1023KiB"):
        yield changed("size: 1MiB", f"size: {small}"), ":5: tiers.memory.size: ", "is less than 1MiB: no file would fit"
    yield changed("size: 1MiB", "high: 120%"), ":5: tiers.memory.high: ", "out of range"
    yield changed("size: 1MiB", "low: 90%"), ":5: tiers.memory.low: ", "is not below the high one"
    yield changed("/archive", "/none"), ":6: tiers.archive.path: ", "does not exist; create it"
    yield changed("/archive", "/mnt/in"), ":6: tiers.archive.path: ", "is inside the mountpoint"
    yield changed("mount: ", f"mount: {base}/archive/in #"), ":1: mount: ", "is inside tier archive"
    yield changed("mount: ", f"mount: {base}/gone #"), ":1: mount: ", "does not exist; create it"
    yield changed("/state", "/mnt/state"), ":3: state: ", "is inside the mountpoint"
    yield changed("/archive", "/link"), ":6: tiers.archive.path: ", "is also the path of tier memory"
    yield text + tier + "archive/in}\n", ":7: tiers.nvme.path: ", "tier nvme is inside tier archive"
    yield rules + "    ack: memry\n", ":9: rules[0].ack: ", "did you mean 'memory'?"
    yield rules + "    ack: archive\n", ":9: rules[0].ack: ", "takes no writes itself"
    yield rules + "    close: archiv\n", ":9: rules[0].close: ", "did you mean 'archive'?"
    yield rules + "    fsync: archiv\n", ":9: rules[0].fsync: ", "did you mean 'archive'?"
    yield rules + "    drain: archiv\n", ":9: rules[0].drain: ", "did you mean 'archive'?"
    yield rules + "    keep: {archiv: all}\n", ":9: rules[0].keep.archiv: ", "did you mean 'archive'?"
    yield text[: text.index("  memory")], ":4: tiers: ", "must be a mapping, not empty"
    yield text.replace("mount: ", "mount: [", 1), ":2: (file): ", "is not valid YAML"
    yield text + "limits: {drain: 2GiB}\n", ":7: limits.drain: ", "is not a rate"
    yield text + "\udcff", ":7: (file): ", "is not UTF-8"


def test_every_mistake_is_one_message_and_nothing_is_mounted(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def mounts(*_: object) -> int:
        raise AssertionError("mounted")

    fake_run_mount(monkeypatch, mounts)
    (tmp_path / "archive/in").mkdir()
    (tmp_path / "link").symlink_to("memory")
    (tmp_path / "mnt/in").mkdir()
    for text, where, says in broken(config.read_text(), tmp_path):
        config.write_bytes(text.encode(errors="surrogateescape"))
        for command in ("mount", "check"):
            assert run(command, config) == 2, text
            captured = capsys.readouterr()
            assert captured.out == ""
            assert captured.err.startswith(f"tierfs: {config}{where}"), captured.err
            assert captured.err.count("\n") == 1
            assert says in captured.err
    assert not (tmp_path / "state").exists()


def test_fsck(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    problems = [{"severity": "error", "what": "digest", "path": "a"}]
    fake = types.ModuleType("tierfs.fsck")
    fake.check_all = lambda policy, progress, data: problems  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tierfs.fsck", fake)
    assert run("fsck", config, "--json") == 1
    assert json.loads(capsys.readouterr().out) == problems
    assert run("fsck", config) == 1
    assert "digest" in capsys.readouterr().out
    problems.clear()
    assert run("fsck", config) == 0


def test_fsck_after_a_reboot_is_one_line(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    problems = [{"severity": "memory", "what": "memory tier memory is gone: nothing is lost", "path": "/m"}]
    fake = types.ModuleType("tierfs.fsck")
    fake.check_all = lambda policy, progress, data: problems  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tierfs.fsck", fake)
    assert run("fsck", config) == 0
    assert capsys.readouterr().out == "memory tier memory is gone: nothing is lost\nno other problems found\n"
    problems.append({"severity": "rolled back", "what": "rolled back: a.pt is again", "path": "a.pt"})
    problems.append({"severity": "undone", "what": "undone: unlink of b.pt", "path": "b.pt"})
    assert run("fsck", config) == 0
    out = capsys.readouterr().out
    assert out.startswith("memory tier memory is gone: nothing is lost (--json lists them)\nno other")
    assert ".pt" not in out
    problems.append({"severity": "lost", "what": "lost: c.pt", "path": "c.pt"})
    assert run("fsck", config) == 1, "bytes of a file are lost"
    problems[-1] = {"severity": "error", "what": "no file for the replica on nvme", "path": "d.pt"}
    assert run("fsck", config) == 1
    out = capsys.readouterr().out
    assert "no file for the replica on nvme" in out
    assert "no other problems" not in out.splitlines()[-1]
    assert run("fsck", config, "--json") == 1
    assert json.loads(capsys.readouterr().out) == problems


@pytest.mark.parametrize("option", ["--repair", "--rebuild"])
def test_fsck_that_lost_a_file_has_failed(
    config: Path, option: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    report = FsckReport()
    report.did("replaced the missing replica on nvme", b"good.pt")
    fake = types.ModuleType("tierfs.fsck")
    fake.repair_all = lambda policy, progress, data: report  # type: ignore[attr-defined]
    fake.rebuild_all = lambda policy, progress: report  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tierfs.fsck", fake)
    assert run("fsck", option, config) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no problems left"
    for number, last in ((1, "1 file lost"), (2, "2 files lost")):
        report.did("missing on the archive; to be made there again", b"%d.pt" % number)
        report.lose("no tier has its bytes", b"%d.pt" % number)
        assert run("fsck", option, config) == 1
        out = capsys.readouterr().out
        assert out.splitlines()[-1] == last
        assert "no problems" not in out
        assert out.count(f"{number}.pt") == 1
    assert run("fsck", option, config, "--json") == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["lost"] == ["1.pt", "2.pt"]
    assert [done["path"] for done in answer["done"]] == ["good.pt", "1.pt", "2.pt"]


@pytest.mark.parametrize("copy", [None, {"number": 3, "made": "2026-01-02T03:04:05Z"}])
def test_a_rebuild_is_told_in_sentences(copy: Json | None, capsys: Capture) -> None:
    render.rebuilt({"why": "there is none", "kept_aside": None, "copy": copy, "batches_logged": 2, "files": 7})
    out = capsys.readouterr().out
    assert ("began with copy 3 of the catalog, made 2026-01-02T03:04:05Z" in out) == (copy is not None)
    assert "{" not in out
    assert "None" not in out


def test_recover_shows_the_last_rebuild_among_the_recoveries(config: Path, tmp_path: Path, capsys: Capture) -> None:
    rebuild = FsckReport()
    rebuild.facts |= {"at": 2e9, "why": "there is none", "kept_aside": "/s/catalog.damaged-1", "files": 7}
    rebuild.facts |= {"copy": {"number": 3, "made": "2026-01-02T03:04:05Z"}, "batches_logged": 2}
    rebuild.did("came back from nvme", "run/a.pt", "restored")
    rebuild.lose("no tier has its bytes", b"run/b\x1b.pt")
    (tmp_path / "state").mkdir()
    keep_rebuild(tmp_path / "state", rebuild.as_json())
    assert run("recover", config) == 0
    alone = capsys.readouterr().out
    assert "nothing to report" not in alone
    keep_report(tmp_path / "state", Report(at=1e9, lost=[Lost("early", 1, 5)]))
    keep_report(tmp_path / "state", Report(at=3e9, orphans_removed=1))
    assert run("recover", config) == 0
    out = capsys.readouterr().out
    assert alone in out
    assert out.index("lost: early") < out.index("the catalog was rebuilt, 1 restored, 1 lost") < out.index("1 orphans")
    for told in (
        "\n  the former one is kept in /s/catalog.damaged-1\n",
        "\n  began with copy 3 of the catalog",
        "\n  restored: run/a.pt: came back from nvme\n",
        "\n  lost: run/b\\x1b.pt: no tier has its bytes\n",
    ):
        assert told in out
    assert run("recover", config, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert [(report["kind"], [lost["path"] for lost in report["lost"]]) for report in answer] == [
        ("recovery", ["early"]),
        ("rebuild", ["run/b\x1b.pt"]),
        ("recovery", []),
    ]
    assert answer[1]["done"] == rebuild.as_json()["done"]


# mount and umount


def fake_run_mount(monkeypatch: pytest.MonkeyPatch, body: Any) -> None:
    fake = types.ModuleType("tierfs.daemon")
    fake.run_mount = body  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tierfs.daemon", fake)


def test_mount_in_the_background(
    config: Path, mnt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def body(policy: object, mountpoint: Path, config_path: Path, ready_fd: int) -> int:
        os.write(1, f"fake daemon of {mountpoint} {config_path}, session {os.getsid(0) != session}".encode())
        os.write(ready_fd, b"ok\n")
        return 0

    session = os.getsid(0)
    fake_run_mount(monkeypatch, body)
    assert run("mount", config) == 0
    assert capsys.readouterr().err == ""
    assert f"fake daemon of {mnt} {config}, session True" in (tmp_path / "state/tierfs.log").read_text()


def test_mount_tells_the_daemons_error(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def refuse(policy: object, mountpoint: Path, config_path: Path, ready_fd: int) -> int:
        os.write(ready_fd, b'{"message": "no /dev/fuse", "exit_code": 1}\n')
        return 1

    def vanish(policy: object, mountpoint: Path, config_path: Path, ready_fd: int) -> int:
        raise ZeroDivisionError

    fake_run_mount(monkeypatch, refuse)
    assert run("mount", config) == 1
    assert capsys.readouterr().err == "tierfs: no /dev/fuse\n"
    fake_run_mount(monkeypatch, vanish)
    assert run("mount", config) == 1
    assert "tierfs.log" in capsys.readouterr().err


def test_mount_in_the_foreground_notifies_systemd(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(5)
        name = f"tierfs-test-{os.getpid()}"
        systemd.bind("\0" + name)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)

        def body(policy: object, mountpoint: Path, config_path: Path, ready_fd: int) -> int:
            os.write(ready_fd, b"ok\n")
            os.close(ready_fd)
            assert systemd.recv(100) == b"READY=1"
            return 5

        fake_run_mount(monkeypatch, body)
        assert run("mount", "--foreground", config) == 5


def test_mountpoint_checks(config: Path, mnt: Path, tmp_path: Path, capsys: Capture) -> None:
    assert run("mount", config, tmp_path / "none") == 2
    assert "does not exist" in capsys.readouterr().err
    assert run("mount", config, config) == 2
    assert "not a directory" in capsys.readouterr().err
    (mnt / "file").write_text("")
    assert run("mount", config) == 2
    assert "not empty" in capsys.readouterr().err


def test_mounting_twice_is_refused(daemon: FakeDaemon, config: Path, capsys: Capture) -> None:
    assert run("mount", config) == 2
    assert "already mounted" in capsys.readouterr().err


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, mnt: Path) -> list[str]:
    """Unmounting is noted here and ends the processes, as far as the command can see."""
    unmounted: list[str] = []
    monkeypatch.setattr(mounting, "mount_table", lambda: {str(mnt): "fuse.tierfs"})
    monkeypatch.setattr(mounting, "unmount", unmounted.append)
    monkeypatch.setattr(mounting, "pid_alive", lambda pid: not unmounted)
    return unmounted


def test_umount_drains_first(daemon: FakeDaemon, mnt: Path, ended: list[str]) -> None:
    assert run("umount", mnt, "--timeout", "1m") == 0
    assert daemon.calls == [("flush", {"path": "", "timeout": 60.0}), ("detach", {"drain": True})]
    assert ended == [str(mnt)]
    assert list_mounts() == []


def test_umount_by_config_without_draining(daemon: FakeDaemon, config: Path, mnt: Path, ended: list[str]) -> None:
    assert run("umount", config, "--no-drain") == 0
    assert daemon.calls == [("detach", {"drain": False})]
    assert ended == [str(mnt)]


def test_umount_that_cannot_drain_stays_mounted(
    daemon: FakeDaemon, mnt: Path, ended: list[str], capsys: Capture
) -> None:
    daemon.answers["flush"] = NotDurableInTime("missing: a.pt")
    assert run("umount", mnt, "--timeout", "1s") == 3
    assert "stays mounted: missing: a.pt" in capsys.readouterr().err
    daemon.answers["flush"] = UsageError("odd")
    assert run("umount", mnt) == 2
    assert ended == []


def test_processes_using(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], cwd=tmp_path) as process:
        try:
            assert f"sleep ({process.pid})" in mounting.processes_using(str(tmp_path))
            assert mounting.processes_using(str(tmp_path) + "x") == []
        finally:
            process.kill()


@pytest.mark.skipif(os.geteuid() != 0, reason="fusermount3 says it in other words")
def test_unmount_of_what_is_not_mounted(mnt: Path, capsys: Capture) -> None:
    assert str(mnt) not in mount_table()
    with pytest.raises(MountError, match="cannot unmount"):
        mounting.unmount(str(mnt))


def test_python_m_tierfs(tmp_path: Path) -> None:
    def program(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, "-m", "tierfs", *arguments], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert program("--version")[:2] == (0, "tierfs, version 0.1.0\n")
    assert program("info", str(tmp_path))[0] == 2
    assert program("status", "--json") == (0, "[]\n", "")
