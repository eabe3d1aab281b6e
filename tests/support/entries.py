"""Entries of thresholds.yaml, made without a file."""

from __future__ import annotations

from typing import Any

from pytest_gpucluster.thresholds.limit import Limit
from pytest_gpucluster.thresholds.resolve import Threshold

DEFAULTS: dict[str, Any] = {
    "criterion": "Every GPU reaches the rate.",
    "per": "gpu",
    "level": "quick",
    "unit": "TFLOPS",
    "severity": "required",
    "kind": "above",
    "numbers": {"any": 700},
    "recipe": {},
    "why": "the handover's limit",
    "source": "handover",
    "file": "/etc/site/thresholds.yaml",
    "line": 41,
}


def threshold(key: str = "tflops", **changes: Any) -> Threshold:
    """An entry: above 700 TFLOPS on every GPU unless told otherwise."""
    return Threshold(key=key, **{**DEFAULTS, **changes})


def limit(kind: Any = "above", value: float = 700, unit: str = "TFLOPS") -> Limit:
    """A limit of its own."""
    return Limit(kind=kind, value=value, unit=unit)
