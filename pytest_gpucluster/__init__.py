"""Decide with pytest whether a GPU cluster may be handed over."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036 -- a checkout, and pip building from one, reach this line by an older Python
    sys.exit("pytest-gpucluster needs Python 3.10 or newer; {} is {}.{}".format(sys.executable, *sys.version_info))

if TYPE_CHECKING:
    from pytest_gpucluster import health, localization
    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.localizers import GpuLocalizer, NodeLocalizer
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.cluster.soak import SoakWork
    from pytest_gpucluster.errors import Blame, MeasurementError
    from pytest_gpucluster.inventory.reading import NotAvailable
    from pytest_gpucluster.judging import agreement, scaling, siblings
    from pytest_gpucluster.judging.finding import Finding
    from pytest_gpucluster.judging.noise import Repeats
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.protocol.functions import measurement

__all__ = [
    "Blame",
    "Cluster",
    "Finding",
    "GpuLocalizer",
    "MeasurementError",
    "NodeLocalizer",
    "NotAvailable",
    "Place",
    "Repeats",
    "Results",
    "SoakWork",
    "agreement",
    "health",
    "localization",
    "measurement",
    "scaling",
    "siblings",
]

_HOMES = {
    "Blame": "errors",
    "Cluster": "cluster.calls",
    "Finding": "judging.finding",
    "GpuLocalizer": "cluster.localizers",
    "MeasurementError": "errors",
    "NodeLocalizer": "cluster.localizers",
    "NotAvailable": "inventory.reading",
    "Place": "places",
    "Repeats": "judging.noise",
    "Results": "cluster.results",
    "SoakWork": "cluster.soak",
    "measurement": "protocol.functions",
    "agreement": "judging.agreement",
    "health": "health",
    "localization": "localization",
    "scaling": "judging.scaling",
    "siblings": "judging.siblings",
}


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``pytest --help`` stays fast."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"{__name__}.{home}")
    return getattr(module, name, module)  # some of the names are modules themselves
