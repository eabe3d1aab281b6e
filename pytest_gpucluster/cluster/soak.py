"""A soak: small pieces of work in turn, round after round, until the time is over. Knows no GPU and no limit.

Each piece is an ordinary call with an ordinary deadline, so nothing can hang for hours, and what goes wrong has a round. What a
journal keeps of each turn is plain data, from which another run reads the soak back. No file is touched here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol

import msgspec

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.finding import Facts, Finding
from pytest_gpucluster.judging.forecast import in_words
from pytest_gpucluster.places import Place
from pytest_gpucluster.text import text_of
from pytest_gpucluster.thresholds.limit import is_finite

Keep = Literal["lowest", "highest", "total"]
CLUSTER = Place(id="cluster", node=-1)
"""Where a value stands that all nodes share. It blames no place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SoakWork:
    """One kind of work.

    ``read`` takes what was found at each measured place out of a round's results. ``keep`` says which value stands for all
    rounds: the lowest, the highest, or (counts) the total. ``compares``: GPUs are compared with each other, so all of them take
    part, whichever tests were selected.
    """

    CLUSTER: ClassVar[Place] = CLUSTER
    """The place of a value that all nodes share."""
    read: Callable[[Results], Mapping[Place, Finding]]
    keep: Keep
    compares: bool = False


