"""The measurements on a CPU: their arithmetic, their refusals, and that a wrong result is an error and not a number."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from pytest_gpucluster.measurements import (
    collective_cases,
    collective_sizes,
    collectives,
    gemm,
    hbm,
    health,
    progress,
    timing,
    transport,
)
from tests.support.loopback_ranks import fork_ranks, results_of_ranks
from tests.support.products import skip_without_cpu_product

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


# --- timing ---


def test_every_call_is_timed() -> None:
    """As many samples as iterations, each of the length of its call."""
    timed = timing.time_each(lambda: time.sleep(0.01), iterations=3)
    assert len(timed.samples_s) == 3
    assert min(timed.samples_s) >= 0.01
    assert timed.median_s >= 0.01


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is timed by its own events")
def test_span_is_per_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span's time is divided by its launches."""
    launched: list[int] = []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: 0.005 * len(launched)))
    assert timing.time_span(lambda: launched.append(1), launches=40) == pytest.approx(0.005)


def test_keep_busy_runs_for_the_time() -> None:
    """The load lasts at least as long as requested, and every call is counted."""
    calls: list[int] = []
    start_s = time.perf_counter()
    launched = timing.keep_busy(lambda: calls.append(1), seconds=0.05)
    assert time.perf_counter() - start_s >= 0.05
    assert launched == len(calls)
    assert timing.keep_busy(lambda: None, seconds=0) == 1


def test_no_iterations_are_refused() -> None:
    """Nothing timed is no measurement."""
    with pytest.raises(ValueError, match="at least 1"):
        timing.time_each(lambda: None, iterations=0)


# --- gemm ---


def small_gemm(**changes: Any) -> gemm.GemmRate:
    """A product small enough for any CPU."""
    recipe: dict[str, Any] = {"dtype": "bfloat16", "sizes": [32, 64], "iterations": 3, "warmup_s": 0.0}
    return gemm.gemm(**{**recipe, **changes})


@pytest.fixture
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timed calls run, and are said to last 1, 2, 3 .. ms."""

    def queue_each(call: Callable[[], object], *, iterations: int, **_watched: Any) -> Callable[[], timing.Timing]:
        call()
        return lambda: timing.Timing(samples_s=[(index + 1) / 1000 for index in range(iterations)])

    monkeypatch.setattr(timing, "queue_each", queue_each)


def test_gemm_arithmetic(fixed_times: None) -> None:
    """2 n^3 FLOP over the median time, the best size judged, every size reported."""
    rate = small_gemm()
    assert rate.best_size == 64
    assert rate.tflops == pytest.approx(2 * 64**3 / 0.002 / 1e12)
    assert set(rate.by_size) == {"32", "64"}
    assert rate.by_size["64"]["median"] == rate.tflops
    assert rate.by_size["64"]["best"] == pytest.approx(2 * 64**3 / 0.001 / 1e12)
    assert rate.by_size["32"]["p10"] < rate.by_size["32"]["median"] < rate.by_size["32"]["p90"]
    assert len(rate.samples_tflops) == 3
    assert small_gemm(iterations=4).tflops == pytest.approx(2 * 64**3 / 0.0025 / 1e12)


def test_gemm_really_measures() -> None:
    """Without any stand-in: a positive finite rate, and a report per size."""
    heard: list[str] = []
    progress.listen(lambda step, _fraction: heard.append(step))
    try:
        rate = small_gemm()
    finally:
        progress.listen(lambda _step, _fraction: None)
    assert 0 < rate.tflops < 10_000
    assert heard == ["size 32", "size 64", "checking the products"]
    json.dumps(dataclasses.asdict(rate), allow_nan=False)


@pytest.mark.parametrize("dtype", sorted(gemm.KINDS))
def test_gemm_of_every_dtype_is_right(dtype: str) -> None:
    """Each dtype's product lies within its own rounding; float32 stays float32 afterwards."""
    before = torch.get_float32_matmul_precision()
    with skip_without_cpu_product(dtype):
        assert small_gemm(dtype=dtype, sizes=[32], iterations=1).tflops > 0
    assert torch.get_float32_matmul_precision() == before


