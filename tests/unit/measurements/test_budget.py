"""A measurement keeps its budget: it repeats less often, leaves out what is only shown, and all ranks do the same."""

from __future__ import annotations

import dataclasses
import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.measurements import collective_cases, collective_sizes, collectives, host_rates, pair_matrix, timing
from pytest_gpucluster.measurements.timing import AT_THE_END, Budget, Launches, affordable
from pytest_gpucluster.thresholds.resolve import BUDGET
from tests.support.loopback_ranks import fork_ranks, results_of_ranks
from tests.support.thresholds_files import packaged
from tests_acceptance.conftest import remark_on, sizes_or_error

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANKS = 3
FULL = Launches(warmup=5, spans=4, each=5, singles=5)
SIZES = [8, 64 << 10, 256 << 10]
LAUNCH_S = 0.02
"""Of a planted slow launch: so long that the rest of the work is a small part of it on a busy machine."""


def test_all_launches_where_they_fit() -> None:
    """Nothing falls, and nothing is said."""
    assert FULL.total == 5 + 4 * 6 + 4 * 6
    found = affordable(FULL, left_s=(FULL.total + AT_THE_END) * 0.1 + 1e-9, one_s=0.1)
    assert found == FULL
    assert found.words_beside(FULL, 9) is None


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (52, Launches(warmup=1, spans=4, each=4, singles=4)),  # the whole warm-up does not fit, and then all fall
        (45, Launches(warmup=1, spans=4, each=4, singles=4)),
        (30, Launches(warmup=1, spans=4, each=2, singles=2)),
        (12, Launches(warmup=1, spans=4, each=1, singles=0)),
        (6, Launches(warmup=1, spans=2, each=1, singles=0)),
        (0, Launches(warmup=1, spans=1, each=1, singles=0)),
        (-9, Launches(warmup=1, spans=1, each=1, singles=0)),
    ],
)
def test_repeats_fall_by_rule(room: int, expected: Launches) -> None:
    """First the spans get shorter, then fewer; one launch is timed in any case."""
    found = affordable(FULL, left_s=(room + AT_THE_END) * 0.5, one_s=0.5)
    assert found == expected
    assert found.total <= max(room, 3)
    assert (found.words_beside(FULL, 9) or "").endswith(" instead of 4 spans of 5 launches, within 9 s")


def test_one_span_of_one_launch_in_words() -> None:
    """As people count."""
    found = Launches(warmup=1, spans=1, each=1, singles=0).words_beside(FULL, 0.75)
    assert found == "timed 1 span of 1 launch instead of 4 spans of 5 launches, within 0.75 s"


@pytest.mark.parametrize("one_s", [1e-6, 0.003, 0.1, 0.5, 4.0, 1e3])
@pytest.mark.parametrize("budget_s", [0.0, 0.3, 3.0, 18.0, 180.0])
def test_the_budget_is_kept_for_any_speed(one_s: float, budget_s: float) -> None:
    """At most three launches beyond it, which a value needs."""
    found = affordable(FULL, left_s=budget_s, one_s=one_s)
    assert (found.total + AT_THE_END) * one_s <= max(budget_s, (3 + AT_THE_END) * one_s) + 1e-9
    assert found.spans >= 1


def test_a_launch_that_takes_no_time() -> None:
    """A clock that is too coarse divides nothing by zero."""
    assert affordable(FULL, left_s=1, one_s=0.0) == FULL


def test_without_a_group_the_own_clock_counts() -> None:
    """One process, and a clock of its own."""
    now = iter([10.0, 13.0])
    assert Budget(5, clock=lambda: next(now)).left_s(7.0) == [2.0, 7.0]
    assert Budget(None).left_s(7.0) == [float("inf"), 7.0]


