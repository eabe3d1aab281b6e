"""The lasting product rate on a CPU: its arithmetic, which half it judges, and that a wrong product is an error."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pytest_gpucluster.inventory.telemetry import Telemetry
from pytest_gpucluster.measurements import gemm, progress, sustained, timing
from pytest_gpucluster.protocol import plain_data
from tests.support.products import skip_without_cpu_product

if TYPE_CHECKING:
    from collections.abc import Callable

    Slices = Callable[[list[tuple[int, float]]], None]

SIZE = 32
FLOP = 2 * SIZE**3


def small(**changes: Any) -> sustained.Sustained:
    """Products small enough for any CPU, for a fifth of a second."""
    recipe: dict[str, Any] = {"size": SIZE, "seconds": 0.2, "slice_s": 0.05}
    return sustained.sustained(**{**recipe, **changes})


@pytest.fixture
def said_to_take(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[tuple[int, float]]], None]:
    """Slices run one product, and are said to be so many products in so many seconds."""

    def install(slices: list[tuple[int, float]]) -> None:
        left = iter(slices)
        said: list[tuple[int, float]] = []

        def keep_busy(call: Callable[[], object], *, seconds: float) -> int:
            call()
            said.append(next(left))
            return said[-1][0]

        def queue_each(call: Callable[[], object], *, iterations: int, **_watched: Any) -> Callable[[], timing.Timing]:
            call()
            return lambda: timing.Timing(samples_s=[said[-1][1]])

        monkeypatch.setattr(timing, "keep_busy", keep_busy)
        monkeypatch.setattr(timing, "queue_each", queue_each)

    return install


class Watched:
    """A sampler without NVML: gives fixed telemetry, and keeps the start of the requested window."""

    error: str | None = None
    since_s: float | None = None
    clock_mhz: float | None = 1484.85

    def __init__(self, _uuid: str | None) -> None:
        """Watch nothing."""

    def __enter__(self) -> Watched:  # noqa: PYI034 -- as the real one
        """Begin."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """End."""

    def summary(self, *, since_s: float = 0.0) -> Telemetry:
        """A power cap and a moment of heat."""
        type(self).since_s = since_s
        return Telemetry(
            samples=100,
            sm_clock_min_mhz=1455.0,
            sm_clock_mean_mhz=self.clock_mhz,
            sm_clock_max_mhz=1980.0,
            temperature_max_c=59.0,
            power_mean_w=691.7,
            power_max_w=694.0,
            pcie_gen_max=5,
            pcie_width_min=16,
            event_reasons=["sw_power_cap", "hw_thermal_slowdown"],
            fault_reasons=["hw_thermal_slowdown"],
        )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    """Telemetry of a GPU at its power limit."""
    fake = type("Fake", (Watched,), {})
    monkeypatch.setattr(sustained, "Sampler", fake)
    return fake


# --- the rate ---


def test_really_measures() -> None:
    """Without any stand-in: at least so long, a positive finite rate, plain data; no NVML, no clock."""
    found = small()
    assert found.seconds >= 0.2
    assert len(found.slices_tflops) >= 2
    assert 0 < found.tflops < 10_000
    json.dumps(dataclasses.asdict(found), allow_nan=False)
    assert plain_data.from_plain(plain_data.to_plain(found)).repeats_tflops == found.repeats_tflops
    if not torch.cuda.is_available():
        assert (found.telemetry, found.of_peak_at_clock_ratio, found.nvml_error) == (None,) * 3


def test_last_half_is_judged(said_to_take: Slices) -> None:
    """A chip that boosts for three slices and then slows down is worth what it holds; every slice is reported."""
    slices = [(40, 1.0), (40, 1.0), (40, 1.0), (20, 1.0), (21, 1.05), (10, 1.0), (22, 1.0)]
    said_to_take(slices)
    found = small(seconds=7.0, slice_s=1.0)
    rates = [FLOP * count / seconds / 1e12 for count, seconds in slices]
    assert found.slices_tflops == [timing.rounded(rate) for rate in rates]
    assert found.repeats_tflops == found.slices_tflops[3:]
    assert found.tflops == pytest.approx(FLOP * 20 / 1e12)
    assert found.seconds == pytest.approx(7.05)


def test_it_lasts_as_long_as_asked(said_to_take: Slices) -> None:
    """Slices that are shorter than meant are followed by more of them."""
    said_to_take([(1, 0.9)] * 9)
    found = small(seconds=2.75, slice_s=1.0)
    assert len(found.slices_tflops) == 4
    assert found.seconds == pytest.approx(3.6)


def test_products_longer_than_all_the_time_make_two_slices(said_to_take: Slices) -> None:
    """Without a second slice there is no second half to judge."""
    said_to_take([(1, 30.0)] * 2)
    assert len(small().slices_tflops) == 2


def test_progress_ends_at_one(said_to_take: Slices) -> None:
    """A report per slice, then the check."""
    said_to_take([(10, 1.0)] * 2)
    heard: list[tuple[str, float | None]] = []
    progress.listen(lambda step, fraction: heard.append((step, fraction)))
    try:
        small(seconds=2.0, slice_s=1.0)
    finally:
        progress.listen(lambda _step, _fraction: None)
    assert heard == [("1.0 of 2 s", 0.5), ("2.0 of 2 s", 1.0), ("checking the product", 1.0)]


# --- the peak at the measured clock ---


def test_peak_at_clock_reproduces_the_reference_run() -> None:
    """H200, 2026-11-20: at 1484.85 MHz 132 x 4096 FLOP a clock are 802.8 TFLOPS, and 667.9 of them 0.832."""
    peak = sustained.peak_at_clock_tflops(peak_tflops=989, peak_clock_mhz=1829.2, clock_mhz=1484.8507)
    assert peak == pytest.approx(802.8172, rel=1e-4)
    assert 667.9436 / peak == pytest.approx(0.8320, abs=1e-4)


def test_boost_clock_is_not_the_clock_of_the_peak() -> None:
    """989 TFLOPS taken for the rate at the boost clock of 1980 MHz would make the same chip 0.90: 8 % too good."""
    peak = sustained.peak_at_clock_tflops(peak_tflops=989, peak_clock_mhz=1980, clock_mhz=1484.8507)
    assert 667.9436 / peak > 0.90


def test_ratio_tells_a_slow_chip_from_a_power_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """At half the clock the rate halves and the ratio stays; at the same clock and half the rate the ratio halves."""
    peaks = {"peak_tflops": FLOP * 20 / 1e12, "peak_clock_mhz": 2000.0}

    def counted(clock_mhz: float, calls_per_s: float) -> sustained.Sustained:
        found = sustained.Counted(clock_mhz=clock_mhz, calls_per_s=calls_per_s, bursts=30)
        monkeypatch.setattr(sustained, "_count", lambda _product: (found, None))
        return small(**peaks)

    healthy, capped, slow = counted(1000.0, 10.0), counted(500.0, 5.0), counted(1000.0, 5.0)
    ratios = [found.of_peak_at_clock_ratio for found in (healthy, capped, slow)]
    assert ratios == pytest.approx([1.0, 1.0, 0.5])
    assert (capped.counted_clock_mhz, capped.counted_tflops) == (500.0, pytest.approx(FLOP * 5 / 1e12))
    assert healthy.peak_at_clock_tflops == pytest.approx(FLOP * 10 / 1e12)


def test_nvmls_clock_is_evidence_and_decides_nothing(watched: type[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML reads 12 % too high on an H200 at its power limit; the ratio is that of the counted clock."""
    found = sustained.Counted(clock_mhz=1330.0, calls_per_s=5.0, bursts=30)
    monkeypatch.setattr(sustained, "_count", lambda _product: (found, None))
    ratios = []
    for clock_mhz in (1330.0, 1485.0, None):
        watched.clock_mhz = clock_mhz
        rate = small(peak_tflops=989, peak_clock_mhz=1830)
        assert rate.evidence["SM MHz"] == clock_mhz
        assert rate.evidence["counted SM MHz"] == 1330.0
        ratios.append(rate.of_peak_at_clock_ratio)
    assert len(set(ratios)) == 1


