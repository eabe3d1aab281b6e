"""What NVIDIA's driver reports while a run goes on: Xids by NVML's events, Xids and SXids by its lines in the kernel log.

NVML's events are heard in a thread for as long as the process lives. The kernel log names the process of an Xid, and is the
only source of the errors of NVSwitches.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pynvml

from pytest_gpucluster.inventory.error_codes import ACTION_CHANGED, NVLINK_XIDS, REMOVED, xid_of
from pytest_gpucluster.inventory.gpu_index import read_addresses
from pytest_gpucluster.inventory.numa import sysfs_address
from pytest_gpucluster.inventory.nvml import ACTIONS
from pytest_gpucluster.inventory.nvml_calls import NvmlError, naming, required, session
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.protocol.node_events import NodeGpu, NodeLoss, NodeSxid, NodeXid, XidDetail

WAIT_MS = 1000
SILENT_S = 30.0
"""A wait that does not return for so long hangs."""


class XidEvents:
    """Listens to all GPUs of the node. It registers for Xids only: events of clocks come in floods."""

    def __init__(self) -> None:
        """Prepare to listen; :meth:`start` begins."""
        self._why: str | None = "NVML has not answered yet"
        self._returned_s = time.monotonic()
        self.is_ready = False
        """Whether every later Xid is heard, or it is known why not."""
        self.gpus: list[NodeGpu] = []
        """The GPUs by index."""
        self.heard: list[tuple[float, NodeXid]] = []
        """What came so far, each with its time by the monotonic clock."""
        self._thread = threading.Thread(target=self._run, name="xid-events", daemon=True)

    def start(self) -> None:
        """Listen from now on."""
        self._thread.start()

    @property
    def why(self) -> str | None:
        """Why events may be missing; None if all that came are known."""
        if self._why is not None:
            return self._why
        silent_s = time.monotonic() - self._returned_s
        if silent_s > SILENT_S:
            return f"NVML has not answered for {silent_s:.0f} s"
        return None if self._thread.is_alive() else "the thread that listens has ended"

    def _run(self) -> None:
        try:
            with session():
                self._listen()
        except NvmlError as error:
            self._why = str(error)
        except Exception as error:  # noqa: BLE001 -- a listener that ends in silence would look like a healthy GPU
            self._why = f"the listener failed: {error!r}"
        finally:
            self.is_ready = True

    def _listen(self) -> None:
        events = required(pynvml.nvmlEventSetCreate)
        by_handle = {}
        for index, address in enumerate(read_addresses()):
            self.gpus.append(NodeGpu(index=index, uuid="", pci=address, why=None))
            try:
                with naming(f"GPU {index}"):
                    handle = required(pynvml.nvmlDeviceGetHandleByIndex, index)
                    by_handle[_address_of(handle)] = index
                    self.gpus[index] = replace(self.gpus[index], uuid=required(pynvml.nvmlDeviceGetUUID, handle))
                    required(pynvml.nvmlDeviceRegisterEvents, handle, pynvml.nvmlEventTypeXidCriticalError, events)
            except NvmlError as error:
                self.gpus[index] = replace(self.gpus[index], why=str(error))
        self._why = None
        self.is_ready = True
        while True:
            self._wait(events, by_handle)

    def _wait(self, events: Any, by_handle: dict[int | None, int]) -> None:
        """Wait for the next event. An error other than the end of the time ends the listening: events may be lost."""
        try:
            event = required(pynvml.nvmlEventSetWait_v2, events, WAIT_MS)
        except NvmlError as error:
            if error.code != pynvml.NVML_ERROR_TIMEOUT:
                raise
        else:
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError:
                gpu = by_handle[_address_of(event.device)]
                self.heard.append((time.monotonic(), NodeXid(code=int(event.eventData), index=gpu)))
        self._returned_s = time.monotonic()


def _address_of(handle: Any) -> int | None:
    """A handle is a pointer; the same GPU always has the same one."""
    return ctypes.cast(handle, ctypes.c_void_p).value


# --- The kernel log ---

KMSG = Path("/dev/kmsg")
DRIVER = ("NVRM:", "nvidia-nvswitch")
"""How the lines of NVIDIA's driver begin."""
RECORD_BYTES = 8192
"""The kernel refuses to hand a record to a smaller buffer."""
LINE_CHARACTERS = 200
ADDRESS = r"(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?"
BEGIN = r"NVRM:\s*(?:GPU\d*\s+)?Xid\b"
XID = re.compile(
    rf"{BEGIN}\s*\(\s*(?:PCI:)?{ADDRESS}(?:\s+[A-Z][A-Z-]*:\w+)*\s*\)\s*:\s*(?P<code>\d{{1,5}})\b"
    r"(?:,\s*pid=['\"]?(?P<pid>\d+)\b)?",
    re.ASCII | re.IGNORECASE,
)
"""The driver's line. Drivers before 450 name no process; newer ones write ``pid='<unknown>'`` where there is none.

Where a GPU is cut (MIG), the instance follows the address: ``PCI:0000:01:00 GPU-I:05``.
"""
NVLINK = re.compile(
    r".*,\s*(?P<unit>[A-Z][A-Z0-9_/]+)\s+(?:Link )?(?P<severity>(?i:(?:non-?)?fatal))\b(?![^([]*,)"
    r"(?:[^([]*?\bLink (?P<link>-?\d{1,4})\b)?(?:[^([]*[([]0x[0-9a-fA-F]+,? (?P<status>0x[0-9a-fA-F]+))?",
    re.ASCII,
)
"""``RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000001 ...``; the second number is the error status. -1 is no link.

A line of a GB200 has several blanks: ``NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (``. The numbers of drivers before R575 stand in
square brackets. The name of a process stands before it and can be anything: the last such words are the driver's, and no comma
follows them.
"""
CAUSE = re.compile(r"\bcaused by previous Xid (?P<cause>\d{1,5})\b", re.ASCII | re.IGNORECASE)
ACTION = re.compile(r"action changed from .* to (?P<number>0x[0-9a-fA-F]{1,8}) \((?P<words>[^)]*)\)", re.ASCII | re.IGNORECASE)
SXID = re.compile(
    r"nvidia-nvswitch(?P<switch>\d{1,4}): SXid \(PCI:(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\): "
    r"(?P<code>\d{1,5}), "
    r"(?:(?P<severity>Fatal|Non-fatal|Correctable)\b(?:, Link (?P<link>\d{1,4})\b)?|(?P<detail>Severity|Data) )?",
    re.ASCII,
)
"""The lines of an error: its severity and link, then ``Severity 1 Engine instance 60 ...`` and ``Data {0x10000000, ...}``."""
UNREAD = re.compile(rf"{BEGIN}|nvidia-nvswitch\d*:\s*SXid\b", re.ASCII | re.IGNORECASE)
"""How a line on an error begins, whether its rest can be read or not."""
SUPPRESSED = re.compile(
    r"\b(?:NVRM|nvidia[\w-]*|nv_\w+)\b.*\b\d+ (?:callbacks|messages|(?:output )?lines) suppressed", re.IGNORECASE
)
"""What the kernel writes in place of the driver's lines where these come too fast."""
OF_DRIVER = re.compile(r"NVRM: |\bnvidia (?=[0-9a-fA-F]{4,8}:)|\bnvidia: probe of ")
PCI = re.compile(ADDRESS)
SUBJECT = re.compile(rf"NVRM: The NVIDIA GPU (?:at )?{ADDRESS}")
"""The first line of a message on a GPU that the driver cannot use; what is wrong with it stands in the lines that follow."""
LOST = re.compile(
    r"fallen off the bus|(?:RmInitAdapter|rm_init_adapter)(?: failed|: .*\b(?:failed|cannot)\b)|NV_ERR_RESET_REQUIRED"
    r"|NV_ERR_GPU_IS_LOST|GPU(?: at)?(?: (?:PCI:)?[0-9a-f:.]+)? (?:is|was|has been) lost|\breset required"
    r"|\brequires? (?:a )?reset|\bneeds? to be reset|Failed to initialize GSP firmware|Cannot attach GPU"
    r"|(?:can't|unable to) change power state .*\binaccessible|Refused to change power state, currently in D3"
    r"|GPU has stopped responding|None of the NVIDIA .* were initialized"
    r"|probe routine failed for (?P<count>\d{1,3}) device|\bprobe (?:of|with driver nvidia)\b.* failed with error",
    re.IGNORECASE,
)
"""What the driver or the kernel writes of a GPU that is lost, without an Xid. A probe that "was not called" is no failure."""


