"""The four kinds of trials, from what the ranks returned: what counts as found, and what does not."""

from __future__ import annotations

import random
from itertools import islice
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_gpucluster.cluster.results import Results
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.places import Place
from pytest_gpucluster.selftest import slow as slowness
from pytest_gpucluster.selftest.ended import Ended, dead, dead_trial, hung, hung_trial
from pytest_gpucluster.selftest.site import ON_GPUS, Site
from pytest_gpucluster.selftest.slow import Plant, delay_percent
from pytest_gpucluster.selftest.straggling import judge_of
from pytest_gpucluster.selftest.wrong import assessed as assessed_bits
from pytest_gpucluster.selftest.wrong import wrong
from tests.support.entries import threshold

if TYPE_CHECKING:
    from pytest_gpucluster.selftest.assessment import Trial

PLACES = tuple(Place(id=f"node0-gpu{gpu}", node=0, gpu=gpu, rank=gpu) for gpu in range(4))
VICTIM = PLACES[2]
CRITERIA = {
    "straggler[hbm_bandwidth]": threshold(
        "straggler[hbm_bandwidth]", kind="max", numbers={"any": 3}, unit="%", recipe={"floor_spread": 0.005}
    )
}


def site(places: tuple[Place, ...] = PLACES) -> Site:
    """Where nothing can be run."""
    return Site(cluster=cast("Any", None), places=places, criteria=CRITERIA, effort=ON_GPUS, chance=random.Random(1))


# --- slow ---


def slowed(*plants: Plant, sees: float = 1.0, device: str = "H200") -> list[Trial]:
    """The trials of copies at 4 TB/s each, of which the victims' lose their percentage times ``sees``."""
    judge = judge_of("copy", CRITERIA)
    assert judge is not None
    values = {
        place: SimpleNamespace(
            delay_us=[lost for lost, _ in plants],
            rates=[4.0 * (1 - sees * lost / 100 * (victim == place)) for lost, victim in plants],
            device=device if place == VICTIM else "H200",
        )
        for place in PLACES
    }
    return slowness.assessed(Results(values, {}), list(plants), operation="copy", judge=judge, effort=ON_GPUS)


def test_a_slow_place_is_found_and_a_clean_repeat_is_not() -> None:
    """By the run's own comparison and limit."""
    clean, found = slowed((0.0, None), (5.0, VICTIM))
    assert (clean.victim, clean.named, clean.found) == (None, (), True)
    assert (found.what, found.named, found.found, found.unjudged) == ("5 % slow in copy", (VICTIM.id,), True, None)
    assert found.measured == {"delay_us": 5.0, "lost_percent": 5.0}


def test_a_plant_that_does_not_show_is_missed() -> None:
    """Were the delay outside the timed window, nobody would be named."""
    _, missed = slowed((0.0, None), (5.0, VICTIM), sees=0.0)
    assert (missed.named, missed.found, missed.unjudged) == ((), False, None)


def test_a_plant_below_the_promise_is_only_told() -> None:
    """3 % is the limit and the healthy spread may hide another 1 %."""
    _, told = slowed((0.0, None), (3.0, VICTIM))
    assert told.unjudged == "straggler[hbm_bandwidth] promises 4 % and more"
    _, alone = slowed((0.0, None), (10.0, VICTIM), device="H100")
    assert alone.unjudged == "1 GPUs of one model are too few to say which is slow"


def test_a_limit_that_was_loosened_is_not_hidden() -> None:
    """With 20 % allowed, 10 % is not found, and the certificate says what is promised."""
    loose = {"straggler[hbm_bandwidth]": threshold(kind="max", numbers={"any": 20}, unit="%", recipe={"floor_spread": 0.005})}
    judge = judge_of("copy", loose)
    assert judge is not None
    assert judge.promised_percent == 21
    rates = {place: 3.6 if place == VICTIM else 4.0 for place in PLACES}
    assert judge.names(rates, dict.fromkeys(PLACES, "H200")) == []


