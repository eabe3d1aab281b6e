"""Training and its scaling through the real controller, agents and workers: what passes, what fails, and by which value."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.thresholds.lint import load
from tests.support.launching import ACCEPTANCE
from tests.support.runs import Torchrun, run_pytest
from tests.support.thresholds_files import in_rehearsal, write_limits

if TYPE_CHECKING:
    from pytest_gpucluster.thresholds.resolve import Threshold
    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CHECKS = {
    "base_digest": [],
    "data_digest": [1],
    "lock_step": [1],
    "all_reduce": [1],
    "adapter_digest": [],
    "finite": [0, 1],
    "adapters_moved": [0],
    "restore": [0, 1],
    "generation": [],
    "graph_lock_step": [1],
    "step_time_spread": [1],
}
"""The ranks at which each check fails below; none where two ranks differ and nobody can say which is wrong.

Where all fail no GPU is to blame.
"""

PLACES = ("node0-cpu0", "node0-cpu1")
RATES = {
    "training_throughput_gpu": PLACES,
    "training_throughput_ddp_node": ("node0",),
    "training_throughput_fsdp_node": ("node0",),
    "finetune_throughput": (None,),
    "finetune_throughput_healthy": (None,),
    "training_scaling_node": ("node0",),
}
ONE_NODE = "needs 2 nodes, and 1 is expected"
NOT_HERE = {
    "training_throughput_ddp_cluster": ONE_NODE,
    "training_throughput_fsdp_cluster": ONE_NODE,
    "training_scaling_cluster": ONE_NODE,
    "busbw_scaling": ONE_NODE,
    "memory_scaling_node": "a rehearsal has no GPU memory to count",
    "memory_scaling_cluster": "a rehearsal has no GPU memory to count",
}
SELECTED = "throughput or scaling or busbw"  # the all-reduce comes first, and leaves a group of two behind


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two ranks, real trainings, the packaged limits."""
    return run_pytest(tmp_path_factory.mktemp("trained"), ACCEPTANCE, "-k", SELECTED)


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two ranks, real trainings, limits that no CPU reaches."""
    folder = tmp_path_factory.mktemp("slow-training")
    above = {key: in_rehearsal(above=1e7) for key in RATES if key != "training_scaling_node"}
    limits = write_limits(folder / "limits.yaml", above)
    return run_pytest(folder, ACCEPTANCE, limits, "-k", "throughput")


def written(threshold: Threshold) -> float:
    """The number of an entry: the handover's for 2 nodes of 8 where there is one, since its ratio is a plain one."""
    return threshold.by_shape.get("2x8", threshold.numbers.get("any", 0.0))


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two nodes of two ranks on which groups of 1, 2 and 4 train as asked, judged by the limits of H200."""
    file = load(None)
    packaged = file.criteria(file.profiles["h200-sxm"])
    keys = [key for key in packaged if "throughput" in key or "scaling" in key]
    limits = {key: in_rehearsal(**{packaged[key].kind: written(packaged[key])}, skip=None) for key in keys}

    def start(**values: Any) -> FinishedRun:
        folder = tmp_path_factory.mktemp("planted-training")
        option = write_limits(folder / "limits.yaml", limits)
        chosen = "(throughput or scaling) and not straggler"
        arguments = ["--gpucluster-expect=nodes=2,gpus_per_node=2", "-k", chosen, "-p", "trained"]
        environment = {"E2E_TRAINED": json.dumps(values)}
        two = Torchrun(ranks=2, nodes=({}, {}))
        return run_pytest(folder, ACCEPTANCE, option, *arguments, torchrun=two, variables=environment)

    return start


@pytest.fixture(scope="module")
def good(planted: Any) -> FinishedRun:
    """The rates of healthy GPUs, and the bus bandwidths of the client's report."""
    return planted()


