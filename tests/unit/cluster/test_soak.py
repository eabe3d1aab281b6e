"""Rounds of work until the time is over, and what is kept of them."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.cluster.soak import CLUSTER, Earlier, Soak, SoakResult, SoakWork
from pytest_gpucluster.errors import ConfigurationError, CriterionFailedError, MeasurementError
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.finding import HERE, Finding
from pytest_gpucluster.judging.plan import Plan
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin.whole_run.soak_reports import Reports, start, worst_of
from pytest_gpucluster.thresholds.limit import Bound
from tests.support.entries import limit, threshold

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pytest_gpucluster.judging.verdict import Record

PLACES = tuple(Place(id=f"node0-gpu{gpu}", node=0, gpu=gpu, rank=gpu) for gpu in range(3))

NO_READINGS: Any = SimpleNamespace(judges={})


def seen(results: Results) -> dict[Place, Finding]:
    """The numbers as they are."""
    return {place: Finding(value=results[place], evidence={"W": 700}) for place in results if place not in results.errors}


RATES = SoakWork(read=seen, keep="lowest")
ERRORS = SoakWork(read=seen, keep="total")


class Script:
    """A soak by a clock that is told how long each turn takes, with given values; remembers who was told what."""

    def __init__(self, *, duration_s: float, wanted: dict[str, Any] | None = None, turn_s: float = 1.0) -> None:
        self.now_s = 1000.0
        self.turn_s = turn_s
        self.turns: list[tuple[int, str, list[str]]] = []
        self.told: list[tuple[int, str, list[str]]] = []
        self.rounds: list[int] = []
        self.works: list[str] = []
        self.soak = Soak(
            duration_s=duration_s,
            places=PLACES,
            wanted=wanted if wanted is not None else {"rate": PLACES, "errors": PLACES},
            watch=self,
            now=lambda: self.now_s,
        )

    def begin(self, soak: Soak, works: Collection[str]) -> None:
        """The rounds begin."""
        assert soak is self.soak
        self.works = [*works]

    def turn(self, turn: Any) -> None:
        """A kind of work begins."""
        self.turns.append((turn.round, turn.criterion, [place.id for place in turn.places]))

    def seen(self, kept: Sequence[SoakResult]) -> None:
        """A turn has brought something."""
        self.told.append((self.soak.round, kept[0].criterion, [one.place.id for one in kept]))

    def round_over(self, soak: Soak) -> None:
        """A round is over."""
        self.rounds.append(soak.round)

    def run(self, works: dict[str, SoakWork], value: Callable[[int, str, Place], float | Exception]) -> Soak:
        """All rounds; ``value(round, criterion, place)`` is what is measured."""
        for turn in self.soak.rounds(works):
            found = {place: value(turn.round, turn.criterion, place) for place in turn.places}
            bad = {place: one for place, one in found.items() if isinstance(one, MeasurementError)}
            turn.keep(Results({place: one for place, one in found.items() if place not in bad}, bad))
            self.now_s += self.turn_s
        return self.soak


def criterion(kind: Any = "above", value: float = 700, **changes: Any) -> Criterion:
    """One that judges at the first place."""
    return Criterion(threshold=threshold(**changes), limit=limit(kind, value), place=PLACES[0])


def test_rounds_are_whole_and_end_with_the_time() -> None:
    """Every work in turn; none begins once the time is over; the last round is finished."""
    script = Script(duration_s=5)
    script.run({"rate": RATES, "errors": ERRORS}, lambda *_: 0.0)
    assert [(number, key) for number, key, _ in script.turns] == [
        (number, key) for number in (1, 2, 3) for key in ("rate", "errors")
    ]
    assert script.rounds == [1, 2, 3]
    assert script.told == script.turns  # at once, not when the round is over
    assert script.soak.elapsed_s == 6
    assert script.soak.unmeasured("rate", PLACES[0]) is None


def test_what_is_written_down_of_the_last_round_is_what_ended_the_soak() -> None:
    """To write a round down takes time as well: a soak that is over must not look like one that was cut short."""
    script = Script(duration_s=5)
    written_s = []

    def write_down(soak: Soak) -> None:
        written_s.append(soak.rounds_s)
        script.now_s += 1.5

    script.round_over = write_down  # type: ignore[method-assign]
    script.run({"rate": RATES, "errors": ERRORS}, lambda *_: 0.0)
    assert written_s == [2, 5.5]


def test_at_least_one_round() -> None:
    """A duration shorter than a turn still measures all."""
    script = Script(duration_s=0.001)
    assert script.run({"rate": RATES, "errors": ERRORS}, lambda *_: 1.0)["errors", PLACES[2]].value == 1


def test_only_what_is_selected_runs() -> None:
    """No work without a test; at the places its tests want, or everywhere where GPUs are compared."""
    compared = SoakWork(read=seen, keep="total", compares=True)
    script = Script(duration_s=1, wanted={"errors": PLACES[:1], "bits": PLACES[1:2]})
    script.run({"rate": RATES, "errors": ERRORS, "bits": compared}, lambda *_: 0.0)
    assert script.turns == [(1, "errors", ["node0-gpu0"]), (1, "bits", ["node0-gpu0", "node0-gpu1", "node0-gpu2"])]
    assert script.works == ["errors", "bits"]


def test_nothing_selected_is_no_soak() -> None:
    """It ends at once."""
    script = Script(duration_s=1e9, wanted={})
    script.run({"rate": RATES}, lambda *_: 0.0)
    assert (script.turns, script.rounds) == ([], [])


@pytest.mark.parametrize(("keep", "value", "worst"), [("lowest", 5.0, 2), ("highest", 9.0, 1), ("total", 21.0, 1)])
def test_what_is_kept(keep: Any, value: float, worst: int) -> None:
    """The lowest, the highest or the sum; evidence from the worst round, the first of equals."""
    script = Script(duration_s=3)
    found = script.run({"rate": SoakWork(read=seen, keep=keep)}, lambda number, *_: {1: 9.0, 2: 5.0, 3: 7.0}[number])
    kept = found["rate", PLACES[0]]
    assert (kept.value, kept.worst_round, kept.rounds) == (value, worst, 3)
    assert kept.evidence == {"rounds": 3, "worst in round": worst, "first round": 9.0, "last round": 7.0, "W": 700}


def test_a_bad_round_is_not_forgotten() -> None:
    """The third round is clean again, and the judgement is that of the second."""
    found = Script(duration_s=3).run({"rate": RATES}, lambda number, *_: 500.0 if number == 2 else 750.0)
    judging = criterion()
    with pytest.raises(CriterionFailedError, match=r"500"):
        found["rate", PLACES[0]].judge(judging)
    assert judging.judged is not None
    assert judging.judged.evidence["worst in round"] == 2


def died(number: int, key: str, place: Place) -> float | Exception:
    """The second GPU's worker dies in round 2 of the first work."""
    if (number, key, place) == (2, "rate", PLACES[1]):
        return MeasurementError("rank 1 died", culprits=(place,), kind="died")
    return 750.0 if key == "rate" else 0.0


