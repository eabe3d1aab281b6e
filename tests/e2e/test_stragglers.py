"""GPUs compared with their siblings, through the real controller, agents and workers: who is named, and who is not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.launching import ACCEPTANCE
from tests.support.runs import run_pytest
from tests.support.thresholds_files import in_rehearsal, write_limits

if TYPE_CHECKING:
    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

TOLERANCES = {  # of four GPUs: the limit, or what the lowest healthy one of a run reaches
    "bf16_tflops": 8.237,
    "bf16_sustained": 5.148,
    "bf16_at_clock": 4.633,
    "fp32_tflops": 2.5,
    "hbm_bandwidth": 3,
    "training_throughput_gpu": 5.148,
    "host_to_device": 8,
    "device_to_host": 8,
}
STANDARD = ("bf16_sustained", "bf16_at_clock", "fp32_tflops", "training_throughput_gpu")
KEYS = {quantity: f"straggler[{quantity}]" for quantity in TOLERANCES}
PLACES = [f"node0-cpu{number}" for number in range(4)]
HEALTHY = dict.fromkeys(PLACES, "passed")


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Start a rehearsal of some ranks in which the comparisons apply, with these siblings."""

    def start(*, ranks: int = 4, select: str = "straggler", level: str = "standard", **siblings: Any) -> FinishedRun:
        folder = tmp_path_factory.mktemp("siblings")
        limits = write_limits(folder / "compare.yaml", dict.fromkeys(KEYS.values(), in_rehearsal(skip=None)))
        arguments = [f"--gpucluster-expect=nodes=1,gpus_per_node={ranks}", f"--gpucluster-level={level}", "-k", select]
        planted = {"E2E_SIBLINGS": json.dumps(siblings)}
        return run_pytest(folder, ACCEPTANCE, limits, *arguments, "-p", "siblings", variables=planted)

    return start


@pytest.fixture(scope="module")
def slow(ran: Any) -> FinishedRun:
    """Rank 2 is 12 % slower than its siblings in everything, which every floor of a rehearsal lets pass."""
    return ran(slow={"2": 0.88})


@pytest.fixture(scope="module")
def mixed(ran: Any) -> FinishedRun:
    """Of six, three are of a model that is half as fast; one of these is slow. One of the others cannot be measured."""
    return ran(
        ranks=6,
        slow={"1": 0.5, "3": 0.5, "5": 0.45},
        model={"1": "NVIDIA H100", "3": "NVIDIA H100", "5": "NVIDIA H100"},
        dies=[4],
        unclocked=[0],
    )


@pytest.mark.parametrize("quantity", TOLERANCES)
def test_the_slow_one_is_named(slow: FinishedRun, quantity: str) -> None:
    """Failed at its own place with value, limit and what it was compared with; its siblings pass."""
    key = KEYS[quantity]
    assert slow.outcomes(key) == {**HEALTHY, PLACES[2]: "failed"}
    row = slow.row(key, PLACES[2])
    sign, limit, unit = row["limit"].split()
    assert (sign, float(limit), unit) == ("<=", pytest.approx(TOLERANCES[quantity], abs=1e-3), row["unit"])
    assert row["value"] == pytest.approx(12, abs=0.2)
    case = slow.case(f"test_straggler[{PLACES[2]}-{quantity}]")
    assert case.outcome == "failure"
    host = row["place"]["hostname"]
    assert f"{key} at {host} cpu 2 ({PLACES[2]}): " in case.text
    assert f"{host} cpu 2 ({PLACES[2]}, rank 2)" in case.text
    evidence = row["evidence"]
    assert evidence["own"] == pytest.approx(evidence["median of siblings"] * 0.88, rel=0.002)
    assert evidence["their MAD"] < 0.002 * evidence["median of siblings"]
    assert (evidence["siblings"], evidence["not measured"], evidence["SM MHz"]) == (3, 0, 1500)


def test_the_slow_one_is_the_culprit(slow: FinishedRun) -> None:
    """All comparisons point at one GPU, and the run is rejected."""
    culprit = slow.culprit(PLACES[2])
    assert culprit["kind"] == "gpu"
    assert set(culprit["criteria"]) == set(KEYS.values())
    assert len(slow.results["culprits"]) == 1
    assert (slow.returncode, slow.results["verdict"]) == (1, "REJECTED")


def test_the_distance_of_a_healthy_one_is_shown(slow: FinishedRun) -> None:
    """As it was seen: rank 1 lies a tenth of a per cent above the median of its siblings, which is rank 0."""
    row = slow.row(KEYS["hbm_bandwidth"], PLACES[1])
    assert row["value"] == pytest.approx(-0.1, abs=0.01)
    assert row["limit"] == "<= 3 %"


@pytest.mark.parametrize(
    ("shares", "percent"),
    [
        ({"1": 0.955, "2": 0.926, "3": 0.897}, 6.1),  # 51.3, 49, 47.5 and 46 TFLOPS
        pytest.param(
            {"0": 0.94, "1": 0.94, "2": 0.94}, -6.3, marks=pytest.mark.slow
        ),  # three are slow, and the median is one of them
    ],
)
def test_nobody_passes_where_nobody_can_be_named(ran: Any, shares: dict[str, float], percent: float) -> None:
    """Siblings that hide each other: too close to call at each place, with the distance; no culprit, and incomplete."""
    unlike = ran(slow=shares, select="straggler and (hbm or fp32)")
    for key in (KEYS["hbm_bandwidth"], KEYS["fp32_tflops"]):
        assert unlike.outcomes(key) == dict.fromkeys(PLACES, "noisy")
        assert unlike.row(key, PLACES[3])["value"] == pytest.approx(percent, abs=0.2)
        assert "nobody can be named: siblings of one host differ by" in unlike.row(key, PLACES[3])["reason"]
    assert unlike.results["culprits"] == []
    assert (unlike.returncode, unlike.results["verdict"]) == (1, "INCOMPLETE")