@pytest.fixture(scope="module")
def bad(planted: Any) -> FinishedRun:
    """The client's own training on several nodes, a collapsed fabric, and layers that are never sharded."""
    return planted(
        rate={"1": 50_000, "2": 41_480, "4": 8_561},
        sharded_rate={"2": 1_999, "4": 500},
        peak_gib={"2": 20.0, "4": 20.0},
        busbw_gb_s={"4": 367.0},
    )


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two ranks whose fine-tune learned, with checks as asked, and steps that are replayed."""

    def start(*, loss_below: float | None = None, **values: Any) -> FinishedRun:
        folder = tmp_path_factory.mktemp("checked")
        changed = {f"finetune_check[{name}]": in_rehearsal(skip=None) for name in ("graph_lock_step", "step_time_spread")}
        if loss_below is not None:
            changed["finetune_loss"] = in_rehearsal(below=loss_below)
        limits = write_limits(folder / "limits.yaml", changed)
        environment = {"E2E_TRAINED": json.dumps(values)}
        return run_pytest(folder, ACCEPTANCE, limits, "-k", "finetune_", "-p", "trained", variables=environment)

    return start


@pytest.fixture(scope="module")
def wrong(checked: Any) -> FinishedRun:
    """Every check failed, and the limit lies where a model that reads no prompt could come."""
    return checked(checks=CHECKS, loss_limit=0.7)


@pytest.mark.fault
@pytest.mark.parametrize(("name", "ranks"), CHECKS.items())
def test_each_check_fails_alone(wrong: FinishedRun, name: str, ranks: list[int]) -> None:
    """1 of at most 0, at a rank that the check names, with what it found."""
    row = wrong.row(f"finetune_check[{name}]")
    assert (row["outcome"], row["value"], row["limit"]) == ("failed", 1, "<= 0 count")
    text = wrong.case(f"test_finetune_check[{name}]").text
    where = rf".*[(]{PLACES[ranks[0]]}[)]" if len(ranks) == 1 else "the cluster"
    assert re.search(rf"finetune_check\[{name}\] at {where}: 1, ", text), text
    assert f"found {name} looked" in text


@pytest.mark.fault
def test_checks_in_sum(wrong: FinishedRun) -> None:
    """As many as there are; the loss itself is fine, and that is the point of them."""
    assert wrong.row("finetune_checks")["value"] == len(CHECKS)
    learned = wrong.row("finetune_loss")["evidence"]
    curve = learned["curve [step, loss]"]
    assert (len(curve), curve[0], curve[-1]) == (100, [0, 7.0], [149, 0.1])
    assert learned["notes"] == ["a note of the run"]
    assert wrong.row("finetune_loss")["outcome"] == wrong.row("finetune_exact_match")["outcome"] == "passed"


@pytest.mark.fault
def test_a_limit_near_the_blind_floor_fails(wrong: FinishedRun) -> None:
    """0.7 of 1.35 nats."""
    row = wrong.row("finetune_loss_limit")
    assert (row["outcome"], row["value"], row["limit"]) == ("failed", pytest.approx(0.5185, abs=1e-4), "< 0.5 ratio")


@pytest.mark.fault
def test_a_check_that_was_not_made_is_an_error(checked: Any) -> None:
    """Neither green nor red, though the sum of failures is 0; the others pass."""
    ran = checked(checks={"lock_step": None, "generation": None}, loss_below=0.675)
    assert ran.row("finetune_checks")["outcome"] == "passed"
    outcomes = {name: ran.row(f"finetune_check[{name}]")["outcome"] for name in CHECKS}
    assert outcomes == {**dict.fromkeys(CHECKS, "passed"), "lock_step": "error", "generation": "error"}
    text = ran.case("test_finetune_check[generation]").text
    assert "made no check 'generation': generation does not apply" in text
    assert ran.results["verdict"] == "INCOMPLETE"
    # The same run: a limit of one's own that lies at half of the blind floor of 1.35.
    assert ran.row("finetune_loss")["outcome"] == "error"
    text = ran.case("test_finetune_loss").text
    assert "the limit of 0.675 nats is not below half of the blind floor of 1.350" in text
    assert ran.row("finetune_loss_limit")["outcome"] == "passed"  # the run's own limit


def test_a_rehearsal_trains_in_every_way(healthy: FinishedRun) -> None:
    """All that two ranks can show passes; the rest is skipped by rule, with its reason."""
    for criterion, places in RATES.items():
        assert healthy.outcomes(criterion) == dict.fromkeys(places, "passed"), criterion
    for criterion, reason in NOT_HERE.items():
        rows = [row for row in healthy.results["criteria"] if row["criterion"] == criterion]
        assert {(row["outcome"], row["reason"]) for row in rows} == {("skipped", reason)}
    assert healthy.returncode == 0


@pytest.mark.parametrize(
    ("criterion", "place", "ranks", "strategy"),
    [
        ("training_throughput_gpu", "node0-cpu1", 1, "none"),
        ("training_throughput_ddp_node", "node0", 2, "ddp"),
        ("training_throughput_fsdp_node", "node0", 2, "fsdp"),
        ("finetune_throughput", None, 2, "ddp"),
    ],
)
def test_who_trained_and_how(healthy: FinishedRun, criterion: str, place: str | None, ranks: int, strategy: str) -> None:
    """A GPU alone is alone though its worker was in a group before; the same rows for each, and what went over the wire."""
    evidence = healthy.row(criterion, place)["evidence"]
    assert (evidence["ranks"], evidence["strategy"], evidence["rows a step"]) == (ranks, strategy, 4 * ranks)
    assert (evidence["GB sent a step"] > 0) == (ranks > 1)


def test_sharding_sends_more(healthy: FinishedRun) -> None:
    """FSDP gathers the base twice beside the all-reduce of the adapters."""
    ddp, fsdp = (
        healthy.row(f"training_throughput_{way}_node", "node0")["evidence"]["GB sent a step"] for way in ("ddp", "fsdp")
    )
    assert fsdp > ddp


def test_scaling_is_the_ratio_of_the_two_rates(healthy: FinishedRun) -> None:
    """Of what was measured for the throughput, not of another measurement."""
    alone = [healthy.row("training_throughput_gpu", place)["value"] for place in PLACES]
    together = healthy.row("training_throughput_ddp_node", "node0")["value"]
    assert healthy.row("training_scaling_node", "node0")["value"] == pytest.approx(100 * together / (sum(alone) / 2), rel=1e-3)


@pytest.mark.fault
@pytest.mark.slow
@pytest.mark.parametrize(
    "criterion", [key for key in RATES if key not in {"training_scaling_node", "finetune_throughput_healthy"}]
)
def test_too_slow_fails(slow: FinishedRun, criterion: str) -> None:
    """With the rate, and what explains it."""
    assert set(slow.outcomes(criterion).values()) == {"failed"}
    rows = [row for row in slow.results["criteria"] if row["criterion"] == criterion]
    assert all(0 < row["value"] < 1e7 and row["evidence"]["ms a step"] > 0 for row in rows)


def test_healthy_nodes_pass(good: FinishedRun) -> None:
    """By the limits of H200; the bus bandwidth by the arithmetic of the client's report."""
    judged = [row for row in good.results["criteria"] if row["outcome"] != "not_selected"]
    assert {row["outcome"] for row in judged} == {"passed"}
    assert {row["criterion"] for row in judged} == {*RATES, *NOT_HERE}
    assert good.row("busbw_scaling")["value"] == pytest.approx(98.4, abs=0.05)
    assert good.row("training_scaling_cluster")["value"] == 100
    assert good.row("finetune_throughput")["evidence"]["ranks"] == 4


