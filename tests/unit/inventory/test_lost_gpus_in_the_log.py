"""GPUs that the driver lost without an Xid: which lines say so, of which GPU, and when the log counts as incomplete."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory.driver_events import KernelLog, parse_loss, parse_xid
from pytest_gpucluster.protocol.node_events import NodeLoss, NodeXid

if TYPE_CHECKING:
    from pathlib import Path

BUS = "NVRM: The NVIDIA GPU 0000:c4:00.0\n{0}NVRM: (PCI ID: 10de:2330) installed in this system\n{0}NVRM: fallen off the bus"
PROBE = "6,3,9,-;NVRM: The NVIDIA probe routine failed for {} device(s).\n"
INIT = "3,4,9,-;NVRM: GPU 0000:c4:00.0: RmInitAdapter failed! (0x24:0x65:1502)\n"
RESET = "3,5,9,-;NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x0000006A)\n"
LOADING = "6,1,1,-;NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64\n"


def read(tmp_path: Path, text: str) -> tuple[set[str | None], str | None]:
    """The addresses of the GPUs that a log shows as lost, and why it is not complete."""
    path = tmp_path / "kmsg"
    path.write_text(text, encoding="utf-8")
    log = KernelLog(path)
    found = log.read()
    assert all(str(one.pci) in one.text.lower() for one in found if isinstance(one, NodeLoss))
    return {one.pci for one in found if isinstance(one, NodeLoss)}, None if log.why is None else log.why.why


@pytest.mark.parametrize(
    "text",
    [
        f"6,1,1,-;{BUS.format('                ')} and is not responding to commands.\n",
        f"6,1,1,-;{BUS.format('').replace(chr(10), chr(92) + 'x0a')} and is not responding to commands.\n",
        f"6,1,1,-;{BUS.format('6,2,1,-;')}\n",
        f"6,1,1,-;{BUS.format('')}\n{PROBE.format(1)}",
        f"6,1,1,-;NVRM: The NVIDIA GPU 0000:c4:00.0 (PCI ID: 10de:2330)\nNVRM: is not supported\n{PROBE.format(1)}",
        INIT,
        f"{LOADING}{INIT}{RESET}",
        "3,1,1,-;NVRM: GPU 0000:C4:00.0: rm_init_adapter failed, device minor number 3\n",
        "3,1,1,-;NVRM: GPU at PCI:0000:c4:00: NV_ERR_RESET_REQUIRED\n",
        "3,1,1,-;NVRM: GPU 0000:c4:00.0: GPU requires reset\n",
        "3,1,1,-;NVRM: GPU 0000:c4:00.0: GPU has fallen off the bus.\n",
        f"{LOADING}4,1,1,-;nvidia 0000:c4:00.0: probe with driver nvidia failed with error -1\n",
        f"{LOADING}4,1,1,-;nvidia: probe of 0000:c4:00.0 failed with error -1\n",
        "3,1,1,-;NVRM: GPU at PCI:0000:c4:00.0 has fallen off the bus.\n",
        "3,1,1,-;NVRM: GPU 0000:c4:00.0: Failed to initialize GSP firmware RM\n",
        "3,1,1,-;NVRM: GPU 0000:c4:00.0: RmInitAdapter: Cannot initialize GSP firmware RM\n",
        "3,1,1,-;NVRM: GPU 0000:c4:00.0: GPU has been lost\n",
        "3,1,1,-;NVRM: GPU 0000:c4:00.0 is lost\n",
        "3,1,1,-;NVRM: GPU at PCI:0000:C4:00 was lost\n",
        f"{LOADING}4,1,1,-;nvidia 0000:c4:00.0: Refused to change power state, currently in D3\n",
        f"{LOADING}3,1,1,-;nvidia 0000:c4:00.0: Unable to change power state from D3cold to D0, device inaccessible\n",
        f"{LOADING}3,1,1,-;nvidia 0000:c4:00.0: can't change power state from D3hot to D0 (config space inaccessible)\n",
        f"{LOADING}3,1,1,-;nvidia 0000:c4:00.0: ERROR: GPU has stopped responding\n",
    ],
)
def test_the_line_names_the_gpu(tmp_path: Path, text: str) -> None:
    """In one record or in several, with the address in the same line or in the first one."""
    assert read(tmp_path, text) == ({"0000:c4:00"}, None)


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (PROBE.format(1), set()),
        (PROBE.format(2), set()),
        (f"6,1,1,-;{BUS.format('')}\n{PROBE.format(2)}", {"0000:c4:00"}),
        (RESET, set()),
        ("3,1,1,-;NVRM: RmInitAdapter failed! (0x26:0x38:1096)\n", set()),
        ("3,1,1,-;NVRM: None of the NVIDIA devices were initialized.\n", set()),
        ("3,1,1,-;NVRM: RmInitAdapter: osInitNvMapping failed, bailing out of RmInitAdapter\n", set()),
        ("3,1,1,-;NVRM: osInitNvMapping: *** Cannot attach gpu\n", set()),
        ("3,1,1,-;NVRM: _kgspBootGspRm: (the GPU is likely in a bad state and may need to be reset)\n", set()),
        (f"{LOADING}4,1,1,-;NVRM: Xid (PCI:somewhere): 79, GPU has fallen off the bus.\n", set()),
        (f"{LOADING}4,1,1,-;nvidia-nvswitch3: SXid (PCI:zz): 22013, Fatal\n", set()),
    ],
)
def test_nothing_says_which_gpu(tmp_path: Path, text: str, lost: set[str]) -> None:
    """The log does not count as complete, with the line as reason."""
    found, why = read(tmp_path, text)
    assert found == lost
    assert why is not None
    assert any(line.partition(";")[2] in why for line in text.splitlines())


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: loading NVIDIA UNIX Open Kernel Module",
        "NVRM: The NVIDIA probe routine was not called for 1 device(s).",
        "NVRM: GPU at PCI:0000:5e:00: GPU-12345678",
        "NVRM: GPU 0000:5e:00.0: GPU serial number is 1650522000123.",
        "NVRM: A GPU crash dump has been created. If possible, please run nvidia-bug-report.sh",
        "NVRM: iovaspaceDestruct_IMPL: 2 left-over mappings in IOVAS 0x100",
        "nvidia 0000:5e:00.0: enabling device (0000 -> 0002)",
        "NVRM: Xid (PCI:0000:5e:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:5e:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        "python3[5]: GPU 0000:c4:00.0: RmInitAdapter failed!",
        "pcieport 0000:c4:00.0: fallen off the bus",
        "",
    ],
)
def test_other_lines(line: str) -> None:
    """An Xid is told as one; what a program or another driver writes is no loss."""
    assert parse_loss(line) is None


def test_an_xid_names_the_gpu_of_what_follows(tmp_path: Path) -> None:
    """The driver's complaints after an Xid 79 need no second GPU. A program's own Xid explains none."""
    fallen = "4,1,1,-;NVRM: Xid (PCI:0000:5e:00): {}, pid=5, name=x, text\n"
    assert read(tmp_path, fallen.format(79) + RESET) == (set(), None)
    assert read(tmp_path, fallen.format(13) + RESET)[1] is not None


@pytest.mark.parametrize("other", ["4,1,1,-;NVRM: Xid (PCI:0000:5e:00): 13, pid=5, name=x, text\n", INIT.replace("c4", "5e")])
def test_a_message_ends_where_another_gpu_is_named(tmp_path: Path, other: str) -> None:
    """A line without an address, long after a message on one GPU, is not about that GPU."""
    named = "6,1,1,-;NVRM: The NVIDIA GPU 0000:c4:00.0 (PCI ID: 10de:2330)\nNVRM: is not responding.\n"
    lost, _ = read(tmp_path, named + other + RESET)
    assert lost == ({"0000:5e:00"} if "RmInit" in other else set())


@pytest.mark.parametrize("instance", [" GPU-I:05", " GPU-I:00", " GPU-I:0c CI-I:01", ""])
@pytest.mark.parametrize("function", ["", ".0"])
def test_an_instance_of_a_gpu(instance: str, function: str) -> None:
    """An Xid of MIG is one of its GPU."""
    line = f"NVRM: Xid (PCI:0000:3b:00{function}{instance}): 94, pid=7194, name=python3, Contained: CE User Channel (0x9)."
    assert parse_xid(line) == NodeXid(code=94, pci="0000:3b:00", pid=7194)