def pci_key(address: str) -> str:
    """A PCI address without the number of its function, in lower case, with a domain of four digits or more."""
    return sysfs_address(address if "." in address else f"{address}.0").rpartition(".")[0]


def parse_xid(line: str) -> NodeXid | None:
    """The Xid in a line of the kernel log, with its address as in :func:`pci_key`; None in every other line."""
    found = XID.search(line)
    if found is None:
        return None
    pid = found["pid"]
    code, pci = int(found["code"]), pci_key(found["pci"])
    return NodeXid(code=code, pci=pci, pid=None if pid is None else int(pid), detail=_detail_of(code, line[found.end() :]))


def _detail_of(code: int, rest: str) -> XidDetail | None:
    """What the line of an Xid says after its process."""
    if code in NVLINK_XIDS and (found := NVLINK.match(" ".join(rest.split()))) is not None:
        link = int(found["link"] or -1)
        severity = found["severity"].replace("-", "").capitalize()
        return XidDetail(severity=severity, unit=found["unit"], link=link if link >= 0 else None, status=found["status"])
    if code == REMOVED and (found := CAUSE.search(rest)) is not None:
        return XidDetail(cause=int(found["cause"]))
    if code == ACTION_CHANGED and (found := ACTION.search(rest)) is not None:
        return XidDetail(action=ACTIONS.get(int(found["number"], 16), found["words"].strip()))
    return None


