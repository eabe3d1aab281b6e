"""What the codes of NVIDIA's driver mean, and what to do about them: Xids of GPUs, SXids of NVSwitches. Pure.

The codes stand in ``error_codes.csv``, what to do in ``error_actions.csv``, one a row, in our own words. Names of Xids are the
driver's (``nverror.h``); codes of graphics and video engines are not listed. Where the guide says to restart a virtual machine,
a node without them is rebooted.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

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


def _rows(file: str) -> list[dict[str, str]]:
    with Path(__file__).with_name(file).open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


ACTIONS: Mapping[Family, Mapping[str, str]] = {
    family: {row["action"]: row["words"] for row in _rows("error_actions.csv") if row["family"] == family}
    for family in get_args(Family)
}
"""What to do, by the action that a code has in ``error_codes.csv``."""


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
    return {
        int(row["code"]): ErrorCode(
            family=family,
            code=int(row["code"]),
            name=row["name"],
            kind=row["kind"],
            meaning=row["meaning"],
            action=ACTIONS[family][row["action"]],
        )
        for row in _rows("error_codes.csv")
        if row["family"] == family
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