def test_gemm_judges_the_best_size_wherever_it_stands(fixed_times: None) -> None:
    """The order of the sizes does not matter."""
    assert small_gemm(sizes=[64, 32]).best_size == 64


def test_gemm_refuses_an_unknown_dtype() -> None:
    """The error names the valid dtypes."""
    with pytest.raises(ValueError, match="unknown dtype 'zeros'; valid"):
        small_gemm(dtype="zeros")


@pytest.mark.parametrize("changes", [{"sizes": []}, {"sizes": [0]}, {"iterations": 0}])
def test_gemm_refuses_to_measure_nothing(changes: dict[str, Any]) -> None:
    """No size and no iteration are errors."""
    with pytest.raises(ValueError, match="at least one"):
        small_gemm(**changes)


@pytest.mark.parametrize("harm", ["nothing computed", "one column wrong", "not finite"])
def test_gemm_sees_a_wrong_product(monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    """A fast wrong product is an error, not a rate."""
    right = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        right(a, b, out=out)
        if harm == "nothing computed":
            out.zero_()
        elif harm == "one column wrong":
            out[:, 5] *= 1.5
        else:
            out[7, 7] = float("nan")

    monkeypatch.setattr(torch, "mm", wrong)
    with pytest.raises(ArithmeticError, match="product"):
        small_gemm(sizes=[64])


def test_a_small_rate_is_not_rounded_to_nothing() -> None:
    """A tiny product of a busy CPU had repeats of 0 TFLOPS, which is outside every limit."""
    assert timing.rounded(4.2e-05) == 4.2e-05
    assert timing.rounded(123.45678) == 123.457
    assert timing.rounded(0.0) == 0.0


def test_slow_products_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 x 64 in a tenth of a second are 5e-06 TFLOPS, in every repeat."""
    slow = timing.Timing(samples_s=[0.1] * 6)
    monkeypatch.setattr(timing, "queue_each", lambda call, **_: (call(), lambda: slow)[1])
    found = gemm.gemm(dtype="float32", sizes=[64], iterations=6, warmup_s=0.0)
    assert min(found.samples_tflops) > 0
    assert min(found.bursts_tflops) > 0


# --- hbm ---


def test_hbm_counts_bytes_moved(fixed_times: None) -> None:
    """A copy moves two arrays, a triad three, a read and a write one; the better of copy and triad is the answer."""
    found = hbm.hbm_bandwidth(size_bytes=4096, iterations=3, warmup=1)
    assert found.size_bytes == 4096
    assert found.copy_tb_s == pytest.approx(2 * 4096 / 0.002 / 1e12)
    assert found.triad_tb_s == pytest.approx(3 * 4096 / 0.002 / 1e12)
    assert found.tb_s == found.triad_tb_s
    assert found.read_tb_s == found.write_tb_s == pytest.approx(4096 / 0.002 / 1e12)
    assert len(found.samples_copy_tb_s) == len(found.samples_triad_tb_s) == 3
    assert (
        found.samples_read_tb_s == found.samples_write_tb_s == [timing.rounded(4096 / seconds / 1e9) for seconds in (1, 2, 3)]
    )
    assert found.repeats_tb_s == found.samples_triad_tb_s


def test_hbm_is_judged_by_copy_and_triad_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read may be faster than both: it explains the answer and is not the answer."""
    seconds = iter([4.0, 9.0, 1e-3, 1e-3])
    monkeypatch.setattr(hbm, "_timed", lambda call, *_counts: (call(), timing.Timing(samples_s=[next(seconds)]))[1])
    found = hbm.hbm_bandwidth(size_bytes=4096, iterations=1, warmup=0)
    assert found.tb_s == found.copy_tb_s < found.read_tb_s
    assert found.repeats_tb_s == found.samples_copy_tb_s


def test_hbm_really_measures() -> None:
    """Without any stand-in: positive finite bandwidths."""
    found = hbm.hbm_bandwidth(size_bytes=1 << 20, iterations=2, warmup=1)
    assert 0 < found.copy_tb_s < 100
    assert 0 < found.triad_tb_s < 100
    assert 0 < found.read_tb_s < 100
    assert 0 < found.write_tb_s < 100
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_hbm_sees_a_copy_that_did_not_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that returns without doing its work is an error."""
    monkeypatch.setattr(timing, "time_each", lambda _call, **_counts: timing.Timing(samples_s=[1.0]))
    with pytest.raises(ArithmeticError, match=r"copy: .* are wrong"):
        hbm.hbm_bandwidth(size_bytes=4096, iterations=1, warmup=0)


def test_hbm_sees_one_wrong_element_of_the_triad(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element is compared."""
    right = torch.add

    def wrong(b: torch.Tensor, c: torch.Tensor, *, alpha: float, out: torch.Tensor) -> None:
        right(b, c, alpha=alpha, out=out)
        out[777] += 1

    monkeypatch.setattr(torch, "add", wrong)
    with pytest.raises(ArithmeticError, match="triad: 1 of the elements 0 to 1023 are wrong"):
        hbm.hbm_bandwidth(size_bytes=4096, iterations=1, warmup=0)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("read", "read: the sum of 512 numbers is 0, not 131328"), ("write", "write: 1024 of the elements 0 to 1023")],
)
def test_hbm_sees_what_was_not_read_or_written(monkeypatch: pytest.MonkeyPatch, kind: str, text: str) -> None:
    """A read or a write that returns without doing its work is an error."""
    kinds = iter(["copy", "triad", "read", "write"])

    def lazy(call: Callable[[], object], *_counts: Any) -> timing.Timing:
        if next(kinds) != kind:
            call()
        return timing.Timing(samples_s=[1.0])

    monkeypatch.setattr(hbm, "_timed", lazy)
    with pytest.raises(ArithmeticError, match=text):
        hbm.hbm_bandwidth(size_bytes=4096, iterations=1, warmup=0)


