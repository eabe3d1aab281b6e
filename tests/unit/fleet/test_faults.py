"""Planted faults and shapes as they are written on a command line."""

from __future__ import annotations

import re

import msgspec
import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.fleet.simulation import (
    FAULTS,
    NODES_ONLY,
    PlantedFault,
    Simulation,
    parse_fault,
    parse_simulation,
    require_model,
)
from tests.support import REPOSITORY

FIRST_CELL = re.compile(r"(?m)^\| *(`[a-z]+`(?:, `[a-z]+`)*) *\|")


def listed(page: str) -> set[str]:
    """The faults in the table of ``gpucluster demo`` of a page: the names in its first column."""
    table = page.partition("| fault |")[2].partition("\n\n")[0]
    return {name for cell in FIRST_CELL.findall(table) for name in re.findall("[a-z]+", cell)}


@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_can_be_planted_and_comes_back(kind: str) -> None:
    """What is read is written the same way, and crosses to the agents as data."""
    text = f"node7:{kind}" if kind in NODES_ONLY else f"node7-gpu5:{kind}"
    fault = parse_fault(text)
    assert str(fault) == text
    assert msgspec.json.decode(msgspec.json.encode(fault), type=PlantedFault) == fault


def test_every_fault_stands_in_the_page_of_the_commands() -> None:
    """The table has each fault that can be planted, and no other one."""
    page = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
    assert listed(page) == set(FAULTS)


def test_a_fault_that_the_page_does_not_name_is_seen() -> None:
    """Names in other columns and in other tables do not count."""
    page = "| `odd` | x |\n\n| fault | the part |\n|---|---|\n| `slow`, `ecc` | like `hbm` |\n\n| `xid` | y |\n"
    assert listed(page) == {"slow", "ecc"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' names no part and fault; say PART:FAULT, for example node3-gpu5:slow or node7:absent"),
        ("slow", "'slow' names no part and fault"),
        ("gpu3:slow", "'gpu3:slow' names no part and fault"),
        ("node-1:slow", "'node-1:slow' names no part and fault"),
        ("node1-gpu:slow", "'node1-gpu:slow' names no part and fault"),
        ("node1:", "'node1:': there is no fault ''; faults: absent, "),
        ("node1:slwo", "there is no fault 'slwo'; faults: .* Did you mean 'slow'"),
        ("node1-gpu2:nvls", "'node1-gpu2:nvls': nvls is a fault of a whole node; say node1:nvls"),
        ("node1:shared", "'node1:shared': shared is a fault of one GPU; say node1-gpu3:shared"),
    ],
)
def test_faults_that_are_none_are_told(text: str, message: str) -> None:
    """With what to say instead."""
    with pytest.raises(ConfigurationError, match=message):
        parse_fault(text)


@pytest.mark.parametrize("shape", ["", "8", "x8", "0x8", "2x0", "2X8", "2x8x2", "-1x8", "2x8 ", "99999x999", "²x8"])
def test_shapes_that_are_none_are_told(shape: str) -> None:
    """Nothing is guessed, and nothing is larger than a store can hold."""
    with pytest.raises(ConfigurationError, match=re.escape(f"{shape!r} is no fleet; say NODESxGPUS, for example 128x8")):
        parse_simulation(shape, faults=[])


@pytest.mark.parametrize("fault", ["node2:slow", "node0-gpu4:hbm", "node9-gpu0:dead"])
def test_faults_outside_of_the_fleet_are_told(fault: str) -> None:
    """A fault that is nowhere would be found by nobody."""
    with pytest.raises(ConfigurationError, match=f"'{fault}' is outside of the fleet 2x4, whose last GPU is node1-gpu3"):
        parse_simulation("2x4", faults=[fault])


def test_a_gpu_without_a_neighbour_cannot_be_shared() -> None:
    """The rank would be alone on its own GPU."""
    with pytest.raises(
        ConfigurationError, match="'node0-gpu0:shared' needs a neighbour, and the nodes of the fleet 2x1 have one"
    ):
        parse_simulation("2x1", faults=["node0-gpu0:shared"])


def test_a_fleet_that_is_absent_is_told() -> None:
    """Nobody would ever say hello."""
    with pytest.raises(ConfigurationError, match="nothing of the fleet 1x2 is present"):
        parse_simulation("1x2", faults=["node0:absent"])


def test_only_gpus_with_a_model_are_simulated() -> None:
    """A B200 was never measured here."""
    require_model("h100-sxm")
    with pytest.raises(ConfigurationError, match="there is no simulated b200; simulated GPUs: h200-sxm, h100-sxm"):
        require_model("b200")


def test_a_simulation_crosses_to_its_agents() -> None:
    """As JSON and back."""
    found = parse_simulation("3x2", seed=5, faults=["node1-gpu1:slow", "node2:absent"])
    assert msgspec.json.decode(msgspec.json.encode(found), type=Simulation) == found
    assert found.present == (0, 1, 2, 3)
    assert [rank for rank in range(6) if found.has(rank, "slow")] == [3]
