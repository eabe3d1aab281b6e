"""Runs of two torchruns that go on: after a SIGKILL of the controller, and after a node was lost."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launching import TORCHRUN
from tests.support.processes import free_port
from tests.support.reports import RESULTS
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

SUITE = """\
    import os
    import time
    from pathlib import Path

    HERE = Path(__file__).parent

    def pid():
        return os.getpid()

    def test_first(cluster, place, criterion):
        criterion.require(cluster.run(pid, per="gpu")[place])

    def test_second(cluster, place, criterion):
        (HERE / "second").touch()
        while (HERE / "wait").exists():
            time.sleep(0.05)
        criterion.require(cluster.run(pid, per="gpu")[place])

    def test_third(cluster, criterion):
        criterion.require(len(cluster.run(pid, per="gpu")))
    """
GPUCLUSTER = (sys.executable, "-m", "pytest_gpucluster.cli")
HOSTS = ("host10", "host9")
EVERY = {"node0-cpu0", "node1-cpu0"}


def can_have_hostnames() -> bool:
    """Whether this machine lets us start a process with a hostname of its own."""
    return subprocess.run(["unshare", "--uts", "true"], capture_output=True, check=False).returncode == 0


pytestmark.append(pytest.mark.skipif(not can_have_hostnames(), reason="no own hostnames here (unshare --uts)"))


def prefixes(*hosts: str) -> list[tuple[str, ...]]:
    """What gives each node its hostname."""
    return [("unshare", "--uts", "sh", "-c", f'hostname {host} && exec "$@"', "sh") for host in hosts]


def begin(starter: Starter) -> list[Launch]:
    """Both torchruns, in the second of three criteria."""
    starter.write(test_parts=textwrap.dedent(SUITE))
    limits = {"first": entry(per="gpu"), "second": entry(per="gpu"), "third": entry()}
    chosen = write_limits(starter.folder / "limits.yaml", limits, extends=False)
    (starter.folder / "wait").touch()
    launches = starter.nodes("--gpucluster", "--junitxml=junit.xml", chosen, ranks=1, prefixes=prefixes(*HOSTS))
    launches[0].until((starter.folder / "second").exists, what="second criterion")
    return launches


def by_torchrun(_: Starter) -> list[str]:
    """The words that go on with a run under torchrun, ``R`` for a node's number."""
    shape = (f"--master-port={free_port()}", "--nnodes=2", "--nproc-per-node=1", "--node-rank=R", "--master-addr=127.0.0.1")
    return [*TORCHRUN, *shape, "-m", "pytest_gpucluster.cli", "resume", RESULTS]


def as_shown(starter: Starter) -> list[str]:
    """The words that ``gpucluster resume`` shows where nobody started it under torchrun."""
    resume = (*GPUCLUSTER, "resume", RESULTS)
    refused = subprocess.run(resume, cwd=starter.folder, capture_output=True, text=True, check=False, timeout=60)
    assert refused.returncode == 4, refused.stderr
    _, _, line = refused.stderr.partition("with its own R: gpucluster launch ")
    words = shlex.split(line.replace("=HOST", "=127.0.0.1"))
    return [*GPUCLUSTER, "launch", f"--master-port={free_port()}", *words]


def go_on(starter: Starter, *hosts: str, line: Callable[[Starter], list[str]] = by_torchrun) -> list[Launch]:
    """The unfinished run goes on, on these hosts."""
    words = line(starter)
    (starter.folder / "wait").unlink(missing_ok=True)
    launches = [
        starter.start([*prefix, *(word.replace("=R", f"={node}") for word in words)], name=f"again{node}")
        for node, prefix in enumerate(prefixes(*hosts))
    ]
    for launch in launches:
        launch.end()
    for launch in launches:
        launch.gone()
    return launches


def rows(results: dict[str, Any]) -> dict[tuple[str, str | None], tuple[str, int]]:
    """Outcome and part of each criterion at each place."""
    return {
        (one["criterion"], one["place"] and one["place"]["id"]): (one["outcome"], one["part"]) for one in results["criteria"]
    }


def test_after_the_controller_was_killed(starter: Starter) -> None:
    """What had passed stays, the rest is measured, and there is one verdict."""
    begun = begin(starter)
    begun[0].controller().send_signal(signal.SIGKILL)
    for launch in begun:
        launch.end()
        launch.gone()
    ended = go_on(starter, *HOSTS)
    results = ended[0].results()
    assert results["verdict"] == "REHEARSED", ended[0].output
    found = rows(results)
    assert {found["first", place] for place in EVERY} == {("passed", 1)}
    assert {found["second", place] for place in EVERY} == {("passed", 2)}
    assert found["third", None] == ("passed", 2)
    assert [one["outcomes"] for one in results["parts"]] == [2, 3]
    assert results["verdict_line"] == ended[0].output.split("verdict ")[-1].splitlines()[0]
    assert {*ended[0].junit().values()} == {"passed", "skipped"}
    assert ended[0].junit()["test_first[node1-cpu0]"] == "passed"


def test_after_a_node_was_lost(starter: Starter) -> None:
    """What could not be measured there is measured when the node is back."""
    begun = begin(starter)
    begun[1].kill_all()
    (starter.folder / "wait").unlink()
    begun[0].end()
    begun[0].gone()
    assert begun[0].results()["verdict"] == "INCOMPLETE"
    ended = go_on(starter, *HOSTS, line=as_shown)
    results = ended[0].results()
    assert results["verdict"] == "REHEARSED", ended[0].output
    assert rows(results)["second", "node0-cpu0"] == ("passed", 2), "of the host9 that was lost"
    assert rows(results)["second", "node1-cpu0"] == ("passed", 1)


@pytest.mark.slow  # by day, both are refused without torchrun (tests/e2e/test_resume.py), and under it in jobs of Slurm
def test_another_part_or_limit_is_refused(starter: Starter) -> None:
    """Under torchrun too: a node's hardware was swapped, or the file of limits is another one. No file is touched."""
    begun = begin(starter)
    begun[0].controller().send_signal(signal.SIGKILL)
    for launch in begun:
        launch.end()
        launch.gone()
    journal = starter.folder / RESULTS / "journal.jsonl"
    text = journal.read_bytes()
    swapped = go_on(starter, "host10", "host11")
    assert "host11 cpu 0 has another hostname: it was host9, and is host11" in swapped[0].output
    limits = starter.folder / "limits.yaml"
    limits.write_text(limits.read_text(encoding="utf-8").replace('"min": 1', '"min": 2'), encoding="utf-8")
    other = go_on(starter, *HOSTS)
    assert "the file of limits is another one" in other[0].output
    assert 0 not in {launch.end() for launch in (*swapped, *other)}
    assert journal.read_bytes() == text
