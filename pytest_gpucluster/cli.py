"""``python -m pytest_gpucluster.cli``: the command ``gpucluster`` under its public module name."""

from __future__ import annotations

import sys

from pytest_gpucluster.commands.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
