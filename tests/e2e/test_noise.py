"""Noise in a real run: measured again with three times the repeats, then judged, or too close to call."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest, user_folder
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from tests.support.runs import FinishedRun

pytestmark = pytest.mark.e2e

LIMIT = {"above": 100, "bound_waived": "a test", "per": "gpu", "unit": "TFLOPS", "noise": 0.1}
CASES = ("quiet", "calm_at_last", "wild", "on_the_limit", "clearly_slow")


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """folders/noise in one run."""
    folder = user_folder("noise", tmp_path_factory.mktemp("user") / "noise")
    criteria = {
        **{f"rate[{name}]": entry(**LIMIT) for name in CASES},
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
        ("wild", "noisy", "error"),
        ("on_the_limit", "noisy", "error"),
        ("clearly_slow", "failed", "failure"),
    ],
)
def test_outcome(noisy: FinishedRun, name: str, outcome: str, kind: str) -> None:
    """Only what was doubtful twice is noisy; what is clear is judged."""
    assert set(noisy.outcomes(f"rate[{name}]").values()) == {outcome}
    assert noisy.case(f"test_rate[node0-cpu0-{name}]").outcome == kind


def test_doubt_is_told_with_both_numbers(noisy: FinishedRun) -> None:
    """In the JUnit file: what was seen first, what then, why; and its type is noisy."""
    case = noisy.case("test_rate[node0-cpu1-wild]")
    assert case.properties["failure_type"] == "noisy"
    assert "too close to call" in case.message
    assert "30 repeats spread over 26.7 %" in case.text
    assert "measured first: 120 TFLOPS, 10 repeats spread over 26.7 %, and 10 % are allowed" in case.text
    limit = noisy.case("test_rate[node0-cpu1-on_the_limit]")
    assert "the limit lies inside the 10th to 90th percentile of 30 repeats, 98.9 to 102.1" in limit.text


def test_a_second_look_is_on_record(noisy: FinishedRun) -> None:
    """A value that was measured again says why and what it was first."""
    evidence = noisy.row("rate[calm_at_last]", "node0-cpu0")["evidence"]
    assert evidence["first measured TFLOPS"] == 120
    assert "10 repeats spread" in evidence["measured again because"]


def test_noise_is_no_way_out(noisy: FinishedRun) -> None:
    """Swallowed noise stays noise, a clear failure after it wins, an advisory entry only remarks."""
    assert set(noisy.outcomes("swallowed").values()) == {"noisy"}
    assert set(noisy.outcomes("fails_later").values()) == {"failed"}
    assert set(noisy.outcomes("advised").values()) == {"passed"}
    assert "advisory: advised at " in noisy.stdout
    assert " cpu 0 (node0-cpu0) is too close to call" in noisy.stdout
    assert noisy.returncode == 1
    assert "6 too close to call" in noisy.verdict_line


def test_noise_blames_nobody(noisy: FinishedRun) -> None:
    """Disagreeing repeats are no reason to replace a part."""
    criteria = {name for culprit in noisy.results["culprits"] for name in culprit["criteria"]}
    assert criteria == {"rate[clearly_slow]", "fails_later"}