def test_small_messages_are_timed_in_long_spans() -> None:
    """As nccl-tests does, 20 back to back; what is judged from 64 MiB on stays at five."""
    for size_bytes in (8, 1 << 20, 16 << 20, (64 << 20) - 1):
        assert collectives.launches_of(size_bytes, iterations=20, warmup=5) == Launches(warmup=5, spans=4, each=20, singles=5)
    for size_bytes in (64 << 20, 1 << 30, 8 << 30):
        assert collectives.launches_of(size_bytes, iterations=20, warmup=5) == FULL
    assert collectives.launches_of(8, iterations=3, warmup=1) == Launches(warmup=1, spans=1, each=3, singles=3)


def test_the_first_launch_of_a_small_span_weighs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span pays one launch and one wait more than its launches; the reference of 20 launches pays them too.

    With 30 us of those and 20 us a launch, spans of five read 0.83 of the reference; now 0.95 to 1.05 of it.
    """
    monkeypatch.setattr(timing, "time_span", lambda _call, *, launches, meanwhile: (meanwhile(), 20e-6 + 30e-6 / launches)[1])
    monkeypatch.setattr(timing, "time_each", lambda _call, *, iterations: timing.Timing(samples_s=[50e-6] * iterations))
    reference_s = 20e-6 + 30e-6 / 20
    launches = collectives.launches_of(8, iterations=20, warmup=5)
    spans_s, _ = collectives._time_launches(lambda: None, launches, lambda: None, reset=lambda: None)
    assert all(0.95 <= reference_s / one_s <= 1.05 for one_s in spans_s)
    by_five = launches._replace(each=5)
    spans_s, _ = collectives._time_launches(lambda: None, by_five, lambda: None, reset=lambda: None)
    assert all(reference_s / one_s < 0.9 for one_s in spans_s)


def test_files_stop_within_the_budget_of_their_entry() -> None:
    """Writing and reading end by the clock, each after ``within_s``; both together within what the entry may take."""
    file = packaged()
    entries = [one for one in file.criteria(file.profiles["h200-sxm"]).values() if "files" in one.recipe]
    timed = {one.key: (2 * one.recipe["within_s"], BUDGET * one.takes_s) for one in entries if one.takes_s is not None}
    assert {*timed} == {"shared_write", "shared_write_all", "scratch_write"}
    assert all(most_s <= budget_s for most_s, budget_s in timed.values()), timed


def test_the_host_s_memory_keeps_its_budget() -> None:
    """One span in any case, and every thread makes as many as the others."""
    cpus = sorted(os.sched_getaffinity(0))
    assert len(host_rates._triad(cpus, 1 << 20, 5, budget_s=0.0)) == 1
    assert len(host_rates._triad(cpus, 1 << 20, 5)) == 5


def test_what_the_report_says() -> None:
    """The sizes that were left out and the repeats that fell stand in the evidence, and in one remark."""
    table = collective_sizes.CollectiveSizes(rows=[{"bytes": 8}], left_out=[], left_out_bytes=[1048576000], budget_s=12.0)
    found = sizes_or_error(lambda: table)
    assert found["sizes left out"] == "1048576000 bytes, as the table had 12 s"
    said = remark_on({**found, "fewer repeats": "timed 1 span"})
    assert said == "fewer repeats: timed 1 span; sizes left out: 1048576000 bytes, as the table had 12 s"
    assert remark_on({"sizes": []}) is None


# --- three ranks over gloo, with collectives that are slow, on one rank only too: started once, every case inside ---


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of the ranks, by case."""
    return results_of_ranks(__file__, tmp_path_factory.mktemp("ranks"), ranks=RANKS)


