"""Which nodes slow a collective that missed its limit: smaller groups of nodes are measured, within a time. Pure.

A node that fell back to sockets makes an all-reduce of 8 GiB take 10 s: eight repeats of it would take all the time there is.
So a smaller group is measured less often.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.judging.failure_text import format_number
from pytest_gpucluster.localization.parts import Kind, MemberGroup, NamedPart, Result, SearchPart, SearchReport, Suspect
from pytest_gpucluster.localization.search import search
from pytest_gpucluster.text import counted
from pytest_gpucluster.thresholds.schema import KnownFault
from pytest_gpucluster.thresholds.versions import needed, packaged_versions, parse

FEWEST_NODES = 3
"""Of two nodes that fail together, either may be to blame."""
BEFORE: dict[Kind, str] = {"part": "", "whole": "all of ", "edge": "what leaves ", "between": "between "}
"""What a suspect is, before its names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSearch:
    """How a search among nodes ended.

    Attributes:
        report: what was found.
        measured: how many groups gave a value.
        seconds: how long it took.
        is_cut: the time was over before it ended by itself.
        unit: of the values.
    """

    report: SearchReport
    measured: int
    seconds: float
    is_cut: bool
    unit: str

    @property
    def nodes(self) -> tuple[str, ...]:
        """The ids of the nodes that are named."""
        return self._named("part")

    @property
    def shared(self) -> Mapping[str, str]:
        """What is named that is no node, in words, by the switches or nodes behind it: itself, its way out, or a connection."""
        named = self._suspects("between")
        ways = {name: f"the way between {' and '.join(suspect.names)}" for suspect in named for name in suspect.names}
        edges = {name: f"the way out of {name}" for name in self._named("edge")}
        return {**ways, **edges, **{name: name for name in self._named("whole")}}

    def _named(self, kind: Kind) -> tuple[str, ...]:
        return tuple(suspect.names[0] for suspect in self._suspects(kind))

    def _suspects(self, kind: Kind) -> list[Suspect]:
        return [found.suspect for found in self.report.culprits if found.suspect.kind == kind]

    @property
    def evidence(self) -> dict[str, Any]:
        """What it found, in words: for each node that is named, for connections, for the rest, and for suspects."""
        spent = f"{counted(self.measured, 'smaller group')} in {counted(self.report.rounds, 'round')}, {self.seconds:.0f} s"
        cut = "; no time was left for more" if self.is_cut else ""
        shown: dict[str, Any] = {_in_words(found.suspect): self._with(found) for found in self.report.culprits}
        rest = self.report.rest
        if rest is not None and rest.result.passed and rest.result.value is not None:
            shown["the rest"] = f"{format_number(rest.result.value)} {self.unit} on {counted(len(rest.group.parts), 'node')}"
        if self.report.unconfirmed:
            shown["suspected, not confirmed"] = [_in_words(found.suspect) for found in self.report.unconfirmed]
        if not self.report.culprits:
            shown["localization"] = "no node could be named"
        return {**shown, "searched": f"{spent}{cut}"}

    def _with(self, found: NamedPart) -> str:
        values = [test.result.value for test in found.evidence if test.result.value is not None]
        passed = f", {found.passed} passed" if found.passed else ""
        return f"{counted(len(found.evidence), 'group')} with it missed the limit, best {format_number(max(values))}{passed}"


def _in_words(suspect: Suspect) -> str:
    return BEFORE[suspect.kind] + " and ".join(suspect.names)


