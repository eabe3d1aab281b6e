"""The errors of NVSwitches (SXids) that the kernel of this host has logged since the run began."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol import node_events
from pytest_gpucluster.protocol.codec import MalformedMessageError
from pytest_gpucluster.protocol.functions import without_device

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.node_events import NodeEvents, NodeSxid


@dataclass(frozen=True, slots=True, kw_only=True)
class SxidSeen:
    """Equal lines on an error of one NVSwitch. ``switch``: its number by the driver; ``pci``: its address.

    ``severity``: the driver's word; ``link``: a port of the switch; None where the line names none. ``is_detail``: the lines
    add numbers to an error that other lines tell.
    """

    code: int
    switch: int
    pci: str
    severity: str | None
    link: int | None
    is_detail: bool
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSxids:
    """The SXids of a host's NVSwitches during the run; ``before``: what the kernel had logged before it, since the boot.

    ``kernel_log_why``: why the kernel log may not have told all; None where it has.
    """

    seen: list[SxidSeen]
    before: list[SxidSeen]
    kernel_log_why: str | None


@without_device
def node_sxids() -> NodeSxids:
    """Ask the listener of this host what it has read in the kernel log."""
    name = os.environ.get(node_events.VARIABLE)
    if name is None:
        return NodeSxids(seen=[], before=[], kernel_log_why="no listener was started")
    try:
        return sxids_of(node_events.ask(name))
    except (OSError, MalformedMessageError) as error:
        return NodeSxids(seen=[], before=[], kernel_log_why=f"the listener of this node does not answer: {error}")


def sxids_of(heard: NodeEvents) -> NodeSxids:
    """What was heard of the switches, during the run and before it."""
    return NodeSxids(
        seen=[_seen(one) for one in heard.sxids if not one.is_before],
        before=[_seen(one) for one in heard.sxids if one.is_before],
        kernel_log_why=heard.log_why,
    )


def _seen(one: NodeSxid) -> SxidSeen:
    return SxidSeen(
        code=one.code,
        switch=one.switch,
        pci=one.pci,
        severity=one.severity,
        link=one.link,
        is_detail=one.is_detail,
        count=one.count,
    )
