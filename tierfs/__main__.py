"""``python -m tierfs``: the same program as ``tierfs``."""

from __future__ import annotations

import sys

from tierfs.cli import main

if __name__ == "__main__":
    sys.exit(main())