def test_hbm_sees_one_element_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum is exact, so one number missing of all shows."""
    right = torch.sum

    def wrong(words: torch.Tensor, **keywords: Any) -> None:
        right(words[1:], **keywords)

    monkeypatch.setattr(torch, "sum", wrong)
    with pytest.raises(ArithmeticError, match="read: the sum of 512 numbers is 131327, not 131328"):
        hbm.hbm_bandwidth(size_bytes=4096, iterations=1, warmup=0)


def test_hbm_sees_one_element_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every element of a fill is compared."""
    right = torch.Tensor.fill_

    def wrong(array: torch.Tensor, value: float) -> torch.Tensor:
        right(array[:-1], value)
        return array

    monkeypatch.setattr(torch.Tensor, "fill_", wrong)
    with pytest.raises(ArithmeticError, match="write: 1 of the elements 0 to 1023 are wrong"):
        hbm.hbm_bandwidth(size_bytes=4096, iterations=1, warmup=0)


def test_hbm_rounds_down_to_whole_words_and_refuses_less() -> None:
    """A size that is no multiple of 8 bytes is measured as the next smaller one; below one word there is nothing."""
    assert hbm.hbm_bandwidth(size_bytes=4103, iterations=1, warmup=0).size_bytes == 4096
    with pytest.raises(ValueError, match="size_bytes must be at least 8, not 7"):
        hbm.hbm_bandwidth(size_bytes=7, iterations=1, warmup=0)


def test_hbm_says_that_memory_is_short() -> None:
    """Arrays beyond the free memory are refused with both numbers, before anything is allocated."""
    with pytest.raises(MemoryError, match=r"need 3145728\.\d+ GiB, .* are free"):
        hbm.hbm_bandwidth(size_bytes=1 << 50, iterations=1, warmup=0)


