"""Each check by itself: what it passes, what it catches, and the ranks it names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from finetune_smoke import digests
from finetune_smoke.checks import exact
from finetune_smoke.checks.exact import Checks, difference
from finetune_smoke.digests import digest, fingerprints
from finetune_smoke.settings.config import InputError
from tests.support.finetune.fixed_ranks import ALONE, FixedRanks, checks_over, only_result

if TYPE_CHECKING:
    from finetune_smoke.ranks import Ranks


@pytest.mark.parametrize(
    ("values", "problem", "odd"),
    [
        ([7, 7, 7], None, ()),
        ([7, 8, 7], "rank 1 of 3 not like the others", (1,)),
        ([7, 8, 7, 7, 9], "ranks 1, 4 of 5 not like the others", (1, 4)),
        ([1, 2], "ranks 0 and 1 differ; it takes three to say which is wrong", ()),
        ([1, 1, 2, 2], "4 ranks hold 2 different values, none of them in the majority", ()),
        ([1, 2, 3], "3 ranks hold 3 different values, none of them in the majority", ()),
    ],
)
def test_a_majority_of_three_names_the_odd_rank(values: list[int], problem: str | None, odd: tuple[int, ...]) -> None:
    """Without a majority (two ranks, a draw, or all different) nobody is named."""
    assert difference(values) == (problem, odd)


def test_equal_values_pass_and_one_rank_is_not_compared() -> None:
    """What was not tested must not look passed."""
    alone, same, other = checks_over(5), checks_over(5, 5), checks_over(5, 5, 6)
    for record in (alone, same, other):
        exact.record_equal(record, "base_digest", values=[5], what="weights")
    assert alone.results() == {}
    assert only_result(same, "base_digest")["passed"]
    assert only_result(other, "base_digest") == {
        "passed": False,
        "detail": "weights: rank 2 of 3 not like the others (1 of 1 looks failed)",
        "ranks": [2],
    }


def test_one_failure_among_passes_is_kept() -> None:
    """A check that failed once has failed; its detail is the first problem."""
    record = checks_over(0)
    record.record("data_digest", problem=None)
    record.record("data_digest", problem="step 10: rank 1", at_fault=[1])
    record.record("data_digest", problem="step 20: rank 0", at_fault=[0])
    record.record("data_digest", problem=None)
    assert only_result(record, "data_digest") == {
        "passed": False, "detail": "step 10: rank 1 (2 of 4 looks failed)", "ranks": [0, 1],
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_digest_sees_any_one_bit(dtype: torch.dtype) -> None:
    """The digest changes with any bit of any element of any type, in odd sizes too."""
    values = torch.arange(37).to(dtype)
    before = digest([values])
    assert digest([values.clone()]) == before
    for byte in range(values.numel() * values.element_size()):
        changed = values.clone()
        changed.view(torch.uint8)[byte] ^= 1 << (byte % 8)
        assert digest([changed]) != before


@pytest.mark.parametrize("changed", [(3, 7), (0, 1, 2, 3), tuple(range(0, 4096, 4)), (1, 2, 5, 6)])
def test_digest_sees_signs_that_flip_together(changed: tuple[int, ...]) -> None:
    """The highest bits of several words do not cancel each other."""
    values = torch.randn(4096, generator=torch.Generator().manual_seed(0)).bfloat16()
    flipped = values.clone()
    flipped[list(changed)] = -flipped[list(changed)]
    assert digest([flipped]) != digest([values])


def test_digest_sees_values_changing_places() -> None:
    """The digest changes if values change places within a tensor or between tensors."""
    a, b = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([5.0, 6.0])
    assert digest([a, b]) != digest([a.flip(0), b])
    assert digest([a, b]) != digest([b, a])


def test_digest_of_large_tensors_is_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts and their order matter; a bit at the end is seen."""
    monkeypatch.setattr(digests, "BLOCK_BYTES", 64)
    values = torch.arange(100, dtype=torch.float32)
    before = digest([values, values])
    changed = values.clone()
    changed[99] += 1
    assert len({before, digest([changed, values]), digest([values, changed])}) == 3


def test_audit_of_a_rank_alone_compares_it_with_itself() -> None:
    """A rank that does not repeat itself is caught without other ranks."""
    values = iter(range(100))

    def unsteady() -> tuple[torch.Tensor, list[torch.Tensor]]:
        return torch.tensor(1.0), [torch.tensor([float(next(values))])]

    record = Checks(ALONE)
    exact.audit(record, step=0, work=lambda: (torch.tensor(1.0), [torch.tensor([2.0])]))
    assert only_result(record, "lock_step")["passed"]
    exact.audit(record, step=50, work=unsteady)
    found = only_result(record, "lock_step")
    assert not found["passed"]
    assert "gradients of the same rows at step 50: rank 0 does not repeat itself" in found["detail"]
    assert found["ranks"] == [0]


