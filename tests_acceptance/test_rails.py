"""One adapter of every node at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pytest_gpucluster import Blame, Finding, MeasurementError, localization
from pytest_gpucluster.measurements.pair_matrix import net_interfaces, rail
from tests_acceptance.conftest import values_of

pytestmark = pytest.mark.fabric

SETTINGS = Blame(part="settings", cause="adapters have other names than on other nodes")


@dataclass(frozen=True)
class RailsMeasured:
    """What the adapters reached, by node id the errors of those that were not measured, and which had fewer repeats."""

    rates: list[localization.RailRate]
    errors: dict[str, list[MeasurementError]]
    shortened: set[str] = field(default_factory=set)

    def leave_out(self, rail_of_nodes, nodes):
        """Keep why an adapter was not measured: no other node has one of its name that is up."""
        why = f"{rail_of_nodes.name} was not measured: no other node has an adapter of this name that is up"
        for node in nodes:
            if node.id in rail_of_nodes.gbit_s:
                error = MeasurementError(f"{node.label}: {why}", culprits=(node,), blame=SETTINGS)
                self.errors.setdefault(node.id, []).append(error)

    def of(self, node):
        """Those of a node.

        Raises:
            MeasurementError: none of them was measured.
        """
        own = [one for one in self.rates if one.node == node.id]
        if not own:
            nothing = MeasurementError(f"{node.label}: no adapter that another node has too is up", blame=Blame(part="nic"))
            raise self.errors.get(node.id, [nothing])[0]
        return own


@pytest.fixture(scope="session")
def rails(nics_at_start, cluster):
    """The adapters that can be named to NCCL, with the nodes where each is up."""
    if cluster.promised.fabric_between_nodes == "sockets":
        results = cluster.run(net_interfaces, per="host", places=cluster.places, deadline_s=60)
        return localization.rails_of_interfaces({node.id: found.interfaces for node, found in values_of(results).items()})
    hosts = {node.id: found.nics for node, found in values_of(nics_at_start).items()}
    return localization.rails_of_nics(hosts, cluster.promised.fabric)


@pytest.fixture(scope="session")
def rails_measured(rails_as_measured, possible):
    """As measured, but with an error for each adapter that carries more than its port can."""
    return only_possible(rails_as_measured, possible("rail_bandwidth"))


@pytest.fixture(scope="session")
def rail_recipe(rails, recipe, budget):
    """How one adapter is measured: all share the budget, and half of it is for those that are measured twice."""
    return {**recipe("rail_bandwidth"), "budget_s": budget("rail_bandwidth", share=0.5 / max(1, len(rails)))}


@pytest.fixture(scope="session")
def rails_as_measured(rails, nic_ways, gpu_states, cluster, rail_recipe):
    """Rate and latency of every adapter of every node: one name at a time, in new workers that use it alone.

    An adapter that seems far worse than the others is measured a second time, and the better value counts.
    """
    arguments = {**rail_recipe}
    again_percent: dict[Any, float] = {name: arguments.pop(f"again_{name}_percent") for name in ("bandwidth", "latency")}
    gpus = cluster.promised.gpus_per_node
    near = [near_gpu(one.name.partition(":")[0], nic_ways, gpu_states, number % gpus) for number, one in enumerate(rails)]
    first, second = RailsMeasured([], {}), RailsMeasured([], {})
    for one, gpu in zip(rails, near, strict=True):
        measure(one, gpu, cluster, arguments, first)
    suspects = {rail for _, rail in localization.slow_rails(first.rates, again_percent)}
    for one, gpu in zip(rails, near, strict=True):
        if one.name in suspects:
            measure(one, gpu, cluster, arguments, second)
    shortened = first.shortened | second.shortened
    return RailsMeasured(localization.better_of(first.rates, second.rates), first.errors, shortened)


def only_possible(measured, can_be):
    """What was measured, with an error for each adapter that carries more than its port can."""
    found = replace(measured, rates=[], errors={node: [*before] for node, before in measured.errors.items()})
    for one in measured.rates:
        error = None if one.share is None else can_be.error(one.share, where=f"{one.node} {one.rail}")
        if error is None:
            found.rates.append(one)
        else:
            found.errors.setdefault(one.node, []).append(error)
    return found


def measure(rail_of_nodes, gpu, cluster, arguments, measured):
    """Add what one adapter of every node reaches, between the GPUs of this number."""
    places = [place for place in cluster.places if place.gpu == gpu and node_of(place, cluster).id in rail_of_nodes.gbit_s]
    if len(places) < 2:
        measured.leave_out(rail_of_nodes, cluster.nodes)
        return
    alone = cluster.with_variables(rail_of_nodes.variables)
    results = alone.run(rail, per="cluster", places=places, name=rail_of_nodes.name, **arguments)
    for place, error in results.errors.items():
        measured.errors.setdefault(node_of(place, cluster).id, []).append(error)
    if not results.errors:
        by_node = {node_of(place, cluster).id: results[place] for place in results}
        measured.rates.extend(localization.rates_of(rail_of_nodes, by_node))
        if any(one.shortened for one in by_node.values()):
            measured.shortened.add(rail_of_nodes.name)


def node_of(place, cluster):
    """The node that a GPU is in."""
    return next(node for node in cluster.nodes if node.node == place.node)


def near_gpu(name, nic_ways, gpu_states, other):
    """The number of a GPU that is nearest to the adapter on the first node that shows it; ``other`` where none does."""
    states = values_of(gpu_states)
    for node, ways in values_of(nic_ways).items():
        own = {place.gpu: state.gpu for place, state in states.items() if place.node == node.node}
        if numbers := localization.gpus_near(name, ways, own):
            return numbers[other % len(numbers)]
    return other


def test_rail_bandwidth(rails_measured, node, criterion):
    """Each adapter of the node carries its part of its port's rate."""
    found = localization.judge_shares(rails_measured.of(node), is_healthy=criterion.limit.holds)
    names = ", ".join(sorted(rails_measured.shortened))
    remark = f"some pairs had one timed transfer only through {names}, to keep the budget" if names else None
    criterion.judge(replace(found, remark=remark))
    raise_errors(rails_measured, node)


@pytest.mark.parametrize("quantity", ["bandwidth", "latency"])
def test_slow_rail(quantity, rails_measured, rail_lags, node, criterion):
    """No adapter of the node is far worse than the others of the cluster."""
    own, most = rails_measured.of(node), criterion.limit.value
    if quantity not in rail_lags:
        rail_lags[quantity] = localization.rail_lags(rails_measured.rates, quantity, limit_percent=most)
    lags = {rail: found for (where, rail), found in rail_lags[quantity].items() if where == node.id}
    if not lags:
        raise_errors(rails_measured, node)
        if rails_measured.errors:
            why = "its adapters have no two others to be compared with, as some were not measured"
            criterion.judge(Finding(unknown={"": (why,)}))
    criterion.judge(localization.judge_lags(own, lags, is_healthy=criterion.limit.holds))
    raise_errors(rails_measured, node)


@pytest.fixture(scope="session")
def rail_lags():
    """Every adapter beside the others, by quantity: made once, and not for every node."""
    return {}


def raise_errors(measured, node):
    """Raise the error of an adapter that was not measured, once the others are judged."""
    for error in measured.errors.get(node.id, []):
        raise error
