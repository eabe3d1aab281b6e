"""How long a run takes, about: the estimate, where a run stands, and what the levels promise."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.config.settings import DEADLINES_S, reaches
from pytest_gpucluster.judging import forecast
from pytest_gpucluster.judging.plan import places_of, rule_against
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.plugin.options import MARKS
from tests.support import REPOSITORY
from tests.support.entries import threshold
from tests.support.thresholds_files import packaged

LIMITS_S = {"quick": 60.0, "standard": 300.0}
SUBJECTS = {"tflops": "compute", "ratio": "compute", "copies": "links"}
CRITERIA = {
    "tflops": threshold("tflops", takes_s=20.0),
    "ratio": threshold("ratio"),
    "speedup": threshold("speedup"),
    "named": threshold("named", measured_with="tflops"),
    "copies": threshold("copies", takes_s=2.0, recipe={"at_once": 1}),
    "unknown": threshold("unknown"),
}
FIXTURES = {
    "tflops": frozenset({"products"}),
    "ratio": frozenset({"products"}),
    "copies": frozenset({"copied", "hosts"}),
    "speedup": frozenset({"products", "copied", "hosts"}),
    "unknown": frozenset({"hosts"}),
}
SUITE = forecast.Suite(subjects=SUBJECTS, fixtures=FIXTURES)


def forecast_of(selected: dict[str, int], *, soak_s: float | None = None, **criteria: forecast.Threshold) -> forecast.Forecast:
    """Of the entries above on a node of 4."""
    return forecast.forecast(selected, {**CRITERIA, **criteria}, SUITE, gpus_per_node=4, soak_s=soak_s)


def whole(level: str, gpus: int) -> forecast.Forecast:
    """All that a level selects of the packaged file, for one node of H200."""
    file = packaged()
    criteria = file.criteria(file.profiles["h200-sxm"])
    inventory = Inventory(num_nodes=1, gpus_per_node=gpus, device="cuda")
    due = [one for one in criteria.values() if reaches(level, one.level) and rule_against(one, inventory) is None]
    selected = {one.key: len(places_of(one, inventory)) for one in due}
    return forecast.forecast(selected, criteria, forecast.Suite(subjects={}, fixtures={}), gpus_per_node=gpus, soak_s=None)


@pytest.mark.parametrize("gpus", [4, 8])
@pytest.mark.parametrize("level", ["quick", "standard"])
def test_a_level_keeps_its_promise(level: str, gpus: int) -> None:
    """Quick is a minute and standard five for everything on one node, by what each entry says it takes."""
    found = whole(level, gpus)
    longest = sorted(((step.takes_s or 0.0, step.criterion) for step in found.steps), reverse=True)[:5]
    assert found.total_s <= LIMITS_S[level], f"{found.total_s:.1f} s; the longest: {longest}"


def test_all_links_of_two_gpus_take_at_most_90_s() -> None:
    """Collectives at every size, pairs, and what lies between two nodes of one GPU, at level standard."""
    file = packaged()
    criteria = file.criteria(file.profiles["h200-sxm"])
    of_links = (
        "busbw",
        "latency[",
        "gpu_pairs",
        "slow_pair",
        "inter_node_busbw",
        "busbw_scaling",
        "nodes_reachable",
        "transport",
    )
    found = [one for one in criteria.values() if one.key.startswith(of_links) and one.level in ("quick", "standard")]
    assert len(found) >= 15
    assert sum(one.takes_s or 0.0 for one in found) <= 90


def test_every_work_of_a_soak_has_an_estimate() -> None:
    """Else the time of a round would be a part of the truth: give it takes_s. Of other entries tests/e2e/test_plan.py knows."""
    file = packaged()
    soaking = [one for one in file.criteria(file.profiles["h200-sxm"]).values() if one.level == "soak"]
    assert soaking
    assert [one.key for one in soaking if one.takes_s is None] == []


def test_no_packaged_estimate_is_above_its_deadline() -> None:
    """What takes so long would be cut off; for every profile, since an override may change either."""
    file = packaged()
    resolved = [(name, one) for name, profile in file.profiles.items() for one in file.criteria(profile).values()]
    assert [
        (name, one.key) for name, one in resolved if (one.takes_s or 0.0) >= (one.deadline_s or DEADLINES_S[one.level])
    ] == []


def test_a_measurement_counts_once() -> None:
    """For all tests that read it, also where only those that share it are selected."""
    assert forecast_of({"tflops": 4, "ratio": 4}).total_s == forecast.STARTUP_S + 20
    assert forecast_of({"ratio": 4}).total_s == forecast.STARTUP_S + 20
    assert [step.takes_s for step in forecast_of({"ratio": 4, "tflops": 4}).steps] == [20, 0]
    assert [step.takes_s for step in forecast_of({"named": 4, "ratio": 4, "tflops": 4}).steps] == [20, 0, 0]


def test_a_test_of_two_measurements_counts_both() -> None:
    """By the fixtures that it takes, those that nobody took before it; a fixture that has no time of its own adds none."""
    assert [step.takes_s for step in forecast_of({"speedup": 4}).steps] == [28]
    assert [step.takes_s for step in forecast_of({"copies": 4, "speedup": 4, "unknown": 1}).steps] == [8, 20, None]


@pytest.mark.parametrize(("places", "at_once", "seconds"), [(4, 1, 8), (8, 1, 8), (1, 1, 2), (4, 3, 4), (4, "all", 2)])
def test_gpus_in_turn_take_turns(places: int, at_once: int | str, seconds: float) -> None:
    """One wave after the other on each node, all nodes at once; fewer GPUs, fewer waves."""
    copies = threshold("copies", takes_s=2.0, recipe={"at_once": at_once})
    assert forecast_of({"copies": places}, copies=copies).total_s == forecast.STARTUP_S + seconds


def test_a_soak_counts_by_its_duration() -> None:
    """Its works share it, and it ends half a round late on average; takes_s is one round's."""
    soaking = {name: threshold(name, level="soak", takes_s=20.0) for name in ("hot", "bits")}
    found = forecast_of({"copies": 1, "hot": 4, "bits": 4}, soak_s=3600, **soaking)
    assert found.total_s == forecast.STARTUP_S + 2 + 3600 + 20
    assert [step.subject for step in found.steps] == ["links", "soak", "soak"]