def test_kernel_without_a_repeatable_form_is_said() -> None:
    """An unrepeatable kernel is bad input; any other error stays a crash."""
    for message, expected in (("cumsum does not have a deterministic implementation", InputError), ("other", RuntimeError)):

        def fail(message: str = message) -> tuple[torch.Tensor, list[torch.Tensor]]:
            raise RuntimeError(message)

        with pytest.raises(expected, match=message):
            exact.audit(Checks(ALONE), step=0, work=fail)


@pytest.mark.parametrize(
    ("once", "again", "detail", "at_fault"),
    [
        ([[1, 2], [1, 2], [1, 3]], None, "gradients of the same rows at step 0: rank 2 of 3 not like", [2]),
        ([[1, 2], [4, 2], [1, 2]], None, "loss of the same rows at step 0: rank 1 of 3 not like", [1]),
        ([[1, 2], [1, 2], [1, 3]], [[1, 2], [1, 2], [1, 9]], "rank 2 does not repeat itself", [2]),
        ([[1, 2], [1, 3]], [[1, 2], [1, 9]], "it takes three to say which is wrong; rank 1 does not repeat itself", []),
    ],
)
def test_audit_names_the_odd_rank_and_those_unlike_themselves(
    once: list[list[int]], again: list[list[int]] | None, detail: str, at_fault: list[int]
) -> None:
    """Wrong arithmetic repeats itself; flaky arithmetic does not."""
    record = checks_over(0)
    exact._judge_lock_step(record, 0, once, again or once)
    found = only_result(record, "lock_step")
    assert detail in found["detail"]
    assert found["ranks"] == at_fault


def test_wrong_all_reduce_names_where_it_arrived_wrong() -> None:
    """Counts of wrong elements by rank: 0 passes, 3 on rank 1 does not."""
    record = checks_over(0, 3)
    exact.record_zero(record, "all_reduce", count=0, what="wrong elements")
    assert only_result(record, "all_reduce")["ranks"] == [1]
    assert "wrong elements: 3 on rank 1" in only_result(record, "all_reduce")["detail"]