def test_who_cannot_be_measured_leaves_that_work_alone() -> None:
    """It is out from then on, in that work; the others go on, and the error has its round."""
    script = Script(duration_s=6)
    found = script.run({"rate": RATES, "errors": ERRORS}, died)
    assert [places for number, key, places in script.turns if key == "rate"][2] == ["node0-gpu0", "node0-gpu2"]
    assert all(len(places) == 3 for _, key, places in script.turns if key == "errors")
    with pytest.raises(MeasurementError, match="in round 2 of the soak, after 1 good ones: rank 1 died") as caught:
        found["rate", PLACES[1]].judge(criterion())
    assert (caught.value.culprits, caught.value.kind) == ((PLACES[1],), "died")
    found["rate", PLACES[0]].judge(criterion())


def test_a_failure_before_the_death_is_a_failure() -> None:
    """Measured and bad comes before not measured any more."""
    found = Script(duration_s=2).run(
        {"rate": RATES}, lambda number, *_: 500.0 if number == 1 else MeasurementError("rank 0 died")
    )
    with pytest.raises(CriterionFailedError):
        found["rate", PLACES[0]].judge(criterion())


def test_everything_lost_ends_the_soak() -> None:
    """Nobody is left to measure: hours of nothing would follow."""
    script = Script(duration_s=1e9)
    script.run({"rate": RATES, "errors": ERRORS}, lambda *_: MeasurementError("all are gone"))
    assert script.rounds == [1]


