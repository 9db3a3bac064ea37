"""Mounts whose tiers fail as told: files in a directory are the switches, see tierfs.testing.faulty.install."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.fault.killing import mnt, points, shared  # noqa: F401 - fixtures
from tests.mount.conftest import disks, mounter  # noqa: F401 - fixtures
from tierfs.testing.faulty import ENVIRONMENT


class Switches:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def errors(self, rate: float, *tiers: str) -> None:
        self._set("rate", str(rate), tiers)

    def spoil(self, rate: float, *tiers: str) -> None:
        self._set("spoil", str(rate), tiers)

    def hang(self, *tiers: str) -> None:
        self._set("hang", "", tiers)

    def _set(self, what: str, value: str, tiers: tuple[str, ...]) -> None:
        for tier in tiers:
            fresh = self._directory / "fresh"
            fresh.write_text(value)
            fresh.rename(self._directory / f"{what}-{tier}")

    def repair(self) -> None:
        for switch in self._directory.iterdir():
            switch.unlink()


@pytest.fixture
def switches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Switches:
    directory = tmp_path / "switches"
    directory.mkdir()
    path = [str(Path(__file__).parent / "seams"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    monkeypatch.setenv(ENVIRONMENT, str(directory))
    return Switches(directory)
