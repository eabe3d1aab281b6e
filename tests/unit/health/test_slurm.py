"""A host and a job of Slurm beside what is there: each planted fault, and its healthy twin."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pytest_gpucluster.health.schedulers import (
    IN_SERVICE,
    OUT_OF_SERVICE,
    at_start_and_end,
    judge_config,
    judge_job,
    judge_node,
    remark_on_blocks,
    with_remark,
)
from pytest_gpucluster.inventory.host import NO_LIMIT_BYTES
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.slurm import SlurmConfig, SlurmNode, SlurmShare, parse_states
from pytest_gpucluster.measurements.host import RankBinding, SlurmState
from tests.support.findings import NOTHING, said

HIDDEN = NotAvailable("Permission denied")
MIB = 2**20
NODE = SlurmNode(
    name="gpu1", host="gpu1", states=["ALLOCATED"], reason="", gpus=8, threads_per_core=2, memory_mib=2000, partitions="gpu",
    version="24.05.4",
)  # fmt: skip
WHOLE = SlurmState(
    partitions={"gpu": "UP"},
    controller="Slurmctld(primary) at head is UP",
    node=NODE,
    share=SlurmShare(cpus=8, memory_mib=2000, gpus=8),
    gpus_seen=8,
    mig_gpus=0,
)
HALF = SlurmShare(cpus=4, memory_mib=1000, gpus=4)
RANK = RankBinding(cpus="0-7", cores="0-3", numa_nodes="0", memory_limit_bytes=2000 * MIB)


def node(**changes: Any) -> SlurmState:
    """The healthy host with other values."""
    return dataclasses.replace(WHOLE, node=dataclasses.replace(NODE, **changes))


def state(**changes: Any) -> SlurmState:
    """The healthy state with other values."""
    return dataclasses.replace(WHOLE, **changes)


def rank(**changes: Any) -> RankBinding:
    """A rank that may use all, with other values."""
    return dataclasses.replace(RANK, **changes)


def bound(*ranks: RankBinding) -> dict[str, RankBinding]:
    """The ranks of a host by their places."""
    return {f"node0-gpu{number}": one for number, one in enumerate(ranks)}


HALF_RANK = rank(cpus="0-1", cores="0-1", memory_limit_bytes=1000 * MIB)


def test_a_healthy_host_and_job() -> None:
    """Nothing is wrong, and all is known."""
    assert said(judge_node(WHOLE)) == said(judge_job(WHOLE, bound(RANK))) == NOTHING


CONFIG = SlurmConfig(
    health_check="/usr/sbin/nhc", interval_s=300, prolog="", accounting="accounting_storage/slurmdbd",
    topology="topology/block", pyxis=True, enroot="/usr/bin/enroot", prolog_most_s=2.0,
    packing="select/cons_tres CR_PACK_NODES", mpi="pmix",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "count", "doubts"),
    [
        ({}, 0, 0),
        ({"health_check": ""}, 1, 0),
        ({"interval_s": 0}, 1, 0),
        ({"interval_s": HIDDEN}, 0, 1),
        ({"accounting": "", "topology": "", "pyxis": HIDDEN, "enroot": None, "prolog_most_s": HIDDEN}, 0, 0),
        ({"packing": "", "mpi": HIDDEN}, 0, 0),
    ],
)
def test_the_health_check_of_slurm(changes: dict[str, Any], count: int, doubts: int) -> None:
    """Not set, or never run, is bad; what a site may do without is shown."""
    found = judge_config(state(config=dataclasses.replace(CONFIG, **changes)))
    assert (found.count, len(found.doubts)) == (count, doubts)
    assert len(judge_config(state(config=HIDDEN)).doubts) == 1


def test_half_a_host() -> None:
    """A job with some of the host that sees no more than that is healthy too."""
    half = state(share=HALF, gpus_seen=4)
    assert said(judge_node(half)) == said(judge_job(half, bound(HALF_RANK))) == NOTHING


@pytest.mark.parametrize("word", sorted(OUT_OF_SERVICE))
@pytest.mark.parametrize("base", ["IDLE", "ALLOCATED", "MIXED"])
def test_states_out_of_service(base: str, word: str) -> None:
    """Each is one, in Slurm's words, with the reason."""
    (wrong,) = judge_node(node(states=[base, word], reason="bad GPU 3")).facts
    assert wrong == f"{word}: {OUT_OF_SERVICE[word]} (reason: bad GPU 3)"


