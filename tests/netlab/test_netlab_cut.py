"""A host whose network goes away in the midst of a run, or was never there: the run ends, and names that host alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launching import Launch, Starter
    from tests.support.netlab import Host

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

CUT = 2
SUITE = """
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

def add_up_for_long():
    for _ in range(2000):
        dist.all_reduce(torch.ones(1))
        Path(f"started-{os.environ['RANK']}").touch()
        time.sleep(0.05)
    return True

def rank():
    return int(os.environ["RANK"])

def test_long(cluster):
    assert cluster.run(add_up_for_long, per="cluster", deadline_s=90).value

def test_after(cluster, place):
    assert cluster.run(rank, per="gpu")[place] >= 0
"""
ENDS_WITHIN_S = 60.0
"""Far below the end of the loop (100 s): a lost host is noticed by its heartbeats, in 10 s."""
CUT_OFF_ENDS_WITHIN_S = 150.0
"""The host that is cut off gives up after a minute in which the store has not answered."""


def pull_the_cable(host: Host) -> None:
    """The interface goes down."""
    host.take_down(0)


def drop_everything(host: Host) -> None:
    """The link stays up, and nothing passes."""
    host.drop_packets(0)


@pytest.mark.parametrize("cut", [drop_everything, pytest.param(pull_the_cable, marks=pytest.mark.slow)])
def test_a_host_that_is_cut_off_in_the_run_is_named(
    starter: Starter, hosts: tuple[Host, ...], cut: Callable[[Host], None]
) -> None:
    """The reports are written without it, the next test runs on the others, and no process is left, there neither."""
    starter.write(test_cut=SUITE)
    launches = launch(starter, hosts[:3])
    for number in range(3):
        launches[0].until((starter.folder / f"started-{number}").exists, what=f"start of rank {number}")
    cut(hosts[CUT])
    deadlines_s = (ENDS_WITHIN_S, ENDS_WITHIN_S, CUT_OFF_ENDS_WITHIN_S)
    codes = [one.end(within_s=within_s) for one, within_s in zip(launches, deadlines_s, strict=True)]
    for one in launches:
        one.gone()
    assert 0 not in codes, codes
    results = launches[0].results()
    assert results["verdict"] == "INCOMPLETE", launches[0].output
    rows = {(row["criterion"], row["place"] and row["place"]["id"]): row["outcome"] for row in results["criteria"]}
    lost = f"node{CUT}-cpu0"
    assert rows["long", None] == "error"
    assert {key: outcome for key, outcome in rows.items() if key[0] == "after"} == {
        ("after", "node0-cpu0"): "passed",
        ("after", "node1-cpu0"): "passed",
        ("after", lost): "error",
    }
    blamed = {culprit["place"]["id"] for culprit in results["culprits"]}
    assert blamed <= {f"node{CUT}", lost}, results["culprits"]
    assert blamed


def launch(starter: Starter, hosts: tuple[Host, ...]) -> list[Launch]:
    """One torchrun of one rank on each host."""
    prefixes = [host.prefix for host in hosts]
    return starter.nodes("--gpucluster", "-s", ranks=1, prefixes=prefixes, address=hosts[0].address())
