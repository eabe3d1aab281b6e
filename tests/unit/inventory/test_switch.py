"""The leaf switch of a node, by the site or by Slurm."""

from __future__ import annotations

import pytest

from pytest_gpucluster.inventory.identity import read_switch


@pytest.mark.parametrize(
    ("variables", "switch"),
    [
        ({}, None),
        ({"GPUCLUSTER_SWITCH": "leaf7"}, "leaf7"),
        ({"GPUCLUSTER_SWITCH": " "}, None),
        (
            {"SLURM_TOPOLOGY_ADDR": "s0.s4.s8.tux1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.switch.node"},  # man srun
            "s8",
        ),
        ({"SLURM_TOPOLOGY_ADDR": "block3.gb07", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}, "block3"),
        ({"SLURM_TOPOLOGY_ADDR": "tux1", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, None),  # topology/flat
        ({"SLURM_TOPOLOGY_ADDR": "s8.tux1.example.org", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, None),  # not clear
        ({"SLURM_TOPOLOGY_ADDR": "s8.tux1"}, None),
        ({"SLURM_TOPOLOGY_ADDR": ".tux1", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node"}, None),
        (
            {
                "GPUCLUSTER_SWITCH": "leaf7",
                "SLURM_TOPOLOGY_ADDR": "s8.tux1",
                "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.node",
            },
            "leaf7",
        ),
    ],
)
def test_leaf_switch(variables: dict[str, str], switch: str | None) -> None:
    """The site's own word first; of Slurm's address the part before the node; nothing is guessed."""
    assert read_switch(variables) == switch
