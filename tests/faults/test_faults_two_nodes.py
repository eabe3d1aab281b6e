"""Rows 1 to 3 of the fault list over two torchruns: the right node is named, and the run goes on on both."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.reporting.rebuild import rebuild
from tests.support.reports import RESULTS

if TYPE_CHECKING:
    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

SUITE = Path(__file__).with_name("planted_ranks.py").read_text(encoding="utf-8")
HOSTS = ("host10", "host9")  # natural order is host9, host10: torchrun's second node is node 0 of the report
SHORTENED = "raised or killed or hung"
AT_ONCE_S = 30.0
PLACED = {
    "raised": (1, 1, "host10", AT_ONCE_S),
    "killed": (2, 0, "host9", AT_ONCE_S),
    "hung": (3, 0, "host9", 3.0 + AT_ONCE_S),
}
"""(rank, node, hostname, s from the fault to the end of the call) of each; the hang has a deadline of 3 s."""


def can_have_hostnames() -> bool:
    """Whether this machine lets us start a process with a hostname of its own."""
    return subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode == 0


pytestmark.append(pytest.mark.skipif(not can_have_hostnames(), reason="no own hostnames here (unshare --uts)"))


@pytest.fixture(scope="module")
def launches(shared_starter: Starter) -> list[Launch]:
    """Both torchruns, started and not yet over."""
    shared_starter.write(test_planted=SUITE)
    prefixes = [("unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh") for host in HOSTS]
    return shared_starter.nodes("--gpucluster", "--junitxml=junit.xml", "-k", SHORTENED, ranks=2, prefixes=prefixes)


@pytest.fixture(scope="module")
def statuses(launches: list[Launch]) -> list[int]:
    """Exit statuses when both are over; no process of them is left."""
    found = [launch.end() for launch in launches]
    for launch in launches:
        launch.gone()
    return found


def test_both_shells_see_it(launches: list[Launch], statuses: list[int]) -> None:
    """No node leaves with 0."""
    assert all(status != 0 for status in statuses), statuses
    assert launches[0].results()["expected"] == {"nodes": 2, "gpus_per_node": 2}


def test_unsigned_messages_are_said(launches: list[Launch], statuses: list[int]) -> None:
    """In the verdict line and results.json, because the ranks are on two hosts; the report from the journal says it too."""
    assert launches[0].results()["environment"]["messages"] == "unsigned"
    said = [line for line in launches[0].output.splitlines() if line.startswith("verdict ")]
    assert said[-1].endswith("; messages were not signed")
    assert rebuild(launches[0].cwd / RESULTS).line.endswith("; messages were not signed")


@pytest.mark.parametrize("case", PLACED)
def test_placed_on_its_node(launches: list[Launch], statuses: list[int], case: str) -> None:
    """The text and results.json name rank, node and hostname of the cause, and no other place."""
    rank, node, hostname, _ = PLACED[case]
    results = launches[0].results()
    (row,) = (row for row in results["criteria"] if row["criterion"] == case)
    assert row["outcome"] == "error"
    first = row["reason"].splitlines()[0]
    assert f"was not measured: rank {rank} (node{node}-" in first
    assert f", {hostname})" in first
    blamed = [culprit["place"] for culprit in results["culprits"] if case in culprit["criteria"]]
    assert [(place["rank"], place["node"], place["hostname"]) for place in blamed] == [(rank, node, hostname)]
    assert launches[0].junit()[f"test_{case}"] == "error"


@pytest.mark.parametrize("case", PLACED)
def test_goes_on_over_both(launches: list[Launch], statuses: list[int], case: str) -> None:
    """The next collective of all ranks of both nodes passes, and the call with the fault was over in time."""
    assert launches[0].junit()[f"test_after_{case}"] == "passed"
    struck_s, ended_s = (
        float((launches[0].cwd / f"{word}-{case}").read_text(encoding="ascii")) for word in ("struck", "ended")
    )
    assert 0 < ended_s - struck_s < PLACED[case][3]