@pytest.mark.parametrize("word", IN_SERVICE)
def test_states_in_service(word: str) -> None:
    """None counts: not even a reservation for maintenance, in which acceptances are run."""
    assert said(judge_node(node(states=["IDLE", word]))) == NOTHING


@pytest.mark.parametrize("text", ["UNKNOWN", "IDLE+?", "IDLE+NEW_IN_2030", "+"])
def test_states_that_say_nothing(text: str) -> None:
    """Are not known, never good."""
    found = judge_node(node(states=parse_states(text)))
    assert (found.judged, len(found.doubts)) == (None, 1)


def test_a_bad_state_beside_an_unknown_one() -> None:
    """Both are shown."""
    found = judge_node(node(states=["DOWN", "NEW_IN_2030"]))
    assert (len(found.facts), len(found.doubts)) == (1, 1)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (state(gpus_seen=7), "NVML shows 7 GPUs, and the job has 8 here"),
        (state(share=HALF, gpus_seen=3), "NVML shows 3 GPUs, and the job has 4 here"),
        (
            dataclasses.replace(node(gpus=4), share=dataclasses.replace(HALF, gpus=4), gpus_seen=8),
            "NVML shows 8 GPUs, and Slurm knows of 4 (Gres)",
        ),
    ],
)
def test_gpus_that_are_counted_unlike(changed: SlurmState, text: str) -> None:
    """Fewer than the job has, or more than the host's GRES."""
    assert said(judge_node(changed)) == ((text,), ())


@pytest.mark.parametrize(
    "changed",
    [node(gpus=0), state(mig_gpus=8, gpus_seen=1), state(share=dataclasses.replace(HALF, gpus=0)), state(share=HALF)],
)
def test_gpus_that_are_not_compared(changed: SlurmState) -> None:
    """No GRES, MIG, and a job with some of them that sees all: the host is no worse for it."""
    assert said(judge_node(changed)) == NOTHING


@pytest.mark.parametrize(
    "changed",
    [
        state(node=HIDDEN),
        node(gpus=HIDDEN),
        state(share=HIDDEN),
        state(share=dataclasses.replace(HALF, gpus=HIDDEN)),
        state(gpus_seen=HIDDEN),
    ],
)
def test_what_is_hidden_of_a_host(changed: SlurmState) -> None:
    """Is never good."""
    found = judge_node(changed)
    assert found.judged is None
    assert "Permission denied" in " ".join(found.doubts)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([rank(cpus="0", cores="0")], "the ranks may use 1 core, and the job has 4 here"),
        ([rank(cores="0"), rank(cores="1")], "the ranks may use 2 cores, and the job has 4 here"),
        ([rank(cpus="0-15", cores="0-7")], "the ranks may use 8 cores, and the job has 4 here: nothing confines it"),
        ([rank(memory_limit_bytes=1000 * MIB)], "the cgroups give the ranks 1000 MiB, and the job has 2000 MiB here"),
        ([RANK, rank(memory_limit_bytes=1000 * MIB)], "the cgroups give the ranks 1000 MiB"),
        ([rank(memory_limit_bytes=4000 * MIB)], "the cgroups give the ranks 4000 MiB"),
    ],
)
def test_ranks_that_may_use_something_else(ranks: list[RankBinding], text: str) -> None:
    """Fewer or more cores than the job's, all ranks together, and less or more memory."""
    (wrong,) = judge_job(WHOLE, bound(*ranks)).facts
    assert text in wrong


def test_nothing_holds_the_job() -> None:
    """A job with half of the host, whose memory and GPUs are not confined."""
    wrong = judge_job(state(share=HALF), bound(dataclasses.replace(HALF_RANK, memory_limit_bytes=NO_LIMIT_BYTES))).facts
    assert wrong == (
        "the job has 1000 MiB here, and no cgroup holds it to that (ConstrainRAMSpace)",
        "the job has 4 of 8 GPUs here and sees 8: others' are not hidden (ConstrainDevices)",
    )


