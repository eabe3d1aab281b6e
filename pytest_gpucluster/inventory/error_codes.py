"""What the codes of NVIDIA's driver mean, and what to do about them: Xids of GPUs, SXids of NVSwitches. Pure.

The codes stand in ``error_codes.csv``, one a row, in our own words. Names of Xids are the driver's (``nverror.h``); codes of
graphics and video engines are not listed. Where the guide says to restart a virtual machine, a node without them is rebooted.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Family: TypeAlias = Literal["Xid", "SXid"]
SOURCES = {
    "catalogue": "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html",
    "guide": "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html",
}
"""The catalogue of Xids for Ampere and newer GPUs, with the list of r555; sections D.4 to D.7 of the Fabric Manager guide,
as leptonai/gpud has written them down."""
REMOVED, ACTION_CHANGED, LINK_DOWN, LINK_SUFFERED = 45, 154, 149, 145
"""Xids that are the consequence of another, ask for a recovery, or come where a link goes down: there, and elsewhere."""
NVLINK_XIDS = range(144, 151)
"""Xids of NVLink from Blackwell on, whose line has unit, severity, link and error status."""
ACTIONS: Mapping[Family, Mapping[str, str]] = {
    "Xid": {
        "restart": "start the program again; if the code comes back with other programs too, run NVIDIA's field diagnostic",
        "check": "look for the error in the program first (compute-sanitizer); if healthy programs get it too, suspect the GPU",
        "reset": (
            "end all processes on the GPU and reset it (nvidia-smi --gpu-reset); if the code comes back, contact the vendor"
        ),
        "reboot": (
            "reboot the node; if the code comes back, check how the GPU sits and its power, then contact the vendor (RMA)"
        ),
        "vendor": "take the GPU out of service and contact the vendor",
        "watch": "nothing at once; watch the GPU, and contact the vendor if the code comes back",
        "link": "check the NVLinks and the fabric (nvidia-smi nvlink -s, Fabric Manager, the switches), then reset the GPU",
        "cooling": "check the power cables, the power supply and the cooling of the GPU",
        "update": "bring driver and firmware to versions that fit each other",
        "recovery": "do what nvidia-smi -q shows as GPU Recovery Action",
        "nothing": "nothing: a test message",
    },
    "SXid": {
        "reboot": "reboot the node: its whole NVLink fabric is affected; if the code comes back, contact the vendor",
        "restart": (
            "restart the virtual machine, or reboot the node where there is none; if the code comes back, contact the vendor"
        ),
        "reset": "reset all GPUs and all NVSwitches of the node; if the code comes back, contact the vendor",
        "link down": (
            "reset the GPU of the link (A100: restart the virtual machine or the node); if it comes back, report the GPU"
        ),
        "connection": (
            "check the connections of the link, unless the other end was shut down; then restart as for a fatal error"
        ),
        "routing": (
            "check the routing of the fabric's partitions (nvswitch-audit), then restart the virtual machine or the node"
        ),
        "throughput": "watch the throughput of the link; contact the vendor if the code comes back",
        "watch": "look for errors of the switch that follow; contact the vendor if the code comes back",
        "cooling": "check the cooling: the switch may narrow its links to save power",
        "vendor": "contact the vendor with the lines of the kernel log",
        "nothing": "nothing",
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorCode:
    """One code: the driver's name for it (empty for an SXid), what it says about the part, its kind, and what to do.

    Kinds of Xids: ``application`` (a program can cause it by itself), ``hardware``, ``link``, ``driver``, ``test`` (a message,
    no error). Kinds of SXids: ``system`` (the whole fabric of the node is lost), ``fatal`` (what uses the link is),
    ``non-fatal``, ``cooling``, ``harmless`` (nothing was lost). ``unknown``: a code that is not listed.
    """

    family: Family
    code: int
    name: str
    kind: str
    meaning: str
    action: str

    def __str__(self) -> str:
        """``Xid 79 (ROBUST_CHANNEL_GPU_HAS_FALLEN_OFF_THE_BUS): the GPU has fallen off the PCIe bus``."""
        return f"{self.family} {self.code}{f' ({self.name})' if self.name else ''}: {self.meaning}"


@functools.cache
def error_codes(family: Family) -> Mapping[int, ErrorCode]:
    """The codes that are listed, read once."""
    with Path(__file__).with_name("error_codes.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["family"] == family]
    return {
        int(row["code"]): ErrorCode(
            family=family,
            code=int(row["code"]),
            name=row["name"],
            kind=row["kind"],
            meaning=row["meaning"],
            action=ACTIONS[family][row["action"]],
        )
        for row in rows
    }


def xid_of(code: int) -> ErrorCode:
    """The meaning of a code; one that is not listed is of the kind ``unknown``, which counts as an error."""
    return error_codes("Xid").get(code) or _unknown(
        "Xid", code, "not in our list", f"see NVIDIA's catalogue, {SOURCES['catalogue']}"
    )


def sxid_of(code: int) -> ErrorCode:
    """The meaning of a code; one that is not in the guide is of the kind ``unknown``."""
    return error_codes("SXid").get(code) or _unknown("SXid", code, "", "not in NVIDIA's Fabric Manager guide")


def _unknown(family: Family, code: int, name: str, meaning: str) -> ErrorCode:
    action = ACTIONS[family]["vendor"]
    return ErrorCode(family=family, code=code, name=name, kind="unknown", meaning=meaning, action=action)
