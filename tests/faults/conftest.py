"""Rows of the fault list, planted in real launches: what a run survives, sees and places."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "launch"))
sys.path.append(str(Path(__file__).parents[1]))  # nvml_simulator

from starting import python_path, shared_starter, starter

__all__ = ["python_path", "shared_starter", "starter"]
