"""What the ports of NICs counted between two readings, and the links that they lost. Pure.

The counters of the InfiniBand architecture stop at their greatest value; those of the driver begin anew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_gpucluster.health.growth import CounterGroup, Counters, Limits, compare_counters
from pytest_gpucluster.health.nics import ACTIVE, LINK_UP, label, own_ports, unread_adapters
from pytest_gpucluster.inventory.nics import Nic, NicPort
from pytest_gpucluster.inventory.reading import NotAvailable, all_or_why, or_none
from pytest_gpucluster.judging.finding import HERE, Finding, merge

__all__ = ["NicReadings", "judge_flaps", "judge_nic_counters"]

GREATEST: Mapping[str, int] = {
    "VL15_dropped": 0xFFFF,
    "excessive_buffer_overrun_errors": 0xF,
    "link_downed": 0xFF,
    "link_error_recovery": 0xFF,
    "local_link_integrity_errors": 0xF,
    "port_rcv_constraint_errors": 0xFF,
    "port_rcv_errors": 0xFFFF,
    "port_rcv_remote_physical_errors": 0xFFFF,
    "port_rcv_switch_relay_errors": 0xFFFF,
    "port_xmit_constraint_errors": 0xFF,
    "port_xmit_discards": 0xFFFF,
    "symbol_error": 0xFFFF,
}
"""The greatest value of each error counter of a port, at which it stays (InfiniBand architecture, PortCounters)."""
WRAP = 1 << 32
"""Where the driver's own counters begin anew."""
CARRIER = "carrier_changes"
ABSENT = "No such file"
"""What is not available for this is not there at all."""
UNJUDGED = (
    "duplicate_request", "np_cnp_sent", "np_ecn_marked_roce_packets", "out_of_buffer", "out_of_sequence", "packet_seq_err",
    "rp_cnp_handled", "rp_cnp_ignored",
)  # fmt: skip
"""Shown where they grew; nobody publishes a limit for them. Those of CNP and ECN count congestion, which is no error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NicReadings:
    """Two readings of one host's adapters, ``seconds`` apart."""

    first: Sequence[Nic] | NotAvailable
    last: Sequence[Nic] | NotAvailable
    seconds: float


def judge_nic_counters(readings: NicReadings, *, fabric: str, limits: Limits) -> Finding:
    """What happened on a host's ports of a fabric between two readings: counters, ports that lost their link or are gone."""
    doubts, pairs = _ports(readings, fabric)
    groups = [group for name, pair in pairs.items() for group in _groups(name, *pair)]
    pauses = [_pauses(name, *pair) for name, pair in pairs.items()]
    shown = (*UNJUDGED, *dict.fromkeys(counter for group in pauses for counter in group.first))
    found = [Finding(kind="nic", unknown={HERE: doubts})]
    found += [_judge_port(name, first, last, limits) for name, (first, last) in pairs.items()]
    found += [compare_counters([*groups, *pauses], seconds=readings.seconds, limits=limits, shown=shown)] if groups else []
    return merge(found)


def judge_flaps(readings: NicReadings, *, fabric: str, limits: Limits) -> Finding:
    """How often the port of a host that lost its link most often lost it. A port that is gone counts once."""
    found = judge_nic_counters(readings, fabric=fabric, limits=limits)
    _, pairs = _ports(readings, fabric)
    lost = max((_losses(group) for name, pair in pairs.items() for group in _groups(name, *pair)), default=0)
    return replace(found, value=lost or (min(found.count, 1) if found.bad or not found.unknown else None))


def _ports(readings: NicReadings, fabric: str) -> tuple[list[str], dict[str, tuple[NicPort, NicPort | None]]]:
    """Why nothing is known of some ports; and each port that was there at the start, with its reading at the end."""
    both = all_or_why((readings.first, readings.last))
    if isinstance(both, NotAvailable):
        return [f"the adapters are {both}"], {}
    if readings.seconds <= 0:
        return ["no time passed between the two readings"], {}
    before, after = ({label(*one): one[1] for one in own_ports(nics, fabric)} for nics in both)
    doubts = [text for nics in both for text in unread_adapters(nics)]
    doubts += [f"{name} came during the run" for name in after if name not in before]
    if not before and not doubts:
        doubts.append(f"there is no {fabric} port to watch")
    return [*dict.fromkeys(doubts)], {name: (port, after.get(name)) for name, port in before.items()}


