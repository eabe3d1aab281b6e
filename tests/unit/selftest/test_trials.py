"""The four kinds of trials, from what the ranks returned: what counts as found, and what does not."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.places import Place
from pytest_gpucluster.selftest.report import NotPlanted, Trial
from pytest_gpucluster.selftest.trials import (
    ON_GPUS,
    Setup,
    delay_percent,
    hung_trial,
    killed_trial,
    promised_percent,
    require_possible_rates,
    slow_trials,
    stragglers,
    try_hung_rank,
    try_killed_rank,
    try_slow_gpu,
    try_wrong_bit,
    wrong_trials,
)
from tests.support.entries import threshold
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from pytest_gpucluster.selftest.trials import Slowdown

PLACES = tuple(Place(id=f"node0-gpu{gpu}", node=0, gpu=gpu, rank=gpu) for gpu in range(4))
VICTIM = PLACES[2]
CRITERIA = {
    "straggler[hbm_bandwidth]": threshold(
        "straggler[hbm_bandwidth]", kind="max", numbers={"any": 3}, unit="%", recipe={"floor_spread": 0.005}
    )
}


def setup(places: tuple[Place, ...] = PLACES) -> Setup:
    """A setup without a cluster: nothing can be run."""
    return Setup(cluster=cast("Any", None), places=places, criteria=CRITERIA, sizes=ON_GPUS, random=random.Random(1))


# --- slow ---


def slowed(*plants: Slowdown, sees: float = 1.0, device: str = "H200") -> list[Trial]:
    """The trials of copies at 4 TB/s each, of which the victims' lose their percentage times ``sees``."""
    values = {
        place: SimpleNamespace(
            delay_us=[lost for lost, _ in plants],
            rates=[4.0 * (1 - sees * lost / 100 * (victim == place)) for lost, victim in plants],
            device=device if place == VICTIM else "H200",
        )
        for place in PLACES
    }
    (threshold,) = CRITERIA.values()
    return slow_trials(Results(values, {}), plants, operation="copy", threshold=threshold, sizes=ON_GPUS)


def test_a_slow_place_is_found_and_a_clean_repeat_is_not() -> None:
    """By the run's own comparison and limit."""
    clean, found = slowed((0.0, None), (5.0, VICTIM))
    assert (clean.victim, clean.named, clean.is_found) == (None, (), True)
    assert (found.what, found.named, found.is_found, found.not_judged) == ("5 % slow in copy", (VICTIM.id,), True, None)
    assert found.measured == {"delay_us": 5.0, "lost_percent": 5.0}


@pytest.mark.parametrize(("key", "usual"), [("bf16_tflops", 780.0), ("fp32_tflops", 51.0), ("hbm_bandwidth", 4.3)])
def test_rates_that_no_gpu_has_are_an_error(key: str, usual: float) -> None:
    """One repeat at one place is enough: a wrong clock shows nobody who is slow. Healthy rates pass."""
    entry = packaged().criteria(packaged().profiles["h200-sxm"])[key]

    def measured(last: float) -> Results:
        rates = {place: [usual] * 3 for place in PLACES} | {VICTIM: [usual, usual, last]}
        return Results({place: SimpleNamespace(rates=found) for place, found in rates.items()}, {})

    require_possible_rates(measured(usual), entry)
    require_possible_rates(measured(10 * usual), None)
    with pytest.raises(MeasurementError, match=f"{key}, planted in {VICTIM.id}: .* more than the hardware can"):
        require_possible_rates(measured(10 * usual), entry)


def test_a_plant_that_does_not_show_is_missed() -> None:
    """If the delay were outside the timed window, no place would be named."""
    _, missed = slowed((0.0, None), (5.0, VICTIM), sees=0.0)
    assert (missed.named, missed.is_found, missed.not_judged) == ((), False, None)


def test_a_plant_below_the_promise_is_only_reported() -> None:
    """3 % is the limit and the healthy spread may hide another 1 %."""
    _, trial = slowed((0.0, None), (3.0, VICTIM))
    assert trial.not_judged == "straggler[hbm_bandwidth] promises 4 % and more"
    _, alone = slowed((0.0, None), (10.0, VICTIM), device="H100")
    assert alone.not_judged == "1 GPU of one model: too few to say which is slow"


def test_a_limit_that_was_loosened_is_not_hidden() -> None:
    """With 20 % allowed, 10 % is not found, and the certificate says what is promised."""
    loose = threshold(kind="max", numbers={"any": 20}, unit="%", recipe={"floor_spread": 0.005})
    assert promised_percent(loose, PLACES) == 21
    rates = {place: 3.6 if place == VICTIM else 4.0 for place in PLACES}
    assert stragglers(loose, rates, dict.fromkeys(PLACES, "H200")) == []