def parse_sxid(line: str) -> NodeSxid | None:
    """The error of an NVSwitch in a line of the kernel log, addresses as for Xids; None in every other line."""
    found = SXID.search(line)
    if found is None:
        return None
    return NodeSxid(
        code=int(found["code"]),
        switch=int(found["switch"]),
        pci=pci_key(found["pci"]),
        severity=found["severity"],
        link=None if found["link"] is None else int(found["link"]),
        is_detail=found["detail"] is not None,
    )


def parse_loss(line: str) -> NodeLoss | None:
    """The loss of a GPU in a line of the kernel log; None in every other line, also in that of an Xid."""
    begin, found = OF_DRIVER.search(line), LOST.search(line)
    if begin is None or found is None or UNREAD.search(line) is not None:
        return None
    at = PCI.search(line)
    pci = None if at is None else pci_key(at["pci"])
    return NodeLoss(pci=pci, text=line[begin.start() :].strip(), count=int(found["count"] or 1))


Logged: TypeAlias = "NodeXid | NodeSxid | NodeLoss"


class KernelLog:
    """Reads the kernel log record by record and never waits."""

    def __init__(self, path: Path = KMSG) -> None:
        """Open the log, at its first record since the boot that the kernel still has."""
        self._trouble: str | None = None
        self._has_driver = False
        self._subject: str | None = None
        self._named: set[str] = set()
        self._unnamed: NodeLoss | None = None
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._trouble = f"{path} cannot be read: {error.strerror}"

    @property
    def why(self) -> NotAvailable | None:
        """Why the log does not show all; None where it does. A log of a container has no lines of the driver.

        A GPU that the driver lost, without a line that says which one, is not shown either.
        """
        if self._trouble is not None:
            return NotAvailable(self._trouble)
        if not self._has_driver:
            return NotAvailable("the kernel log has no line of NVIDIA's driver")
        if self._unnamed is not None and self._unnamed.count > len(self._named):
            return NotAvailable(f"the kernel log does not say which GPU the driver lost: {self._unnamed.text}")
        return None

    def read(self) -> list[Logged]:
        """The Xids, SXids and lost GPUs that were logged since the last call."""
        found: list[Logged] = []
        while self._fd is not None and (data := self._record(self._fd)):
            text = data.decode("utf-8", "replace").replace(r"\x0a", "\n")
            self._has_driver = self._has_driver or any(name in text for name in DRIVER)
            found += filter(None, map(self._parse, text.splitlines()))
        return found

    def _parse(self, line: str) -> Logged | None:
        """What a line tells. An address in the first line of a message holds for those that follow, up to another address."""
        if (subject := SUBJECT.search(line)) is not None:
            self._subject = pci_key(subject["pci"])
        if SUPPRESSED.search(line) is not None:
            self._trouble = self._trouble or f"the kernel left out lines of the driver: {line[:LINE_CHARACTERS]}"
        found = parse_xid(line) or parse_sxid(line)
        if found is not None:
            self._subject = None
            if isinstance(found, NodeXid) and xid_of(found.code).kind == "hardware":
                self._named.add(str(found.pci))
            return found
        if UNREAD.search(line) is not None:
            self._trouble = self._trouble or f"the kernel log has an error that cannot be read: {line[:LINE_CHARACTERS]}"
        return self._placed(parse_loss(line))

    def _placed(self, loss: NodeLoss | None) -> NodeLoss | None:
        """A loss with its address; without one it makes the log incomplete."""
        if loss is None:
            return None
        if loss.pci not in (None, self._subject):
            self._subject = None
        elif loss.pci is None and self._subject is not None:
            loss = replace(loss, pci=self._subject, text=f"GPU {self._subject}: {loss.text}")
        if "probe routine" in loss.text:
            self._subject = None  # the last line of a message
        if loss.pci is not None:
            self._named.add(loss.pci)
        if loss.count > 1 or loss.pci is None:
            self._unnamed = loss if self._unnamed is None or loss.count > self._unnamed.count else self._unnamed
        return loss if loss.pci is not None else None

    def _record(self, fd: int) -> bytes | None:
        """The next record; None where there is none now."""
        while True:
            try:
                return os.read(fd, RECORD_BYTES)
            except BlockingIOError:
                return None
            except OSError as error:
                if error.errno != errno.EPIPE:
                    self._trouble, self._fd = f"the kernel log cannot be read: {error.strerror}", None
                    return None
                self._trouble = "the kernel log lost records before they were read"
