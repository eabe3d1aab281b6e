"""The listeners of two nodes on one machine: each node has its own, and strangers know no name before it is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.launching import Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

SECRET = "c0ffee-of-this-test-11d2"  # noqa: S105 -- the test's own
SUITE = """
import os
from pathlib import Path

from pytest_gpucluster.measurements.health import own_workers
from pytest_gpucluster.protocol import node_events

def hear():
    name = os.environ[node_events.VARIABLE]
    commands = b"".join(path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists())
    return {
        "node": int(os.environ["GROUP_RANK"]),
        "name": name,
        "answers": node_events.ask(name).xids == (),
        "is_on_a_command_line": name.encode() in commands or b"SECRET" in commands,
        "pid": os.getpid(),
        "workers": [(worker.pid, worker.ended_s is not None) for worker in own_workers()],
    }

def dies():
    os.abort()

def test_listeners(cluster):
    before = list(cluster.run(hear, per="gpu").values())
    assert len(cluster.run(dies, per="gpu").errors) == 4
    after = list(cluster.run(hear, per="gpu").values())
    for heard in (before, after):
        assert all(one["answers"] and not one["is_on_a_command_line"] for one in heard)
        assert len({one["name"] for one in heard}) == len({(one["node"], one["name"]) for one in heard}) == 2
    for first, last in zip(before, after):
        assert first["workers"] == [[first["pid"], False]]
        assert last["workers"] == [[last["pid"], False], [first["pid"], True]]
"""


@pytest.mark.parametrize("variables", [{}, {"GPUCLUSTER_SECRET": SECRET}], ids=["unsigned", "signed"])
def test_two_nodes(starter: Starter, variables: dict[str, str]) -> None:
    """The ranks of a node share a listener; each knows its own workers, those that died too; no command line tells anything."""
    starter.environment.update(variables)
    starter.write(test_listeners=SUITE.replace("SECRET", SECRET))
    launches = starter.nodes("--gpucluster", "test_listeners.py", ranks=2, prefixes=[(), ()])
    assert [launch.end() for launch in launches] == [0, 0], launches[0].output
    assert " 1 passed" in launches[0].output, launches[0].output