def test_without_an_entry_nothing_is_planted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run does not compare such rates."""
    bare = replace(setup(), criteria={})
    monkeypatch.setattr(Setup, "run", lambda *_, **__: pytest.fail("something was planted"))
    reasons = [one.text for one in try_slow_gpu(bare) if isinstance(one, NotPlanted)]
    assert len(reasons) == 3
    assert reasons[0] == "a slow GPU cannot be shown: bf16: this run's thresholds have no straggler[bf16_tflops]"


@pytest.mark.parametrize(("lost", "delay"), [(50.0, 100.0), (10.0, 100 / 9), (20.0, 25.0)])
def test_delay(lost: float, delay: float) -> None:
    """A rate 10 % lower takes 11.1 % longer."""
    assert delay_percent(lost) == pytest.approx(delay)


def test_victims_take_turns() -> None:
    """Every place once before any is twice."""
    order = list(islice(setup().victims(), 8))
    assert set(order[:4]) == set(PLACES)
    assert order[:4] == order[4:]


# --- wrong ---


def computed(*, flipped: tuple[str, ...], places: tuple[Place, ...] = PLACES, lost: bool = False) -> dict[Place, Any]:
    """Digests of two kinds, of which the victim's differ in ``flipped``."""

    def digests(place: Place) -> dict[str, str]:
        return {kind: "bad" if kind in flipped and place == VICTIM and not lost else "good" for kind in ("bf16", "fp32")}

    return {place: SimpleNamespace(digests=digests(place), model="H200", excluded={"fp8": "no units"}) for place in places}


def test_a_wrong_bit_is_found() -> None:
    """Each kind by itself; what this GPU lacks cannot be shown."""
    at = {"bf16": VICTIM, "fp32": VICTIM, "fp8": VICTIM}
    *trials, not_planted = wrong_trials(computed(flipped=("bf16", "fp32")), at)
    assert [(trial.where, trial.is_found) for trial in trials if isinstance(trial, Trial)] == [("bf16", True), ("fp32", True)]
    assert not_planted == NotPlanted(kind="wrong", why="fp8: no units")


def test_a_wrong_bit_that_no_digest_shows_is_missed() -> None:
    """And one in another kind of output does not count for this one."""
    trials = wrong_trials(computed(flipped=("fp32",)), {"bf16": VICTIM, "fp32": VICTIM})
    assert [(trial.where, trial.is_found) for trial in trials if isinstance(trial, Trial)] == [("bf16", False), ("fp32", True)]


def test_of_two_both_are_named() -> None:
    """Two places differ, and nothing says which of them is wrong."""
    two = PLACES[1:3]
    (trial,) = wrong_trials(computed(flipped=("bf16",), places=two), {"bf16": VICTIM})
    assert isinstance(trial, Trial)
    assert trial.is_found
    assert set(trial.expected) == {place.id for place in two}
    (missed,) = wrong_trials(computed(flipped=("bf16",), places=two, lost=True), {"bf16": VICTIM})
    assert isinstance(missed, Trial)
    assert not missed.is_found


# --- dead and hung ---


def error(text: str, *culprits: Place, kind: str = "died") -> MeasurementError:
    """The error of a call."""
    return MeasurementError(text, culprits=culprits, kind=kind)


def test_a_dead_rank() -> None:
    """Named alone and as dead; everything else is a miss."""
    found = killed_trial(VICTIM, error("died", VICTIM), detected_s=0.41, recovered_s=2.0)
    assert (found.is_found, found.how) == (True, "in 0.41 s (the next collective after 2 s)")
    for reported in (None, error("died"), error("died", *PLACES[:3]), error("died", PLACES[0])):
        assert not killed_trial(VICTIM, reported, detected_s=0.4, recovered_s=2.0).is_found
    late = killed_trial(VICTIM, error("hung", VICTIM, kind="hung"), detected_s=60.0, recovered_s=2.0)
    assert (late.is_found, late.fault) == (False, "reported as hung, not as died")


def test_a_hung_rank() -> None:
    """Named alone as the one that the others waited for."""
    absent = error("rank 2 never arrived in all_reduce\nmore", VICTIM, kind="hung")
    assert hung_trial(VICTIM, absent, detected_s=3.2, recovered_s=2.0).is_found
    other = hung_trial(VICTIM, error("rank 2 died", VICTIM), detected_s=3.2, recovered_s=2.0)
    assert (other.is_found, other.fault) == (False, "reported as: rank 2 died")
    assert not hung_trial(VICTIM, None, detected_s=0.1, recovered_s=2.0).is_found


@pytest.mark.parametrize(
    ("try_fault", "fewest"), [(try_slow_gpu, 3), (try_wrong_bit, 2), (try_killed_rank, 2), (try_hung_rank, 2)]
)
def test_too_few_places(try_fault: Any, fewest: int) -> None:
    """Reported with the reason, without trying: not a pass, and no objection either."""
    (not_planted,) = try_fault(setup(PLACES[: fewest - 1]))
    assert not not_planted.is_error
    assert not_planted.text.startswith(
        ("a slow GPU cannot be shown: it takes 3", "a wrong bit cannot", "a dead rank cannot", "a hung")
    )
