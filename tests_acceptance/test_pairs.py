"""Every pair of GPUs inside a node."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.pci_tree import position
from pytest_gpucluster.inventory.reading import NotAvailable, or_none
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.localization.gpus import behind_siblings, pairs_of
from pytest_gpucluster.measurements.pair_matrix import pair_matrix

pytestmark = pytest.mark.links


@pytest.fixture(scope="session")
def matrix_in_node(cluster, recipe):
    """Bandwidth, latency and way of every ordered pair of GPUs, in all nodes at once."""
    return cluster.run(pair_matrix, per="node", **recipe("gpu_pairs"))


@pytest.fixture
def gpus(node, cluster):
    """The GPUs of the node by their ids, in the order of the ranks."""
    return {place.id: place for place in cluster.places if place.node == node.node}


@pytest.fixture
def pairs(matrix_in_node, gpu_states, nic_ways, gpus, node):
    """Every ordered pair of the node's GPUs with the topology's word. The word is missing where the topology is not known."""
    listed = None if node in nic_ways.errors else nic_ways[node].gpu_paths
    ways = listed if isinstance(listed, dict) else {}
    states = {name: None if place in gpu_states.errors else or_none(gpu_states[place].gpu) for name, place in gpus.items()}
    return pairs_of(matrix_in_node[node], {name: where(state, ways) for name, state in states.items()})


def where(state, ways):
    """The position of a GPU by what NVML and the PCIe tree show."""
    if state is None:
        return position(None)
    links = [] if isinstance(state.nvlinks, NotAvailable) or state.nvlink_peer != "switch" else state.nvlinks
    return position(ways.get(sysfs_address(state.pci)), nvlinks=sum(link.is_up is True for link in links))


def test_gpu_pairs(pairs, node, criterion):
    """The GPUs of a node reach each other without the host."""
    over_host = [pair for pair in pairs if pair.takes_host]
    unknown = [pair.name for pair in pairs if pair.takes_host is None]
    if over_host or not unknown:
        evidence = {"over the host": [pair.why for pair in over_host], "pairs": [asdict(pair) for pair in pairs]}
        parts = Parts(kind="link", names=tuple(pair.name for pair in over_host))
        criterion.require(len(over_host), evidence=evidence, parts=parts)
    if unknown:
        text = f"{node.label}: neither CUDA nor NCCL's log tells the way of {', '.join(unknown)}"
        raise MeasurementError(text, culprits=(node,), blame=Blame(part="software"))


@pytest.mark.parametrize("quantity", ["bandwidth", "latency"])
def test_slow_pair(quantity, pairs, gpus, criterion):
    """No pair is far worse than the other pairs of its kind."""
    found = behind_siblings(pairs, quantity)
    if not found:
        nothing = "no pair has two others of its kind, so nothing can be compared"
        criterion.require(0.0, evidence={"pairs": [asdict(pair) for pair in pairs]}, remark=nothing)
        return
    worst = max(found, key=lambda ends: found[ends].percent)
    pair = next(one for one in pairs if (one.source, one.target) == worst)
    alone = [one.name for one in pairs if (one.source, one.target) not in found]
    values = {(gpus[one.source], gpus[one.target]): 0.0 for one in pairs}
    values |= {(gpus[source], gpus[target]): one.percent for (source, target), one in found.items()}
    evidence = {
        "worst": f"{pair.name} ({pair.way or 'way not known'}): {pair.gb_s:.4g} GB/s, {pair.latency_us:.4g} us",
        "median of its kind": found[worst].median,
        "others of its kind": found[worst].siblings,
        "pairs": [asdict(one) for one in pairs],
    }
    remark = f"no two others of their kind: {', '.join(alone)}" if alone else None
    criterion.require(values, evidence=evidence, remark=remark)
