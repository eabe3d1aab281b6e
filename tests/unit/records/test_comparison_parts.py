"""Parts that are gone, new, moved or renamed: a line each while they are few, and grouped by hosts where they are many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster.commands.compare import sections
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.records.comparison import RunComparison, compare
from pytest_gpucluster.thresholds.limit import Limit
from tests.support.kept_runs import KeptCluster

NODES, GPUS = 12, 4
BUSBW = Limit(kind="above", value=400, unit="GB/s")


def run_of(cluster: KeptCluster) -> Any:
    """Its results: a value of each GPU, and one of each node."""
    nodes = [name for name, place in cluster.places.items() if place.gpu is None]
    rows = [Record(criterion="busbw", place=name, outcome="passed", value=480.0, limit=BUSBW) for name in nodes]
    return cluster.document([*cluster.records(), *rows])


def compared(after: KeptCluster) -> RunComparison:
    """This cluster against a healthy one."""
    return compare(run_of(healthy()), run_of(after))


def lines_of(found: RunComparison, title: str) -> list[str]:
    """The lines of a section."""
    return dict(sections(found)).get(title, [])


def healthy() -> KeptCluster:
    """The later run, to be changed."""
    return KeptCluster(nodes=NODES, gpus=GPUS)


def without(cluster: KeptCluster, *names: str) -> KeptCluster:
    """The run without these parts."""
    for name in names:
        del cluster.places[name]
    return cluster


@pytest.mark.parametrize("number", [1, 2, NODES])
def test_hosts_with_other_names(number: int) -> None:
    """A new host with all GPUs of a node is that node: nothing moved, nothing is gone, its values are compared."""
    after = healthy()
    for name, place in after.places.items():
        if place.node < number:
            after.places[name] = replace(place, hostname=f"rack7-{place.node}")
    found = compared(after)
    assert (found.parts.moved, found.parts.gone, found.parts.new) == ([], [], [])
    assert found.compared == compared(healthy()).compared
    assert not found.is_worse
    lines = lines_of(found, "hosts with other names")
    if number <= 4:
        assert lines == [f"host{node}, now rack7-{node}" for node in range(number)]
    else:
        assert lines == [f"{NODES} hosts: host[0-{NODES - 1}], now rack7-[0-{NODES - 1}]"]


def test_a_host_is_not_renamed_where_its_gpus_are_of_two_nodes() -> None:
    """Or where its old host is still there: then GPUs moved."""
    after = healthy()
    for name in ("node3-gpu0", "node3-gpu1"):
        after.places[name] = replace(after.places[name], hostname="host3b")
    assert [(old["id"], new["hostname"]) for old, new in compared(after).parts.moved] == [
        ("node3-gpu0", "host3b"),
        ("node3-gpu1", "host3b"),
    ]
    assert lines_of(compared(after), "hosts with other names") == []


def test_slots_and_addresses_are_said() -> None:
    """A GPU that stays on its host: what is another there."""
    after = healthy()
    after.places["node2-gpu1"] = replace(after.places["node2-gpu1"], pci="0000:ff:00.0")
    (line,) = lines_of(compared(after), "parts that moved")
    assert "S-node2-gpu1" in line
    assert line.endswith("-> 0000:ff:00.0")
    for name, place in after.places.items():
        if place.gpu is not None and place.node < 9:
            after.places[name] = replace(place, pci=f"0001:0{place.gpu}:00.0")
    assert lines_of(compared(after), "parts that moved") == ["host[0-8]: 4 GPUs of each at another PCI address or slot"]


def test_whole_nodes_that_moved() -> None:
    """The GPUs of one node in the chassis of another one are one line."""
    after = healthy()
    for gpu in range(GPUS):
        a, b = (after.places[f"node{node}-gpu{gpu}"] for node in (1, 5))
        after.places[a.id] = replace(a, uuid=b.uuid, serial=b.serial)
        after.places[b.id] = replace(b, uuid=a.uuid, serial=a.serial)
    assert lines_of(compared(after), "parts that moved") == [
        "host1: all of its 4 GPUs, now in host5",
        "host5: all of its 4 GPUs, now in host1",
    ]
    swapped = healthy()
    a, b = swapped.places["node1-gpu0"], swapped.places["node5-gpu2"]
    swapped.places[a.id], swapped.places[b.id] = (
        replace(a, uuid=b.uuid, serial=b.serial),
        replace(b, uuid=a.uuid, serial=a.serial),
    )
    assert len(lines_of(compared(swapped), "parts that moved")) == 2


def test_many_gpus_that_are_gone() -> None:
    """One of each node is a line with all hosts, and not one a GPU; few have their serial numbers."""
    few = compared(without(healthy(), "node1-gpu3", "node7-gpu2"))
    assert [line.rpartition(" ")[2] for line in lines_of(few, "parts that are gone")] == ["S-node1-gpu3", "S-node7-gpu2"]
    many = compared(without(healthy(), *(f"node{node}-gpu3" for node in range(NODES)), "node4-gpu0"))
    assert lines_of(many, "parts that are gone") == [
        "host[0-3,5-11]: GPU 3 of each, 11 GPUs",
        "host4: GPUs 0 and 3",
    ]
    assert len(many.parts.gone) == NODES + 1


def test_many_nodes_that_are_gone() -> None:
    """All of one size are one line; new ones as well."""
    names = [name for name, place in healthy().places.items() if place.node < 7]
    found = compared(without(healthy(), *names))
    assert lines_of(found, "parts that are gone") == ["host[0-6]: 7 nodes with 4 GPUs each"]
    later = compare(run_of(without(healthy(), *names)), run_of(healthy()))
    assert lines_of(later, "parts that are new") == ["host[0-6]: 7 nodes with 4 GPUs each"]
