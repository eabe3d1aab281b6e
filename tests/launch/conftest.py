"""Real launches: a folder, a clean environment and a plugin found by its entry point, for each test."""

from __future__ import annotations

import sys
from pathlib import Path

from starting import python_path, shared_starter, starter

__all__ = ["python_path", "shared_starter", "starter"]

sys.path.append(str(Path(__file__).parents[1]))  # nvml_simulator lies beside this folder
