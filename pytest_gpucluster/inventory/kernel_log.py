"""Lines of NVIDIA's driver in the kernel log: Xids of GPUs with their process, SXids of NVSwitches with their link."""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.inventory.reading import NotAvailable

KMSG = Path("/dev/kmsg")
DRIVER = ("NVRM:", "nvidia-nvswitch")
"""How the lines of NVIDIA's driver begin."""
RECORD_BYTES = 8192
"""The kernel refuses to hand a record to a smaller buffer."""
XID = re.compile(
    r"NVRM: Xid \((?:PCI:)?(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\): (?P<code>\d{1,5})"
    r"(?:, pid='?(?P<pid>\d+)'?)?",
    re.ASCII,
)
"""The driver's line. Drivers before 450 name no process; newer ones write ``pid='<unknown>'`` where there is none."""
SXID = re.compile(
    r"nvidia-nvswitch(?P<switch>\d{1,4}): SXid \(PCI:(?P<pci>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.[0-7])?\): "
    r"(?P<code>\d{1,5}), "
    r"(?:(?P<severity>Fatal|Non-fatal|Correctable)\b(?:, Link (?P<link>\d{1,4})\b)?|(?P<detail>Severity|Data) )?",
    re.ASCII,
)
"""The lines of an error: its severity and link, then ``Severity 1 Engine instance 60 ...`` and ``Data {0x10000000, ...}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedSxid:
    """One line on an error of an NVSwitch. ``pci``: as in :func:`pci_key`.

    ``severity``: ``Fatal``, ``Non-fatal`` or ``Correctable``; ``link``: a port of the switch; None where the line names none.
    ``is_detail``: the line adds numbers to an error that another line has told.
    """

    code: int
    switch: int
    pci: str
    severity: str | None = None
    link: int | None = None
    is_detail: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedXid:
    """One Xid in the kernel log. ``pci``: as in :func:`pci_key`; ``pid``: the process, None where the driver names none."""

    code: int
    pci: str
    pid: int | None


def pci_key(address: str) -> str:
    """A PCI address without the number of its function, in lower case, with a domain of four digits or more."""
    domain, bus, device = address.lower().rpartition(".")[0].split(":") if "." in address else address.lower().split(":")
    return f"{domain.lstrip('0').rjust(4, '0')}:{bus}:{device}"


def parse_xid(line: str) -> LoggedXid | None:
    """The Xid in a line of the kernel log; None in every other line."""
    found = XID.search(line)
    if found is None:
        return None
    pid = found["pid"]
    return LoggedXid(code=int(found["code"]), pci=pci_key(found["pci"]), pid=None if pid is None else int(pid))


def parse_sxid(line: str) -> LoggedSxid | None:
    """The error of an NVSwitch in a line of the kernel log; None in every other line."""
    found = SXID.search(line)
    if found is None:
        return None
    return LoggedSxid(
        code=int(found["code"]),
        switch=int(found["switch"]),
        pci=pci_key(found["pci"]),
        severity=found["severity"],
        link=None if found["link"] is None else int(found["link"]),
        is_detail=found["detail"] is not None,
    )


class KernelLog:
    """Reads the kernel log record by record and never waits."""

    def __init__(self, path: Path = KMSG) -> None:
        """Open the log, at its first record since the boot that the kernel still has."""
        self._trouble: str | None = None
        self._has_driver = False
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            self._trouble = f"{path} cannot be read: {error.strerror}"

    @property
    def why(self) -> NotAvailable | None:
        """Why the log does not tell all; None where it does. A log of a container has no lines of the driver."""
        if self._trouble is None and not self._has_driver:
            return NotAvailable("the kernel log has no line of NVIDIA's driver")
        return None if self._trouble is None else NotAvailable(self._trouble)

    def read(self) -> list[LoggedXid | LoggedSxid]:
        """The Xids and SXids that were logged since the last call."""
        found: list[LoggedXid | LoggedSxid] = []
        while self._fd is not None and (data := self._record(self._fd)):
            text = data.decode("utf-8", "replace")
            self._has_driver = self._has_driver or any(name in text for name in DRIVER)
            found += filter(None, (parse_xid(line) or parse_sxid(line) for line in text.splitlines()))
        return found

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
