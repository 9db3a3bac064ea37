"""The command line: ``main`` is the program ``tierfs``."""

from __future__ import annotations

from tierfs.cli.app import main

__all__ = ["main"]