OPERATIONS = ("all_reduce", "all_gather", "send_recv")


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_slow_table_leaves_out_its_largest_sizes(operation: str, ranks: list[dict[str, Any]]) -> None:
    """Launches take as long as their bytes on one rank alone: all ranks leave out the same sizes, and none waits for ever."""
    found = ranks[0][f"{operation} slow table"]
    assert all(one[f"{operation} slow table"] == found for one in ranks)
    kept = [row["bytes"] for row in found["rows"] if row["dtype"] == "float32"]
    assert found["left_out_bytes"] == SIZES[len(kept) :]
    assert found["left_out_bytes"]
    assert kept
    assert {row["dtype"] for row in found["rows"]} == {"float32", "bfloat16"}


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_fast_table_is_whole(operation: str, ranks: list[dict[str, Any]]) -> None:
    """With time enough nothing is left out, and no repeat falls."""
    found = ranks[0][f"{operation} whole table"]
    assert found["left_out_bytes"] == []
    assert not any("shortened" in row for row in found["rows"])
    assert len(found["rows"]) == 2 * len(SIZES)


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_slow_judged_rate_keeps_its_size(operation: str, ranks: list[dict[str, Any]]) -> None:
    """Fewer launches of the same size, the same on every rank, and the report knows."""
    found = ranks[0][f"{operation} slow"]
    assert all(one[f"{operation} slow"] == found for one in ranks)
    assert found["size_bytes"] == SIZES[-1] // 12 * 12
    assert "instead of 4 spans of 20 launches" in found["shortened"]
    assert len(found["spans_busbw_gb_s"]) <= 4
    assert found["time_us"] >= LAUNCH_S * 1e6


@pytest.mark.long
@pytest.mark.e2e
def test_slow_pairs_are_all_measured(ranks: list[dict[str, Any]]) -> None:
    """Every pair has its rate; the later ones by one transfer."""
    for one in ranks:
        found = one["pairs"]
        assert 0 < found["shortened"] < RANKS * (RANKS - 1)
        assert all(value is not None for at, row in enumerate(found["gb_s"]) for to, value in enumerate(row) if at != to)
        assert one["pairs in time"]["shortened"] == 0


def slow_on_one_rank(rank: int, measure: Callable[[], Any], *, by_bytes: bool = False) -> Any:
    """What is measured while every collective takes long, by the clock of rank 1 alone: the others wait inside for it."""
    real_case = collective_cases.case

    def wait(size_bytes: int) -> None:
        if rank == 1:
            time.sleep(LAUNCH_S * (size_bytes / SIZES[-1] if by_bytes else 1))

    def case(*arguments: Any, **named: Any) -> Any:
        found = real_case(*arguments, **named)

        def call() -> None:
            wait(max(found.sent.nbytes, found.received.nbytes))
            found.call()

        return found._replace(call=call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_cases, "case", case)
        return dataclasses.asdict(measure())


def slow_transfers(measure: Callable[[], Any]) -> Any:
    """What is measured while every transfer takes long."""
    real = pair_matrix._move

    def move(*arguments: Any, **named: Any) -> None:
        time.sleep(LAUNCH_S)
        real(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_matrix, "_move", move)
        return dataclasses.asdict(measure())


def ranks_program(rank: int, _folder: Path) -> dict[str, Any]:
    """What a rank does: every case in turn."""
    found: dict[str, Any] = {}
    size = SIZES[-1] // 12 * 12
    for name in OPERATIONS:

        def table(budget_s: float, name: str = name) -> Any:
            return collective_sizes.by_size(name, sizes_bytes=SIZES, iterations=1, warmup=1, budget_s=budget_s)

        def judged(name: str = name) -> Any:
            named = {"size_bytes": size, "iterations": 20, "warmup": 2, "budget_s": 8 * LAUNCH_S}
            return collectives.all_reduce(**named) if name == "all_reduce" else collectives.collective(name, **named)

        found[f"{name} slow table"] = slow_on_one_rank(rank, lambda: table(3 * LAUNCH_S), by_bytes=True)
        found[f"{name} whole table"] = dataclasses.asdict(table(1e3))
        found[f"{name} slow"] = slow_on_one_rank(rank, judged)
    found["pairs"] = slow_transfers(lambda: pair_matrix.pair_matrix(size_bytes=1000, budget_s=LAUNCH_S))
    found["pairs in time"] = dataclasses.asdict(pair_matrix.pair_matrix(size_bytes=1000, budget_s=1e3))
    return found


if __name__ == "__main__":
    fork_ranks(ranks_program, ranks=RANKS)