def test_healthy_siblings_pass(ran: Any) -> None:
    """Four that differ by a tenth of a per cent: nobody is named."""
    healthy = ran()
    assert [healthy.outcomes(key) for key in KEYS.values()] == [HEALTHY] * len(KEYS)
    assert healthy.results["culprits"] == []
    assert healthy.returncode == 0


def test_level_quick_does_not_load_for_long(ran: Any) -> None:
    """What is compared from the lasting load belongs to level standard, as its floor does."""
    quick = ran(level="quick")
    for quantity, key in KEYS.items():
        outcome = "not_selected" if quantity in STANDARD else "passed"
        assert set(quick.outcomes(key).values()) <= {outcome}, key


def test_each_model_is_compared_with_its_like(mixed: FinishedRun) -> None:
    """Half the rate of another model is no shortfall; a tenth less than its own model is."""
    outcomes = mixed.outcomes(KEYS["hbm_bandwidth"])
    assert {place[-1]: outcome for place, outcome in outcomes.items()} == {
        "0": "error",  # its only measured sibling is number 2
        "1": "passed",
        "2": "error",
        "3": "passed",
        "4": "error",
        "5": "failed",
    }
    assert mixed.row(KEYS["hbm_bandwidth"], "node0-cpu5")["value"] == pytest.approx(10, abs=0.2)
    assert mixed.row(KEYS["hbm_bandwidth"], "node0-cpu5")["evidence"]["not measured"] == 1


def test_too_few_siblings_is_not_measured(mixed: FinishedRun) -> None:
    """An error that says how many there were; who was measured is not blamed for it."""
    text = mixed.case("test_straggler[node0-cpu2-hbm_bandwidth]").text
    assert "of its siblings (NVIDIA H200) 1 could be measured, and it takes 2 to compare" in text
    assert {culprit["place"]["id"] for culprit in mixed.results["culprits"]} >= {"node0-cpu5"}
    assert "node0-cpu2" not in {culprit["place"]["id"] for culprit in mixed.results["culprits"]}


def test_what_was_not_measured_says_why(mixed: FinishedRun) -> None:
    """The cause of the measurement, and a clock that could not be read."""
    assert "planted: the product is wrong" in mixed.case("test_straggler[node0-cpu4-bf16_tflops]").text
    assert "bf16_at_clock has no value here" in mixed.case("test_straggler[node0-cpu0-bf16_at_clock]").text
    assert "of its siblings (NVIDIA H200) 0 could" in mixed.case("test_straggler[node0-cpu2-bf16_at_clock]").text


@pytest.mark.slow  # by day, `mixed` has one that fails and a slow one that is named
def test_one_that_fails_does_not_blind_the_others(ran: Any) -> None:
    """Three of four are compared all the same, and the slow one among them is found."""
    found = ran(dies=[0], slow={"3": 0.9})
    assert found.outcomes(KEYS["hbm_bandwidth"]) == {**HEALTHY, PLACES[0]: "error", PLACES[3]: "failed"}


def test_a_narrow_selection_is_compared_with_all(ran: Any) -> None:
    """Measuring one GPU again measures its siblings too, or there would be nothing to compare with."""
    found = ran(select="hbm_bandwidth and cpu2", slow={"2": 0.9})
    left_out = dict.fromkeys(PLACES, "not_selected")
    assert found.outcomes("hbm_bandwidth") == {**left_out, PLACES[2]: "passed"}
    assert found.outcomes(KEYS["hbm_bandwidth"]) == {**left_out, PLACES[2]: "failed"}
    assert found.row(KEYS["hbm_bandwidth"], PLACES[2])["evidence"]["siblings"] == 3


def test_one_gpu_is_too_few_by_rule(ran: Any) -> None:
    """It takes two: with one expected the comparison is skipped, and says so."""
    few = ran(ranks=1)
    for key in KEYS.values():
        assert few.outcomes(key) == {PLACES[0]: "skipped"}
        assert few.row(key, PLACES[0])["reason"].startswith("needs 2 GPUs")


@pytest.mark.slow  # by day, four that are alike pass, and nobody is named among four that hide each other
@pytest.mark.parametrize(("share", "outcome"), [(1.0, "passed"), (0.88, "noisy")])
def test_of_two_that_differ_nobody_is_named(ran: Any, share: float, outcome: str) -> None:
    """Two that are alike pass. Of two that are not, one is slow, and nothing shows which."""
    two = ran(ranks=2, slow={"1": share})
    for key in KEYS.values():
        assert two.outcomes(key) == dict.fromkeys(PLACES[:2], outcome), key
        if outcome == "noisy":
            assert "one of two is slow: they differ by 11.9 %" in two.row(key, PLACES[0])["reason"]
    assert two.results["culprits"] == []


def test_a_rehearsal_compares_nothing(tmp_path_factory: pytest.TempPathFactory) -> None:
    """By the packaged rules, whatever the number of ranks."""
    folder = tmp_path_factory.mktemp("rehearsal")
    plain = run_pytest(folder, ACCEPTANCE, "--gpucluster-expect=nodes=1,gpus_per_node=4", "-k", "straggler")
    for key in KEYS.values():
        assert plain.outcomes(key) == dict.fromkeys(PLACES, "skipped")
    assert plain.row(KEYS["bf16_tflops"], PLACES[0])["reason"] == "the cores of a CPU share too much to be compared"
