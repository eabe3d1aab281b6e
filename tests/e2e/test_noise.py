"""Noise in a real run: measured in further rounds, then judged by the median, or too close to call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest, user_folder
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from tests.support.runs import FinishedRun

pytestmark = pytest.mark.e2e

LIMIT = {"above": 100, "bound_waived": "a test", "per": "gpu", "unit": "TFLOPS", "noise": 0.1}
CASES = ("quiet", "calm_at_last", "wild", "stalls", "stalls_often", "on_the_limit", "slow", "clearly_slow")


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """folders/noise in one run."""
    folder = user_folder("noise", tmp_path_factory.mktemp("user") / "noise")
    criteria = {
        **{f"rate[{name}]": entry(**LIMIT) for name in CASES},
        "rate[stalls_often]": entry(**LIMIT, stalls=0.2),
        "advised": entry(**LIMIT, severity="advisory"),
        "swallowed": entry(**LIMIT),
        "fails_later": entry(**LIMIT),
    }
    limits = write_limits(folder / "limits.yaml", criteria, extends=False)
    return run_pytest(folder, "--gpucluster", "test_noise.py", limits)


@pytest.mark.parametrize(
    ("name", "outcome", "kind"),
    [
        ("quiet", "passed", "passed"),
        ("calm_at_last", "passed", "passed"),
        ("wild", "passed", "passed"),
        ("stalls", "passed", "passed"),
        ("stalls_often", "failed", "failure"),
        ("on_the_limit", "noisy", "error"),
        ("slow", "failed", "failure"),
        ("clearly_slow", "failed", "failure"),
    ],
)
def test_outcome(noisy: FinishedRun, name: str, outcome: str, kind: str) -> None:
    """Only a median at the limit is noisy; a wide spread is none."""
    assert set(noisy.outcomes(f"rate[{name}]").values()) == {outcome}
    assert noisy.case(f"test_rate[node0-cpu0-{name}]").outcome == kind


def test_doubt_is_told_with_both_numbers(noisy: FinishedRun) -> None:
    """In the JUnit file: what was seen first, what then, why; and its type is noisy."""
    case = noisy.case("test_rate[node0-cpu1-on_the_limit]")
    assert case.properties["failure_type"] == "noisy"
    assert "too close to call" in case.message
    assert "the limit lies inside the 99 % interval of the median of 130 repeats, 99.8333 to 101.167" in case.text
    first = "the limit lies inside the 10th to 90th percentile of 10 repeats, 98.9 to 102.1"
    assert f"measured first: 100.5 TFLOPS, {first}" in case.text


def test_further_rounds_are_on_record(noisy: FinishedRun) -> None:
    """A value that was measured again says why, how often, and what it was first."""
    evidence = noisy.row("rate[calm_at_last]", "node0-cpu0")["evidence"]
    assert (evidence["first measured TFLOPS"], evidence["rounds"], evidence["repeats"]) == (96, 4, 40)
    assert evidence["measured again because"] == "10 repeats miss the limit by less than 2 times the 10 % that are allowed"
    assert noisy.row("rate[slow]", "node0-cpu0")["evidence"]["rounds"] == 3
    assert "rounds" not in noisy.row("rate[clearly_slow]", "node0-cpu0")["evidence"]


def test_what_the_median_hides_is_shown(noisy: FinishedRun) -> None:
    """Stalls and a wide spread are remarks of a passed value, on the screen too; too many stalls fail."""
    stalls = "2 of 30 repeats took more than twice as long as the median, the worst 1 TFLOPS"
    assert noisy.row("rate[stalls]", "node0-cpu0")["remark"] == stalls
    assert f": {stalls}" in " ".join(noisy.stdout.split())  # long lines are wrapped
    assert "repeats spread over" in noisy.row("rate[wild]", "node0-cpu1")["remark"]
    often = noisy.row("rate[stalls_often]", "node0-cpu0")
    assert (often["value"], often["unit"]) == (pytest.approx(30), "%")
    assert "30 %, above 20 %" in noisy.case("test_rate[node0-cpu0-stalls_often]").message


def test_noise_is_no_way_out(noisy: FinishedRun) -> None:
    """Swallowed noise stays noise, a clear failure after it wins, an advisory entry only remarks."""
    assert set(noisy.outcomes("swallowed").values()) == {"noisy"}
    assert set(noisy.outcomes("fails_later").values()) == {"failed"}
    assert set(noisy.outcomes("advised").values()) == {"passed"}
    assert "advisory: advised at " in noisy.stdout
    assert " cpu 0 (node0-cpu0) is too close to call" in noisy.stdout
    assert noisy.returncode == 1
    assert "4 too close to call" in noisy.verdict_line


def test_noise_blames_nobody(noisy: FinishedRun) -> None:
    """Disagreeing repeats are no reason to replace a part."""
    criteria = {name for culprit in noisy.results["culprits"] for name in culprit["criteria"]}
    assert criteria == {"rate[stalls_often]", "rate[slow]", "rate[clearly_slow]", "fails_later"}
