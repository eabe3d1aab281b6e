"""Row 21: a node never joins, a wrong address, a closed port. Bare torchrun would wait for ever, before Python starts."""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.launching import ACCEPTANCE, Launch, Starter
from tests.support.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

HERE = "127.0.0.1"
TINY = """
import os

def rank():
    return int(os.environ["RANK"])

def test_both(cluster):
    assert sorted(cluster.run(rank, per="gpu").values()) == [0, 1]
"""


def launcher(
    starter: Starter, node: int, port: int, *pytest_arguments: str, ranks: int = 1, options: Sequence[str] = ()
) -> Launch:
    """``gpucluster launch --run`` of one of two nodes on this machine."""
    where = ["--nnodes", "2", "--nproc-per-node", str(ranks), "--node-rank", str(node), "--master-addr", HERE]
    command = [sys.executable, "-m", "pytest_gpucluster.cli", "launch", "--run", *where, "--master-port", str(port)]
    return starter.start([*command, *options, "--", *pytest_arguments], name=f"node{node}")


def ended_badly(launch: Launch) -> str:
    """Exit code 1, nothing left behind, no traceback; what it said."""
    assert launch.end() == 1, launch.output
    launch.gone()
    assert "Traceback" not in launch.output
    return launch.output


def test_a_node_never_joins(starter: Starter) -> None:
    """Named, with INCOMPLETE reports in which its places are missing; who did join gives up too."""
    options = ("--join-deadline-s", "3", "--hosts", f"{socket.gethostname()},gpu-node-1")
    arguments = (ACCEPTANCE, "--gpucluster-profile=rehearsal", "--junitxml=sub/handover.xml", "--gpucluster-results=r")
    launch = launcher(starter, 0, free_port(), *arguments, ranks=2, options=options)
    output = ended_badly(launch)
    assert "node 1 (gpu-node-1) never joined within 3 s" in output
    assert "verdict INCOMPLETE: " in output
    found = launch.results("r")
    assert found["verdict"] == "INCOMPLETE"
    rows = {row["place"]["id"]: row for row in found["criteria"] if row["criterion"] == "bf16_tflops"}
    absent = 1 if rows["node1-cpu0"]["place"]["hostname"] == "gpu-node-1" else 0  # places go by hostname
    for node, reason in ((absent, "node 1 (gpu-node-1) never joined within 3 s"), (1 - absent, "not run: node 1 never joined")):
        for rank in (0, 1):
            row = rows[f"node{node}-cpu{rank}"]
            assert (row["outcome"], row["reason"]) == ("missing", reason)
    assert [row["place"]["id"] for row in found["culprits"]] == [f"node{absent}"]
    assert launch.junit("sub/handover.xml") == launch.junit("r/junit.xml")
    assert launch.junit("r/junit.xml")[f"test_bf16_tflops[node{absent}-cpu1]"] == "error"
    assert launch.junit("r/junit.xml")["gpucluster.verdict"] == "error"
    assert [event["event"] for event in launch.journal("r")][:3] == ["started", "planned", "bound"]


def test_the_others_are_told(starter: Starter) -> None:
    """Of three nodes the third never comes: the second learns it from node 0 and ends with it."""
    port = free_port()
    second = launcher(starter, 1, port, "--gpucluster", options=("--nnodes", "3"))
    second.wait_for("waiting for node 0 at")
    first = launcher(starter, 0, port, "--gpucluster", options=("--nnodes", "3", "--join-deadline-s", "2"))
    assert "is here: 2 of 3" in ended_badly(first)
    assert "nothing was started: node 2 never joined within 2 s" in ended_badly(second)


def test_node_0_is_told_to_end(starter: Starter) -> None:
    """SIGTERM while it waits: the reports say so, as those of a run would."""
    launch = launcher(starter, 0, free_port(), "--gpucluster-profile=rehearsal")
    launch.wait_for("waiting for 1 other node on port")
    os.kill(launch.pid, signal.SIGTERM)
    ended_badly(launch)
    reasons = {row["reason"] for row in launch.results()["criteria"] if row["outcome"] == "missing"}
    assert "not run: terminated by SIGTERM before all nodes had joined" in reasons


def test_a_wrong_address(starter: Starter) -> None:
    """Nobody listens there: said with host, port and what to check; torchrun is not started."""
    port = free_port()
    launch = launcher(starter, 1, port, "--gpucluster", options=("--join-deadline-s", "2"))
    output = ended_badly(launch)
    assert f"node 0's launcher was not reached at {HERE}:{port} within 2 s: connection refused" in output
    assert [word for word in ("address:", "port:", "firewall:") if word not in output] == []
    assert not (starter.folder / "gpucluster-results").exists()


def test_both_join(starter: Starter) -> None:
    """The run itself, over two torchruns, on the port that the launchers met on; node 1 may come first."""
    starter.write(test_tiny=TINY)
    port = free_port()
    launches = {node: launcher(starter, node, port, "--gpucluster", "--junitxml=junit.xml") for node in (1, 0)}
    assert [launch.end() for launch in launches.values()] == [0, 0], launches[0].output + launches[1].output
    for launch in launches.values():
        launch.gone()
    assert launches[0].junit()["test_both"] == "passed"
    assert launches[0].results()["expected"] == {"nodes": 2, "gpus_per_node": 1}
    assert launches[0].results()["environment"]["messages"] == "signed"
    (bound,) = (event for event in launches[0].journal() if event["event"] == "bound")
    assert [node["id"] for node in bound["nodes"]] == ["node0", "node1"], "node ranks, by the list of who came"
