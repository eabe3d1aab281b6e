"""Lines of the kernel log: which are Xids and SXids, of which part and process; and logs that cannot be read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory.driver_events import KernelLog, parse_sxid, parse_xid, pci_key
from pytest_gpucluster.protocol.node_events import NodeSxid, NodeXid

if TYPE_CHECKING:
    from pathlib import Path

BUS = "NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
"""From the notes on SXids of leptonai/gpud, where SXids of three NVSwitches follow."""
REMAP = "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate."
"""From stas00/ml-engineering, compute/accelerator/nvidia/debug.md."""
OLD = "NVRM: Xid (0000:01:00): 31, Ch 0000000b, engmask 00000120, intr 10000000"
"""From a public paste of a host of 2017 (pastebin.com/NGng33SB)."""
FAULT = (
    "NVRM: Xid (PCI:0000:0a:00): 31, pid=13332, name=cuda_plot_k32_v, Ch 00000010, intr 00000000. "
    "MMU Fault: ENGINE CE2 HUBCLIENT_CE0 faulted @ 0x7f29_5b8c9000. "
    "Fault is of type FAULT_PRIV_VIOLATION ACCESS_TYPE_VIRT_READ"
)
"""From madMAx43v3r/chia-gigahorse, issue 301."""
DOWN = "nvidia-nvswitch1: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 48 LTSSM Fault Up"
DOWN_SEVERITY = "nvidia-nvswitch2: SXid (PCI:0000:07:00.0): 20034, Severity 1 Engine instance 60 Sub-engine instance 00"
"""From the notes on SXids of leptonai/gpud, as ``BUS``."""
MINION = "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ interrupt"
MINION_DATA = (
    "nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Data {0x0000002b, 0x0000002b, 0x00000000, 0x0000002b, 0x80005302, "
    "0x00000000, 0x00000000, 0x00000000, 0x00000000}"
)
"""From NVIDIA/nvtrust, issue 124."""
HOT = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 10004, Thermal Slowdown Engaged | Temp higher than WARN Threshold"
CORRECTED = "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 15019, Correctable, Link 07 text"
"""Made, in the driver's form (NVIDIA/open-gpu-kernel-modules, src/common/nvswitch/kernel)."""