@dataclass(slots=True, kw_only=True)
class SoakResult:
    """What is kept of all rounds of one kind of work at one place; ``worst`` is of the worst round, the first of equal ones."""

    criterion: str
    place: Place
    keep: Keep
    rounds: int = 0
    value: float | None = None
    worst: Finding | None = None
    worst_round: int = 0
    first_and_last: tuple[float, float] = (0.0, 0.0)
    error: MeasurementError | None = None
    remark: str | None = None
    unknown: Facts = field(default_factory=dict)
    latest_round: int = 0

    def add(self, number: int, found: Finding) -> None:
        """One more round. A value that is no finite number was not measured; the rounds go on where a part is unknown."""
        value = found.count if found.value is None else found.value
        if not is_finite(value):
            blamed = () if self.place == CLUSTER else (self.place,)
            self.fail(number, MeasurementError(f"{text_of(value, repr)} is not a finite number", culprits=blamed))
            return
        before = value if self.value is None else self.value
        extreme = min if self.keep == "lowest" else max
        worst = value if self.worst is None else float(self.worst.judged)
        is_worse = self.worst is None or extreme(value, worst) != worst
        self.first_and_last = (value if self.worst is None else self.first_and_last[0], value)
        if self.keep == "total" and self.worst is not None:
            self.value = before + value
        else:
            self.value = extreme(before, value)
        if is_worse:
            self.worst, self.worst_round = replace(found, value=value), number
        self.remark = found.remark or self.remark
        if found.unknown and not self.unknown:
            where = f"in round {number} of the soak"
            self.unknown = {part: [f"{where}: {text}" for text in texts] for part, texts in found.unknown.items()}
        self.rounds += 1
        self.latest_round = number

    def fail(self, number: int, error: MeasurementError) -> None:
        """Record that the place could not be measured in this round. Later rounds leave it out of this kind of work."""
        text = f"in round {number} of the soak, after {self.rounds} good ones: {error}"
        self.error = MeasurementError(text, culprits=error.culprits, kind=error.kind, blame=error.blame)
        self.latest_round = number

    @property
    def own_place(self) -> Place | None:
        """The place of the values; None where all nodes share them."""
        return None if self.place == CLUSTER else self.place

    @property
    def evidence(self) -> dict[str, Any]:
        """The worst round, what it showed, and how the rounds went."""
        assert self.worst is not None
        return {
            "rounds": self.rounds,
            "worst in round": self.worst_round,
            "first round": self.first_and_last[0],
            "last round": self.first_and_last[1],
            **self.worst.evidence,
        }

    def judge(self, criterion: Criterion) -> None:
        """Judge what was measured, then raise the error of what was not.

        Raises:
            CriterionFailedError: a value outside the limit, whatever else happened.
            MeasurementError: a round could not be measured here.
        """
        if self.value is not None and self.worst is not None:
            criterion.judge(replace(self.worst, value=self.value, unknown={}, evidence=self.evidence, remark=self.remark))
        if self.error is not None:
            raise self.error
        if self.unknown:
            unknown = Finding(unknown=self.unknown, unknown_kind=self.worst.unknown_kind if self.worst else None)
            raise unknown.error(self.own_place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One kind of work in one round: measure ``criterion`` at ``places``, then :meth:`keep` the results."""

    round: int
    criterion: str
    places: tuple[Place, ...]
    _work: SoakWork
    _kept: Mapping[Place, SoakResult]
    _watch: Watch

    def keep(self, results: Results) -> None:
        """Fold a round's results into what is kept; those of other places than :attr:`places` are passed over."""
        for place, error in self._errors(results).items():
            if place in self.places:
                self._kept[place].fail(self.round, error)
        for place, found in self._work.read(results).items():
            if place in self.places:
                self._kept[place].add(self.round, found)
        self._watch.seen([self._kept[place] for place in self.places])

    def _errors(self, results: Results) -> Mapping[Place, MeasurementError]:
        """The errors by place; of a value that all nodes share, the cause of all of them."""
        if CLUSTER not in self.places:
            return results.errors
        try:
            results.value  # noqa: B018 -- raises
        except MeasurementError as error:
            return {CLUSTER: error}
        return {}

    def close(self) -> None:
        """Record an error at every place whose value the test did not keep in this turn."""
        for place in self.places:
            if self._kept[place].latest_round != self.round:
                self._kept[place].fail(self.round, MeasurementError(f"{place}: {self.criterion} kept no value"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What a soak had measured when it was cut short. ``kept`` is by criterion and place id.

    ``round``: the last one of which anything was measured. ``elapsed_s``: up to the end of the last whole round.
    """

    round: int
    num_whole_rounds: int
    elapsed_s: float
    kept: Mapping[tuple[str, str], SoakResult]


NOTHING_EARLIER = Earlier(round=0, num_whole_rounds=0, elapsed_s=0.0, kept={})


class Watch(Protocol):
    """What a soak reports its progress to."""

    def begin(self, soak: Soak, works: Collection[str]) -> None:
        """The rounds begin, of these works; a soak that was cut short may go on."""

    def turn(self, turn: Turn) -> None:
        """A kind of work begins."""

    def seen(self, kept: Sequence[SoakResult]) -> None:
        """A turn has new values or errors; its round is not over."""

    def round_over(self, soak: Soak) -> None:
        """A round is over."""


class Soak:
    """What the ``soak`` fixture gives: ``for turn in soak.rounds(works)``, then ``soak[criterion, place]``.

    ``rounds_s``: how long the whole rounds took up to now, those before a cut included; by this the soak ends.
    """

    def __init__(
        self,
        *,
        duration_s: float,
        places: Sequence[Place],
        wanted: Mapping[str, Sequence[Place]],
        watch: Watch,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measure nothing yet.

        Args:
            duration_s: of all rounds, those before a cut included.
            places: all there are.
            wanted: those that selected tests judge, by criterion.
            watch: is called before and after each measurement.
            now: the time in seconds.
        """
        self.duration_s = duration_s
        self.round = 0
        self.num_whole_rounds = 0
        self.is_over = False
        self.rounds_s = 0.0
        self._places = tuple(places)
        self._wanted = wanted
        self._watch = watch
        self._earlier = NOTHING_EARLIER
        self._now = now
        self._began_s = now()
        self._kept: dict[str, dict[Place, SoakResult]] = {}

    def go_on_with(self, earlier: Earlier) -> None:
        """Begin with what was measured before the soak was cut short. Called before the first round."""
        self._earlier = earlier

    @property
    def elapsed_s(self) -> float:
        """Since the first round began, without the time between a cut and what goes on after it."""
        return self._earlier.elapsed_s + self._now() - self._began_s

    def __getitem__(self, key: tuple[str, Place]) -> SoakResult:
        """What is kept of a criterion at a place."""
        return self._kept[key[0]][key[1]]

    def __iter__(self) -> Iterator[SoakResult]:
        """Everything kept so far."""
        return (kept for places in self._kept.values() for kept in places.values())

    def is_wanted(self, criterion: str) -> bool:
        """Whether a selected test judges this criterion."""
        return bool(self._wanted.get(criterion))

    def has_work(self, criterion: str) -> bool:
        """Whether rounds bring values of this criterion."""
        return criterion in self._kept

    def unmeasured(self, criterion: str, place: Place | None) -> str | None:
        """Why the values are not those of the whole soak; None if they are."""
        kept = [one for where, one in self._kept.get(criterion, {}).items() if place is None or where == place]
        lost = next((one.error for one in kept if one.error is not None), None)
        if lost is not None:
            return str(lost)
        if self.num_whole_rounds == 0 or any(one.rounds == 0 for one in kept):
            return "no whole round of the soak was measured"
        if not self.is_over:
            share = f"{in_words(self.elapsed_s)} of {in_words(self.duration_s)}"
            return f"the soak was left before its time was over, in round {self.round}, after {share}"
        return None

    def rounds(self, works: Mapping[str, SoakWork]) -> Iterator[Turn]:
        """The turns of every round: those of ``works`` (by criterion) that a selected test judges, in this order.

        Rounds are whole, and none begins once the time is over; there is at least one. A place that could not be measured
        has no more turns at that work; when nobody has any, the soak is over.
        """
        chosen = {key: work for key, work in works.items() if self._wanted.get(key)}
        self._watch.begin(self, chosen.keys())
        for key, work in chosen.items():
            places = self._places if work.compares else self._wanted[key]
            self._kept[key] = {place: self._begin(key, place, work) for place in places}
        self._began_s, self.round = self._now(), self._earlier.round
        self.num_whole_rounds, self.is_over = self._earlier.num_whole_rounds, False
        self.rounds_s = self._earlier.elapsed_s
        while (self.round == 0 or self.rounds_s < self.duration_s) and any(map(self._left, chosen)):
            self.round += 1
            for key, work in chosen.items():
                places = self._left(key)
                if places:
                    turn = self._turn(key, places, work)
                    self._watch.turn(turn)
                    yield turn
                    turn.close()
            self.num_whole_rounds, self.rounds_s = self.round, self.elapsed_s
            self._watch.round_over(self)
        self.is_over = self.rounds_s >= self.duration_s

    def _begin(self, key: str, place: Place, work: SoakWork) -> SoakResult:
        """What is kept of a work at a place before the first round: what an earlier part of the soak left, or nothing."""
        earlier = self._earlier.kept.get((key, place.id))
        return replace(earlier, place=place) if earlier is not None else SoakResult(criterion=key, place=place, keep=work.keep)

    def _turn(self, key: str, places: tuple[Place, ...], work: SoakWork) -> Turn:
        return Turn(round=self.round, criterion=key, places=places, _work=work, _kept=self._kept[key], _watch=self._watch)

    def _left(self, criterion: str) -> tuple[Place, ...]:
        return tuple(place for place, kept in self._kept[criterion].items() if kept.error is None)

    @property
    def line(self) -> str:
        """How far it is, in words."""
        left_s = max(0.0, self.duration_s - self.elapsed_s)
        return f"round {self.round}: {in_words(self.elapsed_s)} of {in_words(self.duration_s)}, {in_words(left_s)} left"


class SoakRecord:
    """Makes the facts of each measurement. Remembers what it has said, so as not to say it again."""

    def __init__(self) -> None:
        """Nothing was said yet."""
        self._places: dict[str, list[str]] = {}
        self._remarks: dict[tuple[str, str], str | None] = {}
        self._doubtful: set[tuple[str, str]] = set()

    def facts(self, kept: Sequence[SoakResult]) -> dict[str, Any]:
        """What the measurement that ends now gave at each place that has a value; ``kept`` is of one criterion.

        ``places`` are said where they are others than the last time. ``values`` has those that are not ``usual``.
        """
        first, number = kept[0], max(one.latest_round for one in kept)
        measured = [one for one in kept if one.error is None and one.latest_round == number]
        counts = Counter(one.first_and_last[1] for one in measured)
        usual = counts.most_common(1)[0][0] if counts else None
        facts: dict[str, Any] = {"round": number, "criterion": first.criterion, "keep": first.keep, "usual": usual}
        places = [one.place.id for one in measured]
        if places != self._places.get(first.criterion):
            self._places[first.criterion] = facts["places"] = places
        facts["values"] = {one.place.id: one.first_and_last[1] for one in measured if one.first_and_last[1] != usual}
        details = {one.place.id: self._details(one) for one in measured}
        facts["details"] = {place: one for place, one in details.items() if one}
        return facts

    def _details(self, kept: SoakResult) -> dict[str, Any]:
        """The finding where this round is the worst, what is unknown, and the remark where it is another one."""
        found: dict[str, Any] = {}
        if kept.worst is not None and kept.worst_round == kept.latest_round:
            found = {"finding": _plain(kept.worst)}
        key = (kept.criterion, kept.place.id)
        if kept.unknown and key not in self._doubtful:
            self._doubtful.add(key)
            found["unknown"] = _plain_texts(kept.unknown)
        if kept.remark != self._remarks.get(key):
            self._remarks[key] = found["remark"] = kept.remark
        return found


def read_back(
    turns: Iterable[Mapping[str, Any]], *, places: Iterable[Place], num_whole_rounds: int, elapsed_s: float
) -> Earlier:
    """The soak after these measurements, each with the facts that :class:`SoakRecord` made.

    Args:
        turns: in the order in which they were measured.
        places: every GPU and node of this run.
        num_whole_rounds: how many rounds were whole.
        elapsed_s: up to the end of the last whole round.

    Raises:
        AttributeError, LookupError, TypeError, ValueError: these are not such facts.
    """
    by_id = {place.id: place for place in (*places, CLUSTER)}
    kept: dict[tuple[str, str], SoakResult] = {}
    covered: dict[str, list[str]] = {}
    latest = num_whole_rounds
    for turn in turns:
        key, number = str(turn["criterion"]), int(turn["round"])
        latest = max(latest, number)
        covered[key] = [str(place) for place in turn.get("places", covered.get(key, ()))]
        for place in covered[key]:
            keep: Keep = msgspec.convert(turn["keep"], Keep)
            one = kept.setdefault((key, place), SoakResult(criterion=key, place=by_id[place], keep=keep))
            one.add(number, _found(turn, place, by_id))
            one.unknown = _texts(turn["details"].get(place, {}).get("unknown", ()), by_id) or one.unknown
    return Earlier(round=latest, num_whole_rounds=num_whole_rounds, elapsed_s=elapsed_s, kept=kept)


AS_IT_IS = ("kind", "unknown_kind", "advice")
"""What of a finding is text in the journal too."""


def _found(turn: Mapping[str, Any], place: str, by_id: Mapping[str, Place]) -> Finding:
    """What a measurement showed at a place.

    Raises:
        TypeError: the value is no number.
    """
    value = turn["values"].get(place, turn["usual"])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is not the value of a round")
    details = turn["details"].get(place, {})
    facts = details.get("finding", {})
    return Finding(
        value=value,
        bad=_texts(facts.get("bad", ()), by_id),
        evidence=dict(facts.get("evidence", {})),
        remark=details.get("remark"),
        **{name: facts.get(name) for name in AS_IT_IS},
    )


def _plain(finding: Finding) -> dict[str, Any]:
    found = {"bad": _plain_texts(finding.bad), "evidence": dict(finding.evidence)}
    found |= {name: getattr(finding, name) for name in AS_IT_IS}
    return {name: value for name, value in found.items() if value}


def _plain_texts(facts: Facts) -> list[list[Any]]:
    """Texts by subject as rows: whether the subject is a place, its id or name, the texts."""
    return [[isinstance(part, Place), str(part), list(texts)] for part, texts in facts.items()]


def _texts(rows: Iterable[Sequence[Any]], by_id: Mapping[str, Place]) -> Facts:
    return {by_id[name] if is_place else str(name): [str(text) for text in texts] for is_place, name, texts in rows}
