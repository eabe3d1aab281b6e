"""The link between a GPU and its host."""

from dataclasses import replace

import pytest

from pytest_gpucluster import MeasurementError, health
from pytest_gpucluster.measurements.host_link import host_link
from tests_acceptance.conftest import measured, values_of

pytestmark = pytest.mark.links


host_link_all = measured(host_link, "host_to_device_all", per="node")
"""Copies between every GPU and its host, all GPUs of a node at the same time."""


WAYS = {"h2d": "host to device", "d2h": "device to host"}


def judge(criterion, results, place, way):
    """Judge one direction; show what separates a slow link from misplaced memory. All GPUs of a host slow are the host's."""
    link, other = results[place], "d2h" if way == "h2d" else "h2d"
    of_host = {one: found for one, found in values_of(results).items() if one.node == place.node}
    rates = {one: (getattr(found, f"{way}_gb_s"), getattr(found, f"{other}_gb_s")) for one, found in of_host.items()}
    shared = health.judge_shared_link(place, rates, holds=criterion.limit.holds, ways=(WAYS[way], WAYS[other]))
    judged = replace(
        shared,
        value=results.repeated(place, f"{way}_gb_s", f"repeats_{way}_gb_s"),
        evidence={
            "NUMA node": link.numa_node,
            "memory on": link.pages_on,
            "CPUs": link.cpus,
            "both ways GB/s": link.both_gb_s,
            "remote h2d GB/s": link.h2d_remote_gb_s,
            "remote d2h GB/s": link.d2h_remote_gb_s,
            **link.evidence(way),
        },
    )
    criterion.judge(judged)


def test_host_to_device(host_link_alone, place, criterion):
    """One GPU of the node at a time."""
    judge(criterion, host_link_alone, place, "h2d")


def test_device_to_host(host_link_alone, place, criterion):
    """The other way."""
    judge(criterion, host_link_alone, place, "d2h")


def test_host_to_device_all(host_link_all, place, criterion):
    """All GPUs of the node at the same time."""
    judge(criterion, host_link_all, place, "h2d")


def test_device_to_host_all(host_link_all, place, criterion):
    """The other way."""
    judge(criterion, host_link_all, place, "d2h")


def test_numa(host_link_alone, place, criterion):
    """The rank may run on the NUMA node of its GPU, and memory requested there lies there."""
    link = host_link_alone[place]
    if not link.numa_is_known:
        nodes = f"nodes with memory: {link.memory_nodes}"
        raise MeasurementError(f"{place.label}: sysfs does not say on which NUMA node the GPU is ({nodes})", culprits=(place,))
    if link.pages_on is None and len(link.memory_nodes) > 1:
        raise MeasurementError(f"{place.label}: the kernel does not show on which NUMA node memory lies (move_pages)")
    criterion.require(len(link.misplaced), evidence={"found": link.misplaced, "NUMA node": link.numa_node, "CPUs": link.cpus})
