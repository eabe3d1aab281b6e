"""The agent that reads the commands for its node is killed or stopped: only its own rank is named, and no other is lost."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.faults.test_faults_ends import CHOSEN, SUITE, asleep, outcomes
from tests.support.processes import free_port

if TYPE_CHECKING:
    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

RANKS = 4
LATER = """
@pytest.fixture(scope="session")
def again(cluster, slept):
    return cluster.run(quick, per="gpu", deadline_s=60)

def test_again(again, place):
    assert again[place] == 1
"""
CHILDLESS = re.sub(r".*Popen.*", "", SUITE)
LISTENS = "00010000"
MOST_CONNECTIONS = RANKS + 1 + 2
"""Each agent's, the one for the commands, and the controller's two."""


def rank_that_reads(launch: Launch) -> int:
    """The rank whose agent listens for the other agents of the node."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text("utf-8").splitlines()[1:]]
    inodes = {words[6] for words in lines if words[-1].startswith("@gpucluster-commands-") and words[3] == LISTENS}
    for rank in range(RANKS):
        for descriptor in Path(f"/proc/{launch.agent_of(rank).pid}/fd").iterdir():
            found = re.fullmatch(r"socket:\[(\d+)\]", str(descriptor.readlink()))
            if found is not None and found[1] in inodes:
                return rank
    raise AssertionError("no agent shares the commands")


def num_connections(launch: Launch, port: int) -> int:
    """Connections from the controller and its node's agents to the store."""
    return sum(
        connection.raddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        for process in [launch.controller(), *(launch.agent_of(rank) for rank in range(RANKS))]
        for connection in process.net_connections("tcp")
        if connection.raddr
    )


@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        pytest.param(signal.SIGKILL, "6", id="killed"),
        pytest.param(signal.SIGSTOP, "25", id="stopped", marks=pytest.mark.slow),
    ],
)
def test_the_agent_that_reads_in_a_long_call(starter: Starter, number: signal.Signals, seconds: str) -> None:
    """One connection a rank before. Then only that rank has no value; after a stop the others go on measuring too."""
    starter.write(test_long=CHILDLESS + LATER)
    port = free_port()
    launch = starter.torchrun(*CHOSEN, ranks=RANKS, options=("--master-port", str(port)), SLEEP_S=seconds)
    asleep(starter, launch, ranks=RANKS)
    assert 0 < num_connections(launch, port) <= MOST_CONNECTIONS
    victim = rank_that_reads(launch)
    launch.agent_of(victim).send_signal(number)
    assert launch.end() != 0
    launch.gone()
    found = outcomes(launch)
    others = [rank for rank in range(RANKS) if rank != victim]
    assert {rank: found["slept", f"node0-cpu{rank}"][0] for rank in others} == dict.fromkeys(others, "passed")
    outcome, reason = found["slept", f"node0-cpu{victim}"]
    assert outcome in ("error", "missing")
    assert f"rank {victim}" in reason
    if number == signal.SIGSTOP:
        assert "has been silent for 10 s" in reason
        assert {rank: found["again", f"node0-cpu{rank}"][0] for rank in others} == dict.fromkeys(others, "passed")
