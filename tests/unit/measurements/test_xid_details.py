"""What the kernel log says of an Xid beside its code, from its line to the judgement on each GPU of an NVLink domain."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.agent.event_listener import Listener
from pytest_gpucluster.health.driver_errors import judge_xids
from pytest_gpucluster.health.gpu import ADVICE
from pytest_gpucluster.inventory.driver_events import KernelLog, XidEvents, parse_xid
from pytest_gpucluster.inventory.error_codes import ACTIONS, xid_of
from pytest_gpucluster.measurements.health import GpuXids, xids_of
from pytest_gpucluster.places import Place
from pytest_gpucluster.protocol.node_events import NodeEvents, NodeGpu, NodeXid, OwnWorker, XidDetail

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pytest_gpucluster.judging.finding import Finding

STATUS = "0x00000001"
NUMBERS = "0x00000001 0x00000000 0x00100000 0x00000004"
ENDED = OwnWorker(pid=50, ended_s=9.0)


def line(code: int, text: str, pci: str = "0000:18:00") -> str:
    """A line of the driver."""
    return f"NVRM: Xid (PCI:{pci}): {code}, {text}"


def nvlink(unit: str, severity: str, link: str = "13", status: str = "0x00000001") -> str:
    """What the driver writes of an error of its NVLink hardware."""
    return f"{unit} {severity} XC0 i0 Link {link} (0x0409a0c2 {status} {NUMBERS})"


def xids(
    *lines: str,
    at_s: tuple[float, ...] = (),
    nvml: tuple[int, ...] = (),
    workers: Sequence[OwnWorker] = (),
    log_why: str | None = None,
) -> GpuXids:
    """What was heard of GPU 0000:18:00: lines of the log, 100 s ago if no age is given, and codes of NVML."""
    gpu = NodeGpu(index=0, uuid="GPU-0", pci="00000000:18:00.0", why=None)
    logged = [one for one in map(parse_xid, lines) if one is not None]
    assert len(logged) == len(lines)
    ages_s = at_s or (100.0,) * len(lines)
    of_log = [
        NodeXid(code=one.code, pci=one.pci, pid=one.pid, detail=one.detail, age_s=age_s)
        for one, age_s in zip(logged, ages_s, strict=True)
    ]
    of_nvml = [NodeXid(code=code, index=0, age_s=100.0) for code in nvml]
    heard = NodeEvents(nvml_why=None, log_why=log_why, sees_host_pids=True, gpus=(gpu,), xids=(*of_log, *of_nvml))
    return xids_of(gpu, NodeEvents.read(heard.to_json()), workers)


@pytest.mark.parametrize(
    ("code", "text", "detail"),
    [
        (145, nvlink("RLW_RXPIPE", "Nonfatal"), XidDetail(severity="Nonfatal", unit="RLW_RXPIPE", link=13, status=STATUS)),
        (144, nvlink("SAW_MVB", "Non-fatal", "0"), XidDetail(severity="Nonfatal", unit="SAW_MVB", link=0, status=STATUS)),
        (149, nvlink("NETIR", "Fatal", "-1"), XidDetail(severity="Fatal", unit="NETIR", status=STATUS)),
        (149, nvlink("NETIR_EVT", "Fatal", "03"), XidDetail(severity="Fatal", unit="NETIR_EVT", link=3, status=STATUS)),
        (150, "MSE Fatal", XidDetail(severity="Fatal", unit="MSE")),
        # Blanks as in a GB200's log (dmesg of driver 570), and the forms of drivers before R575.
        (
            149,
            "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x00000000)",
            XidDetail(severity="Fatal", unit="NETIR_LINK_EVT", link=1, status="0x00000000"),
        ),
        (145, nvlink("RLW_RXPIPE ", " Nonfatal "), XidDetail(severity="Nonfatal", unit="RLW_RXPIPE", link=13, status=STATUS)),
        (145, nvlink("RLW_RXPIPE", "NONFATAL"), XidDetail(severity="Nonfatal", unit="RLW_RXPIPE", link=13, status=STATUS)),
        (146, "TLW_CTRL Non-Fatal XC 00 i 00 Link 02 [0x5]", XidDetail(severity="Nonfatal", unit="TLW_CTRL", link=2)),
        (
            149,
            "NETIR_LINK_EVT Fatal XC 1 i 2 Link 01 [0xa, 0xb]",
            XidDetail(severity="Fatal", unit="NETIR_LINK_EVT", link=1, status="0xb"),
        ),
        (148, "pid=4, name=<unknown>, NVLPW Link Fatal XC0 i0 Link 05", XidDetail(severity="Fatal", unit="NVLPW", link=5)),
        (
            146,
            nvlink("TLW_RX/TLW_RX_PIPE0", "Fatal", "2"),
            XidDetail(severity="Fatal", unit="TLW_RX/TLW_RX_PIPE0", link=2, status=STATUS),
        ),
        # A program chooses its own name.
        (145, "pid=4, name=AB Nonfatal, RLW_CTRL Fatal XC0 i0 Link 3", XidDetail(severity="Fatal", unit="RLW_CTRL", link=3)),
        (145, "pid=4, name=, AB Nonfatal, RLW_CTRL Fatal XC0 i0 Link 3", XidDetail(severity="Fatal", unit="RLW_CTRL", link=3)),
        (145, "pid=4, name=x, AB Nonfatal, RLW_CTRL XC0 i0 Link 3 (0x1 0x2)", None),
        (145, "pid=4, name=x, AB Nonfatal y, RLW_CTRL XC0 i0 Link 3 [0x5]", None),
        (147, "pid=7, name=x, TREX Nonfatal (0x1, 0x2)", XidDetail(severity="Nonfatal", unit="TREX", status="0x2")),
        (45, "pid=4101, name=python3, Ch 00000001 caused by previous Xid 149", XidDetail(cause=149)),
        (45, "pid='<unknown>', name=<unknown>, Ch 00000003 caused by previous Xid 145", XidDetail(cause=145)),
        (154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)", XidDetail(action="gpu_reset")),
        (154, "pid=1, GPU recovery action changed from 0x1 (X) to 0x2 (Node Reboot Required)", XidDetail(action="node_reboot")),
        (154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)", XidDetail(action="none")),
        (154, "GPU recovery action changed from 0x0 (None) to 0x63 (Dance)", XidDetail(action="Dance")),
        (145, "something new", None),
        (79, nvlink("RLW_RXPIPE", "Fatal"), None),
        (45, "pid=7, name=x, Ch 00000003", None),
    ],
)
def test_a_line(code: int, text: str, detail: XidDetail | None) -> None:
    """Each form that the driver writes; nothing is made up."""
    found = parse_xid(line(code, text))
    assert found is not None
    assert (found.code, found.detail) == (code, detail)


@pytest.mark.parametrize("code", range(144, 151))
@pytest.mark.parametrize("nvml", [0, 1, 2])
def test_an_nvlink_error_that_is_not_fatal(code: int, nvml: int) -> None:
    """It is a remark with unit, link, status and count. What NVML reports of it is the same one; more than that is unknown."""
    found = judge_xids(xids(line(code, nvlink("RLW_RXPIPE", "Nonfatal")), nvml=(code,) * nvml))
    assert found.judged == (None if nvml > 1 else 0)
    assert found.remark is not None
    assert f"Xid {code}" in found.remark
    assert "RLW_RXPIPE Nonfatal, link 13, error status 0x00000001" in found.remark


def test_a_flood() -> None:
    """The count is in the remark."""
    found = judge_xids(xids(*[line(145, nvlink("RLW_RXPIPE", "Nonfatal"))] * 700, nvml=(145,) * 700))
    assert (found.judged, "700 times" in str(found.remark)) == (0, True)


def test_a_fatal_nvlink_error() -> None:
    """It fails, with unit and link; one that is not fatal beside it does not count."""
    lines = line(145, nvlink("RLW_RXPIPE", "Nonfatal", "5")), line(145, nvlink("RLW_CTRL", "Fatal", "7", "0x00000080"))
    found = judge_xids(xids(*lines, nvml=(145, 145)))
    assert found.judged == 1
    assert "RLW_CTRL Fatal, link 7, error status 0x00000080" in found.facts[0]
    assert "link 5" not in found.facts[0]


NO_LOG = "/dev/kmsg cannot be read: Operation not permitted"


@pytest.mark.parametrize("code", range(144, 151))
@pytest.mark.parametrize(
    ("lines", "heard", "why"),
    [
        (0, 1, NO_LOG),
        (0, 700, NO_LOG),
        (0, 1, "the kernel log lost records before they were read"),
        (0, 1, None),
        (1, 0, None),
        (2, 2, None),
    ],
)
def test_a_severity_that_is_not_known(code: int, lines: int, heard: int, why: str | None) -> None:
    """It is unknown, never green, and no part is named: a healthy B200 in a Pod counts Nonfatal ones too."""
    told = xids(*[line(code, "something new")] * lines, nvml=(code,) * heard, log_why=why)
    found = judge_xids(told, lambda: {ROOT: told})
    assert (found.judged, found.facts) == (None, ())
    (doubt,) = found.doubts
    assert f"Xid {code}" in doubt
    assert "its severity is unknown" in doubt
    assert f"not readable without the kernel log ({why})" in doubt or why is None
    error = found.error(ROOT)
    assert (error.culprits, error.blames) == ((), "unknown")
    assert "/dev/kmsg" in str(error)


@pytest.mark.parametrize(
    ("other", "judged"),
    [((79,), 1), ((154,), 1), ((43,), 1), ((999,), 1), ((106,), None), ((79, 154), 2)],
)
def test_an_unknown_severity_beside_what_is_known(other: tuple[int, ...], judged: int | None) -> None:
    """Another Xid of the GPU counts as ever."""
    found = judge_xids(xids(nvml=(145, *other), log_why=NO_LOG))
    assert found.judged == judged
    assert len(found.doubts) == 1


def test_an_unknown_severity_beside_a_fatal_one() -> None:
    """What the log calls fatal counts; NVML reported more than the log has."""
    found = judge_xids(xids(line(145, nvlink("RLW_CTRL", "Fatal", "7")), nvml=(145,) * 3))
    assert (found.judged, len(found.facts), len(found.doubts)) == (1, 1, 1)


def test_no_link() -> None:
    """-1 is none."""
    assert "link -1" not in str(judge_xids(xids(line(149, nvlink("NETIR", "Fatal", "-1")))).facts)


@pytest.mark.parametrize(
    ("number", "words", "action"),
    [
        ("0x1", "GPU Reset Required", "gpu_reset"),
        ("0x2", "Node Reboot Required", "node_reboot"),
        ("0x3", "Drain P2P", "drain_p2p"),
        ("0x4", "Drain and Reset", "drain_and_reset"),
    ],
)
def test_the_recovery_action_is_the_advice(number: str, words: str, action: str) -> None:
    """Also beside other Xids: the driver has decided."""
    text = line(154, f"GPU recovery action changed from 0x0 (None) to {number} ({words})")
    assert judge_xids(xids(text)).advice == ADVICE[action]
    found = judge_xids(xids(line(79, "GPU has fallen off the bus."), text, nvml=(79, 154)))
    assert (found.judged, found.advice) == (2, ADVICE[action])
    assert any(f"recovery action {action}" in fact for fact in found.facts)


def test_the_end_of_a_recovery() -> None:
    """A GPU that asks for nothing any more has no new fault."""
    text = line(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")
    assert judge_xids(xids(text, nvml=(154,))).judged == 0


@pytest.mark.parametrize(
    ("cause", "advice", "own"),
    [(149, "link", 0), (145, "link", 0), (79, "reboot", 0), (94, "reset", 0), (13, "check", 1), (43, "check", 1)],
)
def test_an_xid_that_another_one_caused(cause: int, advice: str, own: int) -> None:
    """The advice is that of its cause, and so is whether a worker's end explains it."""
    text = line(45, f"pid=50, name=python3, Ch 00000001 caused by previous Xid {cause}")
    found = judge_xids(xids(text))
    assert (found.judged, found.advice) == (1, ACTIONS["Xid"][advice])
    assert f"caused by Xid {cause}" in found.facts[0]
    assert judge_xids(xids(text, workers=(ENDED,))).judged == 1 - own