@pytest.mark.parametrize("value", [math.nan, math.inf, True, pytest.param(10**5000, id="long")])
def test_no_number_is_no_measurement(value: float) -> None:
    """It would hide in a minimum."""
    found = Script(duration_s=1).run({"rate": RATES}, lambda *_: value)
    with pytest.raises(MeasurementError, match="not a finite number"):
        found["rate", PLACES[0]].judge(criterion())


def test_a_turn_that_kept_nothing_is_no_good_round() -> None:
    """Neither a forgotten ``keep`` nor a place that ``read`` leaves out passes."""
    script = Script(duration_s=1)
    for turn in script.soak.rounds(
        {"rate": SoakWork(read=lambda _: {PLACES[0]: Finding(value=1.0)}, keep="lowest"), "errors": ERRORS}
    ):
        if turn.criterion == "rate":
            turn.keep(Results(dict.fromkeys(PLACES, 1.0), {}))
        script.now_s += 1
    assert script.soak["rate", PLACES[0]].error is None
    for key, place in (("rate", PLACES[1]), ("errors", PLACES[0])):
        assert "kept no value" in str(script.soak[key, place].error)


def test_other_places_are_passed_over() -> None:
    """A measurement that was not narrowed brings nobody back who is out."""
    script = Script(duration_s=1, wanted={"rate": PLACES[:1]})
    for turn in script.soak.rounds({"rate": RATES}):
        turn.keep(Results({PLACES[0]: 1.0, PLACES[1]: 2.0}, {PLACES[2]: MeasurementError("no")}))
        script.now_s += 1
    assert [kept.place for kept in script.soak] == [PLACES[0]]


@pytest.mark.parametrize(
    ("turns", "told"),
    [
        (0, "no whole round of the soak was measured"),
        (1, "no whole round of the soak was measured"),
        (2, "no whole round of the soak was measured"),
        (5, "the soak was left before its time was over, in round 3, after 5 s of 6 s"),
        (7, None),
    ],
)
def test_a_soak_that_was_left(turns: int, told: str | None) -> None:
    """Whoever leaves the loop has measured no soak, however good the rounds were; that includes one whole round."""
    script = Script(duration_s=6)
    for number, turn in enumerate(script.soak.rounds({"rate": RATES, "errors": ERRORS}) if turns else (), start=1):
        turn.keep(Results(dict.fromkeys(PLACES, 1.0), {}))
        script.now_s += 1
        if number == turns:
            break
    assert script.soak.unmeasured("rate", PLACES[0]) == told
    assert script.soak.unmeasured("made of both", None) == told  # a criterion that is derived from them


def test_a_lost_place_has_no_whole_soak() -> None:
    """Also where its good rounds were bad enough to be a failure; the other places have theirs."""
    found = Script(duration_s=6).run({"rate": RATES, "errors": ERRORS}, died)
    assert "in round 2 of the soak" in str(found.unmeasured("rate", PLACES[1]))
    assert "in round 2 of the soak" in str(found.unmeasured("rate", None))
    assert found.unmeasured("rate", PLACES[0]) is None
    assert found.unmeasured("errors", PLACES[1]) is None


class Records:
    """In the session's place: what was settled, with everybody answering for everything that can be answered for."""

    def __init__(self) -> None:
        self.plan = Plan()
        self.plan.expect("tflops", PLACES[0].id, nodeid="t")
        self.settled: list[Record] = []
        self.recorder = self.live = self
        self.told: list[Record] = []
        self.turns: list[dict[str, Any]] = []

    def write(self, event: str, **facts: Any) -> None:
        """Take what one measurement showed."""
        assert event == "soak_turn"
        self.turns.append(facts)

    def show_failure(self, record: Record) -> None:
        """Show a failure at once."""
        self.told.append(record)

    def record_outcome(self, record: Record) -> None:
        """Take it."""
        self.plan.set_outcome(record)
        self.settled.append(record)


