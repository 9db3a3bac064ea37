"""mount/: the helper calls the CLI as it should, and what the unit and fstab call exists."""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from tierfs.cli.app import cli

MOUNT = Path(__file__).parents[2] / "mount"


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    """A program `tierfs` that writes its arguments down and exits as the file `code` says."""
    program = tmp_path / "bin" / "tierfs"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/called\nexit "$(cat {tmp_path}/code)"\n')
    program.chmod(0o755)
    (tmp_path / "code").write_text("0")
    return tmp_path


def helper(stub: Path, *arguments: str) -> tuple[int, str]:
    environment = {"PATH": f"{stub}/bin:{os.environ['PATH']}"}
    done = subprocess.run(["sh", MOUNT / "mount.tierfs", *arguments], env=environment, capture_output=True, text=True)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["/c y.yaml", "/mnt/x"],
        ["/c y.yaml", "/mnt/x", "-o", "rw,noauto,user,_netdev,nofail,x-systemd.requires=/a,defaults"],
        ["-n", "-v", "-o", "rw", "/c y.yaml", "/mnt/x", "-o", "nofail,nosuid,nodev,user=me"],
        ["/c y.yaml", "/mnt/x", "-sv", "-o", "whatever=*"],
        ["/c y.yaml", "/mnt/x", "-t", "tierfs", "-orw"],
    ],
)
def test_mount(stub: Path, arguments: list[str]) -> None:
    assert helper(stub, *arguments) == (0, "")
    assert (stub / "called").read_text().splitlines() == ["mount", "--", "/c y.yaml", "/mnt/x"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage"),
        (["/c"], "usage"),
        (["/c", "/m", "/n"], "unexpected argument /n"),
        (["/c", "/m", "-o"], "needs a value"),
        (["/c", "/m", "-x"], "unknown option -x"),
        (["/c", "/m", "-o", "size=5"], "unknown option size=5"),
        (["/c", "/m", "-o", "ro"], "read-only"),
        (["/c", "/m", "-o", "allow_other"], "allow_other: true"),
    ],
)
def test_wrong_usage(stub: Path, arguments: list[str], message: str) -> None:
    code, err = helper(stub, *arguments)
    assert code == 1
    assert message in err
    assert not (stub / "called").exists()


def test_fake_mount_calls_nothing(stub: Path) -> None:
    assert helper(stub, "/c", "/m", "-f") == (0, "")
    assert not (stub / "called").exists()


@pytest.mark.parametrize(("tierfs", "mount"), [(0, 0), (1, 32), (2, 1), (130, 32)])
def test_exit_codes_are_those_of_mount(stub: Path, tierfs: int, mount: int) -> None:
    (stub / "code").write_text(str(tierfs))
    assert helper(stub, "/c", "/m")[0] == mount


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(MOUNT / "tierfs@.service")
    return parser


@pytest.mark.parametrize("key", ["ExecStart", "ExecStop", "ExecReload"])
def test_unit_commands_exist(key: str) -> None:
    program, name, *arguments = shlex.split(unit()["Service"][key])
    assert program == "tierfs"
    command = cli.commands[name]
    with command.make_context(name, arguments) as context:
        assert isinstance(context, click.Context)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    """The program is named by its full path here: systemd looks for it, and need not find it on this machine."""
    text = (MOUNT / "tierfs@.service").read_text()
    (tmp_path / "tierfs@.service").write_text(text.replace("=tierfs ", "=/bin/sh "))
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "tierfs@ckpt.service"], capture_output=True, text=True, timeout=60
    )
    ours = [line for line in done.stderr.splitlines() if "tierfs@" in line]
    assert (done.returncode, ours) == (0, [])


def test_unit_waits_for_the_drain() -> None:
    service = unit()["Service"]
    expected = {"Type": "notify", "KillMode": "mixed", "Restart": "on-failure", "TimeoutStopSec": "infinity"}
    assert {key: service[key] for key in expected} == expected


def test_fstab_lines_are_taken_by_the_helper(stub: Path) -> None:
    lines = [s.split() for s in (MOUNT / "fstab.example").read_text().splitlines() if s and not s.startswith("#")]
    assert lines
    for config, mountpoint, kind, options, _, _ in lines:
        assert kind == "tierfs"
        assert helper(stub, config, mountpoint, "-o", options) == (0, "")


def test_helper_is_executable() -> None:
    assert os.access(MOUNT / "mount.tierfs", os.X_OK)
