"""GPUs that the driver lost without an Xid, from the log over the listener to the judgement on each GPU."""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.agent.event_listener import Listener
from pytest_gpucluster.health.driver_errors import judge_xids
from pytest_gpucluster.inventory.driver_events import KernelLog, XidEvents
from pytest_gpucluster.inventory.error_codes import ACTIONS
from pytest_gpucluster.measurements.health import gpu_xids, lost_elsewhere, xids_of
from pytest_gpucluster.protocol import node_events
from pytest_gpucluster.protocol.node_events import VARIABLE, NodeEvents, NodeGpu, NodeLoss, NodeXid

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.judging.finding import Finding

WELL = NodeGpu(index=0, uuid="GPU-0", pci="00000000:1B:00.0", why=None)
REFUSED = NodeGpu(index=1, uuid="", pci="00000000:C4:00.0", why="GPU 1: GPU is lost")
INIT = "NVRM: GPU 0000:c4:00.0: RmInitAdapter failed! (0x24:0x65:1502)"


def judged(gpu: NodeGpu, text: str = INIT, *, is_before: bool, listens: bool = True) -> Finding:
    """The judgement on a GPU after a line on the loss of another one, or of it."""
    loss = NodeLoss(pci="0000:c4:00", text=text, count=3, is_before=is_before)
    why = None if listens else "NVML has ended"
    return judge_xids(xids_of(gpu, NodeEvents(nvml_why=why, log_why=None, gpus=(gpu,), losses=(loss,)), ()))


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        (INIT, "reboot"),
        ("NVRM: GPU 0000:c4:00.0: NV_ERR_RESET_REQUIRED", "reset"),
        ("NVRM: GPU 0000:c4:00.0: GPU requires reset", "reset"),
    ],
)
@pytest.mark.parametrize("is_before", [True, False])
def test_a_gpu_that_nvml_refuses(text: str, advice: str, *, is_before: bool) -> None:
    """It fails with the line, also where the loss is older than the run."""
    found = judged(REFUSED, text, is_before=is_before)
    assert (found.judged, found.advice) == (1, ACTIONS["Xid"][advice])
    assert text in found.facts[0]


def test_a_gpu_that_came_back() -> None:
    """A loss from before the run is shown and does not count, as with an Xid. One during the run counts."""
    back = NodeGpu(index=1, uuid="GPU-1", pci="00000000:C4:00.0", why=None)
    found = judged(back, is_before=True)
    assert (found.judged, found.evidence) == (0, {"before the run": (INIT,)})
    assert judged(back, is_before=False).judged == 1
    assert judged(back, is_before=True, listens=False).judged == 1


def test_the_other_gpus() -> None:
    """A loss of one GPU says nothing of another one."""
    assert judged(WELL, is_before=False).judged == 0


@pytest.mark.parametrize(
    ("on_bus", "is_open"),
    [
        ((), True),
        (("0000:1b:00.0",), True),
        (("0000:1b:00.0", "0000:c4:00.0"), True),
        (("0000:1b:00.0", "0000:c4:00.0", "0000:d4:00.0"), False),
    ],
)
def test_a_gpu_that_nvml_does_not_list(on_bus: tuple[str, ...], *, is_open: bool) -> None:
    """It is one of the host, unless this run was given a part of the host's GPUs."""
    loss = NodeLoss(pci="0000:c4:00", text=INIT, count=3, is_before=True)
    heard = NodeEvents(nvml_why=None, log_why=None, gpus=(WELL,), losses=(loss,))
    assert lost_elsewhere(heard, on_bus) == ([INIT] if is_open else [])
    assert lost_elsewhere(NodeEvents(nvml_why=None, log_why=None, gpus=(WELL, REFUSED), losses=(loss,)), on_bus) == []


@pytest.mark.parametrize(
    ("code", "on_bus", "is_open"),
    [
        (79, ("0000:1b:00.0",), True),
        (119, ("0000:1b:00.0",), True),
        (31, ("0000:1b:00.0",), False),  # a program's own fault
        (79, ("0000:1b:00.0", "0000:c4:00.0"), False),  # it is there: another container may have it
        (79, ("0000:1b:00.0", "0000:d4:00.0"), False),  # this run was given a part of the host
        (79, (), False),  # nobody can say what is there
    ],
)
@pytest.mark.parametrize("age_s", [None, 5.0])
def test_an_xid_of_a_gpu_that_has_gone(code: int, on_bus: tuple[str, ...], age_s: float | None, *, is_open: bool) -> None:
    """An error of hardware at an address that neither NVML nor the PCI bus has any more: a GPU of this host is missing."""
    xid = NodeXid(code=code, pci="0000:c4:00", age_s=age_s)
    found = lost_elsewhere(NodeEvents(nvml_why=None, log_why=None, gpus=(WELL,), xids=(xid, xid)), on_bus)
    assert len(found) == is_open
    assert all(text.startswith(f"GPU 0000:c4:00: Xid {code} ") for text in found)
    assert lost_elsewhere(NodeEvents(nvml_why=None, log_why=None, gpus=(WELL, REFUSED), xids=(xid,)), on_bus) == []


def test_the_worker_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says which GPU the driver lost."""
    loss = NodeLoss(pci="0000:c4:00", text=INIT, count=3, is_before=True)
    monkeypatch.setenv(VARIABLE, "listener")
    monkeypatch.setattr(node_events, "ask", lambda name: NodeEvents(nvml_why=None, log_why=None, gpus=(WELL,), losses=(loss,)))
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = judge_xids(gpu_xids())
    assert found.judged is None
    assert any(INIT in doubt for doubt in found.doubts)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert judge_xids(gpu_xids()).unknown_kind == "node"


def test_the_listener(tmp_path: Path) -> None:
    """Losses are counted, those from before the run apart, and they cross as data."""
    log = tmp_path / "kmsg"
    log.write_text(f"3,1,5,-;{INIT}\n" * 2, encoding="utf-8")
    with socket.socket(socket.AF_UNIX) as taking:
        taking.bind(f"\0gpucluster-losses-test-{os.getpid()}-{time.monotonic_ns()}")
        taking.listen()
        heard = Listener(taking, XidEvents(), KernelLog(log)).heard()
    assert heard.losses == (NodeLoss(pci="0000:c4:00", text=INIT, count=2, is_before=True),)
    assert NodeEvents.read(heard.to_json()) == heard