@pytest.mark.parametrize(
    ("line", "xid"),
    [
        (BUS, NodeXid(code=79, pci="0000:91:00", pid=None)),
        (REMAP, NodeXid(code=63, pci="0000:10:1c", pid=1896)),
        (OLD, NodeXid(code=31, pci="0000:01:00", pid=None)),
        (FAULT, NodeXid(code=31, pci="0000:0a:00", pid=13332)),
        (f"4,1307,52012345,-;{BUS}", NodeXid(code=79, pci="0000:91:00", pid=None)),
        # Made: the forms of the address and of the process in one line.
        ("NVRM: Xid (PCI:0000:5e:00.0): 119, pid='77', name=x", NodeXid(code=119, pci="0000:5e:00", pid=77)),
        # Made: blanks, capitals and quotes that another version may write. Nothing of them may hide an Xid.
        ("NVRM: XID (PCI:0000:5E:00): 79, GPU has fallen off the bus.", NodeXid(code=79, pci="0000:5e:00")),
        ("nvrm:  xid ( pci:0000:5e:00.0 ) : 43, pid=77, name=x", NodeXid(code=43, pci="0000:5e:00", pid=77)),
        ("NVRM: Xid (PCI:0000:5e:00):79", NodeXid(code=79, pci="0000:5e:00")),
        ("NVRM: Xid (PCI:0000:5e:00  GPU-I:05): 94,  pid=77", NodeXid(code=94, pci="0000:5e:00", pid=77)),
        ("NVRM: GPU3 Xid (PCI:0000:5e:00): 62, 023f0f30 00000000", NodeXid(code=62, pci="0000:5e:00")),
        ('NVRM: Xid (PCI:0000:5e:00): 13, pid="77", name=x', NodeXid(code=13, pci="0000:5e:00", pid=77)),
    ],
)
@pytest.mark.parametrize(
    "prefix",
    [
        "",
        "[171167.620236] ",
        "[Wed Jul 30 15:40:22 2026] ",
        "Oct 30 09:49:36 gpu-7 kernel: ",
        "2026-10-30T09:49:36.123456+02:00 gpu-7.example.org kernel: ",
        "30. Okt 09:49:36 gpu-7 kernel[1]: [  888.32] ",
        "<4>",
    ],
)
def test_lines_of_the_driver(line: str, xid: NodeXid, prefix: str) -> None:
    """Each form that the driver has written over the years, whoever wrote what before it."""
    assert parse_xid(prefix + line) == xid


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid: 31",
        "NVRM: Xid 79 (PCI:0000:65:00)",
        "NVRM: Xid (PCI:0000:65:00)",
        "NVRM: xid (PCI:0000:65:00): invalid",
        "NVRM: Xid (PCI:0000:65:00): 123456",
        "NVRM: Xid (GPU-12ab0000-1234-1234-1234-123456789012): 79",
        "NVRM: GPU0 XID (somewhere): 79, GPU has fallen off the bus.",
        "nvidia-nvswitch3: SXID (PCI:zz): 22013, Fatal",
    ],
)
def test_an_error_that_cannot_be_read_makes_the_log_incomplete(tmp_path: Path, line: str) -> None:
    """Something went wrong at some part: a log with such a line shows not all."""
    path = tmp_path / "kmsg"
    path.write_text(f"4,1,5,-;{line}\n", encoding="utf-8")
    log = KernelLog(path)
    assert log.read() == []
    assert log.why is not None
    assert line in log.why.why


@pytest.mark.parametrize(
    "line",
    [
        "",
        "NVRM: loading NVIDIA UNIX Open Kernel Module",
        "NVRM: Xid (PCI:0000:5e:00): ",
        "NVRM: Xid (PCI:zz): 79",
        "NVRM: GPU at PCI:0000:5e:00: GPU-12345678",
        "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO (First)",
        "python3[5]: segfault at 0 ip 0 sp 0 error 4",
    ],
)
def test_other_lines(line: str) -> None:
    """Nothing is made up."""
    assert parse_xid(line) is None


SWITCH_0 = {"switch": 0, "pci": "0000:05:00"}
SWITCH_3 = {"switch": 3, "pci": "0000:04:00"}


@pytest.mark.parametrize(
    ("line", "sxid"),
    [
        (DOWN, NodeSxid(code=20034, switch=1, pci="0000:06:00", severity="Fatal", link=48)),
        (DOWN_SEVERITY, NodeSxid(code=20034, switch=2, pci="0000:07:00", is_detail=True)),
        (MINION, NodeSxid(code=22013, severity="Non-fatal", link=44, **SWITCH_3)),
        (MINION_DATA, NodeSxid(code=22013, is_detail=True, **SWITCH_3)),
        (HOT, NodeSxid(code=10004, **SWITCH_0)),
        (CORRECTED, NodeSxid(code=15019, severity="Correctable", link=7, **SWITCH_0)),
        (f"3,1307,52012345,-;{MINION}", NodeSxid(code=22013, severity="Non-fatal", link=44, **SWITCH_3)),
        (BUS, None),
        ("nvidia-nvswitch3: SXid (PCI:zz): 22013, Fatal", None),
        ("nvidia-nvswitch: Probing device 0000:c1:00.0", None),
        ("", None),
    ],
)
def test_lines_of_the_switches(line: str, sxid: NodeSxid | None) -> None:
    """An error, the numbers that follow it, and what is none."""
    assert parse_sxid(line) == sxid


