"""Nodes of a rack that fell out of its NVLink domain."""

from __future__ import annotations

import pytest

from pytest_gpucluster.health.nvlink import outside_domains

A, B, C = "11111111-0000/1", "22222222-0000/1", "33333333-0000/1"


def rack(*fabrics: str | None) -> dict[str, list[str | None]]:
    """Nodes of four GPUs, each with one fabric for all."""
    return {f"node{number}": [fabric] * 4 for number, fabric in enumerate(fabrics)}


@pytest.mark.parametrize("fabrics", [[A] * 18, [A] * 18 + [B] * 2, [A] * 10 + [B] * 10, [A]])
def test_healthy_racks(fabrics: list[str]) -> None:
    """One domain for up to 18 nodes, two for up to 36, however the nodes are divided."""
    assert outside_domains(rack(*fabrics), nodes_per_domain=18) == {}


def test_a_node_in_another_domain() -> None:
    """The one that is not with the others."""
    found = outside_domains(rack(A, A, B, A), nodes_per_domain=18)
    assert found == {"node2": f"in domain {B} with 0 other nodes: 2 NVLink domains where 1 would do"}


def test_nobody_can_tell_which_of_two_is_the_odd_one() -> None:
    """Both are outside, as either may be."""
    assert {*outside_domains(rack(A, B), nodes_per_domain=18)} == {"node0", "node1"}
    assert {*outside_domains(rack(A, A, A, B, C), nodes_per_domain=4)} == {"node3", "node4"}


def test_a_gpu_that_tells_of_no_fabric() -> None:
    """One of four: its node cannot be in the domain."""
    found = outside_domains({"node0": [A] * 4, "node1": [A, None, A, A]}, nodes_per_domain=18)
    assert found == {"node1": "1 of 4 GPUs show no NVLink fabric beyond the node"}


def test_gpus_in_two_fabrics() -> None:
    """A partition that cuts a node."""
    found = outside_domains({"node0": [A] * 4, "node1": [A, A, B, B]}, nodes_per_domain=18)
    assert found == {"node1": "its GPUs are in 2 NVLink fabrics"}
