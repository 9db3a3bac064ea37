"""Memory tiers that the machine cannot have are refused before anything is mounted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierfs.errors import ConfigError
from tierfs.policy.load import load_policy
from tierfs.policy.machine import Machine, check_machine

GIB = 1 << 30
MACHINE = Machine(memory=64 * GIB, swap=0, nodes={0: 48 * GIB, 2: 16 * GIB})


def check(directory: Path, memory: str, machine: Machine) -> None:
    path = directory / "c.yaml"
    path.write_text(
        f"state: /s\ntiers:\n  memory:\n    kind: memory\n    {memory}\n  archive: {{kind: dir, path: /a}}\n"
    )
    check_machine(load_policy(path), machine)


@pytest.mark.parametrize(
    ("memory", "machine"),
    [
        ("size: 64GiB", MACHINE),
        ("size: 65GiB", Machine(64 * GIB, 2 * GIB, {})),
        ("size: 16GiB\n    numa: [2]", MACHINE),
        ("size: 60GiB\n    numa: [0, 2]", MACHINE),
        ("size: 60GiB\n    numa: [7]", Machine(64 * GIB, 0, {})),
        ("size: 1TiB\n    path: /dev/shm", MACHINE),
    ],
)
def test_what_fits_is_accepted(tmp_path: Path, memory: str, machine: Machine) -> None:
    check(tmp_path, memory, machine)


@pytest.mark.parametrize(
    ("memory", "line", "key", "words"),
    [
        ("size: 65GiB", 5, "size", "more than the 64GiB of memory of this machine"),
        ("size: 17GiB\n    numa: [2]", 5, "size", "more than the 16GiB of memory of NUMA node 2"),
        ("size: 1GiB\n    numa: [0, 1]", 6, "numa", "names NUMA node 1"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, memory: str, line: int, key: str, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(tmp_path, memory, MACHINE)
    assert str(refused.value).startswith(f"{tmp_path}/c.yaml:{line}: tiers.memory.{key}: ")
    assert words in str(refused.value)
    assert "; choose " in str(refused.value)


def test_this_machine(tmp_path: Path) -> None:
    nodes = tmp_path / "devices/system/node"
    for number, size in (("0", "1024 kB"), ("1", "0 kB"), ("12", "2048 kB")):
        (nodes / f"node{number}").mkdir(parents=True)
        text = f"Node {number} MemTotal:       {size}\nNode {number} MemFree: 1 kB\n"
        (nodes / f"node{number}/meminfo").write_text(text)
    (tmp_path / "meminfo").write_text("MemTotal:        4096 kB\nMemFree: 1 kB\nSwapTotal:   8 kB\n")
    assert Machine.this(tmp_path, tmp_path) == Machine(4 << 20, 8 << 10, {0: 1 << 20, 12: 2 << 20})
    found = Machine.this()
    assert found.memory > 1 << 26
    assert sum(found.nodes.values()) <= found.memory * 1.01
