"""Loaded by every Python process of a mount that a test here makes with faults: see tierfs.testing.faulty.install."""

from __future__ import annotations

import sys

if "tierfs" in sys.orig_argv:
    from tierfs.testing.faulty import install

    install()
