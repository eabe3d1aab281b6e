"""What the error counters of NICs grew by between two readings, beside their limits. Pure.

A counter that fell was reset, and one that stood at its greatest value could not grow: then nothing is known of it, which is
never green. The counters of the InfiniBand architecture stop at their greatest value; those of the driver begin anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.health.nics import ACTIVE, LINK_UP, label, own_ports, unread_adapters
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.judging.forecast import in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpucluster.inventory.nics import Nic, NicPort

Counters = dict[str, "int | NotAvailable"]
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
UNJUDGED = ("duplicate_request", "out_of_buffer", "out_of_sequence", "packet_seq_err")
"""Shown where they grew; nobody publishes a limit for them."""
PERIODS_S: Mapping[str, float | None] = {"total": None, "per_s": 1.0, "per_min": 60.0, "per_hour": 3600.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class CounterLimit:
    """The most by which a counter may grow: in all, or in ``period_s`` seconds."""

    most: float
    period_s: float | None

    def holds(self, growth: int, seconds: float) -> bool:
        """Whether so much growth in so many seconds is within the limit."""
        return growth <= self.most if self.period_s is None else growth * self.period_s <= self.most * seconds

    @property
    def text(self) -> str:
        """``120 an hour allowed``."""
        words = {None: "", 1.0: " a second", 60.0: " a minute", 3600.0: " an hour"}
        return f"{self.most:g}{words[self.period_s]} allowed"


@dataclass(frozen=True, slots=True)
class Growth:
    """What happened on the ports of one host between two readings.

    Attributes:
        over: counters that grew beyond their limit, ports that lost their link and stayed without, and ports that are gone.
        lost: how often the port that lost its link most often lost it.
        names: the ports concerned.
        facts: what happened on each of them.
        within: growth within the limits, and that of counters without a limit.
        unknown: why nothing can be said of some counters.
    """

    over: int = 0
    lost: int = 0
    names: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """Two readings of one host's adapters, ``seconds`` apart."""

    first: Sequence[Nic] | NotAvailable
    last: Sequence[Nic] | NotAvailable
    seconds: float


@dataclass(slots=True)
class _Found:
    """What is collected of one port."""

    name: str
    seconds: float
    over: list[str] = field(default_factory=list)
    within: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    grown: dict[str, int] = field(default_factory=dict)


def read_limits(recipe: Mapping[str, Mapping[str, float]]) -> dict[str, CounterLimit]:
    """The limits of a recipe such as ``{link_downed: {total: 0}, symbol_error: {per_hour: 120}}``.

    Raises:
        ConfigurationError: a limit of another form.
    """
    found = {}
    for counter, limit in recipe.items():
        form = (
            f"limits: {counter}: {limit!r} is none; say one of {', '.join(PERIODS_S)} and a number, such as {{per_hour: 120}}"
        )
        if not isinstance(limit, dict) or len(limit) != 1:
            raise ConfigurationError(form)
        ((period, most),) = limit.items()
        if period not in PERIODS_S or isinstance(most, bool) or not isinstance(most, (int, float)):
            raise ConfigurationError(form)
        if not (math.isfinite(most) and most >= 0):
            raise ConfigurationError(form)
        found[counter] = CounterLimit(most=most, period_s=PERIODS_S[period])
    if not found:
        raise ConfigurationError("limits: no counter has a limit, so nothing would be judged")
    return found


def compare(readings: Readings, *, fabric: str, limits: Mapping[str, CounterLimit]) -> Growth:
    """What happened on a host's ports of a fabric between two readings."""
    first, last = readings.first, readings.last
    if isinstance(first, NotAvailable) or isinstance(last, NotAvailable):
        why = first if isinstance(first, NotAvailable) else last
        return Growth(unknown=(f"the adapters are {why}",))
    if readings.seconds <= 0:
        return Growth(unknown=("no time passed between the two readings",))
    before, after = ({label(*one): one[1] for one in own_ports(nics, fabric)} for nics in (first, last))
    unread = [*unread_adapters(first), *unread_adapters(last)]
    unread += [f"{name} came during the run" for name in after if name not in before]
    if not before and not unread:
        unread.append(f"there is no {fabric} port to watch")
    found = [_port(name, port, after.get(name), readings.seconds, limits) for name, port in before.items()]
    bad = [one for one in found if one.over]
    return Growth(
        over=sum(len(one.over) for one in bad),
        lost=max((_losses(one.grown) for one in found), default=0),
        names=tuple(one.name for one in bad),
        facts=tuple(f"{one.name}: {'; '.join(one.over)}" for one in bad),
        within=tuple(f"{one.name}: {'; '.join(one.within)}" for one in found if one.within),
        unknown=(*dict.fromkeys(unread), *(f"{one.name}: {'; '.join(one.unknown)}" for one in found if one.unknown)),
    )


