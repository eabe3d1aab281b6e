"""Nodes that are not in the NVLink domain of their rack, by what NVML tells of their GPUs' fabric. Pure."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.forecast import counted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ADVICE = "look at the partitions of the rack (fabric manager) and at IMEX on the node (nvidia-imex-ctl -N)"


def outside_domains(fabrics: Mapping[str, Sequence[str | None]], *, nodes_per_domain: int) -> dict[str, str]:
    """Why each node is outside, by node id; nodes that are in a domain are left out.

    As many domains as the nodes need are expected, and the largest are taken for them. Where it cannot be told which is the
    odd one, the nodes of all that may be are outside.

    Args:
        fabrics: by node id, the fabric of each of its GPUs; None where NVLink ends at the node by what the GPU tells.
        nodes_per_domain: how many nodes a domain has.
    """
    found: dict[str, str] = {}
    domains: dict[str, str] = {}
    for node, of_gpus in fabrics.items():
        own = [fabric for fabric in of_gpus if fabric is not None]
        if len(own) < len(of_gpus):
            alone = len(of_gpus) - len(own)
            found[node] = f"{alone} of {counted(len(of_gpus), 'GPU')} tell of no NVLink fabric beyond the node"
        elif len({*own}) > 1:
            found[node] = f"its GPUs are in {len({*own})} NVLink fabrics"
        else:
            domains[node] = own[0]
    return {**found, **_odd_ones(domains, expected=-(-len(fabrics) // nodes_per_domain))}


def _odd_ones(domains: Mapping[str, str], *, expected: int) -> dict[str, str]:
    sizes = Counter(domains.values())
    ordered = sizes.most_common()
    if len(ordered) <= expected:
        return {}
    least = ordered[expected - 1][1]
    certain = {domain for domain, size in ordered if size > least or (size == least and ordered[expected][1] < least)}
    told = f"{len(ordered)} NVLink domains where {expected} would do"
    return {
        node: f"in domain {domain} with {counted(sizes[domain] - 1, 'other node')}: {told}"
        for node, domain in domains.items()
        if domain not in certain
    }
