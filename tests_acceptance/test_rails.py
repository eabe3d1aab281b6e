"""One adapter of every node at a time."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.health.nics import nearest_gpus
from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.localization.rails import (
    Quantity,
    RailSeen,
    behind_siblings,
    better_of,
    rails_of_interfaces,
    rails_of_nics,
    seen_of,
    suspected,
)
from pytest_gpucluster.measurements.rails import net_interfaces, rail

pytestmark = pytest.mark.fabric


@dataclass(frozen=True)
class Measured:
    """What the adapters reached, and by node id the errors of those that were not measured."""

    seen: list[RailSeen]
    errors: dict[str, list[MeasurementError]]

    def of(self, node):
        """Those of a node.

        Raises:
            MeasurementError: none of them was measured.
        """
        own = [one for one in self.seen if one.node == node.id]
        if not own:
            nothing = MeasurementError(f"{node.label}: no adapter that another node has too is up", blame=Blame(part="nic"))
            raise self.errors.get(node.id, [nothing])[0]
        return own


@pytest.fixture(scope="session")
def rails(nics_at_start, cluster):
    """The adapters that can be named to NCCL, with the nodes where each is up."""
    if cluster.promised.fabric_between_nodes == "sockets":
        results = cluster.run(net_interfaces, per="host", places=cluster.places, deadline_s=60)
        return rails_of_interfaces({node.id: results[node].interfaces for node in results if node not in results.errors})
    results = nics_at_start.results
    hosts = {node.id: results[node].nics for node in results if node not in results.errors}
    return rails_of_nics(hosts, cluster.promised.fabric)


@pytest.fixture(scope="session")
def rails_measured(rails, nic_ways, gpu_states, cluster, recipe):
    """Rate and latency of every adapter of every node: one name at a time, in new workers that use it alone.

    An adapter that seems far worse than the others is measured a second time, and the better value counts.
    """
    arguments = recipe("rail_bandwidth")
    again_percent: dict[Quantity, float] = {
        "bandwidth": arguments.pop("again_bandwidth_percent"),
        "latency": arguments.pop("again_latency_percent"),
    }
    near = {
        one.name: near_gpu(one.name.partition(":")[0], nic_ways, gpu_states, number % cluster.promised.gpus_per_node)
        for number, one in enumerate(rails)
    }
    first = Measured([], {})
    for one in rails:
        measure(one, near[one.name], cluster, arguments, first)
    suspects = {rail for _, rail in suspected(first.seen, again_percent)}
    second = Measured([], {})
    for one in rails:
        if one.name in suspects:
            measure(one, near[one.name], cluster, arguments, second)
    return Measured(better_of(first.seen, second.seen), first.errors)


def measure(rail_of_nodes, gpu, cluster, arguments, measured):
    """Add what one adapter of every node reaches, between the GPUs of this number."""
    places = [place for place in cluster.places if place.gpu == gpu and node_of(place, cluster).id in rail_of_nodes.gbit_s]
    if len(places) < 2:
        return
    alone = cluster.with_variables(rail_of_nodes.variables)
    results = alone.run(rail, per="cluster", places=places, name=rail_of_nodes.name, **arguments)
    for place, error in results.errors.items():
        measured.errors.setdefault(node_of(place, cluster).id, []).append(error)
    if not results.errors:
        measured.seen.extend(seen_of(rail_of_nodes, {node_of(place, cluster).id: results[place] for place in results}))


def node_of(place, cluster):
    """The node that a GPU is in."""
    return next(node for node in cluster.nodes if node.node == place.node)


def near_gpu(name, nic_ways, gpu_states, other):
    """The number of a GPU that is nearest to the adapter on the first node that shows it; ``other`` where none does."""
    for node in nic_ways:
        found = None if node in nic_ways.errors else nic_ways[node]
        way = None if found is None else found.paths.get(name)
        if found is None or way is None or isinstance(way, NotAvailable) or isinstance(found.gpu_paths, NotAvailable):
            continue
        near = nearest_gpus(way, found.gpu_paths)
        known = [place for place in gpu_states if place.node == node.node and place not in gpu_states.errors]
        gpus = {sysfs_address(gpu_states[place].gpu.pci): place.gpu for place in known if gpu_states[place].gpu is not None}
        numbers = sorted(gpus[address] for address in near if address in gpus)
        if numbers:
            return numbers[other % len(numbers)]
    return other


def test_rail_bandwidth(rails_measured, node, criterion):
    """Each adapter of the node carries its part of its port's rate."""
    own = rails_measured.of(node)
    known = {one.rail: one.share for one in own if one.share is not None}
    if not known:
        raise MeasurementError(f"{node.label}: the rate of no port is known", culprits=(node,), blame=Blame(part="nic"))
    slow = tuple(rail for rail, share in known.items() if not criterion.limit.holds(share))
    evidence = {"slow": slow, "rails": [{**asdict(one), "share": one.share} for one in own]}
    criterion.require(min(known.values()), evidence=evidence, parts=Parts(kind="nic", names=slow))
    raise_errors(rails_measured, node)


@pytest.mark.parametrize("quantity", ["bandwidth", "latency"])
def test_slow_rail(quantity, rails_measured, rails_behind, node, criterion):
    """No adapter of the node is far worse than the others of the cluster."""
    own = {one.rail: one for one in rails_measured.of(node)}
    behind = {rail: found for (where, rail), found in rails_behind[quantity].items() if where == node.id}
    if not behind:
        raise_errors(rails_measured, node)
        if rails_measured.errors:
            raise MeasurementError(
                f"{node.label}: its adapters have no two others to be compared with, as some were not measured"
            )
        rates = [f"{one.rail}: {one.gb_s:.4g} GB/s, {one.latency_us:.4g} us" for one in own.values()]
        criterion.require(0.0, evidence={"rates": rates}, remark=f"no two other adapters to compare with: {'; '.join(rates)}")
        return
    worst = max(behind, key=lambda rail: behind[rail].percent)
    evidence = {
        "worst": f"{worst}: {own[worst].gb_s:.4g} GB/s, {own[worst].latency_us:.4g} us",
        "median of the others": behind[worst].median,
        "others": behind[worst].siblings,
        "with": list(own[worst].partners),
    }
    slow = tuple(rail for rail, found in behind.items() if not criterion.limit.holds(found.percent))
    criterion.require(behind[worst].percent, evidence=evidence, parts=Parts(kind="nic", names=slow))
    raise_errors(rails_measured, node)


@pytest.fixture(scope="session")
def rails_behind(rails_measured):
    """Every adapter beside the others, by quantity: made once, and not for every node."""
    return {quantity: behind_siblings(rails_measured.seen, quantity) for quantity in ("bandwidth", "latency")}


def raise_errors(measured, node):
    """Raise the error of an adapter that was not measured, once the others are judged."""
    for error in measured.errors.get(node.id, []):
        raise error
