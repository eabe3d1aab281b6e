"""Every comparison of parts that should be alike: without a majority nobody is named, or all are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.health.drift import DriftRules, Fact, compare_facts
from pytest_gpucluster.health.hosts import ClockReading, skews
from pytest_gpucluster.health.nvlink import judge_fabric, outside_domains
from pytest_gpucluster.inventory.nvlinks import GpuFabric
from pytest_gpucluster.judging.agreement import suspicions
from pytest_gpucluster.judging.siblings import Healthy, Siblings, compare
from pytest_gpucluster.localization.rails import RailRate, rail_lags

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Names = set[int]
FABRIC: dict[str, Any] = {"state": "completed", "cluster_uuid": "a", "error": None, "troubles": ()}


def by_fabric(groups: Sequence[int]) -> Names:
    """GPUs of a node by their clique."""
    fabrics = {at: GpuFabric(**FABRIC, clique=group) for at, group in enumerate(groups)}
    return {part for part in judge_fabric(dict.fromkeys(fabrics, "switch"), fabrics).bad if isinstance(part, int)}


def by_domain(groups: Sequence[int]) -> Names:
    """Nodes of a rack by their NVLink domain."""
    found = outside_domains({str(at): [f"domain{group}"] for at, group in enumerate(groups)}, nodes_per_domain=18)
    return {int(node) for node in found}


def facts_of(name: str, values: Sequence[Any]) -> list[Fact]:
    """One fact of each host."""
    return [Fact(kind="host", name=name, node=str(at), part=str(at), value=value) for at, value in enumerate(values)]


def by_drift(groups: Sequence[int]) -> Names:
    """Hosts by a fact, in words."""
    facts = facts_of("kernel", [f"6.{group}" for group in groups])
    return {int(one.part) for row in compare_facts(facts, DriftRules()) for one in row.outliers}


def by_number(groups: Sequence[int]) -> Names:
    """Hosts by a fact that is a number."""
    facts = facts_of("memory", [1000 + 500 * group for group in groups])
    return {int(one.part) for row in compare_facts(facts, DriftRules(percent=2)) for one in row.outliers}


def by_digest(groups: Sequence[int]) -> Names:
    """GPUs by the bits that they compute."""
    digests = {at: {"bf16": str(group)} for at, group in enumerate(groups)}
    return {at for at, against in suspicions(digests, dict.fromkeys(digests, "H200")).items() if against}


def by_clock(groups: Sequence[int]) -> Names:
    """Hosts by their clock, seconds apart."""
    readings = {str(at): ClockReading(shown_s=1e9 + group, sent_s=1e9, received_s=1e9) for at, group in enumerate(groups)}
    return {int(host) for host, skew in skews(readings).items() if not skew.is_within(0.1)}


def by_rate(groups: Sequence[int]) -> Names:
    """GPUs of one host by a rate, a fifth apart."""
    rates = {at: 100.0 - 20 * group for at, group in enumerate(groups)}
    alike = Siblings(rates=rates, models=dict.fromkeys(rates, "H200"), hosts=dict.fromkeys(rates, 0))
    found = compare(alike, Healthy(floor_spread=0.01), limit_percent=5)
    return {at for at, one in found.items() if one.doubt is None and one.shortfall.percent > max(5, one.allowed_percent)}


def by_rate_of_hosts(groups: Sequence[int]) -> Names:
    """Hosts of one GPU each, by its rate."""
    rates = {at: 100.0 - 20 * group for at, group in enumerate(groups)}
    alike = Siblings(rates=rates, models=dict.fromkeys(rates, "H200"), hosts={at: at for at in rates})
    found = compare(alike, Healthy(floor_spread=0.01, between_hosts=0.01), limit_percent=5)
    return {at for at, one in found.items() if one.doubt is None and one.shortfall.percent > max(5, one.allowed_percent)}


def by_rail(groups: Sequence[int]) -> Names:
    """Adapters of one rail, by node."""
    facts: dict[str, Any] = {"rail": "mlx5_0:1", "latency_us": 5.0, "gbit_s": 400.0, "partners": ()}
    rates = [RailRate(node=str(at), gb_s=50.0 - 10 * group, **facts) for at, group in enumerate(groups)]
    return {int(node) for (node, _), lag in rail_lags(rates, "bandwidth", limit_percent=10).items() if lag.percent > 10}


def by_latency(groups: Sequence[int]) -> Names:
    """Adapters of one rail, by their latency."""
    facts: dict[str, Any] = {"rail": "mlx5_0:1", "gb_s": 50.0, "gbit_s": 400.0, "partners": ()}
    rates = [RailRate(node=str(at), latency_us=5.0 * 3**group, **facts) for at, group in enumerate(groups)]
    return {int(node) for (node, _), lag in rail_lags(rates, "latency", limit_percent=50).items() if lag.percent > 50}


COMPARISONS = (by_rail, by_latency, by_fabric, by_domain, by_drift, by_number, by_digest, by_clock, by_rate, by_rate_of_hosts)
SPLITS = [(0, 1), (0, 0, 1, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 2), (0, 1, 1, 0), (0, 0, 1, 2), (0, 0, 1, 1, 2)]


@pytest.mark.parametrize("groups", SPLITS)
@pytest.mark.parametrize("named", COMPARISONS)
def test_without_a_majority_nobody_is_named_or_all(named: Callable[[Sequence[int]], Names], groups: Sequence[int]) -> None:
    """1-1, 2-2, 4-4, 1-1-1 and unlike ones: whichever group comes first is not taken for the right one."""
    assert named(groups) in (set(), set(range(len(groups))))
    assert named(groups[::-1]) in (set(), set(range(len(groups))))


@pytest.mark.parametrize("groups", [(0, 0, 1), (0, 1, 0, 0), (0, 0, 0, 0, 0, 1, 1, 1)])
@pytest.mark.parametrize("named", COMPARISONS)
def test_with_a_majority_the_others_are_named(named: Callable[[Sequence[int]], Names], groups: Sequence[int]) -> None:
    """2-1, 3-1 and 5-3."""
    assert named(groups) == {at for at, group in enumerate(groups) if group}
