"""GPUs of a host that have not joined their NVLink fabric, or are in another part of it than their siblings. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.inventory.reading import NotAvailable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.inventory.gpu_fabric import GpuFabric

JOINED = "completed"
ADVICE = "look at the fabric manager of the node (systemctl status nvidia-fabricmanager, and its log), and restart it"


@dataclass(frozen=True, slots=True)
class FabricSeen:
    """The fabric of a host's GPUs: what is wrong with each that is not healthy (``bad``), and what is not known of others."""

    bad: Mapping[str, str]
    unknown: Mapping[str, tuple[str, ...]]


def judge_fabric(peers: Mapping[str, str | NotAvailable], fabrics: Mapping[str, GpuFabric | NotAvailable]) -> FabricSeen:
    """Every GPU whose NVLinks end at a switch must have joined. Both arguments are by GPU; ``peers``: what its links end at.

    NVLinks that end at GPUs need no fabric.
    """
    bad: dict[str, str] = {}
    unknown: dict[str, tuple[str, ...]] = {}
    joined: dict[str, tuple[str, int]] = {}
    for gpu, fabric in fabrics.items():
        peer = peers[gpu]
        if isinstance(peer, NotAvailable):
            unknown[gpu] = (f"what its NVLinks end at is {peer}",)
        elif peer == "gpu":
            continue
        elif isinstance(fabric, NotAvailable):
            unknown[gpu] = (f"its fabric is {fabric}",)
        elif fabric.state == "not_supported":
            unknown[gpu] = (f"its NVLinks end at a {peer}, and it tells of no fabric",)
        elif (fault := _fault(fabric)) is not None:
            bad[gpu] = fault
        else:
            joined[gpu] = (fabric.cluster_uuid, fabric.clique)
    usual = Counter(joined.values()).most_common(1)
    bad.update({gpu: f"in clique {at[1]} of cluster {at[0]}" for gpu, at in joined.items() if at != usual[0][0]})
    return FabricSeen(bad, unknown)


def _fault(fabric: GpuFabric) -> str | None:
    if fabric.state != JOINED:
        return f"its state is {fabric.state}"
    if fabric.error is not None:
        return f"its registration failed: {fabric.error}"
    return ", ".join(fabric.troubles) or None
