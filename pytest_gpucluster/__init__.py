"""Decide with pytest whether a GPU cluster may be handed over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.errors import MeasurementError
    from pytest_gpucluster.judging.noise import Repeats
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.protocol.functions import measurement

__all__ = ["Cluster", "MeasurementError", "Place", "Repeats", "Results", "measurement"]

_HOMES = {
    "Cluster": "pytest_gpucluster.cluster.calls",
    "MeasurementError": "pytest_gpucluster.errors",
    "Place": "pytest_gpucluster.places",
    "Repeats": "pytest_gpucluster.judging.noise",
    "Results": "pytest_gpucluster.cluster.results",
    "measurement": "pytest_gpucluster.protocol.functions",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``pytest --help`` stays fast."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
