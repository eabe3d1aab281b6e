"""Entries of thresholds.yaml, made without a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.thresholds.limit import Limit
from pytest_gpucluster.thresholds.resolve import Threshold

if TYPE_CHECKING:
    from collections.abc import Mapping

DEFAULTS: dict[str, Any] = {
    "criterion": "Every GPU reaches the rate.",
    "per": "gpu",
    "level": "quick",
    "unit": "TFLOPS",
    "why": "the handover's limit",
    "source": "handover",
    "file": "/etc/site/thresholds.yaml",
    "line": 41,
}


def threshold(
    key: str = "tflops", *, kind: str = "above", numbers: Mapping[int | str, float] | None = None, **changes: Any
) -> Threshold:
    """An entry: above 700 TFLOPS on every GPU, with ``changes``."""
    return Threshold(key=key, **{**DEFAULTS, kind: numbers or {"any": 700}, **changes})


def limit(kind: Any = "above", value: float = 700, unit: str = "TFLOPS") -> Limit:
    """A limit of its own."""
    return Limit(kind=kind, value=value, unit=unit)