def test_all_reduce_that_loses_a_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mean that is off by a few units in the last place, and one that is not."""
    monkeypatch.setattr(torch.distributed, "broadcast", lambda _vector, _source: None)
    counted: list[int] = []

    class Counting(FixedRanks):
        def gather(self, values: Any) -> list[list[Any]]:
            counted.extend(values)
            return [list(values), [0]]

    vector = torch.linspace(-1, 1, 101)
    for factor in (2.0, 2.0 * (1 + 2**-20)):
        monkeypatch.setattr(torch.distributed, "all_reduce", lambda mean, factor=factor: mean.mul_(factor))
        exact._audit_all_reduce(Checks(cast("Ranks", Counting(0, 0))), 0, vector)
    assert counted[0] == 0
    assert counted[1] >= 100  # one of the 101 is 0


@pytest.mark.parametrize(
    ("everyone", "at_fault"),
    [
        ([(0, 11, 0, 11), (4, 12, 4, 12)], []),
        ([(0, 11, 0, 11), (4, 11, 4, 11)], []),  # equal texts
        ([(0, 11, 0, 11), (4, 13, 4, 12)], [1]),  # other contents
        ([(0, 11, 0, 11), (0, 11, 4, 11)], [1]),  # another row with the same text
        ([(0, 11, 0, 11), (0, 11, 0, 11), (8, 12, 8, 12)], [0, 1]),
    ],
)
def test_rows_other_than_demanded_name_their_reader(everyone: list[tuple[int, ...]], at_fault: list[int]) -> None:
    """Rows that are read twice name both readers. Rows are identified by number, because texts may be equal."""
    record = checks_over(*everyone)
    exact.record_rows_read(record, step=0, read=(0, 0), demanded=(0, 0))
    assert only_result(record, "data_digest")["passed"] == (not at_fault)
    assert only_result(record, "data_digest")["ranks"] == at_fault


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_value_that_is_no_number_is_caught(value: float) -> None:
    """A NaN in one step is enough, and so is one weight of many, though every loss before it was fine."""
    record = Checks(ALONE)
    weights = [torch.ones(5, 5), torch.zeros(7)]
    exact.record_finite(record, values=[1.0, 2.0], weights=weights)
    assert only_result(record, "finite")["passed"]
    weights[1][6] = value
    for found in ({"values": [1.0, value]}, {"values": [1.0], "weights": weights}):
        record = Checks(ALONE)
        exact.record_finite(record, **found)
        assert "not finite: 1 on rank 0" in only_result(record, "finite")["detail"]


@pytest.mark.parametrize(
    ("once", "again", "detail", "at_fault"),
    [
        ([[1, 2]] * 3, None, None, []),
        ([[1, 2], [1, 2], [1, 3]], None, "rank 2 of 3 not like the others", [2]),
        ([[1, 2], [5, 2], [1, 2]], None, "rank 1 of 3 not like the others", [1]),
        ([[1, 2], [1, 3]], None, "ranks 0 and 1 differ; it takes three to say which is wrong", []),
        ([[1, 2]] * 3, [[1, 2], [1, 2], [1, 9]], "rank 2 does not repeat itself", [2]),
    ],
)
def test_replays_name_the_odd_rank(
    once: list[list[int]], again: list[list[int]] | None, detail: str | None, at_fault: list[int]
) -> None:
    """The replays name the rank as the audit does."""
    record = checks_over(0)
    exact._judge_replays(record, 50, [once, again or once])
    found = only_result(record, "graph_lock_step")
    assert found["passed"] == (detail is None)
    assert found["ranks"] == at_fault
    assert detail is None or f"replays of the same rows at step 50: {detail}" in found["detail"]


@pytest.mark.parametrize("again", [[[1, 9], [1, 2]], [[1, 9], [1, 8]]])
def test_replays_that_repeat_on_no_majority_are_no_pass(again: list[list[int]]) -> None:
    """Kernels that never repeat themselves look like this; a look before that chanced to agree does not count."""
    record = checks_over(0)
    exact._judge_replays(record, 0, [[[1, 2], [1, 2]], [[1, 2], [1, 2]]])
    exact._judge_replays(record, 50, [[[1, 2], [1, 2]], again])
    assert record.results() == {}
    assert "the graph's kernels cannot be compared" in record.left_out()["graph_lock_step"]


def replays(*looks: list[int]) -> tuple[Checks, list[int]]:
    """The checks after an audit whose replays give such digests by rank, and how many replays each took."""
    record, left = checks_over(*looks[0]), [list(look) for look in looks]
    made: list[int] = []

    def gather(_values: object) -> list[list[int]]:
        return [[0, value] for value in left.pop(0)]

    record.ranks.gather = gather  # type: ignore[method-assign]
    exact.audit_replays(record, step=50, work=lambda: (torch.zeros(1), [made.append(1) or torch.zeros(1)]))  # type: ignore[func-returns-value]
    return record, made


def test_replays_that_agree_are_made_twice() -> None:
    """A healthy run makes no further replays."""
    record, made = replays([7, 7, 7], [7, 7, 7])
    assert only_result(record, "graph_lock_step")["passed"]
    assert len(made) == exact.FEWEST_REPLAYS


def test_kernels_that_differ_now_and_then_blame_nobody() -> None:
    """One rank differs at first, another one later: so it is the kernels."""
    record, made = replays([7, 7, 7, 9], [7, 7, 7, 7], [7, 7, 7, 7], [7, 8, 7, 7], *[[7, 7, 7, 7]] * 6)
    assert record.results() == {}
    assert "ranks 1, 3 of 4 differ from themselves" in record.left_out()["graph_lock_step"]
    assert len(made) == exact.MOST_REPLAYS


def test_the_one_rank_that_does_not_repeat_itself_is_named() -> None:
    """All other ranks repeat themselves, ten times."""
    record, _ = replays([7, 7, 7, 9], *[[7, 7, 7, 7]] * 9)
    assert only_result(record, "graph_lock_step")["ranks"] == [3]


def test_what_was_left_out_still_fails_if_it_failed() -> None:
    """A failed check counts even if it was left out at another time."""
    record = checks_over(0)
    record.record("graph_lock_step", problem="rank 1", at_fault=[1])
    record.leave_out("graph_lock_step", why="cannot be compared")
    assert not only_result(record, "graph_lock_step")["passed"]
    assert record.left_out() == {}


def test_adapter_that_never_changed_is_caught() -> None:
    """The adapter's fingerprint did not change."""
    record = Checks(ALONE)
    start = fingerprints([torch.zeros(4), torch.ones(4)])
    exact.record_moved(record, before=start, now=fingerprints([torch.full((4,), 1e-20), torch.ones(4) + 1e-3]))
    assert only_result(record, "adapters_moved")["passed"]
    exact.record_moved(record, before=start, now=fingerprints([torch.zeros(4), torch.ones(4) + 1e-3]))
    assert "adapter tensors of 2 that never changed: 1 on rank 0" in only_result(record, "adapters_moved")["detail"]


def test_deterministic_switch_is_put_back() -> None:
    """Also after an error. Within, it does more than warn: a warning leaves attention's backward unrepeatable."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    within = []

    def fail() -> None:
        with exact.deterministic():
            within.extend([torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()])
            within.append(torch.backends.cuda.cudnn_sdp_enabled())  # type: ignore[no-untyped-call]  # torch's
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert within == [True, False, False]
    assert before == (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
