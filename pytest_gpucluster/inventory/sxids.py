"""What NVSwitch errors (SXids) mean and what to do about them, in our own words. Pure.

After sections D.4 to D.7 of NVIDIA's Fabric Manager user guide, as leptonai/gpud has written them down. The guide speaks of
virtual machines; where it says to restart one, a node without them is rebooted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

GUIDE = "https://docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide/index.html"
SxidKind: TypeAlias = Literal["system", "fatal", "non-fatal", "cooling", "harmless", "unknown"]
"""``system``: the whole fabric of the node is lost. ``fatal``: what uses the link is. ``harmless``: nothing was lost."""

REBOOT = "reboot the node: its whole NVLink fabric is affected; if the code comes back, contact the vendor"
RESTART = "restart the virtual machine, or reboot the node where there is none; if the code comes back, contact the vendor"
RESET = "reset all GPUs and all NVSwitches of the node; if the code comes back, contact the vendor"
LINK_DOWN = "reset the GPU of the link (A100: restart the virtual machine or the node); if it comes back, report the GPU"
CONNECTION = "check the connections of the link, unless the other end was shut down; then restart as for a fatal error"
ROUTING = "check the routing of the fabric's partitions (nvswitch-audit), then restart the virtual machine or the node"
THROUGHPUT = "watch the throughput of the link; contact the vendor if the code comes back"
WATCH = "look for errors of the switch that follow; contact the vendor if the code comes back"
COOLING = "check the cooling: the switch may narrow its links to save power"
VENDOR = "contact the vendor with the lines of the kernel log"
NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sxid:
    """One code: what it says about the switch, its kind, and what to do."""

    code: int
    kind: SxidKind
    meaning: str
    action: str

    def __str__(self) -> str:
        """``SXid 20034: a link has gone down``."""
        return f"SXid {self.code}: {self.meaning}"


CORRECTED = (
    11012, 11021, 11022, 11023, 12021, 12023, 15008, 15011, 19049, 19055, 19057, 19059, 19062, 19065, 19068, 19071, 24001,
    24002, 24003,
)  # fmt: skip
"""Codes of errors of one bit that the switch corrected."""
FATAL: Mapping[int, str] = {
    11001: "a command that came in was invalid",
    11009: "a packet came in on an invalid virtual channel",
    11013: "a header that came in had an uncorrectable error",
    11018: "the routing table (RID) had an uncorrectable error",
    11019: "the routing table (RLAN) had an uncorrectable error",
    11020: "control data that came in had a parity error",
    12001: "a buffer between crossbar and output overflowed",
    12002: "a packet was at the wrong output",
    12022: "the input of an output port had an uncorrectable error",
    12024: "the memory of an output port had an uncorrectable error",
    12025: "credits of an output port overflowed",
    12026: "a request was at the wrong destination",
    12027: "a response was at the wrong destination",
    12030: "control data of an output port had a parity error",
    12031: "credits of an output port had a parity error",
    12032: "an output port got a packet of the wrong type",
    14017: "a request that waited for its answer timed out",
    15001: "a routing buffer overflowed or underflowed",
    15006: "counts of finished transfers overflowed or underflowed",
    15009: "a routing table (GLT) had an uncorrectable error",
    15010: "routing data had a parity error",
    15012: "a packet to be routed had an uncorrectable error",
    15013: "credits of the routing had a parity error",
    **dict.fromkeys((19047, 19054, 19060, 19063, 19066, 19069), "a header in the link's buffers had an uncorrectable error"),
    **dict.fromkeys((19048, 19056, 19058, 19061, 19064, 19067, 19070), "data in the link's buffers had an uncorrectable error"),
    **dict.fromkeys((24004, 24005, 24006), "the memory that tracks requests had an uncorrectable error"),
    24007: "a request that was tracked timed out",
}
SYSTEM: Mapping[int, str] = {
    10003: "an interrupt came that nobody handles",
    12020: "an output port sent packets out of sequence",
    22003: "the controller of the links (Minion) halted",
    22011: "the controller of the links (Minion) had an external error",
    **dict.fromkeys((23001, 23010), "an input buffer of the crossbar overflowed"),
    **dict.fromkeys((23002, 23011), "an input buffer of the crossbar underflowed"),
    **dict.fromkeys((23003, 23012), "credits at the crossbar's output overflowed"),
    **dict.fromkeys((23004, 23013), "credits at the crossbar's output underflowed"),
    **dict.fromkeys((23005, 23006, 23014, 23015), "packets at the crossbar's input were not in one piece"),
    **dict.fromkeys((23007, 23016), "there may be gaps at the crossbar's input"),
    23008: "a packet at the crossbar's input had an invalid destination",
    23009: "a packet at the crossbar's input had a parity error",
    23017: "credits of the crossbar had a parity error",
}
_OTHER: tuple[tuple[int, SxidKind, str, str], ...] = (
    (10001, "non-fatal", "an access to a register of the switch failed; fatal errors may follow", WATCH),
    (10002, "non-fatal", "an access to a register of the switch timed out; fatal errors may follow", WATCH),
    (10004, "cooling", "the switch has become too hot", COOLING),
    (10005, "cooling", "the switch was too hot until now", COOLING),
    (11004, "non-fatal", "an access over the switch was not allowed; traffic of its GPU stalls", ROUTING),
    (12028, "non-fatal", "an access to a register over the switch failed; traffic of its GPU stalls", RESTART),
    (19084, "non-fatal", "the other end of a link gave no sign of life", RESET),
    (20001, "non-fatal", "a link had to send a packet again", THROUGHPUT),
    (20034, "fatal", "a link has gone down", LINK_DOWN),
    (22012, "fatal", "the controller of a link (Minion) reports a broken connection", CONNECTION),
    (22013, "harmless", "a message of the controller of the links (Minion)", NOTHING),
)


def _catalogue() -> dict[int, Sxid]:
    rows: list[tuple[int, SxidKind, str, str]] = [
        *((code, "harmless", "errors of one bit, which the switch corrected", NOTHING) for code in CORRECTED),
        *((code, "fatal", meaning, RESTART) for code, meaning in FATAL.items()),
        *((code, "system", meaning, RESET if code == 10003 else REBOOT) for code, meaning in SYSTEM.items()),
        *_OTHER,
    ]
    return {code: Sxid(code=code, kind=kind, meaning=meaning, action=action) for code, kind, meaning, action in sorted(rows)}


SXIDS: Mapping[int, Sxid] = _catalogue()


def sxid_of(code: int) -> Sxid:
    """The meaning of a code; one that is not in the guide is of the kind ``unknown``."""
    unknown = Sxid(code=code, kind="unknown", meaning="not in NVIDIA's Fabric Manager guide", action=VENDOR)
    return SXIDS.get(code, unknown)
