"""The benchmark of the channel: what it writes, what it refuses, and that it leaves no process behind."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import uuid
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import psutil
import pytest

from pytest_gpucluster.protocol.messages import Failure, FailureKind, Reply, Success
from tests.support.names import function_named
from tests.support.scripts import BENCHMARKS, benchmark_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SCRIPT = BENCHMARKS / "channel.py"
MARK = "GPUCLUSTER_BENCHMARK_TEST"
PLAINLY = ("GPUCLUSTER_SECRET", "RANK", "WORLD_SIZE", "LOCAL_RANK")
MEASURED = (
    "join_s",
    "call_median_ms",
    "call_p10_ms",
    "call_p90_ms",
    "store_cpu_ms",
    "controller_cpu_ms",
    "agents_cpu_ms",
    "quit_s",
)


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    """The script as a module."""
    with benchmark_module("channel") as module:
        yield module


def run(*arguments: str, mark: str, within_s: float) -> subprocess.CompletedProcess[str]:
    """One run of it, as a user would start it, from another folder."""
    environment = {name: value for name, value in os.environ.items() if name not in PLAINLY} | {MARK: mark}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(
        command,
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def marked(mark: str) -> list[psutil.Process]:
    """The living processes of one run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile
    return found


def nothing_is_left(mark: str, *, within_s: float) -> bool:
    """Whether all processes of a run end in time."""
    deadline_s = time.monotonic() + within_s
    while left := marked(mark):
        if time.monotonic() > deadline_s:
            for process in left:
                process.kill()
            return False
        time.sleep(0.05)
    return True


def cost(benchmark: Any, agents: int, median_ms: float, *, reply_bytes: int = 150) -> Any:
    """A call that took so long."""
    return benchmark.CallCost(
        agents=agents,
        nodes=agents // 8,
        reply_bytes=reply_bytes,
        calls=5,
        others_cores=0.0,
        **{**dict.fromkeys(MEASURED, 1.0), "call_median_ms": median_ms},
    )


SLOWLY_ACCEPTED = """
import sys, time
sys.path.insert(0, {folder!r})
import channel
from pytest_gpucluster.agent import command_reader
from pytest_gpucluster.controller import call_maker

is_own_user, call_maker.MARGIN_S = command_reader.is_own_user, 5.0
command_reader.is_own_user = lambda line: time.sleep(0.1) or is_own_user(line)
with channel.simulated(4) as simulation:
    print("answered in", channel.time_call_s(simulation.controller, 4))
    simulation.controller.quit(0)
"""


@pytest.mark.e2e
def test_agents_that_are_accepted_late_get_every_command() -> None:
    """The reader of a busy node accepted them after the first command: none of them had it, and nothing was measured."""
    code = SLOWLY_ACCEPTED.format(folder=str(BENCHMARKS))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answered in" in done.stdout