def test_xid_137_of_a_worker() -> None:
    """It may be a program's own error."""
    text = line(137, "pid=50, name=python3, NVLink: fault")
    assert judge_xids(xids(text, workers=(ENDED,))).judged == 0
    assert judge_xids(xids(text)).judged == 1


# The NVLink domain.

ROOT = Place(id="node0-gpu0", node=0, gpu=0)
DOWN = line(149, nvlink("NETIR_LINK_DOWN", "Fatal", "14"))
SUFFERED = line(145, nvlink("RLW_SRC_TRACK", "Fatal", "14"))
RESET = line(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
REMOVED = line(45, "pid=7, name=x, Ch 1 caused by previous Xid 145")
PLAIN = line(45, "pid=7, name=x, Ch 00000001")
"""Drivers before those that name the cause: what a program left is removed after any error."""


def beside(own: GpuXids, *others: GpuXids) -> Finding:
    """The judgement on a GPU in a domain with others."""
    peers = {replace(ROOT, id=f"node{number}-gpu0", node=number): one for number, one in enumerate(others)}
    return judge_xids(own, lambda: peers)


@pytest.mark.parametrize(
    "own",
    [
        xids(SUFFERED),
        xids(SUFFERED, SUFFERED, RESET),
        xids(REMOVED),
        xids(SUFFERED, REMOVED),
        xids(SUFFERED, PLAIN, RESET),
        xids(nvml=(145,), log_why=NO_LOG),
        xids(SUFFERED, at_s=(60.0,)),
    ],
)
@pytest.mark.parametrize(
    "root", [xids(DOWN), xids(DOWN, SUFFERED, REMOVED), xids(nvml=(149,), log_why=NO_LOG), xids(DOWN, RESET)]
)
def test_the_consequence_of_a_link_of_another_gpu(own: GpuXids, root: GpuXids) -> None:
    """It fails, and blames the other GPU, with that one's link and advice."""
    found = beside(own, root, xids(SUFFERED))
    assert found.judged >= 1
    assert found.culprits(()) == (ROOT,)
    assert found.facts[0].startswith("node0-gpu0: Xid 149")
    assert ("link 14" in found.facts[0]) == bool(root.kernel_log)
    assert found.advice == judge_xids(root).advice or root.nvml
    assert found.advice is not None


NO_HARM_DOWN, NO_HARM = line(149, nvlink("NETIR_LINK_DOWN", "Nonfatal")), line(145, nvlink("RLW_RXPIPE", "Nonfatal"))
"""What NVML reports too, without the severity."""
HEARD_DOWN, HEARD = xids(nvml=(149,), log_why=NO_LOG), xids(nvml=(145,), log_why=NO_LOG)


def test_a_link_that_took_the_whole_domain_along() -> None:
    """Without one severity: one GPU has Xid 149 and all others have 145. Each fails, and the one is named."""
    found = beside(HEARD, HEARD_DOWN, HEARD)
    assert (found.judged, found.culprits(())) == (1, (ROOT,))
    assert beside(HEARD_DOWN, HEARD, HEARD).judged == 1


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (HEARD, (HEARD_DOWN,)),
        (HEARD, (HEARD_DOWN, xids())),
        (HEARD, (HEARD_DOWN, HEARD_DOWN)),
        (HEARD, (HEARD_DOWN, xids(line(145, nvlink("RLW_RXPIPE", "Nonfatal"))))),
        (HEARD_DOWN, (HEARD, xids())),
        (HEARD_DOWN, (HEARD,)),
        (HEARD_DOWN, ()),
        (HEARD, (HEARD, HEARD)),
        (HEARD, (xids(NO_HARM_DOWN, nvml=(149,)), HEARD)),
        (HEARD, (HEARD_DOWN, xids(NO_HARM, nvml=(145,)))),
    ],
)
def test_a_link_that_took_some_along(own: GpuXids, others: tuple[GpuXids, ...]) -> None:
    """Of two GPUs, or with one that had nothing or no harm, the severity has to be known: nobody is named."""
    found = beside(own, *others)
    assert (found.judged, found.facts) == (None, ())


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (xids(SUFFERED), (xids(SUFFERED), xids())),
        (xids(DOWN), (xids(DOWN),)),
        (xids(SUFFERED, line(79, "GPU has fallen off the bus.")), (xids(DOWN),)),
        (xids(RESET), (xids(DOWN),)),
        (xids(PLAIN), (xids(DOWN),)),
        (xids(PLAIN, RESET), (xids(DOWN),)),
        (xids(SUFFERED, line(45, "pid=7, name=x, Ch 1 caused by previous Xid 94")), (xids(DOWN),)),
        (xids(SUFFERED, at_s=(500.0,)), (xids(DOWN),)),
        (xids(SUFFERED), (xids(line(149, nvlink("NETIR", "Nonfatal"))),)),
        (xids(line(145, nvlink("RLW_RXPIPE", "Nonfatal"))), (xids(DOWN),)),
        (xids(), (xids(DOWN),)),
        (xids(line(45, "pid=7, name=x, Ch 1 caused by previous Xid 94")), (xids(DOWN),)),
    ],
)
def test_no_consequence(own: GpuXids, others: tuple[GpuXids, ...]) -> None:
    """A fault of its own, another time, or no link that went down: nobody else is blamed."""
    assert beside(own, *others).culprits(()) == ()


