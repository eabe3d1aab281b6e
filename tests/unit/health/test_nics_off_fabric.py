"""Who takes another way than the promised fabric, by the connections of each node."""

from __future__ import annotations

import pytest

from pytest_gpucluster.health.nics import NodeTraffic, judge_transport


@pytest.mark.parametrize(
    ("traffic", "culprits", "shown"),
    [
        ({"node0": (4, 0), "node1": (4, 0)}, (), {}),
        ({"node0": (4, 1), "node1": (4, 4), "node2": (4, 1)}, ("node1",), {"node0": 1, "node1": 4, "node2": 1}),
        ({"node0": (4, 4), "node1": (4, 4), "node2": (8, 0)}, ("node0", "node1"), {"node0": 4, "node1": 4}),
        ({"node0": (4, 4), "node1": (4, 4)}, (), {"node0": 4, "node1": 4}),
        ({"node0": (4, 2), "node1": (4, 2)}, (), {"node0": 2, "node1": 2}),
        ({"node0": (4, 4), "node1": (0, 0)}, (), {"node0": 4}),
    ],
    ids=["nobody", "one and its neighbours", "two", "all", "some of each", "nothing to compare with"],
)
def test_the_node_that_uses_the_fabric_for_nothing(
    traffic: dict[str, tuple[int, int]], culprits: tuple[str, ...], shown: dict[str, int]
) -> None:
    """It is to blame where others use it; where nobody does, or all do in part, no node is."""
    found = judge_transport({name: NodeTraffic(*counts) for name, counts in traffic.items()})
    assert found.names == culprits
    assert found.value == sum(off for _, off in traffic.values())
    texts = {name: f"{count} of {traffic[name][0]} connections" for name, count in shown.items()}
    assert found.evidence == ({"off the fabric": texts} if texts else {})