def test_hbm_refuses_to_measure_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that fit the L2 cache would give its bandwidth."""
    monkeypatch.setattr(hbm, "_cache_bytes", lambda: 50 << 20)
    with pytest.raises(ValueError, match="L2 cache"):
        hbm.hbm_bandwidth(size_bytes=16 << 20, iterations=1, warmup=0)


# --- health ---


def test_clocks_under_load_without_nvml() -> None:
    """The load runs; what only NVML knows is None, which no criterion takes for good."""
    found = health.clocks_under_load(seconds=0.05, size=64)
    assert found.tflops > 0
    assert found.seconds >= 0.05
    if not torch.cuda.is_available():
        assert (found.telemetry, found.evidence) == (None, {})


# --- collectives: arithmetic ---


@pytest.mark.parametrize(("ranks", "time_s", "expected"), [(8, 4.150e-3, 442.2), (16, 4.520e-3, 435.0)])
def test_reference_report_is_reproduced(ranks: int, time_s: float, expected: float) -> None:
    """The client's "1 GB" rows are 1000 MiB, and their busbw is nccl-tests' formula."""
    found = collectives.busbw_gb_s("all_reduce", size_bytes=1_048_576_000, time_s=time_s, ranks=ranks)
    assert round(found, 1) == expected


def test_busbw_factors_are_those_of_nccl_tests() -> None:
    """On 8 ranks; what is not in the table is an error."""
    factors = {operation: factor(8) for operation, factor in collectives.BUSBW_FACTOR.items()}
    assert factors["all_reduce"] == 1.75
    assert factors["all_gather"] == factors["reduce_scatter"] == factors["all_to_all"] == 0.875
    assert factors["broadcast"] == factors["reduce"] == factors["send_recv"] == 1
    with pytest.raises(KeyError):
        collectives.busbw_gb_s("gather", size_bytes=8, time_s=1, ranks=8)


@pytest.mark.parametrize(
    ("dtype", "ranks", "size_bytes", "text"),
    [
        ("float32", 1, 8, "needs 2 to"),
        ("bfloat16", 512, 8, "all_reduce in bfloat16 needs 2 to 256 ranks"),
        ("complex64", 2, 8, "unknown dtype"),
        ("float64", 2, 7, "must hold 1 float64 at least"),
    ],
)
def test_all_reduce_refuses(dtype: str, ranks: int, size_bytes: int, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that could not be exact is not measured."""
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    with pytest.raises(ValueError, match=text):
        collectives.all_reduce(size_bytes=size_bytes, iterations=1, warmup=0, dtype=dtype)


