"""Two ranks: a clean run passes every check, and each planted fault is caught by the check that is there for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from finetune_smoke.ranks import Ranks
from finetune_smoke.settings.config import InputError, OwnInputError, preset
from finetune_smoke.training.loop import finetune
from tests.support.finetune.runs import ONE_RANK, QUICK, failed, options, result, torchrun

pytestmark = pytest.mark.long

Outcomes = dict[str, list[dict[str, Any]]]


def test_clean_run_passes_every_check(outcomes: Outcomes) -> None:
    """No false alarm, every check looked, and the loss falls."""
    clean = outcomes["clean"][0]
    assert failed(clean) == set()
    assert set(clean["checks"]) == {
        "adapter_digest", "adapters_moved", "all_reduce", "base_digest", "data_digest", "finite", "lock_step", "restore",
        "step_time_spread",
    }  # fmt: skip
    assert clean["world_size"] == 2
    assert 6 < clean["first_loss"] < 8
    assert clean["losses"][-1] < clean["losses"][0]


def test_outcome_is_the_same_on_every_rank(outcomes: Outcomes) -> None:
    """Times, rates and verdicts too; even of runs in which the ranks drifted apart."""
    for name, (first, second) in outcomes.items():
        assert first == second, name


CAUGHT = {
    "frozen": "adapters_moved", "noallreduce": "adapter_digest", "dupdata-of-rank-0": "data_digest", **ONE_RANK,
}  # fmt: skip


@pytest.mark.parametrize("fault", CAUGHT)
def test_fault_is_caught_by_its_check(outcomes: Outcomes, fault: str) -> None:
    """Table of section 5 of the research: who sees what. Weights that drifted also fail the audit of a later step."""
    assert {CAUGHT[fault]} <= failed(outcomes[fault][0]) <= {CAUGHT[fault], "lock_step"}


@pytest.mark.parametrize(
    ("fault", "rank"), [("base-late", 1), ("wrongdata", 1), ("dupdata-of-rank-0", 0), ("truncate-ckpt", 1), ("straggler", 1)]
)
def test_guilty_rank_is_named_where_it_can_be_told(outcomes: Outcomes, fault: str, rank: int) -> None:
    """These checks need no majority."""
    assert outcomes[fault][0]["checks"][CAUGHT[fault]]["ranks"] == [rank]


def test_two_ranks_cannot_say_which_differs(outcomes: Outcomes) -> None:
    """The audit says so and names no rank."""
    check = outcomes["bitflip"][0]["checks"]["lock_step"]
    assert check["ranks"] == []
    assert "it takes three" in check["detail"]


def test_learning_rate_of_zero_is_caught_by_the_loss(outcomes: Outcomes) -> None:
    """It ends where it began, where the clean run has come down. As with frozen adapters, all ranks are named, and agree."""
    clean, lr0 = outcomes["clean"][0], outcomes["lr0"][0]
    assert lr0["losses"][-1] > lr0["first_loss"] - 0.2 > clean["losses"][-1]
    for outcome in (lr0, outcomes["frozen"][0]):
        assert failed(outcome) == {"adapters_moved"}
        assert outcome["checks"]["adapters_moved"]["ranks"] == [0, 1]


def test_curve_does_not_depend_on_the_number_of_ranks(outcomes: Outcomes) -> None:
    """The same rows a step, shared by two or read by one: float32 losses agree to 1e-5."""
    alone = finetune(preset("tiny", **QUICK))
    assert alone.losses == pytest.approx(outcomes["clean"][0]["losses"], rel=1e-5)


def test_resumed_run_ends_like_the_uninterrupted_one(outcomes: Outcomes) -> None:
    """From step 3 at the same world size, to the bit; the curve holds the steps before too."""
    whole, resumed = outcomes["checkpointed"][0], outcomes["resumed"][0]
    assert resumed["losses"] == whole["losses"]
    assert resumed["adapter_digest"] == whole["adapter_digest"]
    assert failed(resumed) == set()


def test_packed_rows_train(outcomes: Outcomes) -> None:
    """The rows of `7b-shape`, on each rank its own."""
    assert failed(outcomes["packed"][0]) == set()


def test_torchrun_prints_one_result(tmp_path: Any) -> None:
    """The command line under torchrun: exit 0, one RESULT as the last line, progress once."""
    done = torchrun("-m", "finetune_smoke", *options(QUICK), "--checkpoint-dir", tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.startswith("RESULT ") for line in lines].count(True) == 1
    assert result(done.stdout)["world_size"] == 2
    assert [line.startswith("step 6 of 6") for line in lines].count(True) == 1
    assert (tmp_path / "step-6" / "_SUCCESS").exists()


def test_bad_input_is_said_once_under_torchrun() -> None:
    """Rows that two ranks cannot share: one line, of rank 0, and exit code 2 of the ranks."""
    done = torchrun("-m", "finetune_smoke", "--rows", "33")
    assert done.returncode != 0
    assert done.stderr.count("33 rows a step cannot be shared by 2 ranks") == 1
    assert "exitcode  : 2" in done.stderr


def test_problem_of_one_rank_is_raised_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank concerned raises its message, the others name that rank; both raise InputError."""

    def refuse() -> None:
        raise InputError("no such directory: /data")

    ranks = Ranks(rank=1, world_size=2, device=torch.device("cpu"))
    monkeypatch.setattr(Ranks, "gather", lambda _self, _values: [[0], [1]])
    with pytest.raises(OwnInputError, match="no such directory: /data"):
        ranks.run_on_all_ranks(refuse)
    monkeypatch.setattr(Ranks, "gather", lambda _self, _values: [[1], [0]])
    with pytest.raises(InputError, match="rank 0 cannot go on; its message says why"):
        ranks.run_on_all_ranks(lambda: None)


def test_no_rank_waits_for_one_that_met_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any exception: the rank informs the others first, and then raises it."""
    gathered: list[list[int]] = []

    def broken() -> None:
        raise ZeroDivisionError("planted")

    ranks = Ranks(rank=1, world_size=2, device=torch.device("cpu"))
    monkeypatch.setattr(Ranks, "gather", lambda _self, values: gathered.append(list(values)) or [[0], [1]])
    with pytest.raises(ZeroDivisionError, match="planted"):
        ranks.run_on_all_ranks(broken)
    assert gathered == [[1]]
