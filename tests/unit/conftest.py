"""Fixtures of the tests that need no mount."""

from __future__ import annotations

from tests.conftest_disks import disk

__all__ = ["disk"]