@pytest.mark.parametrize(("dtype", "ranks"), [("float32", 4096), ("bfloat16", 200), ("float16", 64), ("int32", 3)])
def test_test_pattern_sums_exactly(dtype: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum stays below the dtype's first gap, and a missing or doubled rank changes it."""
    own, totals = [], []
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    for rank in (0, 1):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        case = collective_cases.case("all_reduce", size_bytes=8, dtype=dtype)
        own.append(case.own[0].double())
        totals.append(case.expected[0].double())
    assert torch.equal(*totals)
    assert totals[0].max() <= collective_cases.EXACT[dtype]
    assert own[0].min() >= 1
    assert ranks == 200 or not torch.equal(*own)  # in bfloat16 each of 200 ranks can only add 1


def test_node_number_comes_from_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the variable, or from the caller; without either it is an error and not node 0."""
    monkeypatch.setenv("GPUCLUSTER_NODE", "3")
    assert collectives.node_number() == 3
    assert collectives.node_number(5) == 5
    monkeypatch.delenv("GPUCLUSTER_NODE")
    with pytest.raises(RuntimeError, match="GPUCLUSTER_NODE is not set"):
        collectives.node_number()


FAULTS = ("missing", "doubled", "shifted", "swapped")

# --- two ranks over gloo: started once, every case inside; see two_ranks_program ---


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of two ranks, by case."""
    return results_of_ranks(__file__, tmp_path_factory.mktemp("ranks"), ranks=2)


@pytest.mark.e2e
def test_all_reduce_of_two_ranks(two_ranks: list[dict[str, Any]]) -> None:
    """Plain numbers that fit each other, the same on both ranks."""
    found = two_ranks[0]["all_reduce"]
    assert two_ranks[1]["all_reduce"] == found
    assert (found["world_size"], found["size_bytes"]) == (2, 1 << 20)
    assert (found["nccl_version"], found["nvls"]) == (None, None)
    assert found["busbw_gb_s"] == pytest.approx(found["algbw_gb_s"])  # the factor of two ranks is 1
    assert found["algbw_gb_s"] == pytest.approx(found["size_bytes"] / found["time_us"] / 1000)
    assert len(found["spans_busbw_gb_s"]) == 2
    assert len(found["samples_busbw_gb_s"]) == 10
    assert two_ranks[0]["bfloat16"]["size_bytes"] == 1000


@pytest.mark.e2e
def test_time_is_the_slowest_rank_s(two_ranks: list[dict[str, Any]]) -> None:
    """Rank 1 says 0.5 s a launch: that is the answer on both."""
    assert two_ranks[0]["slow"]["time_us"] == two_ranks[1]["slow"]["time_us"] == 500_000


@pytest.mark.e2e
def test_wrong_sum_names_the_rank_that_saw_it(two_ranks: list[dict[str, Any]]) -> None:
    """One wrong element on rank 1 is an error on both ranks, with rank 1 named."""
    expected = "ArithmeticError: all_reduce gave wrong elements on rank 1 (2 elements)"
    assert [rank["wrong_sum"] for rank in two_ranks] == [expected] * 2


@pytest.mark.e2e
def test_nodes_reached(two_ranks: list[dict[str, Any]]) -> None:
    """Both nodes answered, under the numbers their workers were given."""
    for rank in two_ranks:
        found = rank["nodes_reached"]
        assert (found["nodes"], found["num_nodes"], found["world_size"]) == ([0, 1], 2, 2)
        assert found["hostnames"] == {"0": [socket.gethostname()], "1": [socket.gethostname()]}
        assert found["round_trip_us"] > 0


@pytest.mark.e2e
def test_transport_of_a_rehearsal_is_sockets(two_ranks: list[dict[str, Any]]) -> None:
    """Gloo is TCP, and says so."""
    found = two_ranks[0]["transport"]
    assert (found["backend"], found["network"], found["inter_node"]) == ("gloo", "Socket", {"NET/Socket": 1})


@pytest.mark.e2e
def test_transport_reads_the_new_group_s_channels(two_ranks: list[dict[str, Any]]) -> None:
    """Only the lines written since the new group count, and they are found by pid and hostname."""
    for rank in two_ranks:
        found = rank["transport_nccl"]
        assert found["inter_node"] == {"NET/IB/GDRDMA": 1}
        assert (found["network"], found["gdr"]) == ("IB", True)


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("transport_silent", "RuntimeError: rank 1: the NCCL log shows no channel"),
        ("transport_no_crossing", "RuntimeError: 2 nodes, yet no rank's NCCL log shows a channel between two"),
    ],
)
def test_transport_that_measured_nothing_is_an_error(two_ranks: list[dict[str, Any]], case: str, text: str) -> None:
    """An empty log, or none between nodes, is refused on every rank: never 0 channels off the fabric."""
    assert all(rank[case].startswith(text) for rank in two_ranks)


