"""Laws that every judge of several parts obeys, and the one rule by which a criterion judges a finding."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import CriterionFailedError, MeasurementError
from pytest_gpucluster.health import (
    NicReadings,
    NodeTraffic,
    PortPromise,
    judge_ber,
    judge_fabric,
    judge_nic_counters,
    judge_nvlink_counters,
    judge_nvlinks,
    judge_pcie_links,
    judge_ports,
    judge_transport,
    read_limits,
)
from pytest_gpucluster.inventory.nvlinks import GpuFabric, LinkCounters, NvLink
from pytest_gpucluster.inventory.nvml import GpuCounters
from pytest_gpucluster.inventory.pci_tree import PciNode, PciPath
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.finding import HERE, Finding, merge
from pytest_gpucluster.localization import RailRate, judge_pair_paths, judge_shares
from pytest_gpucluster.localization.gpus import GpuPair
from pytest_gpucluster.places import Place
from tests.support.sysfs import port_with
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

REFUSED = NotAvailable("Not Supported")
STATES = ("healthy", "bad", "unknown")
NODE = Place(id="node0", node=0)
NAMES = tuple(f"part{number}" for number in range(5))
JOINED = GpuFabric(state="completed", error=None, cluster_uuid="0", clique=0, troubles=[])
LIMITS = {"link_downed": {"total": 0}, "carrier_changes": {"total": 0}}


@dataclass(frozen=True)
class Judge:
    """A judge of parts: a reading for each state of a part, and the finding of readings by part."""

    name: str
    of: Mapping[str, Any]
    judge: Callable[[Mapping[str, Any]], Finding]
    value_is_worse: str = "count"
    """Whether the judged value is the number of bad facts, or the ``lowest`` or ``highest`` of all parts."""


def link(**changes: Any) -> list[NvLink]:
    """The one link of a GPU."""
    known = {"is_up": True, "speed_gb_s": 26.562, "effective_ber": 1e-15, "symbol_ber": 1e-15}
    return [NvLink(link=0, **{**known, **changes})]


def counters(**changes: Any) -> tuple[GpuCounters, GpuCounters]:
    """A GPU of one link at the start, and at the end."""
    before = healthy(LinkCounters, link=0, replays=5, recoveries=5, crc_flits=5, crc_data=5)
    first, last = (healthy(GpuCounters, pcie_errors={}, nvlinks=[one]) for one in (before, replace(before, **changes)))
    return first, last


def way(name: str, **changes: Any) -> PciPath:
    """A device of this address below a root port."""
    device, port = healthy(PciNode, address=name, **changes), healthy(PciNode, address=f"port of {name}")
    return PciPath(numa_node="0", nodes=[device, port])


def pair(name: str, *, path: str | None, peer_access: bool | None) -> GpuPair:
    """A pair of GPUs."""
    return GpuPair(source=name, target="other", way=None, gb_s=1.0, latency_us=1.0, path=path, peer_access=peer_access)


def rail(name: str, gb_s: float, gbit_s: float | None = 400.0) -> RailRate:
    """An adapter."""
    return RailRate(node="node0", rail=name, gb_s=gb_s, latency_us=1.0, gbit_s=gbit_s, partners=())


JUDGES = (
    Judge(
        "nvlinks",
        {"healthy": link(), "bad": link(is_up=False), "unknown": REFUSED},
        lambda parts: judge_nvlinks(parts, gb_s=25.0),
        "lowest",
    ),
    Judge(
        "bit error rates",
        {"healthy": link(), "bad": link(effective_ber=1e-3), "unknown": link(effective_ber=REFUSED)},
        lambda parts: judge_ber(parts, kind="effective", is_healthy=lambda rate: rate < 1e-12),
        "highest",
    ),
    Judge(
        "fabric",
        {"healthy": JOINED, "bad": replace(JOINED, state="in_progress"), "unknown": REFUSED},
        lambda parts: judge_fabric(dict.fromkeys(parts, "switch"), parts),
    ),
    Judge(
        "NVLink counters",
        {"healthy": counters(), "bad": counters(replays=6), "unknown": counters(replays=REFUSED)},
        lambda parts: judge_nvlink_counters(parts, seconds=60.0, limits=read_limits({"replays": {"total": 0}})),
    ),
    Judge(
        "PCIe links",
        {"healthy": {}, "bad": {"width": 8}, "unknown": {"width": NotAvailable("Unknown")}},
        lambda parts: judge_pcie_links({name: way(name, **changes) for name, changes in parts.items()}),
    ),
    Judge(
        "paths of pairs",
        {
            "healthy": {"path": "P2P/CUMEM", "peer_access": True},
            "bad": {"path": "SHM/direct", "peer_access": False},
            "unknown": {"path": None, "peer_access": None},
        },
        lambda parts: judge_pair_paths([pair(name, **one) for name, one in parts.items()]),
    ),
)
"""Judges of which each part has its own readings. Ports of NICs and drift are compared with others: see their own tests."""


def names_in(facts: Mapping[Any, Any]) -> set[str]:
    """The parts that have facts."""
    return {str(part) for part in facts}


def found(judge: Judge, states: Mapping[str, str]) -> Finding:
    """What a judge makes of parts in these states."""
    return judge.judge({name: judge.of[state] for name, state in states.items()})


def has_value(judge: Judge, states: Mapping[str, str]) -> bool:
    """Whether a part is known at all, so that there is something to judge."""
    return any(state != "unknown" for state in states.values())


SOME = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(STATES), min_size=1)


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.name)
@given(states=SOME)
def test_each_part_has_its_own_word(judge: Judge, states: dict[str, str]) -> None:
    """Bad facts and doubts are just those of the bad and the unknown parts; every name was given."""
    finding = found(judge, states)
    own = {name if judge.name != "paths of pairs" else f"{name} -> other": state for name, state in states.items()}
    assert names_in(finding.bad) == {name for name, state in own.items() if state == "bad"}
    assert names_in(finding.unknown) == {name for name, state in own.items() if state == "unknown"}


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.name)
@given(states=SOME, data=st.data())
def test_order_does_not_matter(judge: Judge, states: dict[str, str], data: st.DataObject) -> None:
    """The same parts in another order."""
    mixed = {name: states[name] for name in data.draw(st.permutations([*states]))}
    one, other = found(judge, states), found(judge, mixed)
    assert (one.judged, one.count, len(one.doubts)) == (other.judged, other.count, len(other.doubts))


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.name)
@given(states=SOME)
def test_a_healthy_part_changes_no_other(judge: Judge, states: dict[str, str]) -> None:
    """What is wrong with the others, and unknown of them, stays."""
    one, more = found(judge, states), found(judge, {**states, "another": "healthy"})
    assert (one.count, len(one.doubts)) == (more.count, len(more.doubts))


@pytest.mark.parametrize("judge", JUDGES, ids=lambda judge: judge.name)
@given(states=SOME)
def test_an_unknown_part_makes_no_bad_one_pass(judge: Judge, states: dict[str, str]) -> None:
    """It takes nothing from the bad facts, and the whole is never clean."""
    one, more = found(judge, states), found(judge, {**states, "another": "unknown"})
    assert one.count == more.count
    assert more.unknown
    assert (more.judged is None) is (not has_value(judge, states) or (judge.value_is_worse == "count" and more.count == 0))


@pytest.mark.parametrize("judge", [*JUDGES], ids=lambda judge: judge.name)
def test_nothing_is_never_bad(judge: Judge) -> None:
    """No part at all: no fault is invented; a place without parts is for the caller, who knows which parts there should be."""
    assert found(judge, {}).count == 0


def test_places_that_are_compared() -> None:
    """Nobody is named where no node uses the fabric, and where no host says what is usual."""
    assert judge_transport({"node0": NodeTraffic(4, 4), "node1": NodeTraffic(4, 4)}).bad == {}
    silent = judge_ports({"node0": NotAvailable("no class"), "node1": NotAvailable("no class")}, PortPromise(fabric="roce"))
    assert all(one.judged is None and one.unknown for one in silent.values())
    nothing = judge_nic_counters(NicReadings(first=[], last=[], seconds=1), fabric="roce", limits=read_limits(LIMITS))
    assert (nothing.judged, bool(nothing.unknown)) == (None, True)
    ports = port_with(link_downed=0)
    clean = judge_nic_counters(NicReadings(first=ports, last=ports, seconds=1), fabric="roce", limits=read_limits(LIMITS))
    assert clean.judged == 0


def test_shares_of_rails() -> None:
    """The least one is judged; without a known one nothing is."""
    own = [rail("a", 49.0), rail("b", 20.0), rail("c", 49.0, None)]
    shares = judge_shares(own, is_healthy=lambda share: share >= 0.8)
    assert (shares.value, shares.names) == (pytest.approx(0.4), ("b",))
    assert judge_shares([rail("c", 49.0, None)], is_healthy=bool).judged is None


# The one rule.


def criterion(limit: float = 0) -> Criterion:
    """At most ``limit`` at a node."""
    file = packaged()
    threshold = file.criteria(file.profiles["h200-sxm"])["nic_errors"]
    known = threshold.limit(gpus=8, cluster={})
    return Criterion(threshold=threshold, limit=replace(known, value=limit), place=NODE)


GPUS = tuple(Place(id=f"node0-gpu{number}", node=0, gpu=number) for number in range(4))


@given(
    bad=st.integers(0, 3),
    unknown=st.integers(0, 3),
    limit=st.integers(0, 3),
    value=st.one_of(st.none(), st.integers(0, 5)),
)
def test_judge_what_is_known_then_raise_what_is_unknown(bad: int, unknown: int, limit: int, value: int | None) -> None:
    """Outside the limit it fails, whatever is unknown; within it an unknown part is an error; only what is known passes."""
    finding = Finding(
        bad={f"port{number}": ("is down",) for number in range(bad)},
        unknown={f"port{10 + number}": ("was refused",) for number in range(unknown)},
        value=value,
        kind="nic",
    )
    judge, counted = criterion(limit), bad if value is None else value
    if counted > limit and (value is not None or bad):
        with pytest.raises(CriterionFailedError):
            judge.judge(finding)
    elif unknown:
        with pytest.raises(MeasurementError, match="was refused") as raised:
            judge.judge(finding)
        assert (raised.value.culprits, raised.value.blames) == ((NODE,), "unknown")
        assert judge.judged is None
    else:
        judge.judge(finding)
        assert judge.judged is not None
        assert judge.judged.outcome == "passed"


@given(st.sets(st.sampled_from(GPUS)), st.sets(st.sampled_from(GPUS)))
def test_who_is_blamed(bad: set[Place], unknown: set[Place]) -> None:
    """Some bad GPUs of a node, in place of the node; the node where all of them are bad. The same for unknown ones."""
    finding = Finding(
        bad=dict.fromkeys(sorted(bad, key=str), ("is bad",)),
        unknown=dict.fromkeys(sorted(unknown, key=str), ("was refused",)),
        kind="gpu",
    )
    judge = criterion()
    if bad:
        with pytest.raises(CriterionFailedError):
            judge.judge(finding, among=GPUS)
        assert judge.judged is not None
        assert {*judge.judged.culprits} == ({one.id for one in bad} if len(bad) < len(GPUS) else {"node0"})
    elif unknown:
        with pytest.raises(MeasurementError) as raised:
            judge.judge(finding, among=GPUS)
        assert {*raised.value.culprits} == (unknown if len(unknown) < len(GPUS) else {NODE})


@pytest.mark.parametrize("value", [math.nan, math.inf, "3", True, None])
def test_a_value_that_is_no_number_never_passes(value: Any) -> None:
    """Also where nothing is unknown; None stands for the number of bad facts."""
    if value is None:
        criterion().judge(Finding(value=value))
        return
    with pytest.raises(MeasurementError):
        criterion().judge(Finding(value=value))


def test_findings_of_one_place_are_merged() -> None:
    """Facts side by side, in order; what only one of them has is kept."""
    one = Finding(bad={HERE: ("a",)}, evidence={"x": 1}, kind="gpu", remark="r")
    two = Finding(bad={HERE: ("b",), "port": ("c",)}, unknown={"port": ("d",)}, evidence={"y": 2}, advice="do")
    both = merge([one, two])
    assert (both.facts, both.doubts) == (("a", "b", "port: c"), ("port: d",))
    assert (both.evidence, both.kind, both.remark, both.advice) == ({"x": 1, "y": 2}, "gpu", "r", "do")


def test_a_subject_without_a_text_is_left_out() -> None:
    """An empty list is no fact and no doubt."""
    finding = Finding(bad={HERE: (), "port": ()}, unknown={"port": []})
    assert (finding.bad, finding.unknown, finding.judged) == ({}, {}, 0)
