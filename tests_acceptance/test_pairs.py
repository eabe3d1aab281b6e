"""Every pair of GPUs inside a node."""

from dataclasses import asdict, replace

import pytest

from pytest_gpucluster import localization
from pytest_gpucluster.measurements.pair_matrix import pair_matrix
from tests_acceptance.conftest import measured

pytestmark = pytest.mark.links


matrix_in_node = measured(pair_matrix, "gpu_pairs", per="node", in_budget=True)
"""Bandwidth, latency and way of every ordered pair of GPUs, in all nodes at once."""


@pytest.fixture
def gpus(node, cluster):
    """The GPUs of the node by their ids, in the order of the ranks."""
    return {place.id: place for place in cluster.places if place.node == node.node}


@pytest.fixture
def pairs(matrix_in_node, gpu_states, nic_ways, gpus, node):
    """Every ordered pair of the node's GPUs with the topology's word. The word is missing where the topology is not known."""
    listed = None if node in nic_ways.errors else nic_ways[node].gpu_paths
    ways = listed if isinstance(listed, dict) else {}
    states = {name: None if place in gpu_states.errors else gpu_states[place].gpu for name, place in gpus.items()}
    positions = {name: localization.position_of(one, ways) for name, one in states.items()}
    return localization.pairs_of(matrix_in_node[node], positions)


def test_gpu_pairs(pairs, matrix_in_node, node, criterion):
    """The GPUs of a node reach each other without the host."""
    count = matrix_in_node[node].shortened
    remark = f"{count} of {len(pairs)} pairs had one timed transfer only, to keep the budget" if count else None
    criterion.judge(replace(localization.judge_pair_paths(pairs), remark=remark))


@pytest.fixture
def possible_pairs(pairs, possible):
    """The pairs whose values hardware can give, and the errors of the others."""
    return only_possible(pairs, possible("busbw[send_recv]", gpus=2), possible("latency[all_reduce]", gpus=2))


def only_possible(pairs, can_carry, can_take):
    """What of the pairs can be compared: a wrong value says nothing of the others."""
    wrong = [can_carry.error(one.gb_s, where=one.name) or can_take.error(one.latency_us, where=one.name) for one in pairs]
    kept = [one for one, error in zip(pairs, wrong, strict=True) if error is None]
    return kept, [error for error in wrong if error is not None]


@pytest.mark.parametrize("quantity", ["bandwidth", "latency"])
def test_slow_pair(quantity, possible_pairs, gpus, criterion):
    """No pair is far worse than the other pairs of its kind."""
    pairs, errors = possible_pairs
    judge_pairs(pairs, quantity, gpus, criterion)
    for error in errors:
        raise error


def judge_pairs(pairs, quantity, gpus, criterion):
    """Compare the pairs of each kind."""
    found = localization.pair_lags(pairs, quantity)
    if not found:
        nothing = "no pair has two others of its kind, so nothing can be compared"
        criterion.require(0.0, evidence={"pairs": [asdict(pair) for pair in pairs]}, remark=nothing)
        return
    worst = max(found, key=lambda ends: found[ends].percent)
    pair = next(one for one in pairs if (one.source, one.target) == worst)
    without = [one.name for one in pairs if (one.source, one.target) not in found]
    values = {(gpus[one.source], gpus[one.target]): 0.0 for one in pairs}
    values |= {(gpus[source], gpus[target]): one.percent for (source, target), one in found.items()}
    evidence = {
        "worst": f"{pair.name} ({pair.way or 'way not known'}): {pair.gb_s:.4g} GB/s, {pair.latency_us:.4g} us",
        "median of its kind": found[worst].median,
        "others of its kind": found[worst].siblings,
        "pairs": [asdict(one) for one in pairs],
    }
    remark = f"no two others of their kind: {', '.join(without)}" if without else None
    criterion.require(values, evidence=evidence, remark=remark)