@pytest.mark.long
@pytest.mark.e2e
def test_results(tmp_path: Path) -> None:
    """A short run measures everything, in plain data, with numbers that can be; nothing stays behind."""
    mark = uuid.uuid4().hex
    options = ["--agents", "8", "4", "--calls", "5", "--rounds", "2", "--out", str(tmp_path / "new" / "folder")]
    done = run(*options, mark=mark, within_s=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "death to all peers released" in done.stdout
    assert nothing_is_left(mark, within_s=10)
    content = json.loads((tmp_path / "new" / "folder" / "results.json").read_text(encoding="utf-8"))
    assert [(calls["agents"], calls["calls"]) for calls in content["calls"]] == [(4, 5), (4, 5), (8, 5), (8, 5)]
    empty, full = (calls["reply_bytes"] for calls in content["calls"][:2])
    assert 100 < empty < 200
    assert 1900 < full < 2100
    for calls in content["calls"]:
        assert set(calls) == {"agents", "nodes", "reply_bytes", "calls", "others_cores", *MEASURED}
        assert all(math.isfinite(calls[name]) and calls[name] > 0 for name in MEASURED), calls
        assert calls["call_p10_ms"] <= calls["call_median_ms"] <= calls["call_p90_ms"]
        assert 0 <= calls["others_cores"] < math.inf
    recovery = content["recovery"]
    assert recovery["rounds"] == len(recovery["release_s"]) == len(recovery["replacement_s"]) == 2
    assert all(0 < seconds < 30 for seconds in recovery["release_s"] + recovery["replacement_s"]), recovery
    assert [aim["quantity"] for aim in content["aims"]] == ["release_median_s", "replacement_median_s"]
    assert len(content["load_average_before"]) == len(content["load_average_after"]) == 3
    assert ET.parse(tmp_path / "new" / "folder" / "plot.svg").getroot().tag.endswith("svg")  # noqa: S314 -- just written


@pytest.mark.long
@pytest.mark.e2e
def test_ends_by_itself() -> None:
    """At its limit it gives up, says where it was, and takes the processes it started with it."""
    mark = uuid.uuid4().hex
    done = run("--agents", "4", "--calls", "1000000", "--limit-s", "3", mark=mark, within_s=60)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert "measure_calls" in done.stderr
    assert nothing_is_left(mark, within_s=10)


def test_aims(benchmark: Any) -> None:
    """Above its limit an aim is missed, at it reached. That of 1024 agents grows with more; full replies have none."""
    recovery = benchmark.Recovery(release_s=[0.5, 1.5, 0.6], replacement_s=[2.1, 1.0, 2.2])
    costs = [cost(benchmark, 64, 70.0), cost(benchmark, 1024, 50.0), cost(benchmark, 2048, 100.1)]
    aims = benchmark.aims_of([*costs, cost(benchmark, 1024, 90.0, reply_bytes=2000)], recovery)
    assert [(aim["what"], aim["value"], aim["reached"]) for aim in aims] == [
        ("empty call, 1024 agents", 50.0, True),
        ("empty call, 2048 agents", 100.1, False),
        ("death to all peers released", 0.6, True),
        ("release to the next result", 2.1, False),
    ]


def test_plot(benchmark: Any) -> None:
    """Well-formed, a dot for each round, every number of agents named; more milliseconds lie higher."""
    recovery = benchmark.Recovery(release_s=[0.1, 0.2, 0.3], replacement_s=[0.4, 0.5, 3.0])
    drawn = benchmark.draw([cost(benchmark, 4, 0.5), cost(benchmark, 1024, 90.0)], recovery)
    picture = ET.fromstring(drawn)  # noqa: S314 -- just drawn
    tags = [element.tag.rpartition("}")[2] for element in picture]
    assert tags.count("circle") == 6
    words = [element.text for element in picture if element.tag.endswith("text")]
    assert {"4", "1024", "aim 50 ms at 1024", "release", "replacement"} <= set(words)
    medians = next(element for element in picture if element.get("stroke-width") == "2")
    (_, first_y), (_, last_y) = (map(float, point.split(",")) for point in medians.attrib["points"].split())
    assert last_y < first_y


def test_too_few_descriptors(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The soft limit is raised as far as needed; a hard limit below that is said before anything starts."""
    raised: list[Any] = []
    monkeypatch.setattr(benchmark.resource, "getrlimit", lambda which: (256, 4096))
    monkeypatch.setattr(benchmark.resource, "setrlimit", lambda which, limits: raised.append(limits))
    benchmark.allow_descriptors(64)
    assert raised == []
    benchmark.allow_descriptors(1024)
    assert raised == [(1280, 4096)]
    with pytest.raises(SystemExit, match="4096 agents need 4736 open files, the hard limit is 4096"):
        benchmark.allow_descriptors(4096)


def controller(answer: Callable[[int], Reply]) -> Any:
    """A controller whose every rank answers so."""
    return SimpleNamespace(
        name=lambda function: function_named(function.__name__), call=lambda call: {rank: answer(rank) for rank in call.ranks}
    )


def failure(kind: FailureKind, rank: int) -> Failure:
    """The reply of a rank that failed."""
    return Failure(kind=kind, error=f"rank {rank} is {kind}")


def test_wrong_answers_are_not_timed(benchmark: Any) -> None:
    """One agent that fails ends the benchmark, by name; so does a wrong sum."""
    assert benchmark.time_call_s(controller(lambda _rank: Success(value=6)), 8) > 0
    with pytest.raises(RuntimeError, match=r"not every agent answered: {3: .*rank 3 is lost"):
        benchmark.time_call_s(controller(lambda rank: failure("lost", rank) if rank == 3 else Success(value=6)), 8)
    benchmark.add_everywhere(controller(lambda _rank: Success(value=6)))
    with pytest.raises(RuntimeError, match="the sum over four ranks is wrong"):
        benchmark.add_everywhere(controller(lambda rank: Success(value=6 - (rank == 1))))


def test_a_death_that_is_not_seen_is_not_timed(benchmark: Any, tmp_path: Path) -> None:
    """Everybody released and nobody dead is no release after a death."""
    stamp = tmp_path / "stamp"
    stamp.write_text("1.0", encoding="ascii")
    wrong: list[tuple[FailureKind, FailureKind]] = [("hung", "released"), ("died", "hung"), ("released", "released")]
    for kind, others in wrong:
        answers = controller(lambda rank, kind=kind, others=others: failure(kind if rank == 2 else others, rank))
        with pytest.raises(RuntimeError, match="not seen as one"):
            benchmark.kill_one(answers, stamp)
    answers = controller(lambda rank: failure("died" if rank == 2 else "released", rank))
    assert benchmark.kill_one(answers, stamp)[0] == 1.0


@pytest.mark.parametrize("wrong", [["--agents", "0"], ["--calls", "1"], ["--rounds", "0"]])
def test_wrong_options(benchmark: Any, monkeypatch: pytest.MonkeyPatch, wrong: list[str]) -> None:
    """Too few of anything is a usage error."""
    monkeypatch.setattr(sys, "argv", ["channel.py", *wrong])
    with pytest.raises(SystemExit, match="2"):
        benchmark.main()