@pytest.mark.fault
@pytest.mark.parametrize(
    ("criterion", "places", "value", "limit"),
    [
        ("training_scaling_cluster", (None,), 20.64, "> 90 %"),
        ("training_scaling_node", ("node0", "node1"), 82.96, "> 90 %"),
        ("busbw_scaling", (None,), 82.99, "> 90 %"),
        ("memory_scaling_node", ("node0", "node1"), 41.67, "<= 10 %"),
        ("memory_scaling_cluster", (None,), 66.67, "<= 10 %"),
        ("training_throughput_fsdp_node", ("node0", "node1"), 1_999, "> 2000 tokens/s/GPU"),
        ("training_throughput_fsdp_cluster", (None,), 500, "> 500 tokens/s/GPU"),
    ],
)
def test_what_does_not_scale_fails(
    bad: FinishedRun, criterion: str, places: tuple[str | None, ...], value: float, limit: str
) -> None:
    """The client's own run is one of these: 8,561 of 41,480 tokens/s/GPU is 20.6 %."""
    assert bad.outcomes(criterion) == dict.fromkeys(places, "failed")
    for place in places:
        row = bad.row(criterion, place)
        assert (row["value"], row["limit"]) == (pytest.approx(value, abs=0.01), limit)


@pytest.mark.fault
def test_a_rate_that_keeps_the_contract_still_fails_to_scale(bad: FinishedRun) -> None:
    """8,561 is far above 500 and above 2000: only the ratio shows that the fabric is not used."""
    for criterion in ("training_throughput_ddp_cluster", "finetune_throughput", "training_throughput_ddp_node"):
        assert set(bad.outcomes(criterion).values()) == {"passed"}
    assert bad.results["verdict"] == "REJECTED"


@pytest.mark.fault
def test_memory_tells_what_it_should_be(bad: FinishedRun) -> None:
    """Measured, due, and of how many ranks."""
    evidence = bad.row("memory_scaling_cluster")["evidence"]
    assert evidence == {"peak GiB": 20, "due GiB": 12, "GiB alone": 20, "GiB sharded": 12, "ranks": 4}
