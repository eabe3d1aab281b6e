"""Whose the processes on a GPU are: pids of this namespace and of the host's, hidden ones, and those that come and go."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster import text
from pytest_gpucluster.inventory import occupancy
from pytest_gpucluster.inventory.occupancy import OwnProcesses

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

OWN, SIBLING, FOREIGN, OTHER, ON_HOST = 100, 101, 4711, 4712, 900_100
HERE = {OWN: True, SIBLING: True, FOREIGN: False, OTHER: False}
"""The processes of this namespace: whether they belong to the run."""

Reading = tuple[list[int], bool, set[int]]
"""The listed pids, whether this process has its context, and the foreign ones."""
READINGS: dict[str, list[Reading]] = {
    "idle": [([], False, set()), ([OWN], True, set()), ([OWN], True, set())],
    "it comes and stays": [([], False, set()), ([OWN], True, set()), ([OWN, FOREIGN], True, {FOREIGN})],
    "it comes and goes": [([OWN], True, set()), ([FOREIGN, OWN], True, {FOREIGN}), ([OWN], True, set())],
    "two come": [([OWN], True, set()), ([FOREIGN, OWN, OTHER], True, {FOREIGN, OTHER})],
    "it was there before": [([FOREIGN], False, {FOREIGN}), ([FOREIGN, OWN], True, {FOREIGN})],
    "it comes before the context is listed": [
        ([], True, set()),
        ([FOREIGN], True, {FOREIGN}),
        ([OWN, FOREIGN], True, {FOREIGN}),
    ],
    "another worker of the run": [([], False, set()), ([SIBLING, OWN], True, set()), ([SIBLING, FOREIGN], True, {FOREIGN})],
    "a stranger of another namespace": [([OWN], True, set()), ([OWN, ON_HOST], True, {ON_HOST})],
    "the worker before this one ends": [([900], False, {900}), ([], False, set()), ([OWN], True, set())],
    "the host's pids": [([], False, set()), ([ON_HOST], True, set()), ([ON_HOST], True, set())],
    "the host's pids, and it comes": [([], False, set()), ([ON_HOST], True, set()), ([ON_HOST, 901_000], True, {901_000})],
    "the host's pids, and it goes": [([ON_HOST], True, set()), ([ON_HOST, 5], True, {5}), ([ON_HOST], True, set())],
    "the host's pids, and it was there": [([5], False, {5}), ([5, ON_HOST], True, {5}), ([5], True, {5})],
    "the host's pids, and it comes with the context": [
        ([], False, set()),
        ([5, ON_HOST], True, {5, ON_HOST}),  # either may be this process
        ([5, ON_HOST], True, {5, ON_HOST}),
        ([ON_HOST], True, set()),
        ([5, ON_HOST], True, {5}),
    ],
    "the host's pids, and a stranger of this namespace": [
        ([], False, set()),
        ([FOREIGN, ON_HOST], True, {FOREIGN}),
        ([ON_HOST], True, set()),
    ],
    "all are hidden": [([], False, set()), ([], True, set()), ([], True, set())],
    "the context is listed late": [([], True, set()), ([ON_HOST], True, set()), ([ON_HOST, 5], True, {5})],
}


@pytest.mark.parametrize("readings", READINGS.values(), ids=READINGS)
def test_foreign_processes_of_each_reading(readings: list[Reading]) -> None:
    """Each foreign process in each reading that lists it, and never one of this run."""
    processes = OwnProcesses(OWN, HERE.get)
    for listed, has_context, foreign in readings:
        assert processes.foreign_among(listed, has_context=has_context) == foreign, listed


def test_own_process_that_has_ended_stays_known() -> None:
    """What a measurement started is listed for a moment after its end, when nobody can be asked any more."""
    alive = {OWN: True, SIBLING: True}
    processes = OwnProcesses(OWN, alive.get)
    assert processes.foreign_among([OWN, SIBLING], has_context=True) == set()
    del alive[SIBLING]
    assert processes.foreign_among([OWN, SIBLING], has_context=True) == set()


# Real processes.

WORKER = """
import importlib.util, json, os, subprocess, sys

spec = importlib.util.spec_from_file_location("own_processes", {file!r})
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
child = subprocess.Popen(["sleep", "600"])
print(json.dumps([os.getpid(), child.pid]), flush=True)
for line in sys.stdin:
    print(json.dumps([module.belongs_to_run(pid) for pid in json.loads(line)]), flush=True)
"""


class Played:
    """A process with the command line of an agent, as a worker has it, in a session of its own; it has started another."""

    def __init__(self, folder: Path, address: str) -> None:
        """``folder`` has a package that stands for the real one; ``address``: the store's, as JSON."""
        settings = f'{{"ranks": [], "address": {address}, "roots": []}}'
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pytest_gpucluster.agent.main", settings],
            env={**os.environ, "PYTHONPATH": str(folder)},
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid, self.child = self._read()

    def ask(self, pids: list[int]) -> list[bool | None]:
        """What it takes these processes for."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(pids) + "\n")
        self._process.stdin.flush()
        return self._read()

    def end(self) -> None:
        """Kill it and what it started."""
        os.killpg(self.pid, signal.SIGKILL)
        self._process.communicate()

    def _read(self) -> list[Any]:
        assert self._process.stdout is not None
        answer: list[Any] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture
def play(tmp_path: Path) -> Iterator[Callable[[str], Played]]:
    """Starts played workers of runs with this store."""
    package = tmp_path / "pytest_gpucluster" / "agent"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package.parent / "text.py").symlink_to(text.__file__)
    (package / "main.py").write_text(WORKER.format(file=occupancy.__file__), encoding="utf-8")
    started: list[Played] = []

    def start(address: str) -> Played:
        started.append(Played(tmp_path, address))
        return started[-1]

    yield start
    for one in started:
        one.end()


def test_whose_a_real_process_is(play: Callable[[str], Played]) -> None:
    """The own session, workers of the same store and what they started; everybody else; nobody."""
    ours = '{"host": "127.0.0.1", "port": 29500, "run_id": "none"}'
    first, second = play(ours), play(ours)
    others = [play(ours.replace("29500", "29501")), play(ours.replace("127.0.0.1", "gpu-node-7"))]
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True)
    assert first.ask([first.pid, first.child, second.pid, second.child]) == [True] * 4
    assert first.ask([pid for other in others for pid in (other.pid, other.child)]) == [False] * 4
    assert first.ask([os.getpid(), 1]) == [False, False]
    assert first.ask([int(gone.stdout), 4_194_999]) == [None, None]


@pytest.mark.parametrize("address", ["null", "7", '"text"'])
def test_command_line_without_a_store(play: Callable[[str], Played], address: str) -> None:
    """Nothing in common is not the same store."""
    assert play(address).ask([os.getpid()]) == [False]
