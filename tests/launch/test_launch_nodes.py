"""Two torchruns as two nodes."""

from __future__ import annotations

import socket
import subprocess

import pytest

from tests.support.launching import ACCEPTANCE, Launch, Starter

pytestmark = pytest.mark.e2e

HOSTS = ("host10", "host9")  # natural order is host9, host10: node numbers do not follow torchrun's
PID_NAMESPACE = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


def can(*command: str) -> bool:
    """Whether this machine lets us start such a process."""
    return subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0


def ended(launches: list[Launch]) -> list[int]:
    """Exit statuses, every process gone."""
    codes = [launch.end() for launch in launches]
    for launch in launches:
        launch.gone()
    return codes


def last_lines(launch: Launch) -> list[str]:
    """What every node shows last: the verdict, and where its report lies."""
    line = launch.results()["verdict_line"]
    report = next(one for one in launch.output.splitlines() if one.startswith("report: "))
    assert report.startswith(f"report: {launch.cwd / 'gpucluster-results'} on ")
    return [f"verdict {line}", report]


REJECTS = """
import pytest

@pytest.mark.distributed
def test_rejects(rank):
    assert rank != 3
"""


def test_a_rejection_is_last_on_every_node(starter: Starter) -> None:
    """In torchrun's banner, which comes after all that a rank can print, and above it; no link to a manual in its place."""
    starter.write(test_rejects=REJECTS)
    launches = starter.nodes("--gpucluster", ranks=2, prefixes=[(), ()])
    assert ended(launches) == [1, 1], launches[0].output
    verdict, report = last_lines(launches[0])
    assert verdict.startswith("verdict REJECTED: 1 failed")
    for launch in launches:
        *_, cause, where, border = launch.output.rstrip().splitlines()
        assert (cause, where, set(border)) == (f"  traceback : {verdict}", f"  {report}", {"="})
        assert "To enable traceback" not in launch.output
        assert launch.output.count(f"\n{verdict}\n") + launch.output.startswith(f"{verdict}\n") >= 1


def test_a_usage_error_is_last_under_torchrun(starter: Starter) -> None:
    """Its text is printed once; torchrun's banner points to it."""
    launch = starter.torchrun("--gpucluster-level=lowest")
    assert launch.end() == 1
    *_, cause, border = launch.output.rstrip().splitlines()
    assert set(border) == {"="}
    assert cause == "  traceback : usage error: the ERROR line above says what is wrong"
    assert launch.output.count("'lowest'") == 1
    assert "To enable traceback" not in launch.output


@pytest.mark.skipif(not can("unshare", "--uts"), reason="no own hostnames here (unshare --uts)")
def test_two_nodes(starter: Starter) -> None:
    """Places by natural order of hostname, one report, from node 0 of the controller; both shells see one status."""
    prefixes = [("unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh") for host in HOSTS]
    chosen = ("-k", "nodes_reachable or busbw or inter", "--junitxml=junit.xml")
    launches = starter.nodes(ACCEPTANCE, *chosen, ranks=2, prefixes=prefixes)
    assert ended(launches) == [0, 0], launches[0].output
    first, second = launches
    assert "test session starts" not in second.output
    assert second.output.splitlines()[-2:] == last_lines(first)
    assert first.output.splitlines()[-2:] == last_lines(first)
    rows = {(row["criterion"], row["place"] and row["place"]["id"]): row for row in first.results()["criteria"]}
    assert rows["nodes_reachable", None]["value"] == 2
    assert rows["inter_node_busbw[all_reduce]", None]["outcome"] == "passed"
    assert rows["busbw[all_reduce]", "node0"]["place"]["hostname"] == "host9"
    assert rows["busbw[all_reduce]", "node1"]["place"]["hostname"] == "host10"
    assert first.results()["expected"] == {"nodes": 2, "gpus_per_node": 2}
    bound = next(event["places"] for event in first.journal() if event["event"] == "bound")
    assert {place["id"]: place["rank"] for place in bound} == {
        "node0-cpu0": 2,
        "node0-cpu1": 3,
        "node1-cpu0": 0,
        "node1-cpu1": 1,
    }
    assert first.junit()["test_busbw[node1-all_reduce]"] == "passed"


UNREACHABLE = """
extends: packaged
criteria:
  "inter_node_busbw[all_reduce]":
    profiles:
      rehearsal: {above: 1000000, why: a limit that nothing reaches}
"""


@pytest.mark.slow  # by day, of four hosts the slow one is searched (tests/netlab), and of simulated nodes
def test_smaller_groups_are_measured_where_all_nodes_are_too_slow(starter: Starter) -> None:
    """Real process groups of some nodes; as each of them is too slow, no node is named, and all ends as ever."""
    (starter.folder / "site.yaml").write_text(UNREACHABLE)
    chosen = ("-k", "inter_node_busbw", "--gpucluster-thresholds=site.yaml")
    launches = starter.nodes(ACCEPTANCE, *chosen, ranks=1, prefixes=[()] * 4)
    assert ended(launches) == [1] * 4, launches[0].output
    (row,) = (row for row in launches[0].results()["criteria"] if row["outcome"] == "failed")
    assert row["evidence"]["localization"] == "no node could be named"
    assert int(row["evidence"]["searched"].partition(" ")[0]) >= 4
    assert launches[0].results()["culprits"] == []


SLOW = """
import os
import time

def slow():
    time.sleep(1)
    return int(os.environ["RANK"])

def test_slow(cluster):
    assert sorted(cluster.run(slow, per="gpu").values()) == [0, 1]
"""


@pytest.mark.skipif(not can(*PID_NAMESPACE), reason="no own process ids here (unshare --pid)")
def test_two_nodes_of_one_hostname(starter: Starter) -> None:
    """Equal hostnames do not mean one machine (containers, ``localhost``): nobody is taken for dead by a foreign pid."""
    starter.write(test_slow=SLOW)
    launches = starter.nodes("--gpucluster", ranks=1, prefixes=[PID_NAMESPACE, ()])
    assert ended(launches) == [0, 0], launches[0].output
    rows = {row["criterion"]: row for row in launches[0].results()["criteria"]}
    assert rows["slow"]["outcome"] == "passed"
    bound = next(event["places"] for event in launches[0].journal() if event["event"] == "bound")
    assert [place["hostname"] for place in bound] == [socket.gethostname()] * 2
