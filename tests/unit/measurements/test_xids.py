"""What was heard on a node, told apart by GPU and by whose it is, and how it is judged."""

from __future__ import annotations

import csv
import os
import time
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.health.driver_errors import judge_xids
from pytest_gpucluster.inventory import error_codes as error_code_module
from pytest_gpucluster.inventory.error_codes import NVLINK_XIDS, SOURCES, error_codes, xid_of
from pytest_gpucluster.measurements.health import gpu_xids, own_workers, xids_of
from pytest_gpucluster.protocol import node_events
from pytest_gpucluster.protocol.node_events import (
    ENDED_VARIABLE,
    VARIABLE,
    EndedWorkers,
    NodeEvents,
    NodeGpu,
    NodeXid,
    OwnWorker,
)

GPU = NodeGpu(index=1, uuid="GPU-1", pci="00000000:43:00.0", why=None)
KEY = "0000:43:00"
WORKERS = (OwnWorker(pid=51), OwnWorker(pid=50, ended_s=9.0), OwnWorker(pid=49, ended_s=1000.0))


def judged(*xids: NodeXid, **heard: Any) -> Any:
    """The judgement on GPU 1."""
    told = {"nvml_why": None, "log_why": None, "sees_host_pids": True, **heard}
    return judge_xids(xids_of(GPU, NodeEvents(gpus=(GPU,), xids=xids, **told), WORKERS))


@pytest.mark.parametrize("code", sorted(error_codes("Xid")))
def test_every_code(code: int) -> None:
    """Each counts with its meaning and advice, but for test messages, and errors of NVLink whose severity nobody tells."""
    found = judged(NodeXid(code=code, index=1, age_s=100.0))
    if xid_of(code).kind == "test":
        assert (found.judged, found.facts, found.advice) == (0, (), None)
    elif code in NVLINK_XIDS:
        assert (found.judged, found.facts, len(found.doubts)) == (None, (), 1)
    else:
        assert (found.judged, found.facts, found.advice) == (1, (str(xid_of(code)),), xid_of(code).action)


@pytest.mark.parametrize(
    ("xid", "over"),
    [
        (NodeXid(code=43, index=1, age_s=10.0), 0),
        (NodeXid(code=43, index=1, age_s=40.0), 1),
        (NodeXid(code=43, index=0, age_s=10.0), 0),
        (NodeXid(code=79, index=1, age_s=10.0), 1),
        (NodeXid(code=94, index=1, age_s=10.0), 1),
        (NodeXid(code=12345, index=1, age_s=10.0), 1),
        (NodeXid(code=31, pci=KEY, pid=50, age_s=10.0), 0),
        (NodeXid(code=31, pci=KEY, pid=77, age_s=10.0), 1),
        (NodeXid(code=31, pci=KEY, pid=51, age_s=1000.0), 0),
        (NodeXid(code=31, pci=KEY, pid=50, age_s=1000.0), 0),
        (NodeXid(code=31, pci=KEY, pid=49, age_s=1000.0), 0),
        (NodeXid(code=31, pci=KEY, pid=49, age_s=10.0), 1),
        (NodeXid(code=79, pci=KEY, pid=50, age_s=10.0), 1),
        (NodeXid(code=79, pci="0000:44:00", age_s=10.0), 0),
        (NodeXid(code=79, pci=KEY), 0),
    ],
)
def test_whose_it_is(xid: NodeXid, over: int) -> None:
    """A worker of this GPU excuses what a program can cause; nothing excuses the rest. Before the run is not in it."""
    assert judged(xid).judged == over


def test_the_workers_are_those_of_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process, and those that the agent had before; how long ago each ended."""
    monkeypatch.delenv(ENDED_VARIABLE, raising=False)
    assert own_workers() == [OwnWorker(pid=os.getpid())]
    ended = EndedWorkers(ended=((50, time.monotonic() - 9.0), (52, time.monotonic())))
    monkeypatch.setenv(ENDED_VARIABLE, ended.to_json().decode())
    now, first, second = own_workers()
    assert (now.ended_s, first.pid, second.pid) == (None, 50, 52)
    assert first.ended_s == pytest.approx(9.0, abs=5.0)
    assert second.ended_s == pytest.approx(0.0, abs=5.0)


def test_pids_of_a_container() -> None:
    """The kernel's pids are not comparable there: the time decides."""
    assert judged(NodeXid(code=31, pci=KEY, pid=9999, age_s=10.0), sees_host_pids=False).judged == 0


def test_both_sources_tell_one_error() -> None:
    """It counts once; what only one tells counts too."""
    both = (NodeXid(code=79, index=1, age_s=30.0), NodeXid(code=79, pci=KEY, age_s=30.0), NodeXid(code=48, pci=KEY, age_s=30.0))
    assert judged(*both).judged == 2


def test_before_the_run() -> None:
    """It is shown."""
    assert judged(NodeXid(code=79, pci=KEY)).evidence == {"before the run": (str(xid_of(79)),)}


def test_one_source_is_enough() -> None:
    """Both silent is not: nothing is known then, also where a worker's own code was heard."""
    own = NodeXid(code=43, index=1, age_s=10.0)
    assert judged(own, log_why="Permission denied").unknown == {}
    assert judged(own, nvml_why="Not Supported").unknown == {}
    assert judged(own, nvml_why="Not Supported", log_why="Permission denied").judged is None


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No listener, or one that is gone: why, and nothing else."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert judge_xids(gpu_xids()).unknown
    monkeypatch.setenv(VARIABLE, "gpucluster-events-nobody")
    assert "does not answer" in judge_xids(gpu_xids()).doubts[0]


def test_a_listener_that_is_not_ready_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first reading comes back only when later Xids are heard."""
    waits = NodeEvents(nvml_why="NVML has not answered yet", log_why=None, is_ready=False)
    answers = [waits, waits, NodeEvents(nvml_why="no NVML", log_why=None)]
    monkeypatch.setenv(VARIABLE, "listener")
    monkeypatch.setattr(node_events, "ask", lambda name: answers.pop(0))
    assert gpu_xids().nvml_why == "no NVML"
    assert answers == []


def test_every_row_of_the_list_has_an_action_and_a_source() -> None:
    """A code twice, or a word that nobody knows, is found here and not during a run."""
    with Path(str(error_code_module.__file__)).with_suffix(".csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len({(row["family"], row["code"]) for row in rows}) == len(rows)
    assert len(rows) == len(error_codes("Xid")) + len(error_codes("SXid"))
    assert {row["source"] for row in rows} == set(SOURCES)