def test_without_an_entry_there_is_no_judge() -> None:
    """The run does not compare such rates."""
    assert judge_of("bf16", CRITERIA) is None


@pytest.mark.parametrize(("lost", "delay"), [(50.0, 100.0), (10.0, 100 / 9), (20.0, 25.0)])
def test_delay(lost: float, delay: float) -> None:
    """A rate 10 % lower takes 11.1 % longer."""
    assert delay_percent(lost) == pytest.approx(delay)


def test_victims_take_turns() -> None:
    """Every place once before any is twice."""
    order = list(islice(site().victims(), 8))
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
    trials, unshown = assessed_bits(computed(flipped=("bf16", "fp32")), at)
    assert [(trial.where, trial.found) for trial in trials] == [("bf16", True), ("fp32", True)]
    assert [(one.why, one.objects) for one in unshown] == [("fp8: no units", False)]


def test_a_wrong_bit_that_no_digest_shows_is_missed() -> None:
    """And one in another kind of output does not count for this one."""
    trials, _ = assessed_bits(computed(flipped=("fp32",)), {"bf16": VICTIM, "fp32": VICTIM})
    assert [(trial.where, trial.found) for trial in trials] == [("bf16", False), ("fp32", True)]


def test_of_two_both_are_named() -> None:
    """That is all that two can tell."""
    two = PLACES[1:3]
    (trial,), _ = assessed_bits(computed(flipped=("bf16",), places=two), {"bf16": VICTIM})
    assert trial.found
    assert set(trial.should_name) == {place.id for place in two}
    (missed,), _ = assessed_bits(computed(flipped=("bf16",), places=two, lost=True), {"bf16": VICTIM})
    assert not missed.found


# --- dead and hung ---


def error(text: str, *culprits: Place, kind: str = "died") -> MeasurementError:
    """What the run said of a call."""
    return MeasurementError(text, culprits=culprits, kind=kind)


def test_a_dead_rank() -> None:
    """Named alone and as dead; everything else is a miss."""
    found = dead_trial(VICTIM, Ended(error=error("died", VICTIM), seconds=0.41, recovered_s=2.0))
    assert (found.found, found.told) == (True, "in 0.41 s (the next collective after 2 s)")
    for said in (None, error("died"), error("died", *PLACES[:3]), error("died", PLACES[0])):
        assert not dead_trial(VICTIM, Ended(error=said, seconds=0.4, recovered_s=2.0)).found
    late = dead_trial(VICTIM, Ended(error=error("hung", VICTIM, kind="hung"), seconds=60.0, recovered_s=2.0))
    assert (late.found, late.fault) == (False, "told as hung, not as died")


def test_a_hung_rank() -> None:
    """Named alone as the one that the others waited for."""
    absent = error("rank 2 never arrived in all_reduce\nmore", VICTIM, kind="hung")
    assert hung_trial(VICTIM, Ended(error=absent, seconds=3.2, recovered_s=2.0)).found
    other = hung_trial(VICTIM, Ended(error=error("rank 2 died", VICTIM), seconds=3.2, recovered_s=2.0))
    assert (other.found, other.fault) == (False, "told as: rank 2 died")
    assert not hung_trial(VICTIM, Ended(error=None, seconds=0.1, recovered_s=2.0)).found


@pytest.mark.parametrize(("kind", "fewest"), [(slowness.slow, 3), (wrong, 2), (dead, 2), (hung, 2)])
def test_too_few_places(kind: Any, fewest: int) -> None:
    """Said with the reason, without trying: not a pass, and no objection either."""
    trials, (unshown,) = kind(site(PLACES[: fewest - 1]))
    assert trials == []
    assert not unshown.objects
    assert unshown.words.startswith(
        ("a slow GPU cannot be shown: it takes 3", "a wrong bit cannot", "a dead rank cannot", "a hung")
    )
