"""The program as a whole: usage, completion, paths that are on no mount."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.talking import Capture, FakeDaemon, run


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


def test_python_m_tierfs(tmp_path: Path) -> None:
    def program(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, "-m", "tierfs", *arguments], capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert program("--version")[:2] == (0, "tierfs, version 0.1.0\n")
    assert program("info", str(tmp_path))[0] == 2
    assert program("status", "--json") == (0, "[]\n", "")
