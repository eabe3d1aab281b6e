"""The agents that the controller starts: a new process of its own, or a fork that has nothing of the controller but memory."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.controller import local_agents
from pytest_gpucluster.fleet.agents import FleetController
from pytest_gpucluster.fleet.simulation import parse_simulation
from pytest_gpucluster.protocol.channel import Address
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

PARENT = """
import json, os, signal, subprocess, sys, tempfile, warnings
from pytest_gpucluster.controller import local_agents
from pytest_gpucluster.controller.local_agents import Fork

signal.signal(signal.SIGTERM, lambda *_: os._exit(77))
sys.excepthook = lambda *_: print("the hook of the parent")
lock, (alive, _), folder = tempfile.TemporaryFile(), os.pipe(), sys.argv[1]

def tell():
    held = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")}
    with open(f"{folder}/told", "w") as told:
        json.dump({
            "leads": os.getsid(0) == os.getpid(),
            "has lock": any("deleted" in link for link in held),
            "has pipe": os.readlink(f"/proc/self/fd/{alive}").startswith("pipe:"),
            "hears": [int(bool(callable(signal.getsignal(number)))) for number in (signal.SIGTERM, signal.SIGINT)],
        }, told)
    print("printed", flush=True)
    os._exit(7)

def fail():
    raise ValueError("planted")

def stay():
    signal.pause()

with open(f"{folder}/log", "ab") as log:
    ended = {name: Fork(to_do, output=log.fileno(), kept=[alive]) for name, to_do in {"tell": tell, "fail": fail}.items()}
    codes = {name: fork.wait(120) for name, fork in ended.items()}
    fork = Fork(stay, output=log.fileno(), kept=[])
    try:
        fork.wait(0.1)
    except subprocess.TimeoutExpired:
        codes["stays"] = fork.poll()
    os.killpg(fork.pid, signal.SIGTERM)
    codes["ended"] = fork.wait(120)
    fork.kill()
    killed = Fork(stay, output=log.fileno(), kept=[])
    killed.kill()
    codes["killed"] = killed.wait()
    local_agents.BEGIN_S, local_agents._begin_anew = 0.2, lambda *_arguments, **_more: signal.pause()
    codes["stuck"] = Fork(stay, output=log.fileno(), kept=[]).wait(120)
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What forks of a process with a lock, a signal handler and a hook of its own said and left."""
    folder = tmp_path_factory.mktemp("forks")
    command = [sys.executable, "-c", PARENT, str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "told").read_text())
    return {"codes": json.loads(done.stdout), "told": told, "log": (folder / "log").read_text(), "stderr": done.stderr}


def test_a_fork_has_nothing_but_memory(forks: dict[str, Any]) -> None:
    """No lock stays locked by it, no handler of the parent runs in it; the pipe that it was given is there."""
    assert forks["told"] == {"leads": True, "has lock": False, "has pipe": True, "hears": [0, 1]}


def test_a_fork_prints_to_the_log(forks: dict[str, Any]) -> None:
    """Its exceptions too, and by no hook of the parent."""
    assert "printed\n" in forks["log"]
    assert "ValueError: planted\n" in forks["log"]
    assert "hook" not in forks["log"]
    assert forks["stderr"] == ""


def test_the_end_of_a_fork(forks: dict[str, Any]) -> None:
    """Its code. What failed ends with 1 and never goes on as its parent; a signal to its group reaches it.

    One that does not begin is killed.
    """
    assert forks["codes"] == {"tell": 7, "fail": 1, "stays": None, "ended": -15, "killed": -9, "stuck": -9}


@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_with_threads_starts_a_new_one(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that another thread holds would stay locked in a fork."""
    monkeypatch.setattr(local_agents.threading, "active_count", lambda: threads)
    monkeypatch.setattr(local_agents.threading, "main_thread", threading.current_thread)
    controller = FleetController(parse_simulation("1x2", faults=[]), rootdir=tmp_path)
    controller._link._address = Address(host="127.0.0.1", port=1, run_id="run")
    found = controller._command(3, 4)
    assert callable(found) is (threads == 1)
    assert callable(found) or found[1:3] == ["-m", "pytest_gpucluster.fleet.agents"]
