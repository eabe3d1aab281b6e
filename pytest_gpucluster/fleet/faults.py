"""Planted bad parts of a simulated fleet: ``node23-gpu3:slow``. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.protocol.codec import TypedMessage

if TYPE_CHECKING:
    from collections.abc import Mapping

FaultKind: TypeAlias = Literal[
    "absent", "busy", "cable", "clique", "clock", "corrupt", "dead", "dimm", "disk", "ecc", "hbm", "hung", "late",
    "links", "lost", "nvlink", "nvls", "odd", "pair", "pattern", "pcie", "rail", "reset", "shared", "slow", "sockets",
    "throttled", "trunk", "uplink", "versions", "xid",
]  # fmt: skip
FAULTS: Mapping[FaultKind, str] = {
    "absent": "never joins",
    "busy": "another program holds its memory",
    "cable": "one port of the node's NICs has no link",
    "clique": "the node is not in the NVLink domain of its rack (GB200 NVL72)",
    "clock": "the node's clock is late",
    "corrupt": "computes wrong bits",
    "dead": "its worker dies under lasting load",
    "dimm": "memory modules of the node are missing",
    "disk": "the node's scratch is half as fast as others",
    "ecc": "has uncorrected memory errors and a row that waits for a remap",
    "hbm": "has 10 % less memory bandwidth",
    "hung": "hangs in the memory test",
    "late": "joins and answers late, and is healthy",
    "links": "its NVLinks carry half of their rate",
    "lost": "the node is gone from the test under lasting load on",
    "nvlink": "one of its NVLinks is down",
    "nvls": "the all-reduce of the node runs without NVLink SHARP",
    "odd": "the node has another kernel",
    "pair": "speaks to the next GPU of its node through the host",
    "pattern": "loses bits of its memory",
    "pcie": "its link to the host came up at half its rate",
    "rail": "one adapter of the node carries half of its rate",
    "reset": "asks to be reset",
    "shared": "its rank uses the GPU of a neighbour, so that two ranks claim that one",
    "slow": "computes 30 % slower at the same clock",
    "sockets": "the node speaks to others over sockets",
    "throttled": "is slowed by heat under lasting load",
    "trunk": "the uplinks of the node's leaf switch carry half of their rate",
    "uplink": "the node's adapters carry half of their rate",
    "versions": "the node has another torch and another driver",
    "xid": "the driver reports during the run that it has fallen off the bus",
}
NODES_ONLY = (
    "cable",
    "clique",
    "clock",
    "dimm",
    "disk",
    "lost",
    "nvls",
    "odd",
    "rail",
    "sockets",
    "trunk",
    "uplink",
    "versions",
)
GPUS_ONLY = ("pair", "shared")
PART = re.compile(r"node(\d{1,6})(?:-gpu(\d{1,3}))?", re.ASCII)
FORM = "say PART:FAULT, for example node3-gpu5:slow or node7:absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(TypedMessage):
    """One planted fault. The node is the one with this number in its hostname; ``gpu`` None: all of the node."""

    node: int
    gpu: int | None
    kind: FaultKind

    def __str__(self) -> str:
        """The fault as it is written on the command line."""
        part = f"node{self.node}" if self.gpu is None else f"node{self.node}-gpu{self.gpu}"
        return f"{part}:{self.kind}"


def parse_fault(text: str) -> Fault:
    """``node23-gpu3:slow`` as a :class:`Fault`.

    Raises:
        ConfigurationError: no such form or fault, a fault of a node that names a GPU, or one of a GPU that names a node.
    """
    part, _, kind = text.partition(":")
    found = PART.fullmatch(part)
    if found is None:
        raise ConfigurationError(f"{text!r} names no part and fault; {FORM}")
    if kind not in FAULTS:
        known = ", ".join(FAULTS)
        raise ConfigurationError(f"{text!r}: there is no fault {kind!r}; faults: {known}.{did_you_mean(kind, [*FAULTS])}")
    if kind in NODES_ONLY and found[2] is not None:
        raise ConfigurationError(f"{text!r}: {kind} is a fault of a whole node; say node{found[1]}:{kind}")
    if kind in GPUS_ONLY and found[2] is None:
        raise ConfigurationError(f"{text!r}: {kind} is a fault of one GPU; say {part}-gpu3:{kind}")
    return Fault(node=int(found[1]), gpu=None if found[2] is None else int(found[2]), kind=cast("FaultKind", kind))
