"""What a judge of hardware found at one place: which parts are bad, which are unknown, and what to do. Pure.

Every judge returns a :class:`Finding`, and ``criterion.judge`` has the one rule for all of them: judge what is known, then
raise what is unknown. So an unknown part never makes a bad one pass, and nothing unknown is ever green.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias, TypeVar

from pytest_gpucluster.errors import Blame, MeasurementError, Part
from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.noise import Repeats
from pytest_gpucluster.judging.siblings import Compared
from pytest_gpucluster.places import Place

HERE = ""
"""The subject of facts about the judged place itself."""
NOBODY = "no part is named"
"""The subject of what is unknown where the judged place may well be healthy: an error of it blames nobody."""
NOT_HARDWARE = ("software", "settings", "host")
"""Kinds that are also to blame for what they keep from being read; nobody takes them out of service for it."""
Subject: TypeAlias = "Place | str"
"""What a fact is about: a GPU or a node, the name of a part inside the place (a port), :data:`HERE` or :data:`NOBODY`."""
Facts: TypeAlias = "Mapping[Any, Sequence[str]]"
"""Texts by :data:`Subject`."""
Key = TypeVar("Key", bound=Subject)
BAD: Final = "bad"
UNKNOWN: Final = "unknown"
REMARK: Final = "remark"
Said: TypeAlias = "tuple[Any, Literal['bad', 'unknown', 'remark'], str]"
"""One thing that a judge says: the :data:`Subject`, what it says of it, and the text. A remark is about the whole place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What is known of one place, and what is not.

    Attributes:
        bad: by subject, each thing that is wrong with it, in words. A subject without a text is left out, here and below.
        unknown: by subject, why nothing can be said of it, or of a part of it.
        value: what the criterion judges, in its unit; None: the number of bad facts, and nothing if all is unknown.
        evidence: what else was seen, shown in reports.
        remark: what a value within its limit does not show.
        kind: the kind of the bad part, of the bad places where both are bad; None: what the place is.
        unknown_kind: the kind to blame for what is unknown; None: ``kind`` if that is one of :data:`NOT_HARDWARE`, otherwise
            ``unknown``, as a part that cannot be read may be healthy.
        advice: what to do about the worst bad part; None: what is usual for its kind.
        unknown_advice: what to do about what is unknown; None: what is usual for the kind to blame.
        among: the nodes that share the bad part, if it is a part of none of them, such as a leaf switch. Places in ``bad`` are
            then bad by themselves as well, and both are culprits.
        behind: by the name of such a bad part, the nodes of ``among`` that share it: each part is a culprit.
        disturbed_by: who else kept the host busy while ``value`` was measured: outside its limit, or too close to
            call, it is then an error and no failure of the part.
    """

    bad: Facts = field(default_factory=dict)
    unknown: Facts = field(default_factory=dict)
    value: float | Repeats | Compared | Mapping[Any, float] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    remark: str | None = None
    kind: Part | None = None
    unknown_kind: Part | None = None
    advice: str | None = None
    unknown_advice: str | None = None
    among: tuple[Place, ...] = ()
    behind: Mapping[str, tuple[Place, ...]] = field(default_factory=dict)
    disturbed_by: str | None = None

    def __post_init__(self) -> None:
        """Leave out subjects without a text."""
        for name in ("bad", "unknown"):
            object.__setattr__(self, name, {part: tuple(texts) for part, texts in getattr(self, name).items() if texts})

    @property
    def count(self) -> int:
        """How many facts are bad."""
        return sum(map(len, self.bad.values()))

    @property
    def facts(self) -> tuple[str, ...]:
        """Each bad fact in a line, with its subject."""
        return tuple(_lines(self.bad))

    @property
    def doubts(self) -> tuple[str, ...]:
        """Each reason why something is unknown in a line, with its subject."""
        return tuple(_lines(self.unknown))

    @property
    def judged(self) -> Any:
        """The value to judge; None if nothing is known."""
        if self.value is not None:
            return self.value
        return None if self.unknown and not self.bad else self.count

    def with_evidence(self, **evidence: Any) -> Finding:
        """The same finding, with more to show beside it."""
        return replace(self, evidence={**self.evidence, **evidence})

    def culprits(self, among: Iterable[Place]) -> tuple[Place, ...]:
        """The bad places; none if all of ``among`` are bad, as the fault is then not theirs."""
        return _some_of(self.bad, among)

    @property
    def names(self) -> tuple[str, ...]:
        """The bad parts inside the place that have a name of their own."""
        return tuple(part for part in self.bad if isinstance(part, str) and part != HERE)

    def error(self, place: Place | None, among: Iterable[Place] = ()) -> MeasurementError:
        """The error of what is unknown: at the unknown places of ``among`` if it is some of them, otherwise at ``place``."""
        own = () if place is None or {*self.unknown} == {NOBODY} else (place,)
        where = "" if place is None else f"{place.label}: "
        of_kind: Part = self.kind if self.kind in NOT_HARDWARE else "unknown"
        part = self.unknown_kind or of_kind
        blame = Blame(part=part, cause=self.doubts[0], advice=self.unknown_advice)
        culprits = _some_of(self.unknown, among) or own
        step = f"\n  next: {self.unknown_advice}" if self.unknown_advice is not None else ""
        return MeasurementError(f"{where}{'; '.join(self.doubts)}{step}", culprits=culprits, blame=blame)


def gather(pairs: Iterable[tuple[Key, str]]) -> dict[Key, tuple[str, ...]]:
    """Facts by their subject, in the order of the first fact of each."""
    return {part: tuple(facts) for part, facts in grouped(pairs).items()}


def finding_of(said: Iterable[Said]) -> Finding:
    """All that a judge says, one by one, as a finding; ``dataclasses.replace`` gives it a kind, advice and evidence."""
    by_word = grouped((word, (part, text)) for part, word, text in said)
    bad, unknown, remarks = (by_word.get(word, []) for word in (BAD, UNKNOWN, REMARK))
    return Finding(bad=gather(bad), unknown=gather(unknown), remark="; ".join(text for _, text in remarks) or None)


def merge(findings: Iterable[Finding]) -> Finding:
    """Several findings of one place as one: facts and doubts side by side; the rest is that of the first that has it."""
    every = list(findings)

    def first(name: str) -> Any:
        return next((value for one in every if (value := getattr(one, name)) not in (None, ())), None)

    return Finding(
        bad=gather(_pairs(every, lambda one: one.bad)),
        unknown=gather(_pairs(every, lambda one: one.unknown)),
        evidence={name: value for one in every for name, value in one.evidence.items()},
        remark="; ".join(one.remark for one in every if one.remark) or None,
        kind=first("kind"),
        unknown_kind=first("unknown_kind"),
        advice=first("advice"),
        unknown_advice=first("unknown_advice"),
        among=first("among") or (),
        behind={name: nodes for one in every for name, nodes in one.behind.items()},
        disturbed_by=first("disturbed_by"),
    )


def _pairs(findings: Iterable[Finding], of: Callable[[Finding], Facts]) -> Iterator[tuple[Subject, str]]:
    return ((part, fact) for one in findings for part, facts in of(one).items() for fact in facts)


def _lines(facts: Facts) -> Iterator[str]:
    for part, texts in facts.items():
        name = part.id if isinstance(part, Place) else part
        yield from (f"{name}: {text}" if name else text for text in texts)


def _some_of(facts: Facts, among: Iterable[Place]) -> tuple[Place, ...]:
    """The places that have facts; none if they are all of ``among``."""
    found = tuple(part for part in facts if isinstance(part, Place))
    return found if {*found} != {*among} else ()