def _groups(name: str, first: NicPort, last: NicPort | None) -> Iterator[CounterGroup]:
    """The counters of the architecture, and those of the driver with the changes of the interfaces."""
    if last is not None:
        before, after = or_none(first.counters) or {}, or_none(last.counters) or {}
        yield CounterGroup(part=name, first=before, last=after, greatest=GREATEST)
        yield CounterGroup(part=name, first=_of_driver(first), last=_of_driver(last), greatest=GREATEST, wraps_at=WRAP)


def _pauses(name: str, first: NicPort, last: NicPort | None) -> CounterGroup:
    """The pause counters that did not fall. Whoever resets them leaves the counters of errors as they are."""
    before, after = or_none(first.pauses) or {}, (or_none(last.pauses) if last is not None else None) or {}
    kept = {counter: value for counter, value in before.items() if after.get(counter, -1) >= value}
    return CounterGroup(part=name, first=kept, last={counter: after[counter] for counter in kept})


def _of_driver(port: NicPort) -> Counters:
    """The driver's counters, and the changes of the interfaces where there are any: InfiniBand needs none."""
    own = or_none(port.hw_counters) or {}
    has_none = isinstance(port.carrier_changes, NotAvailable) and port.fabric != "roce"
    return own if has_none else {**own, CARRIER: port.carrier_changes}


def _losses(group: CounterGroup) -> int:
    """How often a link was lost. Its interfaces change twice each time, down and up; there may be several."""
    downs, changes = (or_none(group.growth(name)) or 0 for name in ("link_downed", CARRIER))
    return max(int(downs), math.ceil(changes / 2))


def _judge_port(name: str, first: NicPort, last: NicPort | None, limits: Limits) -> Finding:
    """A port that was up and is not, is slower or gone; and counters with a limit that it does not show."""
    if last is None:
        return Finding(bad={name: ("is gone",)})
    bad, unknown = [], [*_unread_counters(first, limits)]
    for before, after, up in ((first.state, last.state, ACTIVE), (first.physical_state, last.physical_state, LINK_UP)):
        if isinstance(after, NotAvailable):
            unknown.append(f"its state is {after}")
        elif before == up != after:
            bad.append(f"is {after} at the end, and was {before}")
            break
    was, rate = first.rate_gbit_s, last.rate_gbit_s
    if not bad and last.state == ACTIVE and not isinstance(was, NotAvailable):
        if isinstance(rate, NotAvailable):
            unknown.append(f"its rate is {rate}")
        elif rate < was:
            bad.append(f"is at {rate:g} Gb/s at the end, and was at {was:g}")
    return Finding(bad={name: bad}, unknown={name: unknown})


def _unread_counters(port: NicPort, limits: Limits) -> Iterator[str]:
    """Why counters with a limit are not known: InfiniBand has all of the architecture's, RoCE those of its driver."""
    counted, own = port.counters, port.hw_counters
    if isinstance(counted, NotAvailable) and isinstance(own, NotAvailable):
        yield f"its counters are {counted}"
        return
    known = {*(or_none(counted) or ()), *(or_none(own) or ())}
    if isinstance(own, NotAvailable) and (port.fabric == "roce" or ABSENT not in own.why):
        yield f"its hw_counters are {own}"
    elif port.fabric in ("infiniband", "roce") and not known & {*limits}:
        yield f"it shows none of the counters {', '.join(limits)}"
    elif port.fabric == "infiniband" and (missing := [one for one in limits if one in GREATEST and one not in known]):
        why = counted.why if isinstance(counted, NotAvailable) else "the driver does not count it"
        yield f"{', '.join(missing)} cannot be read: {why}"