@pytest.mark.parametrize("dtype", collective_cases.EXACT)
@pytest.mark.parametrize("operation", collective_cases.CASES)
def test_collective_is_timed_and_right(operation: str, dtype: str, two_ranks: list[dict[str, Any]]) -> None:
    """The same on every rank, with nccl-tests' factor."""
    found = two_ranks[0][f"{operation} {dtype}"]
    assert found == two_ranks[1][f"{operation} {dtype}"]
    assert found["size_bytes"] == 100_000
    factor = collectives.BUSBW_FACTOR[operation](2)
    assert found["busbw_gb_s"] == pytest.approx(factor * found["algbw_gb_s"])
    assert found["algbw_gb_s"] == pytest.approx(100_000 / found["time_us"] / 1e3)
    assert 0 < found["p50_us"] <= found["p99_us"]
    assert len(found["spans_busbw_gb_s"]) == 2


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", collective_cases.CASES)
def test_wrong_element_is_an_error_on_every_rank(operation: str, fault: str, two_ranks: list[dict[str, Any]]) -> None:
    """It names the rank that received something else."""
    for found in two_ranks:
        assert found[f"{operation} {fault}"].startswith(f"ArithmeticError: {operation} gave wrong elements on rank 1 (")


@pytest.mark.parametrize("operation", collective_cases.CASES)
def test_a_collective_by_size(operation: str, two_ranks: list[dict[str, Any]]) -> None:
    """Each size in each dtype, the same rows on every rank; none is smaller than an element for each rank."""
    found = two_ranks[0][f"{operation} by size"]
    assert found == two_ranks[1][f"{operation} by size"]
    least = 1 if operation in collective_cases.WHOLE else 2
    expected = [("float32", 4 * least), ("float32", 4096), ("bfloat16", 2 * least), ("bfloat16", 4096)]
    assert [(row["dtype"], row["bytes"]) for row in found["rows"]] == expected
    for row in found["rows"]:
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["algbw_gb_s"] == pytest.approx(row["bytes"] / row["us"] / 1e3, rel=0.01, abs=1e-5)
        assert row["busbw_gb_s"] == pytest.approx(row["algbw_gb_s"] * collectives.BUSBW_FACTOR[operation](2), abs=2e-5)
        assert row["slowest_rank"] in (0, 1)


def test_a_wrong_element_names_its_size(two_ranks: list[dict[str, Any]]) -> None:
    """Every row is verified."""
    expected = "ArithmeticError: all_reduce gave wrong elements on rank 1 (2 elements), at 64 bytes of bfloat16"
    assert [rank["wrong_size"] for rank in two_ranks] == [expected] * 2


def test_the_slowest_rank_is_named(two_ranks: list[dict[str, Any]]) -> None:
    """Rank 1 says 0.5 s a launch."""
    assert two_ranks[0]["slow"]["slowest_rank"] == two_ranks[1]["slow"]["slowest_rank"] == 1


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather"])
def test_a_dtype_that_cannot_count_the_ranks_is_left_out(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 counts to 256: the rest is shown all the same, and what is left out is said."""
    asked: list[str] = []
    monkeypatch.setattr(dist, "get_world_size", lambda: 257)
    monkeypatch.setattr(collectives, "collective", lambda _operation, **named: asked.append(named["dtype"]))
    monkeypatch.setattr(collective_sizes, "_row", lambda _timed: {})
    found = collective_sizes.by_size(operation, sizes_bytes=[8, 4096])
    assert set(asked) == {"float32"}
    assert found.left_out == ["bfloat16"]


def outcome(call: Callable[[], Any]) -> Any:
    """The measurement's fields, or its error as text."""
    try:
        return dataclasses.asdict(call())
    except (ArithmeticError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"


def with_nccl_log(folder: Path, rank: int, lines: str) -> Any:
    """The transport of two gloo ranks that believe they run NCCL; ``lines`` appear as the new group is made."""
    log = folder / f"nccl.{socket.gethostname().partition('.')[0]}.{os.getpid()}"
    log.write_text("gpu-node-0:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0\n")
    os.environ["GPUCLUSTER_NCCL_LOG"] = str(folder / "nccl.%h.%p")
    real = dist.new_group

    def new_group(ranks: list[int]) -> Any:
        with log.open("a") as file:
            file.write(lines.format(source=rank, target=1 - rank))
        return real(ranks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda: "nccl")
        patch.setattr(dist, "new_group", new_group)
        return outcome(lambda: transport.transport(size_bytes=64))


def wrong_sum(rank: int, measure: Callable[[], Any]) -> Any:
    """An all-reduce that breaks one element on rank 1."""
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor) -> None:
        real(tensor)
        if rank == 1:
            tensor[3] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", all_reduce)
        return outcome(measure)


def broken(fault: str, received: torch.Tensor) -> None:
    """Plant a fault into what a rank received."""
    half = received.numel() // 2
    if fault == "missing":
        received[:half] = 0
    elif fault == "doubled":
        received[:half] *= 2
    elif fault == "shifted":
        received.copy_(received.roll(1))
    else:
        received.copy_(torch.cat([received[half:], received[:half]]))


def wrong_collective(rank: int, operation: str, fault: str) -> Any:
    """A collective of which rank 1 receives something else."""
    real = collective_cases.case

    def case(*arguments: Any, **named: Any) -> Any:
        whole = real(*arguments, **named)

        def call() -> None:
            whole.call()
            if rank == 1:
                broken(fault, whole.received)

        return whole._replace(call=call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_cases, "case", case)
        return outcome(lambda: collectives.collective(operation, size_bytes=4096, iterations=1, warmup=0))


def slow_rank(rank: int) -> Any:
    """A span that rank 1 says took half a second a launch."""
    real = timing.time_span

    def time_span(call: Callable[[], object], *, launches: int, **watched: Any) -> float:
        seconds = real(call, launches=launches, **watched)
        return 0.5 if rank == 1 else seconds

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "time_span", time_span)
        return outcome(lambda: collectives.all_reduce(size_bytes=400, iterations=5, warmup=0))


