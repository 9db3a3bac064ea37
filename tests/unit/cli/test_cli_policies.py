"""check and explain, and what is wrong with a policy."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.cli.talking import Capture, fake_run_mount, run


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