def test_count_needs_a_gpu() -> None:
    """On a CPU nothing is counted, and nothing is an error."""
    assert sustained._count(lambda: None) == (None, None)


def test_telemetry_is_of_the_judged_half(said_to_take: Slices, watched: type[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clock, power and temperature since the last slice of the first half ended; reasons of all of it."""
    said_to_take([(10, 1.0)] * 6)
    ticks = iter(range(100, 200))
    monkeypatch.setattr(sustained.time, "monotonic", lambda: float(next(ticks)))
    found = small(seconds=6.0, slice_s=1.0)
    assert len(found.slices_tflops) == 6
    assert watched.since_s == 102.0
    seen = found.telemetry
    assert seen is not None
    assert (seen.sm_clock_mean_mhz, seen.sm_clock_min_mhz, seen.temperature_max_c) == (1484.85, 1455.0, 59.0)
    assert (seen.power_mean_w, seen.power_max_w, seen.samples) == (691.7, 694.0, 100)
    assert seen.event_reasons == ["sw_power_cap", "hw_thermal_slowdown"]
    assert seen.fault_reasons == ["hw_thermal_slowdown"]
    assert found.of_peak_at_clock_ratio is None  # no peak was given


def test_without_a_counted_clock_there_is_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be compiled: no ratio, which no criterion takes for good, and the reason."""
    monkeypatch.setattr(sustained, "_count", lambda _product: (None, "the SM clock could not be counted: no NVRTC"))
    found = small(peak_tflops=989, peak_clock_mhz=1830)
    assert (found.peak_at_clock_tflops, found.of_peak_at_clock_ratio, found.counted_tflops) == (None, None, None)
    assert found.clock_error == "the SM clock could not be counted: no NVRTC"


def test_telemetry_that_stopped_is_no_telemetry(said_to_take: Slices, watched: type[Watched]) -> None:
    """NVML went away: what it said before is not of the judged half."""
    said_to_take([(10, 1.0)] * 2)
    watched.error = "GPU is lost"
    found = small(seconds=2.0, slice_s=1.0)
    assert (found.telemetry, found.nvml_error) == (None, "GPU is lost")


# --- the product ---


@pytest.mark.parametrize("dtype", sorted(gemm.KINDS))
def test_every_dtype_is_loaded_and_checked(dtype: str) -> None:
    """Each dtype's product lies within its own rounding; float32 stays float32 afterwards."""
    before = torch.get_float32_matmul_precision()
    with skip_without_cpu_product(dtype):
        assert small(dtype=dtype, seconds=0.02, slice_s=0.01).tflops > 0
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("harm", ["nothing computed", "one column wrong", "not finite"])
def test_a_wrong_product_is_an_error(monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    """A fast wrong product is no rate."""
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
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ArithmeticError, match="product"):
        small(dtype="tf32")
    assert torch.get_float32_matmul_precision() == before


def test_only_the_last_product_wrong_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check compares the product after the load, not one from before it."""
    right, calls = torch.mm, []

    def wears_out(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> None:
        right(a, b, out=out)
        calls.append(1)
        if len(calls) > 3:
            out[:, 5] *= 1.5

    monkeypatch.setattr(torch, "mm", wears_out)
    with pytest.raises(ArithmeticError, match="product is wrong"):
        small()


# --- wrong use ---


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "bf16"}, "unknown dtype 'bf16'; valid: bfloat16, float16"),
        ({"size": 0}, "size >= 1"),
        ({"seconds": 0.09}, "at least two slices"),
        ({"slice_s": 0}, "slice_s > 0"),
        ({"seconds": float("inf")}, "at least two slices"),
        ({"peak_tflops": 989}, "belong together: not 989 and None"),
        ({"peak_clock_mhz": 1830}, "belong together: not None and 1830"),
        ({"peak_tflops": 989, "peak_clock_mhz": 0}, "above 0"),
    ],
)
def test_refuses(changes: dict[str, Any], text: str) -> None:
    """Arguments that measure nothing, or something else than meant, are refused."""
    with pytest.raises(ValueError, match=text):
        small(**changes)