@pytest.mark.parametrize(
    ("changed", "of_rank"),
    [
        (WHOLE, rank(memory_limit_bytes=NO_LIMIT_BYTES)),
        (WHOLE, rank(memory_limit_bytes=2000 * MIB - 4096)),
        (state(share=SlurmShare(cpus=8, memory_mib=0, gpus=8)), rank(memory_limit_bytes=NO_LIMIT_BYTES)),
        (WHOLE, rank(cpus="0-3", cores="0-3")),
        (state(share=SlurmShare(cpus=7, memory_mib=2000, gpus=8)), RANK),
        (state(share=HALF, mig_gpus=8), HALF_RANK),
        (dataclasses.replace(node(gpus=0), share=dataclasses.replace(HALF, gpus=0)), HALF_RANK),
    ],
)
def test_what_is_alike_all_the_same(changed: SlurmState, of_rank: RankBinding) -> None:
    """All memory needs no limit; a page, one thread of each core and half a core are no difference; MIG is not compared."""
    assert said(judge_job(changed, bound(of_rank))) == NOTHING


@pytest.mark.parametrize("changed", [state(node=HIDDEN), state(share=HIDDEN)])
def test_what_is_hidden_of_a_job(changed: SlurmState) -> None:
    """Nothing is judged, and why is said."""
    found = judge_job(changed, bound(RANK))
    assert found.judged is None
    assert "Permission denied" in " ".join(found.doubts)


def test_memory_that_cannot_be_read() -> None:
    """The rest is judged all the same."""
    found = judge_job(WHOLE, bound(rank(cores="0", memory_limit_bytes=HIDDEN)))
    assert len(found.facts) == 1
    assert found.doubts == ("the memory limit is not available: Permission denied",)


def test_no_rank() -> None:
    """Is not known."""
    assert judge_job(WHOLE, {}).doubts == ("no rank of the host shows where it may run",)


def test_both_ends_of_a_run() -> None:
    """What was wrong, or hidden, at the start counts too, and is told from what is so at the end."""
    drained, hidden = node(states=["IDLE", "DRAIN"]), state(node=HIDDEN)
    assert said(at_start_and_end(WHOLE, WHOLE)) == NOTHING
    assert at_start_and_end(drained, WHOLE).facts == ("DRAIN: it gets no new jobs, at the start",)
    assert at_start_and_end(WHOLE, drained).facts == ("DRAIN: it gets no new jobs",)
    assert at_start_and_end(drained, drained).facts == ("DRAIN: it gets no new jobs",)
    assert at_start_and_end(hidden, WHOLE).doubts[0].endswith("at the start")


RACK = {f"node{at}": f"rack{at // 2}" for at in range(4)}


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (["b0", "b0", "b1", "b1"], [None] * 4),
        (["b0", "b0", "b0", "b1"], ["block b0 has hosts of 2 NVLink domains"] * 3 + ["is in 2 blocks of Slurm: b0, b1"]),
        (["b0", "b1", "b2", "b2"], ["is in 2 blocks of Slurm: b0, b1"] * 2 + [None] * 2),
        (["b0", None, HIDDEN, "b1"], [None] * 4),
        ([None] * 4, [None] * 4),
    ],
)
def test_blocks_beside_nvlink_domains(blocks: list[Any], said: list[str | None]) -> None:
    """A block that crosses racks, and a rack that is cut, are remarks of each host that has part in it."""
    by_node = dict(zip(RACK, blocks, strict=True))
    for node, words in zip(RACK, said, strict=True):
        found = remark_on_blocks(node, by_node, RACK)
        assert (found is None) if words is None else (found is not None and words in found)
        assert remark_on_blocks(node, by_node, {}) is None, "NVLink ends at the node"
    remarked = with_remark(judge_node(WHOLE), "odd")
    assert remarked.remark == "odd"
    assert with_remark(remarked, None).remark == "odd"