@pytest.mark.parametrize(
    ("line", "is_whole"),
    [
        ("nvidia_ioctl: 1234 callbacks suppressed", False),
        ("NVRM: 5 messages suppressed", False),
        ("NVRM: 37 output lines suppressed due to ratelimiting", False),
        ("[  88.32] nv_printf_ratelimited: 12 callbacks suppressed", False),
        ("nvidia-nvswitch0: 3 callbacks suppressed", False),
        ("net_ratelimit: 33 callbacks suppressed", True),
        ("nvme_queue_rq: 4 callbacks suppressed", True),
        ("systemd[1]: 12 output lines suppressed due to ratelimiting", True),
    ],
)
def test_lines_that_the_kernel_left_out(tmp_path: Path, line: str, is_whole: bool) -> None:  # noqa: FBT001
    """The log is not complete where the driver's own came too fast; what others write too fast is theirs."""
    file = tmp_path / "kmsg"
    file.write_text(f"4,1,5,-;NVRM: loading\n4,2,6,-;{line}\n4,3,7,-;{BUS}\n", encoding="utf-8")
    log = KernelLog(file)
    assert [type(one) for one in log.read()] == [NodeXid]
    assert (log.why is None) is is_whole
    assert is_whole or "left out lines of the driver" in str(log.why)


@pytest.mark.parametrize("address", ["00000000:1B:00.0", "0000:1b:00", "0000:1b:00.0", "00000000:1B:00"])
def test_addresses_of_one_gpu(address: str) -> None:
    """NVML writes a domain of eight digits, the kernel one of four."""
    assert pci_key(address) == "0000:1b:00"


def test_a_log_that_grows(tmp_path: Path) -> None:
    """Each record is told once."""
    path = tmp_path / "kmsg"
    path.write_text(f"4,1,5,-;{BUS}\n6,2,6,-;usb 1-1: new device\n", encoding="utf-8")
    log = KernelLog(path)
    assert [xid.code for xid in log.read()] == [79]
    with path.open("a", encoding="utf-8") as more:
        more.write(f"4,3,7,-;{REMAP}\n")
    assert [xid.code for xid in log.read()] == [63]
    assert (log.read(), log.why) == ([], None)


def test_a_log_of_switches_alone(tmp_path: Path) -> None:
    """Their lines are the driver's too."""
    path = tmp_path / "kmsg"
    path.write_text(f"3,1,5,-;{DOWN}\n3,2,5,-;{DOWN_SEVERITY}\n", encoding="utf-8")
    log = KernelLog(path)
    assert [one.code for one in log.read() if isinstance(one, NodeSxid)] == [20034, 20034]
    assert log.why is None


def test_a_log_without_the_driver(tmp_path: Path) -> None:
    """A log of a container tells nothing of the GPUs, until it has a line of the driver."""
    path = tmp_path / "kmsg"
    path.write_text("6,2,6,-;usb 1-1: new device\n", encoding="utf-8")
    log = KernelLog(path)
    assert log.read() == []
    assert log.why is not None
    path.write_text("6,2,6,-;usb 1-1: new device\n6,3,7,-;NVRM: loading NVIDIA UNIX Open Kernel Module\n", encoding="utf-8")
    assert (log.read(), log.why) == ([], None)


def test_no_log(tmp_path: Path) -> None:
    """The reason is the system's own."""
    log = KernelLog(tmp_path / "none")
    assert log.read() == []
    assert log.why is not None
    assert "No such file" in log.why.why


@pytest.mark.parametrize(("error", "said"), [(1, "Operation not permitted"), (32, "lost records")])
def test_a_log_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, said: str) -> None:
    """Reading is refused, or the kernel has overwritten what was not read yet: the log is not known as a whole."""
    path = tmp_path / "kmsg"
    path.write_text("", encoding="utf-8")
    log, reads = KernelLog(path), iter([OSError(error, os.strerror(error))])

    def read(*_: int) -> bytes:
        for one in reads:
            raise one
        return b""

    monkeypatch.setattr(os, "read", read)
    assert log.read() == []
    assert log.why is not None
    assert said in log.why.why
