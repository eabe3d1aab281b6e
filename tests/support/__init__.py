"""What several tests use: launching a run, entries of thresholds.yaml, a simulated NVML, small trainings."""

from __future__ import annotations

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
