"""The limit of open files is raised where that is allowed, and told where it is not; before any rank can time out."""

from __future__ import annotations

import json
import resource
import subprocess
import sys

import pytest

from pytest_gpucluster.config.process import SPARE_FILES, require_open_files
from pytest_gpucluster.protocol.channel import most_connections

UNLIMITED = resource.RLIM_INFINITY
ASK = """
import json, os, resource, subprocess, sys
from pytest_gpucluster.config.process import require_open_files
from pytest_gpucluster.errors import ConfigurationError

connections, limits, of_another = json.loads(sys.argv[1])
other = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
pid = other.pid if of_another else 0
resource.prlimit(pid, resource.RLIMIT_NOFILE, tuple(limits))
try:
    require_open_files(connections, num_ranks=connections // 2, pid=pid)
    said = None
except ConfigurationError as error:
    said = str(error)
print(json.dumps([*resource.prlimit(pid, resource.RLIMIT_NOFILE), said]))
other.communicate()
"""


def ask(connections: int, limits: tuple[int, int], *, of_another: bool = False) -> tuple[int, int, str | None]:
    """The limits after the check in a process of its own, and what the check said; the hard limit is never raised here."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    chosen = [limit if limit != UNLIMITED else hard for limit in limits]
    command = [sys.executable, "-c", ASK, json.dumps([connections, chosen, of_another])]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    soft, hard, said = json.loads(run.stdout)
    return soft, hard, said


@pytest.mark.parametrize("of_another", [False, True])
@pytest.mark.parametrize(
    ("connections", "limits", "soft"),
    [
        (100, (1024, 4096), 1024),
        (960, (1024, 4096), 1024),
        (961, (1024, 4096), 4096),
        (3000, (1024, 4096), 4096),
        (4032, (256, 4096), 4096),
        (200, (256, UNLIMITED), UNLIMITED),
    ],
)
def test_a_soft_limit_that_is_too_low_is_raised_to_the_hard_one(
    connections: int, limits: tuple[int, int], soft: int, *, of_another: bool
) -> None:
    """Enough is left as it is."""
    found, hard, said = ask(connections, limits, of_another=of_another)
    assert (found, said) == (hard if soft == UNLIMITED else soft, None)


@pytest.mark.parametrize("of_another", [False, True])
@pytest.mark.parametrize(("connections", "limits"), [(4033, (1024, 4096)), (3331, (1024, 1024)), (200, (256, 256))])
def test_a_hard_limit_is_told(connections: int, limits: tuple[int, int], *, of_another: bool) -> None:
    """What is needed, what is there, and what to say where."""
    soft, hard, said = ask(connections, limits, of_another=of_another)
    assert (soft, hard) == limits, "left as it was"
    needed = connections + SPARE_FILES
    assert said is not None
    assert f"needs {needed} open files for the {connections} connections of {connections // 2} ranks, and may" in said
    assert f"may have {soft} (hard limit {hard})" in said
    assert f"ulimit -n {needed}" in said


def test_a_process_that_is_gone_refuses_nothing() -> None:
    """Nothing is known of it."""
    ended = subprocess.Popen(["true"])
    ended.wait()
    require_open_files(10**6, num_ranks=10**5, pid=ended.pid)


@pytest.mark.parametrize(("world_size", "num_nodes"), [(8, 1), (1024, 128), (4096, 512)])
def test_connections_grow_with_ranks_and_nodes(world_size: int, num_nodes: int) -> None:
    """One for each rank's agent, one for its worker, and one for each node's commands; and not many more."""
    number = most_connections(world_size=world_size, num_nodes=num_nodes)
    assert 2 * world_size + num_nodes < number <= 2 * world_size + 3 * num_nodes + 3
