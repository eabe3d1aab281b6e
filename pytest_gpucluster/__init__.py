"""Decide with pytest whether a GPU cluster may be handed over."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 10):  # noqa: UP036 -- a checkout, and pip building from one, reach this line by an older Python
    sys.exit("pytest-gpucluster needs Python 3.10 or newer; {} is {}.{}".format(sys.executable, *sys.version_info))

if TYPE_CHECKING:
    from pytest_gpucluster import health as health
    from pytest_gpucluster import localization as localization
    from pytest_gpucluster.cluster.calls import Cluster as Cluster
    from pytest_gpucluster.cluster.localizers import GpuLocalizer as GpuLocalizer
    from pytest_gpucluster.cluster.localizers import NodeLocalizer as NodeLocalizer
    from pytest_gpucluster.cluster.results import Results as Results
    from pytest_gpucluster.cluster.soak import SoakWork as SoakWork
    from pytest_gpucluster.errors import Blame as Blame
    from pytest_gpucluster.errors import MeasurementError as MeasurementError
    from pytest_gpucluster.inventory.reading import NotAvailable as NotAvailable
    from pytest_gpucluster.judging import agreement as agreement
    from pytest_gpucluster.judging import scaling as scaling
    from pytest_gpucluster.judging import siblings as siblings
    from pytest_gpucluster.judging.finding import Finding as Finding
    from pytest_gpucluster.judging.noise import Repeats as Repeats
    from pytest_gpucluster.places import Place as Place
    from pytest_gpucluster.protocol.functions import measurement as measurement

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
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``pytest --help`` stays fast."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    module = import_module(f"{__name__}.{home}")
    return getattr(module, name, module)  # some of the names are modules themselves
