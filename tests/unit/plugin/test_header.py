"""The first lines of a run: what is asked, the plan, what has joined."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster.cluster.binding import Binding
from pytest_gpucluster.inventory.identity import Identity
from pytest_gpucluster.judging.forecast import Forecast, Step
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.plugin.header import joined_lines, plan_lines, run_lines, wrap

STACK = {"driver": "580.159", "CUDA": "13.0", "NCCL": "2.28.9"}


def setup(**changes: Any) -> Any:
    """The setup of an acceptance of 64 nodes with 8 GPUs, by packaged limits."""
    facts = {
        "rehearsal": False,
        "simulation": None,
        "level_reached": True,
        "inventory": Inventory(num_nodes=64, gpus_per_node=8, device="cuda"),
        "changed_entries": {},
        "settings": SimpleNamespace(level="standard", thresholds=None, audit=False),
        "thresholds": SimpleNamespace(path=SimpleNamespace(name="site.yaml")),
        "profile": SimpleNamespace(name="h200-sxm", accept_at="standard"),
    }
    return SimpleNamespace(**{**facts, **changes})


def binding(
    num_nodes: int,
    gpus: int,
    *,
    absent: tuple[str, ...] = (),
    stacks: dict[int, dict[str, str]] | None = None,
    is_listed: bool = False,
) -> Binding:
    """Nodes of H200 that all answer but those places; ``stacks``: the versions of single nodes."""
    hosts = tuple(f"gpu-node-{node}" for node in range(num_nodes)) if is_listed else ()
    inventory = Inventory(num_nodes=num_nodes, gpus_per_node=gpus, device="cuda", hosts=hosts)
    places = [
        replace(place, rank=number, hostname=f"gpu-node-{place.node}") if place.id not in absent else place
        for number, place in enumerate(inventory.places)
    ]
    identities = {
        place.id: Identity(
            hostname=f"gpu-node-{place.node}",
            group_rank=place.node,
            local_rank=place.gpu or 0,
            versions={"torch": "2.11"},
            torch_gpus=gpus,
            gpu_name="NVIDIA H200",
            stack=(stacks or {}).get(place.node, STACK),
        )
        for place in places
        if place.rank is not None
    }
    silent = {number: f"rank {number} never joined within 120 s" for number, one in enumerate(places) if one.rank is None}
    return Binding(inventory=inventory, places=tuple(places), identities=identities, unidentified=silent)


def test_what_is_asked() -> None:
    """Version, kind, shape, level, profile and limits, in one wide line or two narrow ones."""
    line = "gpucluster 0.1.0   ACCEPTANCE   64 nodes x 8 GPUs   level standard   profile h200-sxm   limits packaged"
    assert run_lines(setup(), version="0.1.0", width=200) == [line]
    assert run_lines(setup(), version="0.1.0", width=80) == [
        "gpucluster 0.1.0   ACCEPTANCE   64 nodes x 8 GPUs   level standard",
        "      profile h200-sxm   limits packaged",
    ]


def test_one_of_each_is_one() -> None:
    """One GPU in one node."""
    alone = setup(inventory=Inventory(num_nodes=1, gpus_per_node=1, device="cuda"))
    assert "   1 node x 1 GPU   " in run_lines(alone, version="0.1.0", width=120)[0]


def test_own_limits_are_named() -> None:
    """With how many of them differ from the packaged ones."""
    settings = SimpleNamespace(level="standard", thresholds="site.yaml", audit=False)
    own = setup(settings=settings, changed_entries=dict.fromkeys("ab"))
    assert run_lines(own, version="1", width=200)[0].endswith("   limits site.yaml (2 changed)")
    edited = setup(changed_entries=dict.fromkeys("a"))
    assert run_lines(edited, version="1", width=200)[0].endswith("   limits packaged (1 changed)")


def test_what_cannot_accept_says_so() -> None:
    """A rehearsal, a simulated fleet, and a level below the one that the profile asks for."""
    rehearsal = setup(rehearsal=True, inventory=Inventory(num_nodes=1, gpus_per_node=2, device="cpu"))
    assert "   REHEARSAL on the CPU: accepts nothing   1 node x 2 ranks   " in run_lines(rehearsal, version="1", width=200)[0]
    simulated = run_lines(setup(simulation=object()), version="1", width=200)[0]
    assert "   SIMULATED fleet, no GPU was measured: accepts nothing   64 nodes x 8 GPUs   " in simulated
    quick = run_lines(setup(level_reached=False), version="1", width=200)[0]
    assert "   ACCEPTANCE of nothing yet: the profile asks for standard   " in quick


def test_the_plan_fits() -> None:
    """Wrapped between the subjects."""
    steps = [("a", "health", 66, 4.0), ("b", "compute", 24, 52.0), ("c", "training", 1, 80.0)]
    plan = Forecast(
        steps=tuple(Step(criterion=name, subject=subject, tests=tests, takes_s=took) for name, subject, tests, took in steps),
        left_out=6,
    )
    assert plan_lines(plan, width=80) == [
        "plan: 3 criteria, 91 checks, 6 not applicable, about 2:20 (health 0:04,",
        "      compute 0:52, training 1:20, start-up 0:04)",
    ]
    assert len(plan_lines(plan, width=200)) == 1


def test_one_node() -> None:
    """Hostname, GPUs and versions; that all of it joined needs no line."""
    line = "gpu-node-0: 8 NVIDIA H200, driver 580.159, CUDA 13.0, NCCL 2.28.9, torch 2.11"
    assert joined_lines(binding(1, 8), width=80) == [line]


def test_many_nodes_are_folded() -> None:
    """By what is in them, the most frequent kind first; then how many joined."""
    found = binding(64, 8, stacks={7: {**STACK, "driver": "550.1"}, 9: {**STACK, "driver": "550.1"}})
    wide = joined_lines(found, width=200)
    assert wide[0].startswith("gpu-node-[0-6,8,10-63]: 62 nodes x 8 NVIDIA H200, driver 580.159, CUDA 13.0, ")
    assert wide[1].startswith("gpu-node-[7,9]: 2 nodes x 8 NVIDIA H200, driver 550.1, ")
    assert wide[2:] == ["joined 64 of 64 nodes, 512 of 512 GPUs"]
    assert joined_lines(found, width=80)[0].endswith(",")


def test_many_kinds_of_node_are_counted() -> None:
    """Nodes that all differ do not fill the screen."""
    lines = joined_lines(binding(64, 8, stacks={node: {"driver": str(node)} for node in range(64)}), width=200)
    assert len(lines) == 5
    assert lines[3] == "      and 61 other kinds of node"


def test_absent_places_are_named() -> None:
    """By host, as far as a list names it, never by a number that would point to another; with the reason of the first."""
    lost = (*(f"node63-gpu{gpu}" for gpu in range(8)), "node5-gpu3")
    whole, why = "joined 63 of 64 nodes, 503 of 512 GPUs; absent: ", "(rank 43 never joined within 120 s)"
    listed = joined_lines(binding(64, 8, absent=lost, is_listed=True), width=200)
    assert listed[-1] == f"{whole}gpu-node-63, gpu-node-5 gpu 3 {why}"
    assert joined_lines(binding(64, 8, absent=lost), width=200)[-1] == f"{whole}1 unknown host, node5-gpu3 {why}"
    gone = tuple(f"node{node}-gpu{gpu}" for node in range(1, 64) for gpu in range(8))
    most = joined_lines(binding(64, 8, absent=gone, is_listed=True), width=80)
    assert most[1:3] == [
        "joined 1 of 64 nodes, 8 of 512 GPUs; absent: gpu-node-[1-63]",
        "      (rank 8 never joined within 120 s)",
    ]
    assert "absent: 63 unknown hosts" in joined_lines(binding(64, 8, absent=gone), width=80)[1]


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider(width: int) -> None:
    """Whatever stands in the facts; and nothing of it acts on a terminal."""
    found = binding(64, 8, absent=("node5-gpu3",), stacks={0: {"driver": "5" * 300, "CUDA": "13\x1b[2J\nverdict ACCEPTED"}})
    lines = [*run_lines(setup(), version="1", width=width), *joined_lines(found, width=width)]
    assert max(map(len, lines)) <= width
    assert "\x1b" not in "".join(lines)
    assert "\n" not in "".join(lines)


def test_wrap() -> None:
    """Later lines are set in; a piece that is too long is cut."""
    assert wrap(["one", "two", "three"], width=9) == ["one two", "      ..."]
    assert wrap(["one", "two", "three"], width=11) == ["one two", "      three"]