@pytest.mark.parametrize(
    ("values", "number"),
    [((6600.0, 750.0, 751.0), 1), ((750.0, 6600.0, 751.0), 2), ((750.0, 751.0, 6600.0), 3), ((6600.0,), 1)],
)
def test_one_round_that_is_too_good(values: tuple[float, ...], number: int) -> None:
    """The worst round is judged, and hides a clock that was wrong in another one. It is on record at once, with its round."""
    session: Any = Records()
    judge = criterion()
    judge.limit = replace(judge.limit, bound=Bound(value=1070.0, unit="TFLOPS", is_most=True, by="the sheet"))
    reports = Reports(session, session, {("tflops", PLACES[0].id): judge}, NO_READINGS)
    kept = SoakResult(criterion="tflops", place=PLACES[0], keep="lowest")
    for at, value in enumerate(values, start=1):
        if kept.error is None:
            kept.add(at, Finding(value=value))
            reports.seen([kept])
    (record,) = session.settled
    assert record.outcome == "error"
    assert kept.error is not None
    assert f"in round {number} of the soak, after {number - 1} good ones: tflops at {PLACES[0]}: 6600 TFLOPS" in str(kept.error)
    with pytest.raises(MeasurementError, match="more than the hardware can: the measurement is wrong"):
        kept.judge(judge)


def test_a_round_that_misses_stays_a_failure_beside_one_that_is_too_good() -> None:
    """Whatever else happened."""
    session: Any = Records()
    judge = criterion()
    judge.limit = replace(judge.limit, bound=Bound(value=1070.0, unit="TFLOPS", is_most=True, by="the sheet"))
    reports = Reports(session, session, {("tflops", PLACES[0].id): judge}, NO_READINGS)
    kept = SoakResult(criterion="tflops", place=PLACES[0], keep="lowest")
    for at, value in enumerate((500.0, 6600.0), start=1):
        kept.add(at, Finding(value=value))
        reports.seen([kept])
    assert [one.outcome for one in session.settled] == ["failed"]
    with pytest.raises(CriterionFailedError):
        kept.judge(judge)


def test_a_bad_turn_is_on_record_before_its_round_is_over() -> None:
    """And nobody can answer for it yet: the rest of the soak was not measured."""
    session: Any = Records()
    reports = Reports(session, session, {("tflops", PLACES[0].id): criterion()}, NO_READINGS)
    kept = SoakResult(criterion="tflops", place=PLACES[0], keep="lowest")
    kept.add(1, Finding(value=750.0))
    reports.seen([kept])
    assert session.settled == []
    kept.add(2, Finding(value=500.0))
    reports.seen([kept])
    kept.add(3, Finding(value=400.0))
    reports.seen([kept])
    assert [(one.outcome, one.value, one.waivable) for one in session.settled] == [("failed", 500.0, False)]
    assert session.told == session.settled
    assert [(turn["round"], turn["usual"]) for turn in session.turns] == [(1, 750.0), (2, 500.0), (3, 400.0)]


def test_worst_of_all_places() -> None:
    """By the way in which a work is kept."""

    def pairs(soak: Soak) -> Iterable[Any]:
        return [(kept, criterion()) for kept in soak]

    def value(_number: int, _key: str, place: Place) -> float:
        return float(place.gpu or 0)

    found = Script(duration_s=1).run({"rate": RATES, "errors": ERRORS}, value)
    told = worst_of(list(pairs(found)))
    assert {key: (one["value"], one["place"]) for key, one in told.items()} == {
        "rate": (0.0, "node0-gpu0"),
        "errors": (2.0, "node0-gpu2"),
    }


def test_a_soak_goes_on_where_it_was_cut() -> None:
    """Its rounds, time and values are those of one soak; the time between the two parts does not count."""
    first = Script(duration_s=6)
    turns = iter(first.soak.rounds({"rate": RATES, "errors": ERRORS}))
    for number, turn in zip(range(5), turns, strict=False):  # two rounds and a half
        turn.keep(Results(dict.fromkeys(PLACES, float(number)), {}))
        first.now_s += 1
    kept = {(one.criterion, one.place.id): one for one in first.soak}
    second = Script(duration_s=6)
    second.soak.go_on_with(Earlier(round=3, num_whole_rounds=2, elapsed_s=4.0, kept=kept))
    found = second.run({"rate": RATES, "errors": ERRORS}, lambda *_: 9.0)
    assert [(number, key) for number, key, _ in second.turns] == [(4, "rate"), (4, "errors")]
    assert (found.elapsed_s, found.num_whole_rounds, found.is_over) == (6.0, 4, True)
    assert (found["rate", PLACES[0]].value, found["rate", PLACES[0]].rounds) == (0.0, 4)
    assert found["errors", PLACES[0]].value == 1 + 3 + 9
    assert found.unmeasured("rate", PLACES[0]) is None