def test_the_plan_in_words() -> None:
    """Counts, time, what has no estimate and what does not apply; then each subject that has an estimate."""
    plan = replace(forecast_of({"tflops": 4, "ratio": 4, "copies": 4, "unknown": 4}), left_out=3)
    assert " ".join(plan.plan) == (
        "4 criteria, 16 checks, 3 not applicable, 1 without an estimate, about 0:32 (compute 0:20, links 0:08, start-up 0:04)"
    )
    assert (
        " ".join(forecast_of({"unknown": 1}).plan) == "1 criterion, 1 check, 1 without an estimate, about 0:04 (start-up 0:04)"
    )


OWN_COST = REPOSITORY / "docs" / "results" / "2026-11-27-own-cost" / "results.json"
MOST_OFF = 0.2
"""Of what the books take."""


def error_of_books(fleet: dict[str, Any]) -> float:
    """How far off the plan of the books is, as a share of what they took."""
    step = forecast.Step(criterion="a", subject="health", tests=fleet["testcases"], takes_s=None)
    return abs(forecast.Forecast(steps=(step,)).books_s / float(fleet["books_s"]) - 1)


def test_the_planned_books_are_what_kept_fleets_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 20 %; with the seconds of an older version they are not."""
    fleets = [one for one in json.loads(OWN_COST.read_text(encoding="utf-8"))["books"] if one["testcases"]]
    assert {one["fleet"] for one in fleets} == {"16x8", "32x8", "128x8"}
    assert max(map(error_of_books, fleets)) <= MOST_OFF
    monkeypatch.setattr(forecast, "BOOKS_OF_A_TEST_S", 0.0018)
    assert min(map(error_of_books, fleets)) > MOST_OFF


@pytest.mark.parametrize(("tests", "words"), [(555, ""), (7_406, "bookkeeping 0:09,"), (59_038, "bookkeeping 1:13,")])
def test_the_books_of_many_tests_are_planned(tests: int, words: str) -> None:
    """All ranks wait for them: they stand in the plan and in its sum, and pass with the tests. Of few tests nothing is said."""
    plan = forecast.Forecast(steps=(forecast.Step(criterion="a", subject="health", tests=tests, takes_s=10.0),))
    assert ("bookkeeping" in " ".join(plan.plan)) is bool(words)
    assert words in " ".join(plan.plan)
    assert plan.total_s == forecast.STARTUP_S + 10.0 + plan.books_s
    meter = forecast.Meter(plan)
    for _ in range(tests - 1):
        meter.finish("a")
    assert meter.progress(plan.total_s).fraction == pytest.approx(forecast.UNFINISHED)


def test_the_first_training_pays_for_all() -> None:
    """It loads and compiles; the next one, one on a CPU, and what trains nothing do not."""
    training = {name: threshold(name, takes_s=10.0, recipe={"preset": "small"}) for name in ("loss", "rate")}
    rehearsed = threshold("loss", takes_s=10.0, recipe={"preset": "tiny"})
    found = forecast_of({"tflops": 1, "loss": 1, "rate": 1}, **training)
    assert [step.takes_s for step in found.steps] == [20, 10, 10]
    assert [found.lasts_s(step) for step in found.steps] == [20, 10 + forecast.FIRST_TRAINING_S, 10]
    assert found.total_s == forecast.STARTUP_S + 40 + forecast.FIRST_TRAINING_S
    assert "others 0:35" in " ".join(found.plan)
    meter = forecast.Meter(found)
    meter.finish("tflops")
    meter.finish("loss")
    assert meter.progress(30).fraction == pytest.approx(1 - 10 / found.total_s)
    assert forecast_of({"loss": 1}, loss=rehearsed).total_s == forecast.STARTUP_S + 10


def test_the_self_test_is_planned() -> None:
    """Its time stands in the plan and in the sum; a single place plants nothing, and is done sooner."""
    plan = replace(forecast_of({"tflops": 2}), selftest_s=18.0)
    assert plan.total_s == forecast.STARTUP_S + 18 + 20
    assert " ".join(plan.plan).endswith("about 0:42 (compute 0:20, self-test 0:18, start-up 0:04)")
    one, two, many = (forecast.selftest_s(places=places, is_rehearsal=False) for places in (1, 2, 512))
    assert 0 < one < two <= many
    assert forecast.selftest_s(places=2, is_rehearsal=True) < two


def test_progress_through_the_self_test() -> None:
    """Its time passes before the first test, and counts wholly once that begins."""
    meter = forecast.Meter(replace(PLAN, selftest_s=18.0))
    meter.begin(forecast.SELFTEST, 1)
    meter.joined(4)
    during = meter.progress(14)
    assert during.fraction == pytest.approx((forecast.STARTUP_S + 10) / (TOTAL_S + 18))
    meter.begin("tflops", 22)
    after_it = meter.progress(22)
    assert after_it.fraction == pytest.approx((forecast.STARTUP_S + 18) / (TOTAL_S + 18))
    assert after_it.remaining_s == pytest.approx(TOTAL_S - forecast.STARTUP_S)


def test_a_program_that_is_not_there_takes_no_time() -> None:
    """Its criterion is skipped at once."""
    diagnosed = threshold("diagnosed", takes_s=10.0)
    suite = replace(SUITE, absent=frozenset({"diagnosed"}))
    criteria = {**CRITERIA, "diagnosed": diagnosed}
    found = forecast.forecast({"diagnosed": 4, "tflops": 4}, criteria, suite, gpus_per_node=4, soak_s=None)
    assert [step.takes_s for step in found.steps] == [0, 20]


def test_subjects_are_our_marks() -> None:
    """All of them but those that are no subject."""
    others = ("distributed", "again", "at_end", "over_run", "compares", "each_entry", "reads")
    assert set(forecast.SUBJECTS) == {mark for mark in MARKS if not mark.startswith(others)}


PLAN = forecast_of({"tflops": 2, "ratio": 2, "copies": 2})
TOTAL_S = forecast.STARTUP_S + 20 + 4


def after(*finished: str, current: str | None = None, since_s: float = 0.0) -> forecast.Meter:
    """Where the plan above stands after these tests, while a test of ``current`` runs."""
    meter = forecast.Meter(PLAN)
    for criterion in finished:
        meter.finish(criterion)
    if current is not None:
        meter.begin(current, since_s)
    return meter


def test_progress_by_planned_time() -> None:
    """Start-up, then each measurement as its time passes, wholly once its first test is done."""
    assert forecast.Meter(PLAN).progress(0) == forecast.Progress(fraction=0, elapsed_s=0, remaining_s=TOTAL_S)
    began = forecast.Meter(PLAN)
    began.begin("tflops", 4)
    began.joined(4)
    assert began.progress(10) == forecast.Progress(fraction=10 / TOTAL_S, elapsed_s=10, remaining_s=TOTAL_S - 10)
    assert after("tflops", current="tflops", since_s=4).progress(24).remaining_s == 4
    assert after(*("tflops", "ratio", "copies") * 2).progress(15).fraction == 1


def test_waiting_for_ranks_is_not_late() -> None:
    """The first measurement begins when they have joined, however long that takes."""
    meter = after(current="copies")
    assert meter.progress(100).remaining_s is not None
    meter.joined(100)
    assert meter.progress(101).remaining_s is not None
    assert meter.progress(150).remaining_s is None


def test_a_slow_run_expects_the_rest_to_be_slow() -> None:
    """And a quick one a quick rest."""
    slow, quick = after("tflops").progress(60), after("tflops").progress(10)
    assert slow.remaining_s is not None
    assert quick.remaining_s is not None
    assert quick.remaining_s < 4 < slow.remaining_s


def test_longer_than_estimated() -> None:
    """What hangs moves the progress ever less, never to the end of its part, and soon leaves no time to tell."""
    meter = after(current="tflops", since_s=4)
    meter.joined(4)
    at_end, late, very_late = (meter.progress(4 + seconds) for seconds in (20, 60, 6000))
    assert at_end.remaining_s is not None
    assert late.remaining_s is None is very_late.remaining_s
    assert at_end.fraction < late.fraction < very_late.fraction < 24 / TOTAL_S
    assert late.text == "83 %  1:04, longer than estimated"
    short = forecast.Meter(replace(PLAN, steps=()))
    short._tests_left = 1  # of a test without an estimate
    assert [short.progress(seconds).remaining_s is None for seconds in (1, 60)] == [False, True]
    again = after("tflops", "ratio", "copies", current="tflops")
    assert again.progress(TOTAL_S + 60).text == "99 %  1:28, longer than estimated"
    assert after("tflops", "tflops", "ratio", "ratio", current="copies").progress(1e6).percent == 99


@given(st.lists(st.sampled_from(["tflops", "ratio", "copies", "strange"])), st.lists(st.floats(0, 1e6)))
def test_progress_never_lies(finished: list[str], times_s: list[float]) -> None:
    """Between 0 and 1, never falling, and 1 only when all is done; no negative time."""
    meter, before = after(*finished, current="copies"), 0.0
    for now_s in sorted(times_s):
        now = meter.progress(now_s)
        assert before <= now.fraction <= 1
        assert (now.fraction == 1) == (len([one for one in finished if one != "strange"]) >= 6)
        assert now.remaining_s is None or now.remaining_s >= 0
        before = now.fraction


@pytest.mark.parametrize(
    ("seconds", "words", "clock"),
    [
        (0.4, "0 s", "0:00"),
        (48.4, "48 s", "0:48"),
        (110, "110 s", "1:50"),
        (720, "12 min", "12:00"),
        (29100, "8 h 5 min", "8:05:00"),
    ],
)
def test_times(seconds: float, words: str, clock: str) -> None:
    """As an estimate, and as a clock."""
    assert (forecast.in_words(seconds), forecast.clock(seconds)) == (words, clock)


@pytest.mark.parametrize(
    ("tests", "available_gib", "begin"),
    [
        (59_038, 0.9, "the books of 59,038 tests take about 1.0 GiB of memory on this host, and 0.9 GiB are available"),
        (59_038, 1.0, None),
        (436_000, 4.5, "the books of 436,000 tests take about 4.8 GiB of memory on this host, and 4.5 GiB are available"),
        (436_000, 5.0, None),
        (0, 0.3, "the books of 0 tests take about 0.4 GiB"),
    ],
)
def test_books_that_do_not_fit_the_memory_are_foreseen(tests: int, available_gib: float, begin: str | None) -> None:
    """Before the first test, with what to do; where they fit, nothing is said."""
    remark = forecast.memory_remark(tests, available_gib=available_gib)
    assert (remark is None) == (begin is None)
    assert remark is None or (remark.startswith(str(begin)) and "groups of nodes" in remark)


def test_tests_without_any_estimate_are_counted() -> None:
    """A user's own tests have none: a share of the 4 s of start-up would be 99 % at once."""
    steps = [forecast.Step(criterion=name, subject="others", tests=2, takes_s=None) for name in ("a", "b")]
    meter = forecast.Meter(forecast.Forecast(steps=tuple(steps), first_training=None))
    meter.begin("a", 0)
    meter.joined(4)
    assert meter.progress(40).text == " 0 %  0:40, 0 of 4 tests"
    meter.finish("a")
    assert meter.progress(41).text == "25 %  0:41, 1 of 4 tests"
    for name in ("a", "b", "b"):
        meter.finish(name)
    assert meter.progress(42).fraction == 1.0


@pytest.mark.parametrize(
    ("remaining_s", "left"), [(66.2, "about 1:07 left"), (0.0, "about 0:01 left"), (None, "longer than estimated")]
)
def test_what_still_runs_has_time_left(remaining_s: float | None, left: str) -> None:
    """Never 0:00: the run goes on."""
    assert forecast.Progress(fraction=0.99, elapsed_s=41.0, remaining_s=remaining_s).text == f"99 %  0:41, {left}"
