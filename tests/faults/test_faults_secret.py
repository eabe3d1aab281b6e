"""The shared secret is in no output of a run, whatever fails: terminal, JUnit, results.json, journal, logs, tracebacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.launching import Launch, Starter

pytestmark = [pytest.mark.e2e, pytest.mark.fault]

SECRET = "c0ffee-of-this-test-7f3a"  # noqa: S105 -- the test's own
SUITE = """
import json
import os
import signal
import subprocess

import pytest

def environment_now():  # short enough that pytest shows all of it
    return {name: value for name, value in os.environ.items() if name.startswith("GPUCLUSTER_")}

def raises_with_environment():
    environment = environment_now()
    raise RuntimeError(f"this worker has {environment}")

def prints_environment():
    print(environment_now(), flush=True)
    subprocess.run(["env"], check=True)
    raise RuntimeError("the output is part of the message")

def returns_environment():
    return environment_now()

def too_large(text=""):
    return "x" * 5_000_000

def dies():
    print(environment_now(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

def cannot_be_encoded(value):
    return value

def healthy():
    return 2.0

@pytest.mark.parametrize("function", [raises_with_environment, prints_environment, returns_environment, too_large, dies])
def test_worker(cluster, criterion, function):
    criterion.require(cluster.run(function, per="gpu", deadline_s=40))

@pytest.mark.parametrize("argument", ["x" * 5_000_000, object(), {1: 2}, float("nan"), "\\udcff"], ids=list("abcde"))
def test_argument(cluster, criterion, argument):
    criterion.require(cluster.run(cannot_be_encoded, per="gpu", value=argument, deadline_s=40))

def test_healthy(cluster, criterion):
    criterion.require(cluster.run(healthy, per="gpu", deadline_s=40))

@pytest.mark.distributed(per="cluster")
def test_distributed(rank):
    environment = environment_now()
    assert environment == rank

def test_controller(cluster):
    environment, state = environment_now(), vars(cluster._controller)
    print(environment)
    subprocess.run(["env"], check=True)
    raise RuntimeError("everything is among the locals")
"""
LIMITS = {
    **{f"worker[{name}]": entry(min=1) for name in ("raises_with_environment", "prints_environment", "returns_environment")},
    **{f"worker[{name}]": entry(min=1) for name in ("too_large", "dies")},
    **{f"argument[{name}]": entry(min=1) for name in "abcde"},
    "healthy": entry(min=1),
}
LOUD = ("--showlocals", "--tb=long", "-v", "-rA", "--full-trace", "-o", "junit_logging=all")


def chosen(starter: Starter) -> tuple[str, ...]:
    """The suite is written; how a run of it is asked for in which pytest shows all that it can show."""
    starter.write(test_failures=SUITE)
    limits = write_limits(starter.folder / "limits.yaml", LIMITS, extends=False)
    return ("--gpucluster", limits, "--junitxml=junit.xml", *LOUD)


def start_pytest(starter: Starter) -> Launch:
    """One rank, started by the controller."""
    return starter.pytest(*chosen(starter), "--gpucluster-expect", "nodes=1,gpus_per_node=1", GPUCLUSTER_SECRET=SECRET)


def start_torchrun(starter: Starter) -> Launch:
    """Two ranks, one of which becomes an agent by exec."""
    return starter.torchrun(*chosen(starter), GPUCLUSTER_SECRET=SECRET)


def outputs(folder: Path) -> dict[str, bytes]:
    """Every file that the run wrote, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("start", [pytest.param(start_pytest, marks=pytest.mark.slow), start_torchrun])
def test_the_secret_is_shown_nowhere(starter: Starter, start: Callable[[Starter], Launch]) -> None:
    """Failures of all kinds are shown with all their locals, the healthy test passes, and the secret stays hidden."""
    launch = start(starter)
    assert launch.end(within_s=240) == 1, launch.output
    launch.gone()
    assert launch.results()["environment"]["messages"] == "signed"
    found = {row["criterion"]: row["outcome"] for row in launch.results()["criteria"]}
    assert found["healthy"] == "passed", launch.output
    assert [name for name, outcome in found.items() if outcome == "passed"] == ["healthy"], found
    assert launch.junit()["test_controller"] == "failure"
    assert "at most 4194304 cross the channel" in launch.output
    shown = [name for name, data in outputs(starter.folder).items() if SECRET.encode() in data]
    assert not shown
    assert SECRET not in launch.output
