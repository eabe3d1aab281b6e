"""What differs between parts that should be alike, and who is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.health.drift import (
    OF_GPU,
    OF_HOST,
    OF_NIC,
    DriftRules,
    Fact,
    FactRow,
    compare_facts,
    facts_of_gpus,
    facts_of_hosts,
    facts_of_nics,
    judge_drift,
    meets,
    summary,
)
from pytest_gpucluster.inventory.host import HostFacts, read_host
from pytest_gpucluster.inventory.machine import Management, Software
from pytest_gpucluster.inventory.nics import Nic, NicPort
from pytest_gpucluster.inventory.nvml import GpuState
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from pytest_gpucluster.measurements.host import HostState
from pytest_gpucluster.thresholds.lint import load
from tests.support.findings import NOTHING, said

HIDDEN = NotAvailable("Permission denied (/sys)")


def facts(values: list[Any], name: str = "kernel", **changes: Any) -> list[Fact]:
    """One fact of hosts, one value each."""
    return [
        Fact(**{"kind": "host", "name": name, "node": f"node{at}", "part": f"node{at}", "value": value, **changes})
        for at, value in enumerate(values)
    ]


def row(values: list[Any], **rules: Any) -> FactRow:
    """These values of one fact, compared."""
    (found,) = compare_facts(facts(values), DriftRules(**rules))
    return found


def odd_nodes(found: FactRow) -> list[str]:
    """The nodes that are named."""
    return [one.node for one in found.outliers]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (["6.8"], []),
        (["6.8"] * 2, []),
        (["6.8"] * 64, []),
        (["6.8", "6.5"], [0, 1]),
        (["6.8", "6.5", "6.8"], [1]),
        (["6.8", "6.5", "6.8", "6.5"], [0, 1, 2, 3]),
        (["6.8", "6.5", "5.4"], [0, 1, 2]),
        (["6.8"] * 61 + ["6.5", "5.4", "6.5"], [61, 62, 63]),
        ([True, False, True], [1]),
        ([0, 0, 1], [2]),
    ],
)
def test_who_is_named(values: list[Any], named: list[int]) -> None:
    """Those outside the majority; all where there is none."""
    assert odd_nodes(row(values)) == [f"node{at}" for at in named]


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=20))
def test_every_part_is_alike_or_odd(values: list[str]) -> None:
    """None is counted twice, and nothing differs only where all are the same."""
    found = row(values)
    assert found.alike + len(found.outliers) == len(values)
    assert (not found.outliers) == (len(set(values)) == 1)


@pytest.mark.parametrize(
    ("values", "percent", "named"),
    [
        ([2015.1, 2014.9, 2015.0], 2, []),
        ([2015.1, 2014.9, 1511.0], 2, [2]),
        ([2015.1, 2014.9, 2015.0], 0, [0, 1, 2]),
        ([112, 112, 111], 0, [2]),
        ([0, 0, 0], 2, []),
    ],
)
def test_numbers_that_are_near(values: list[float], percent: float, named: list[int]) -> None:
    """Hosts reserve memory differently; a missing module is another thing."""
    assert odd_nodes(row(values, percent=percent)) == [f"node{at}" for at in named]


def test_values_that_could_not_be_read() -> None:
    """Never taken for alike, and never for different: said at their node, if any other node gave the value."""
    found = row(["6.8", HIDDEN, "6.8"])
    assert (found.alike, found.outliers, [one.node for one in found.unread]) == (2, (), ["node1"])
    assert said(judge_drift([found], "node1")) == ((), ("kernel: not available: Permission denied (/sys)",))
    assert said(judge_drift([found], "node0")) == NOTHING
    nowhere = row([HIDDEN, HIDDEN])
    assert not nowhere.is_compared
    assert said(judge_drift([nowhere], "node1")) == NOTHING


@pytest.mark.parametrize(
    ("demanded", "named"),
    [("6.8.*", [2]), ("6.5.*", [0, 1, 2]), (">= 6.8", [2]), (">= 6.8.0-46", [0, 1, 2]), (">=6.5", [2]), (">= 7", [0, 1, 2])],
)
def test_what_is_demanded(demanded: str, named: list[int]) -> None:
    """Outliers stay outliers. What all have is wrong too, if something else is demanded."""
    found = row(["6.8.0-45-generic", "6.8.0-45-generic", "6.5.0"], demanded={"kernel": demanded})
    assert odd_nodes(found) == [f"node{at}" for at in named]
    odd = judge_drift([found], "node2").facts
    assert odd == (f"kernel: 6.5.0, demanded is {demanded}",)


@pytest.mark.parametrize("version", ["570.86", "570.86.10", "571", "v570.100"])
def test_versions_at_least(version: str) -> None:
    """By numbers, not by letters."""
    assert meets(version, ">= 570.86")


@pytest.mark.parametrize("version", ["570.85.99", "99.9", "unset", ""])
def test_versions_below(version: str) -> None:
    """A value without a number is no version."""
    assert not meets(version, ">= 570.86")


def test_a_demand_without_a_version() -> None:
    """Nothing is at least nothing."""
    assert not meets("570.86", ">= unset")


def test_a_demanded_fact_that_is_unknown() -> None:
    """A misspelt name would never fail: it is an error that says the names."""
    with pytest.raises(ValueError, match="nothing is known of kernle, which the recipe demands; known are kernel"):
        row(["6.8"], demanded={"kernle": "6.8"})


def test_ignored_facts() -> None:
    """By pattern."""
    both = [*facts(["6.8", "6.5"]), *facts(["1", "2"], name="variable NCCL_X")]
    assert [one.name for one in compare_facts(both, DriftRules(ignore=["variable *"]))] == ["kernel"]


def test_a_shown_fact_accuses_nobody() -> None:
    """Who differs stands in the table and in the summary. What is demanded is judged all the same."""
    boards = [*facts(["692-2G520", "965-2G520"], name="GPU board", kind="gpu"), *facts([HIDDEN], name="GPU board", kind="gpu")]
    rows = compare_facts(boards, DriftRules(shown=["GPU *"]))
    assert [said(judge_drift(rows, node)) for node in ("node0", "node1")] == [NOTHING] * 2
    assert odd_nodes(rows[0]) == ["node0", "node1"]
    assert "2 parts differ: node0 (GPU board), node1 (GPU board)" in summary(rows, num_nodes=1)
    demanded = compare_facts(boards, DriftRules(shown=["GPU *"], demanded={"GPU board": "692-*"}))
    assert judge_drift(demanded, "node1").facts == ("node1 GPU board: 965-2G520, demanded is 692-*",)


def test_two_boards_of_one_model_are_no_fault() -> None:
    """By the packaged limits: two healthy H200 of one host, 692-2G520-0282-001 and 965-2G520-0041-000, were rejected."""
    packaged = load(None)
    recipe = packaged.criteria(packaged.profiles["h200-sxm"])["drift"].recipe
    one = healthy(GpuState, index=0, visible=True, cuda_index=0)
    two = {f"node0-gpu{at}": replace(one, board_part_number=board) for at, board in enumerate(("692-2G520", "965-2G520"))}
    other = {**two, "node0-gpu1": replace(one, vbios="96.00.D0.00.02")}
    rows = [compare_facts(facts_of_gpus("node0", gpus), DriftRules(**recipe)) for gpus in (two, other)]
    assert [len(judge_drift(found, "node0").facts) for found in rows] == [0, 2]


def test_only_like_with_like() -> None:
    """GPUs of one model, NICs of one type."""
    many = [*facts(["96.00"] * 3, among="H200"), *facts(["88.00"], among="H100")]
    assert [one.outliers for one in compare_facts(many, DriftRules())] == [(), ()]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["6.8"] * 4, "1 fact compared over 4 nodes, all alike"),
        (["6.8", "6.5", "6.8"], "1 fact compared over 3 nodes; 1 part differs: node1 (kernel)"),
        (
            ["6.8"] * 7 + ["6.5"] * 6,
            (
                "1 fact compared over 13 nodes; 6 parts differ: "
                "node7 (kernel), node8 (kernel), node9 (kernel), node10 (kernel) and 2 more"
            ),
        ),
        (["6.8"], "1 fact read, and no second host to compare with"),
    ],
)
def test_summary(values: list[str], said: str) -> None:
    """One line for the terminal."""
    assert summary([row(values)], num_nodes=len(values)) == said


def test_a_fact_says_why_it_is_odd() -> None:
    """With what the others have, or that they do not agree."""
    assert judge_drift([row(["6.8", "6.5", "6.8"])], "node1").facts == ("kernel: 6.5, 2 of 3 have 6.8",)
    assert judge_drift([row(["6.8", "6.5"])], "node1").facts == ("kernel: 6.5, no majority among 2",)
    gpu = compare_facts(facts(["1", "2", "1"], name="VBIOS", kind="gpu", part="node1-gpu3"), DriftRules())
    assert judge_drift(gpu, "node1").facts == ("node1-gpu3 VBIOS: 2, 2 of 3 have 1",)


def host(**variables: str) -> HostState:
    """This machine with these variables."""
    more = {"software": healthy(Software), "management": healthy(Management)}
    return HostState(facts=read_host(), versions={"torch": "2.9"}, variables=variables, **more)


def test_facts_of_hosts() -> None:
    """Every field has its name, and a variable that one host has is unset on the other."""
    assert {*OF_HOST, "translated"} == set(HostFacts.__slots__), "its devices are named beside the fact of the IOMMU's kinds"
    rows = compare_facts(
        facts_of_hosts({"node0": host(), "node1": host(NCCL_ALGO="Ring"), "node2": host()}), DriftRules(percent=2)
    )
    assert [one.name for one in rows if one.outliers] == ["variable NCCL_ALGO"]
    assert judge_drift(rows, "node1").facts == ("variable NCCL_ALGO: Ring, 2 of 3 have unset",)


def test_a_variable_that_names_its_host_is_not_compared() -> None:
    """NCCL_HOSTID must differ from host to host: it was called a drift of every node."""
    hosts = {f"node{number}": host(NCCL_HOSTID=f"h{number}") for number in range(4)}
    rows = compare_facts(facts_of_hosts(hosts), DriftRules(percent=2))
    assert [one.name for one in rows if one.outliers or "HOSTID" in one.name] == []


def test_fields_that_are_compared_exist() -> None:
    """Of GPUs and NICs."""
    assert set(OF_GPU) <= set(GpuState.__slots__)
    assert set(OF_NIC) <= set(Nic.__slots__)


def nic(device: str, **changes: Any) -> Nic:
    """An adapter without ports."""
    return healthy(Nic, **{"device": device, "firmware": "28.43.1", "board_id": "MT_0838", **changes})


def test_facts_of_nics() -> None:
    """Firmware by adapter; how many of each type by host; another type is another thing."""
    management = nic("mlx5_8", hca_type="MT4127", firmware="26.1")
    hosts = {
        "node0": [nic("mlx5_0"), nic("mlx5_1"), management],
        "node1": [nic("mlx5_0"), nic("mlx5_1", firmware="28.39.2"), management],
        "node2": [nic("mlx5_0"), management],
    }
    rows = compare_facts([fact for node, nics in hosts.items() for fact in facts_of_nics(node, nics)], DriftRules())
    assert said(judge_drift(rows, "node0")) == NOTHING
    assert judge_drift(rows, "node1").facts == ("node1 mlx5_1 NIC firmware: 28.39.2, 4 of 5 have 28.43.1",)
    assert judge_drift(rows, "node2").facts == ("NICs: 1 MT4127, 1 MT4129, 2 of 3 have 1 MT4127, 2 MT4129",)


def with_keys(*keys: list[str] | NotAvailable, **port: Any) -> list[Nic]:
    """Adapters with one port each that has these partition keys."""
    return [nic(f"mlx5_{at}", ports=[healthy(NicPort, number=1, pkeys=one, **port)]) for at, one in enumerate(keys)]


def drift_of(*hosts: list[Nic]) -> list[tuple[str, ...]]:
    """What differs at each of these hosts, and what is not known of it."""
    facts = [fact for at, nics in enumerate(hosts) for fact in facts_of_nics(f"node{at}", nics)]
    rows = compare_facts(facts, DriftRules())
    return [(*judge_drift(rows, f"node{at}").facts, *judge_drift(rows, f"node{at}").doubts) for at in range(len(hosts))]


def test_a_partition_key_of_another_tenant() -> None:
    """Of two hosts both are named, with the membership that a key lacks; of three the odd one is."""
    tenant, other = with_keys(["0x8001", "0x7fff"]), with_keys(["0x0002", "0x7fff"])
    (own,), (foreign,) = drift_of(tenant, other)
    assert own.startswith("partition keys: 0x8001, 0x7fff, ")
    assert foreign.startswith("partition keys: 0x0002 (limited), 0x7fff, ")
    first, second, third = drift_of(tenant, other, tenant)
    assert (first, third) == ((), ())
    assert second[0].startswith("partition keys: 0x0002 (limited), 0x7fff, 2 of 3 have 0x8001, 0x7fff")


def test_partition_keys_that_are_alike() -> None:
    """Whatever the order of the adapters is, and also with other keys on ports for storage; RoCE has none to compare."""
    compute, storage = ["0x8001", "0x7fff"], ["0x8002"]
    assert drift_of(with_keys(compute, compute, storage), with_keys(storage, compute, compute)) == [(), ()]
    assert drift_of(with_keys(["0xffff"], fabric="roce"), with_keys(["0x8001"], fabric="roce")) == [(), ()]
    assert drift_of(with_keys(compute), with_keys(["0xffff"], state="DOWN"), with_keys(compute)) == [(), (), ()]


def test_the_membership_is_a_part_of_the_key() -> None:
    """A limited member beside full ones of the same partition."""
    first, second, third = drift_of(with_keys(["0x8001"]), with_keys(["0x0001"]), with_keys(["0x8001"]))
    assert (first, third) == ((), ())
    assert second[0].startswith("partition keys: 0x0001 (limited), 2 of 3 have 0x8001")


def test_partition_keys_that_cannot_be_read() -> None:
    """Where others show theirs, that host is not measured."""
    assert drift_of(with_keys(["0x8001"]), with_keys(HIDDEN), with_keys(["0x8001"]))[1] == (f"partition keys: {HIDDEN}",)


def test_a_host_without_the_gid_of_the_others() -> None:
    """RoCE: one host lacks the IPv4 GID, or has it at another index. On InfiniBand there is none to compare."""

    def with_gid(gid: str, fabric: str = "roce") -> list[Nic]:
        return with_keys(["0xffff"], fabric=fabric, roce_gid=gid)

    usual = with_gid("RoCE v2 IPv4 at 3")
    for odd in ("RoCE v2 IPv4 at 5", "no RoCE v2 IPv4"):
        first, second, third = drift_of(usual, with_gid(odd), usual)
        assert (first, third) == ((), ())
        assert second == (f"GIDs: {odd}, 2 of 3 have RoCE v2 IPv4 at 3",)
        assert drift_of(with_gid("a", "infiniband"), with_gid(odd, "infiniband")) == [(), ()]


def test_a_host_that_shows_no_nics() -> None:
    """Where others show theirs, that host is not measured; where nobody does, there is nothing to compare."""
    hosts = {"node0": [nic("mlx5_0")], "node1": HIDDEN, "node2": [nic("mlx5_0")]}
    rows = compare_facts([fact for node, nics in hosts.items() for fact in facts_of_nics(node, nics)], DriftRules())
    assert [said(judge_drift(rows, node)) for node in ("node0", "node2")] == [NOTHING, NOTHING]
    assert said(judge_drift(rows, "node1")) == ((), ("NICs: not available: Permission denied (/sys)",))
    assert said(judge_drift(compare_facts(facts_of_nics("node1", HIDDEN), DriftRules()), "node1")) == NOTHING
