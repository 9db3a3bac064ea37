"""Whether the memory tier of a policy fits the machine. A tmpfs takes any size; a mistake shows when it fills up."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tierfs.policy.load import refusal
from tierfs.policy.model import Policy
from tierfs.units import format_size


@dataclass(frozen=True, slots=True)
class Machine:
    """In bytes."""

    memory: int
    swap: int
    nodes: Mapping[int, int]
    """Memory by NUMA node; empty when the kernel does not tell."""

    @classmethod
    def this(cls, proc: Path = Path("/proc"), sys: Path = Path("/sys")) -> Machine:
        """The one we run on."""
        nodes = {}
        for node in sys.glob("devices/system/node/node[0-9]*"):
            size = _kilobytes(node / "meminfo", "MemTotal")
            if size:
                nodes[int(node.name.removeprefix("node"))] = size
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(_kilobytes(proc / "meminfo", "MemTotal") or memory, _kilobytes(proc / "meminfo", "SwapTotal"), nodes)


def _kilobytes(file: Path, name: str) -> int:
    """A line of a meminfo file, in bytes; 0 when it is not there."""
    try:
        found = re.search(rf"\b{name}:\s*(\d+) kB", file.read_text())
    except OSError:
        return 0
    return int(found[1]) << 10 if found else 0


def check_machine(policy: Policy, machine: Machine) -> None:
    """Refuse a tmpfs that would be on NUMA nodes without memory, and one that takes more than there is. Raises
    ConfigError. A memory tier with a path is not our tmpfs: what it can hold, its filesystem knows."""
    for tier in policy.tiers:
        if tier.kind != "memory" or tier.path is not None:
            continue
        where, room = "this machine", machine.memory
        if tier.numa and machine.nodes:
            missing = [node for node in tier.numa if node not in machine.nodes]
            if missing:
                raise refusal(
                    policy,
                    f"tiers.{tier.name}.numa",
                    f"names NUMA node {missing[0]}, which this machine does not have or which has no memory",
                    f"choose among {', '.join(map(str, sorted(machine.nodes)))} (`numactl -H` lists them)",
                )
            where = f"NUMA node {', '.join(map(str, tier.numa))}"
            room = sum(machine.nodes[node] for node in tier.numa)
        if (tier.size or 0) > room + machine.swap:
            swap = f" and {format_size(machine.swap)} of swap" if machine.swap else ""
            raise refusal(
                policy,
                f"tiers.{tier.name}.size",
                f"is more than the {format_size(room)} of memory{swap} of {where}: once filled it would take the"
                " programs' memory",
                "choose less, and leave room for the programs",
            )