def _losses(grown: Mapping[str, int]) -> int:
    """How often a link was lost. Its interfaces change twice each time, down and up; there may be several."""
    return max(grown.get("link_downed", 0), math.ceil(grown.get(CARRIER, 0) / 2))


def _port(name: str, first: NicPort, last: NicPort | None, seconds: float, limits: Mapping[str, CounterLimit]) -> _Found:
    found = _Found(name, seconds)
    if last is None:
        found.over.append("is gone")
        return found
    _judge_state(first, last, found)
    _judge_counters(_of_architecture(first), _of_architecture(last), limits, found)
    _judge_counters(_of_driver(first), _of_driver(last), limits, found)
    if isinstance(first.counters, NotAvailable) and isinstance(first.hw_counters, NotAvailable):
        found.unknown.append(f"its counters are {first.counters}")
    elif first.fabric == "infiniband":
        known = first.counters if isinstance(first.counters, dict) else {}
        lacking = [one for one in limits if one in GREATEST and one not in known]
        found.unknown.extend([f"{', '.join(lacking)} cannot be read: {_why(first)}"] if lacking else [])
    return found


def _why(port: NicPort) -> str:
    return port.counters.why if isinstance(port.counters, NotAvailable) else "the driver does not count it"


def _of_architecture(port: NicPort) -> Counters:
    return port.counters if isinstance(port.counters, dict) else {}


def _of_driver(port: NicPort) -> Counters:
    """The driver's counters, and the changes of the interfaces where there are any: InfiniBand needs none."""
    own = port.hw_counters if isinstance(port.hw_counters, dict) else {}
    has_none = isinstance(port.carrier_changes, NotAvailable) and port.fabric != "roce"
    return own if has_none else {**own, CARRIER: port.carrier_changes}


def _judge_state(first: NicPort, last: NicPort, found: _Found) -> None:
    """A port that was up and is not."""
    for before, after, up in ((first.state, last.state, ACTIVE), (first.physical_state, last.physical_state, LINK_UP)):
        if isinstance(after, NotAvailable):
            found.unknown.append(f"its state is {after}")
        elif before == up != after:
            found.over.append(f"is {after} at the end, and was {before}")
            return


def _judge_counters(first: Counters, last: Counters, limits: Mapping[str, CounterLimit], found: _Found) -> None:
    fallen = next(_falls(first, last), None)
    if fallen is not None:
        found.unknown.append(f"{fallen}: somebody reset the counters during the run, and what they held before is lost")
    for name in (*limits, *UNJUDGED):
        if name not in first and name not in last:
            continue  # a driver that does not count it
        grown = _growth(name, first, last, was_reset=fallen is not None)
        if isinstance(grown, str):
            found.unknown.extend([grown] if name in limits else [])
            continue
        found.grown[name] = grown
        if name not in limits or limits[name].holds(grown, found.seconds):
            found.within.extend([_in_words(name, grown, found.seconds)] if grown else [])
        else:
            found.over.append(f"{_in_words(name, grown, found.seconds)}, {limits[name].text}")


def _falls(first: Counters, last: Counters) -> Iterator[str]:
    """Every counter that fell, traffic included: a reset takes all of a port's."""
    for name, before in first.items():
        after = last.get(name)
        if isinstance(before, int) and isinstance(after, int) and after < before and not _wrapped(name, before, after):
            yield f"{name} fell from {before} to {after}"


def _wrapped(name: str, before: int, after: int) -> bool:
    """Whether a counter of the driver went over its end: from the last quarter of its range into the first."""
    return name not in GREATEST and 3 * WRAP // 4 <= before < WRAP and after < WRAP // 4


def _growth(name: str, first: Counters, last: Counters, *, was_reset: bool) -> int | str:
    """How much a counter grew, at least; or why that is not known."""
    before, after = (one.get(name, NotAvailable("the counter is not there")) for one in (first, last))
    if isinstance(before, NotAvailable) or isinstance(after, NotAvailable):
        return f"{name} is {before if isinstance(before, NotAvailable) else after}"
    if was_reset and after < before:
        return after
    if before >= GREATEST.get(name, math.inf):
        return (
            f"{name} stood at its greatest value, {before}, before the run, so it cannot show growth; clear it (perfquery -R)"
        )
    return after - before + (WRAP if after < before else 0)


def _in_words(name: str, growth: int, seconds: float) -> str:
    return f"{name} +{growth} in {in_words(seconds)} ({format_number(growth * 3600 / seconds)} an hour)"
