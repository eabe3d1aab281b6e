"""Versions of a host that have a known fault, by the table of ``thresholds.versions``. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.health.hosts import RDMA
from pytest_gpucluster.inventory.reading import NONE, NotAvailable, or_none
from pytest_gpucluster.judging.finding import HERE, Finding
from pytest_gpucluster.text import shortlist
from pytest_gpucluster.thresholds.versions import OF_CONTAINERS, SCHEMES, Version, needed, parse

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.machine import Software
    from pytest_gpucluster.inventory.nics import Nic
    from pytest_gpucluster.measurements.host import HostState
    from pytest_gpucluster.thresholds.schema import KnownFault

__all__ = ["judge_container_versions", "judge_versions"]

NVIDIA_ADAPTERS = "mlx5_core"
"""The driver of the adapters whose firmware the table knows."""
OF_TORCH = {"cuda": "CUDA", "nccl": "NCCL"}
NAMED = 4


def judge_versions(
    state: HostState,
    nics: Sequence[Nic] | NotAvailable,
    known: Mapping[str, Sequence[KnownFault]],
    *,
    num_nodes: int,
    fabric: str,
) -> Finding:
    """Driver, CUDA, NCCL, kernel, OFED and firmware with a known fault.

    ``num_nodes``: some faults show on several only. ``fabric``: adapters that cannot be listed are unknown where it needs them,
    which is between nodes: a node of a run of its own may have none.
    """
    found: dict[str, list[tuple[str, str | NotAvailable]]] = defaultdict(list)
    found["driver"] = [("", state.versions.get("driver", NotAvailable("NVML gives no version of the driver")))]
    found |= {component: [("", state.versions.get(name, NONE))] for component, name in OF_TORCH.items()}
    found["kernel"] = [("", state.facts.kernel)]
    found |= {"cuda_toolkit": [("", state.software.cuda_toolkit)], "ofed": [("", state.software.ofed)]}
    if isinstance(nics, NotAvailable) and fabric in RDMA and num_nodes > 1:
        found["nic_firmware"] = [("", nics)]
    for nic in or_none(nics) or ():
        if nic.driver == NVIDIA_ADAPTERS:
            found["nic_firmware"].append((nic.device, nic.firmware))
    switches = state.software.nvswitches
    found["nvswitch"] = [("", switches)] if isinstance(switches, NotAvailable) else [*switches.items()]
    machines = (None, state.software.machine)
    apply_here = {
        name: [one for one in faults if one.machine in machines and num_nodes >= one.nodes] for name, faults in known.items()
    }
    return _judged(found, apply_here)


def judge_container_versions(software: Software, known: Mapping[str, Sequence[KnownFault]]) -> Finding | None:
    """Runc, Docker and NVIDIA's container toolkit with a known fault; None where none is there, or a container hides them."""
    found = {name: [("", getattr(software, name))] for name in OF_CONTAINERS}
    return None if all(version == NONE for ((_, version),) in found.values()) else _judged(found, known)


def _judged(
    found: Mapping[str, Sequence[tuple[str, str | NotAvailable]]], known: Mapping[str, Sequence[KnownFault]]
) -> Finding:
    """All components: those with a fault, those of which nothing can be said, and what each has."""
    bad, remarks, unknown, updates = [], [], [], {}
    shown: dict[str, Any] = {}
    for component, parts in found.items():
        title, faults = SCHEMES[component].title, known.get(component, ())
        for version, where in _by_version(parts).items():
            name = f"{title} of {shortlist(where, most=NAMED)}" if where else title
            shown[name] = str(version)
            if version == NONE or not faults:
                continue
            own = None if isinstance(version, NotAvailable) else parse(component, version)
            if own is None:
                none = f"{version!r}, which is no version of {title} that is known here"
                unknown.append(f"{name} is {version if isinstance(version, NotAvailable) else none}")
                continue
            for fault, update in _old(component, own, faults):
                text = f"{name} {version} is older than {update}: {fault.fault} ({fault.source}, {fault.date})"
                if own.build and fault.older == "failure":
                    unknown.append(f"{text}; a distribution has built it, and may have mended it: ask its tracker of security")
                elif fault.older == "failure":
                    bad.append(text)
                    updates[title] = update
                else:
                    remarks.append(text)
    advice = "; ".join(f"update {title} to {update} or newer" for title, update in updates.items())
    return Finding(
        bad={HERE: bad},
        unknown={HERE: unknown},
        kind="software",
        advice=advice or None,
        remark="; ".join(remarks) or None,
        evidence=shown,
        unknown_advice="say what holds here under `versions:` of your thresholds file (docs/versions.md)",
    )


def _old(component: str, own: Version, faults: Sequence[KnownFault]) -> Iterator[tuple[KnownFault, str]]:
    for fault in faults:
        if fault.flavour in (None, own.flavour) and (update := needed(component, own, fault)) is not None:
            yield fault, update


def _by_version(parts: Sequence[tuple[str, str | NotAvailable]]) -> dict[str | NotAvailable, list[str]]:
    """The names of the parts that have each version."""
    found: dict[str | NotAvailable, list[str]] = defaultdict(list)
    for name, version in parts:
        found[version] += [name] if name else []
    return found
