"""A host and a cluster in the eyes of Kubernetes, beside what is there. Pure: readings in, what is wrong out."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.inventory.kubernetes import FORBIDDEN, UNNAMED
from pytest_gpucluster.inventory.reading import NONE, NotAvailable
from pytest_gpucluster.judging.finding import HERE, Finding
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.inventory.kubernetes import KubernetesCluster, KubernetesNode

__all__ = ["judge_kubernetes", "judge_operators", "why_not_asked"]

READY = "Ready"
TROUBLES: Mapping[str, str] = {
    "MemoryPressure": "it is short of memory, and evicts Pods",
    "DiskPressure": "it is short of disk, and evicts Pods",
    "PIDPressure": "it is short of process numbers",
    "NetworkUnavailable": "its network is not set up",
    "KernelDeadlock": "node-problem-detector found a task that hangs in the kernel",
    "ReadonlyFilesystem": "node-problem-detector found a file system that became read-only",
}
"""Conditions that are bad where they are ``True``: Kubernetes' own, and those of node-problem-detector's packaged rules."""
ADVICE = "kubectl describe node; look at the device plugin's log and at the GPUs (gpucluster info)"
RIGHT_TO = "let the run read nodes, daemonsets and storageclasses (kubectl auth can-i --list), or run it without kubectl"


def why_not_asked(why_none: str | None, needed: Any) -> str | None:
    """Why nothing is judged: no cluster can be asked, not by this host's name, or not by this run. Silence is no reason."""
    may_not = isinstance(needed, NotAvailable) and needed.why.startswith((FORBIDDEN, UNNAMED))
    return needed.why if may_not else why_none


def judge_kubernetes(node: KubernetesNode | NotAvailable, gpus_on_bus: int | NotAvailable) -> Finding:
    """What keeps Pods from the host or from a GPU of it; a condition of others that is True is a remark."""
    if isinstance(node, NotAvailable):
        return Finding(unknown={HERE: (f"the host's record is {node}",)}, kind="host", unknown_advice=RIGHT_TO)
    bad: list[str] = []
    unknown: list[str] = []
    remarks: list[str] = []
    _judge_conditions(node, bad, unknown, remarks)
    _judge_gpus(node, gpus_on_bus, bad, unknown, remarks)
    return Finding(
        bad={HERE: bad},
        unknown={HERE: unknown},
        kind="host",
        advice=ADVICE,
        remark="; ".join(remarks) or None,
        evidence={**_shown(node), "GPUs on the PCI bus": str(gpus_on_bus)},
    )


def _judge_conditions(node: KubernetesNode, bad: list[str], unknown: list[str], remarks: list[str]) -> None:
    if isinstance(node.conditions, NotAvailable):
        unknown.append(f"its conditions are {node.conditions}")
        return
    ready = node.conditions.get(READY)
    if ready is None:
        unknown.append("Kubernetes does not say whether it is Ready")
    elif ready != "True":
        bad.append(f"Ready is {ready}: Kubernetes gives it no Pods")
    for name, state in node.conditions.items():
        if name in TROUBLES and state != "False":
            (bad if state == "True" else unknown).append(f"{name} is {state}: {TROUBLES[name]}")
        elif name not in TROUBLES and name != READY and state == "True":
            remarks.append(f"the condition {name} is True, whose meaning is not known here")


def _judge_gpus(
    node: KubernetesNode, on_bus: int | NotAvailable, bad: list[str], unknown: list[str], remarks: list[str]
) -> None:
    counts = {"GPUs for Pods": node.gpus, "GPUs of the host": node.all_gpus, "GPUs on the PCI bus": on_bus}
    unknown += [f"{name}: {value}" for name, value in counts.items() if isinstance(value, NotAvailable)]
    if isinstance(node.gpus, NotAvailable) or isinstance(node.all_gpus, NotAvailable):
        return
    if node.gpus < node.all_gpus:
        bad.append(f"Pods get {node.gpus} of {counted(node.all_gpus, 'GPU')}: the device plugin takes the others for bad")
    if isinstance(on_bus, NotAvailable) or node.shared != NONE or not on_bus:
        return
    if not node.all_gpus:
        remarks.append(f"Kubernetes counts no GPU of this host, and {counted(on_bus, 'GPU')} on the PCI bus")
    elif node.all_gpus < on_bus:
        bad.append(f"Kubernetes counts {counted(node.all_gpus, 'GPU')}, and {on_bus} are on the PCI bus")


def judge_operators(cluster: KubernetesCluster) -> Finding:
    """DaemonSets for GPUs and adapters that lack a ready Pod somewhere."""
    sets = cluster.daemonsets
    bad: list[str] = []
    unknown: list[str] = []
    for name, ready in ({} if isinstance(sets, NotAvailable) else sets).items():
        counts = None if isinstance(ready, NotAvailable) else re.fullmatch(r"(\d+) of (\d+)", ready)
        if counts is None:
            unknown.append(f"the DaemonSet {name}: {ready}")
        elif int(counts[1]) < int(counts[2]):
            bad.append(f"the DaemonSet {name} has {ready} Pods ready")
    named = {"the DaemonSets": sets, "the GPU operator": cluster.gpu_operator, "the network operator": cluster.network_operator}
    unknown += [f"{name}: {value}" for name, value in named.items() if isinstance(value, NotAvailable)]
    return Finding(
        bad={HERE: bad},
        unknown={HERE: unknown},
        kind="software",
        advice="kubectl get pods --all-namespaces -o wide; look at the Pods of these DaemonSets that are not ready",
        evidence=_shown(cluster),
        unknown_advice=RIGHT_TO,
    )


def _shown(readings: Any) -> dict[str, str]:
    """Each reading in words."""
    return {field.name.replace("_", " "): _words(getattr(readings, field.name)) for field in dataclasses.fields(readings)}


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {one}" for name, one in value.items()) or "none"
    words: Sequence[str] = value if isinstance(value, list) else [str(value)]
    return ", ".join(words) or "none"