def test_a_soak_needs_its_level() -> None:
    """At another level there is no duration."""
    session: Any = SimpleNamespace(setup=SimpleNamespace(settings=SimpleNamespace(soak_s=None)))
    with pytest.raises(ConfigurationError, match="give the entry level: soak"):
        start(session, session, {}, NO_READINGS)


NODE = Place(id="node0", node=0)


def test_a_node_has_rounds_too() -> None:
    """What a node shares is measured once a round, beside what every GPU does."""
    script = Script(duration_s=2, wanted={"rate": PLACES, "flaps": (NODE,)})
    script.run({"rate": RATES, "flaps": ERRORS}, lambda number, criterion, _: float(number if criterion == "flaps" else 700))
    assert [turn for turn in script.turns if turn[1] == "flaps"] == [(1, "flaps", ["node0"])]
    assert (script.soak["flaps", NODE].value, script.soak.is_wanted("flaps"), script.soak.is_wanted("wear")) == (1, True, False)


def shared(results: Results) -> dict[Place, Finding]:
    """One value of all places."""
    return {} if results.errors else {CLUSTER: Finding(value=results.value)}


@pytest.mark.parametrize("lost", [(), (PLACES[1],)])
def test_a_value_that_all_share(lost: tuple[Place, ...]) -> None:
    """One a round, and an error is the cause of those of all ranks: the rank that is to blame, and no other place."""
    script = Script(duration_s=2, wanted={"fabric": (CLUSTER,)})
    values = {place: 350.0 for place in PLACES if place not in lost}
    errors = {place: MeasurementError(f"{place} died", culprits=(place,)) for place in lost}
    for turn in script.soak.rounds({"fabric": SoakWork(read=shared, keep="lowest")}):
        script.now_s += 1.0
        turn.keep(Results(values, errors))
    kept = script.soak["fabric", CLUSTER]
    assert [one[2] for one in script.turns] == [["cluster"]] * (1 if lost else 2)
    assert (kept.value, kept.rounds) == ((None, 0) if lost else (350.0, 2))
    assert (None if kept.error is None else kept.error.culprits) == (lost or None)


def test_a_value_that_all_share_blames_no_place() -> None:
    """Neither where it is no number, nor where something beside it is not known."""
    kept = SoakResult(criterion="fabric", place=CLUSTER, keep="lowest")
    kept.add(1, Finding(value=math.nan))
    assert kept.error is not None
    assert kept.error.culprits == ()
    kept = SoakResult(criterion="fabric", place=CLUSTER, keep="lowest")
    kept.add(1, Finding(value=900, unknown={HERE: ("no clocks",)}))
    with pytest.raises(MeasurementError, match="in round 1 of the soak: no clocks") as caught:
        kept.judge(criterion("above", 1))
    assert caught.value.culprits == ()


def test_what_is_not_known_beside_a_value_is_never_green() -> None:
    """Rounds go on; the total is judged first, then the first thing that was not known is raised, with its round."""
    kept = SoakResult(criterion="flaps", place=NODE, keep="total")
    for number, unknown in enumerate((None, "port 1: reset", "port 2: reset", None), start=1):
        kept.add(number, Finding(value=0, unknown={HERE: (unknown,) if unknown else ()}))
    judge = criterion("max", 0)
    with pytest.raises(MeasurementError, match=r"node0.*: in round 2 of the soak: port 1: reset"):
        kept.judge(judge)
    kept.add(5, Finding(value=1, kind="nic", bad={"mlx5_2 port 1": ("lost its link",)}))
    with pytest.raises(CriterionFailedError, match="node0-gpu0 mlx5_2 port 1: 1 TFLOPS"):
        kept.judge(judge)
    assert judge.judged is not None
    assert judge.judged.blames == "nic"
