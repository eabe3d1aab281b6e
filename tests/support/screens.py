"""Kept screens. ``GPUCLUSTER_TESTS_KEEP_SCREENS=1 pytest tests/unit/reporting`` writes them anew: look at each one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def kept_screen(path: Path, lines: Sequence[str]) -> list[str]:
    """The lines of the kept file, which is first written from ``lines`` where the environment asks for that."""
    if os.environ.get("GPUCLUSTER_TESTS_KEEP_SCREENS"):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path.read_text(encoding="utf-8").split("\n")[:-1]
