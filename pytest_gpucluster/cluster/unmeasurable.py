"""Errors of places that cannot be measured, and of the groups they belong to. Pure: places and replies in, errors out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pytest_gpucluster.controller.diagnosis import diagnose
from pytest_gpucluster.errors import Blame, MeasurementError
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory.occupancy import SHOWN_PROCESSES, GpuProcess, Occupancy
from pytest_gpucluster.places import UNKNOWN_HOST, Place
from pytest_gpucluster.protocol.messages import Reply
from pytest_gpucluster.text import counted, one_line

Errors = dict[Any, MeasurementError]
FREE_IT = "end what holds the GPU, or wait for its job"
FIND_IT = "compare nvidia-smi, lspci and kernel log: those that joined have the first numbers, so another one may be absent"


def rank_of(place: Place) -> int:
    """The rank bound to a place.

    Raises:
        ValueError: no rank is.
    """
    if place.rank is None:
        raise ValueError(f"{place.id} is not bound")
    return place.rank


class Attendance:
    """How many of the expected GPUs answer, the nodes of which one does, and the hostnames by node."""

    def __init__(self, places: Collection[Place]) -> None:
        """``places``: all expected GPUs, as far as they are bound."""
        self.expected = len(places)
        self.answering = sum(place.rank is not None for place in places)
        self.answering_nodes = {place.node for place in places if place.rank is not None}
        self.hostnames = {place.node: place.hostname for place in reversed([*places]) if place.hostname}


def missing_error(place: Place, attendance: Attendance) -> MeasurementError:
    """The error of a GPU or node at which no rank answers.

    The culprit is the GPU, or its node where no GPU of that node answers.
    """
    hostname = attendance.hostnames.get(place.node, UNKNOWN_HOST)
    count = f"{attendance.answering} of {attendance.expected} expected places answer"
    if place.gpu is not None and place.node in attendance.answering_nodes:
        cause = f"no such GPU joined on {hostname}"
        text, culprit, blame = f"{place.id} is missing: {cause}", place, Blame(part="gpu", cause=cause, advice=FIND_IT)
    else:
        cause = f"{hostname} is absent"
        text, culprit, blame = f"{cause}: no such node joined", place.of_node, Blame(part="node", cause=cause)
    return MeasurementError(f"not run: {text} ({count})", culprits=(culprit,), kind="missing", blame=blame)


def not_idle_error(place: Place, found: Occupancy) -> MeasurementError:
    """The error of every measurement on a GPU that other work uses; the GPU itself has no fault."""
    limit = f"an idle GPU: up to {found.memory_limit_gib:g}"
    used = "" if found.memory_used_gib is None else f"{found.memory_used_gib:.1f} GiB in use ({limit})"
    busy = "" if found.utilization_percent is None else f"{found.utilization_percent} % busy"
    usage = ", ".join(part for part in (used, busy) if part)
    return MeasurementError(
        f"GPU not idle: {one_line(found.text)} on {place.label}\n"
        f"  before anything of this run was on it: {usage or 'NVML shows no more'}\n"
        "  next: end that process, or wait for its job, and start again; what is measured beside it would be wrong",
        culprits=(place,),
        kind="not_idle",
        blame=Blame(part="software", cause=f"GPU not idle: {one_line(found.text)}", advice=FREE_IT),
    )


def idle_again(busy: Iterable[Place], replies: Mapping[int, Reply]) -> dict[Place, Occupancy]:
    """The places of ``busy`` whose GPU nobody else uses any more, by their second reading."""
    read = {place: replies[rank_of(place)] for place in busy}
    values = {place: reply.value for place, reply in read.items() if reply.ok and not reply.foreign_processes}
    return {place: found for place, found in values.items() if not found.holders}


def foreign_process_errors(replies: Mapping[int, Reply], group: Iterable[Place], *, what: str) -> dict[Place, MeasurementError]:
    """The error of each member of a group on whose GPU a foreign process was seen; ``what`` went on meanwhile, in words."""
    found = {place: replies[rank_of(place)] for place in group}
    return {place: _foreign_process_error(place, reply, what) for place, reply in found.items() if reply.foreign_processes}


def _foreign_process_error(place: Place, reply: Reply, what: str) -> MeasurementError:
    seen = reply.foreign_processes
    text = ", ".join(GpuProcess(pid=one.pid, name=one.name, memory_gib=one.memory_gib).text for one in seen[:SHOWN_PROCESSES])
    more = f", {counted(len(seen) - SHOWN_PROCESSES, 'more process', 'more processes')}" if len(seen) > SHOWN_PROCESSES else ""
    when = f"came during this run, before {what}" if seen[0].when == "before" else f"came while {what}"
    lines = [
        f"GPU not idle: {text}{more} on {place.label}",
        f"  {when}; what was measured beside it is no value of this GPU",
        *([] if reply.ok else [f"  and there: {reply.error.partition(chr(10))[0]}"]),
        "  next: end that process, or wait for its job, and start again",
    ]
    blame = Blame(part="software", cause=f"GPU not idle: {text}{more}", advice=FREE_IT)
    return MeasurementError("\n".join(lines), culprits=(place,), kind="not_idle", blame=blame)


def error_for(replies: Mapping[int, Reply], places: Iterable[Place], *, what: str) -> MeasurementError:
    """The error of a group of ranks at ``places``, of which at least one failed; ``what`` did not work, in words."""
    by_rank = {place.rank: place for place in places if place.rank is not None}

    def name(rank: int) -> str:
        place = by_rank.get(rank)
        return f"rank {rank} ({place.id}, {place.hostname})" if place is not None else f"rank {rank}"

    found = diagnose(replies, name=name, what=what)
    named, failed = frozenset(found.culprits), frozenset(found.failed)
    culprits = tuple(place for rank, place in by_rank.items() if rank in named)
    if found.blames == "host" and found.advice is not None:  # a state of the host, which each of its ranks may meet
        culprits = tuple({place.node: place.of_node for place in culprits}.values())
    among = () if culprits or found.blames == "software" else tuple(by_rank[rank] for rank in by_rank if rank in failed)
    blame = Blame(part=found.blames, cause=found.cause, among=among, advice=found.advice)
    return MeasurementError(found.text, culprits=culprits, kind=found.kind, blame=blame)


def errors_of_pairs(unmeasurable: Mapping[Place, MeasurementError], chosen: Sequence[Place]) -> Errors:
    """The error of every ordered pair of ``chosen`` that has an unmeasurable member."""
    pairs = [(first, second) for first in chosen for second in chosen if first != second]
    errors = {pair: unmeasurable.get(pair[0]) or unmeasurable.get(pair[1]) for pair in pairs}
    return {pair: error for pair, error in errors.items() if error is not None}


def complete_groups(
    chosen: Sequence[Place], unmeasurable: Mapping[Place, MeasurementError], *, per: str
) -> tuple[list[list[Place]], Errors]:
    """The groups (nodes, NVLink domains, or the cluster) without an unmeasurable member, and the errors of the other members.

    A result from an incomplete group would answer a different question, so all its members get the error.
    """
    domains = domains_of(chosen) if per == "domain" else {}
    groups = grouped((place.node if per == "node" else domains.get(place.node, 0), place) for place in chosen)
    complete: list[list[Place]] = []
    errors: Errors = {}
    for group in groups.values():
        reasons = [unmeasurable[place] for place in group if place in unmeasurable]
        if reasons:
            errors.update(dict.fromkeys(group, merged(reasons)))
        else:
            complete.append(group)
    return complete, errors


def domains_of(places: Iterable[Place]) -> dict[int, int | str]:
    """The NVLink domain of each node: the fabric that all its GPUs belong to, or the node where they tell of none."""
    fabrics = grouped((place.node, place.fabric) for place in places)
    return {node: found[0] or node if len({*found}) == 1 else node for node, found in fabrics.items()}


def merged(errors: Sequence[MeasurementError]) -> MeasurementError:
    """The first error; where all of them are about GPUs that are not idle, one error that names every such GPU."""
    if len(errors) < 2 or any(error.kind != "not_idle" for error in errors):
        return errors[0]
    culprits = tuple(place for error in errors for place in error.culprits)
    also = ", ".join(place.label for place in culprits[1:])
    return MeasurementError(
        f"{errors[0]}\n  not idle either: {also}", culprits=culprits, kind="not_idle", blame=errors[0].blame
    )