def test_the_listener(tmp_path: Path) -> None:
    """Details cross as data; Xids of NVLink that differ in their time only are one with a count."""
    log, events = tmp_path / "kmsg", XidEvents()
    log.write_text(f"4,1,5,-;{DOWN}\n4,2,5,-;{DOWN}\n4,3,5,-;{REMOVED}\n4,3,5,-;{REMOVED}\n", encoding="utf-8")
    events.heard = [(time.monotonic(), NodeXid(code=code, index=0)) for code in (145, 145, 43, 43)]
    with socket.socket(socket.AF_UNIX) as taking:
        taking.bind(f"\0gpucluster-details-test-{os.getpid()}-{time.monotonic_ns()}")
        taking.listen()
        heard = Listener(taking, events, KernelLog(log)).heard()
    assert [(one.code, one.count) for one in heard.xids] == [(145, 2), (43, 1), (43, 1), (149, 2), (45, 1), (45, 1)]
    assert [one.detail for one in heard.xids][3:5] == [
        XidDetail(severity="Fatal", unit="NETIR_LINK_DOWN", link=14, status="0x00000001"),
        XidDetail(cause=145),
    ]
    assert NodeEvents.read(heard.to_json()) == heard


def test_unknown_words_of_a_recovery_action() -> None:
    """They are shown."""
    text = line(154, "GPU recovery action changed from 0x0 (None) to 0x63 (Dance)")
    found = judge_xids(xids(text))
    assert found.facts == (f"{xid_of(154)}, recovery action Dance",)