def two_ranks_program(rank: int, folder: Path) -> dict[str, Any]:
    """What a rank does: every case in turn."""
    os.environ["GPUCLUSTER_NODE"] = str(rank)
    line = "gpu-node-0:1:1 [0] NCCL INFO "
    crossing = line + "Channel 00/0 : {source}[0] -> {target}[0] [send] via NET/IB/0/GDRDMA\n"
    within = line + "Channel 00/0 : {source}[0] -> {source}[0] via P2P/IPC\n"
    network = line + "NET/IB : Using [0]mlx5_0:1/IB [RO]\n" + line + "Using network IB\n"
    return {
        "all_reduce": outcome(lambda: collectives.all_reduce(size_bytes=1 << 20, iterations=10, warmup=1)),
        "bfloat16": outcome(lambda: collectives.all_reduce(size_bytes=1001, iterations=1, warmup=0, dtype="bfloat16")),
        "slow": slow_rank(rank),
        "wrong_sum": wrong_sum(rank, lambda: collectives.all_reduce(size_bytes=400, iterations=1, warmup=0)),
        "wrong_size": wrong_sum(
            rank, lambda: collective_sizes.by_size("all_reduce", sizes_bytes=[64], dtypes=["bfloat16"], iterations=1)
        ),
        **{
            f"{name} by size": outcome(lambda name=name: collective_sizes.by_size(name, sizes_bytes=[1, 4096], iterations=5))
            for name in collective_cases.CASES
        },
        **{
            f"{name} {dtype}": outcome(
                lambda name=name, dtype=dtype: collectives.collective(
                    name, size_bytes=100_000, iterations=10, warmup=1, dtype=dtype
                )
            )
            for name in collective_cases.CASES
            for dtype in collective_cases.EXACT
        },
        **{f"{name} {fault}": wrong_collective(rank, name, fault) for name in collective_cases.CASES for fault in FAULTS},
        "nodes_reached": outcome(collectives.nodes_reached),
        "transport": outcome(lambda: transport.transport(size_bytes=64)),
        "transport_nccl": with_nccl_log(folder, rank, network + crossing),
        "transport_silent": with_nccl_log(folder, rank, crossing if rank == 0 else ""),
        "transport_no_crossing": with_nccl_log(folder, rank, within),
    }


if __name__ == "__main__":
    fork_ranks(two_ranks_program, ranks=2)