def search_nodes(
    nodes: Mapping[str, str | None],
    measure: Callable[[Sequence[MemberGroup], float], Sequence[Result]],
    *,
    within_s: float,
    unit: str,
    clock: Callable[[], float] = time.monotonic,
) -> NodeSearch:
    """Search for so long, at least one round.

    Args:
        nodes: the ids of at least :data:`FEWEST_NODES` nodes, each with the switch or rack that it shares with others, if
            that is known.
        measure: the results of the groups of a round, which share no node, and the seconds that are left for it.
        within_s: no further round begins after so many seconds.
        unit: of the values.
        clock: the time in seconds.
    """
    began_s, measured, is_cut = clock(), 0, False

    def in_time(groups: Sequence[MemberGroup]) -> Sequence[Result]:
        nonlocal measured, is_cut
        left_s = began_s + within_s - clock()
        if left_s <= 0:
            is_cut = True
            return [Result(passed=None) for _ in groups]
        found = measure(groups, left_s)
        measured += sum(one.passed is not None for one in found)
        return found

    parts = [SearchPart(name=node, within=() if shared is None else (shared,)) for node, shared in nodes.items()]
    report = search(parts, in_time)
    return NodeSearch(report=report, measured=measured, seconds=clock() - began_s, is_cut=is_cut, unit=unit)


ITERATIONS = 8
"""Of each smaller group at most: a search has a minute, and is after nodes that are clearly too slow."""
FEWEST_ITERATIONS = 2
GROUP_S = 3.0
"""Seconds beyond which a group gets fewer iterations, if it is as slow as the collective that missed its limit."""
SLOW_WARMUP = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What a smaller group is measured with.

    Attributes:
        size_bytes: of the all-reduce.
        iterations: that are timed.
        warmup: iterations before these.
        dtype: that of the recipe.
    """

    size_bytes: int
    iterations: int
    warmup: int
    dtype: str


def effort_of(recipe: Mapping[str, Any], *, nodes: int, gpus: int, busbw_gb_s: float) -> Effort:
    """What fits into :data:`GROUP_S`, :data:`FEWEST_ITERATIONS` at least. The size stays: the limit holds for no smaller one.

    Args:
        recipe: of the all-reduce that missed its limit.
        nodes: of the largest group, which decide about the size as in the all-reduce itself.
        gpus: of the largest group.
        busbw_gb_s: the bus bandwidth that is expected of a bad group, in 10^9 bytes a second.
    """
    is_large = nodes >= recipe.get("large_from_nodes", math.inf)
    size_bytes = recipe["large_size_bytes" if is_large else "size_bytes"]
    fitting = GROUP_S * busbw_gb_s * 1e9 / (size_bytes * 2 * (gpus - 1) / gpus)  # nccl-tests' factor of an all-reduce
    iterations, warmup = min(ITERATIONS, recipe["iterations"]), recipe["warmup"]
    if fitting < iterations + warmup:
        warmup = min(SLOW_WARMUP, warmup)
        iterations = min(iterations, max(FEWEST_ITERATIONS, int(fitting) - warmup))
    return Effort(size_bytes=size_bytes, iterations=iterations, warmup=warmup, dtype=recipe["dtype"])


# --- NCCL's choice of an algorithm ---
# Large messages over many nodes go best by rings. Where NCCL chose something else and rings are fast enough, the library is
# slow, and no node, cable or switch is to blame.

RINGS = {"NCCL_ALGO": "Ring"}
"""What makes NCCL take rings."""
CHOICE = "NCCL's choice of an algorithm"
"""The culprit."""


def is_not_ring(algorithm: str | None) -> bool:
    """Whether NCCL chose something else than rings; not where its choice is unknown."""
    return algorithm is not None and algorithm.replace("_", "").lower() != "ring"


def advice_on_choice(algorithm: str, version: str | None, *, nodes: int, faults: Sequence[KnownFault] | None = None) -> str:
    """What to do about a choice that is slow where rings are fast.

    Args:
        algorithm: that NCCL chose, as its log calls it.
        version: of NCCL, ``2.29.7``; None where it is not known.
        nodes: of the collective.
        faults: what is known of NCCL's versions; None for the packaged table. Never seen by this program: nothing ran here on
            four nodes.
    """
    what = f"take another NCCL than {version or 'this one'}, or set NCCL_ALGO=Ring for jobs of this size"
    own = parse("nccl", version or "")
    for known in packaged_versions().nccl if faults is None else faults:
        mended = needed("nccl", own, known) if own is not None and known.algorithm == algorithm else None
        if mended is not None and nodes >= known.nodes:
            return f"{what}; known of {algorithm}: {known.fault} ({known.source}), mended in {mended}"
    return what
