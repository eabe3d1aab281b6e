"""Matrix products per second of the current device.

Method: operands of normal random numbers (zeros and constants draw less power and read up to 20 % high), output
allocated beforehand, one CUDA event pair per product, all of a burst queued before any is waited for, 2 n^3
operations a product. Each size is timed in bursts with a rest and a warm-up of their own, whose lengths decide whether
the clock's rate or the power limit's is measured (docs/decisions/0007).
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from pytest_gpucluster.inventory.telemetry import Sampler, Telemetry, Watched
from pytest_gpucluster.measurements import progress, timing
from pytest_gpucluster.measurements.timing import Timing
from pytest_gpucluster.protocol.functions import Simulated, simulated_by

CHECKED = 64
"""Number of rows and of columns, spread over the product; their crossings are compared with a float64 reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductKind:
    """How a dtype is multiplied, and the largest allowed error of its product relative to the product's RMS.

    ``capability`` is the compute capability of the first GPUs with matrix units for it. Sizes are multiples of
    ``step``. ``by_columns``: the second operand is stored column by column.
    """

    storage: torch.dtype
    output: torch.dtype
    tolerance: float
    capability: tuple[int, int]
    precision: str = "highest"
    step: int = 1
    by_columns: bool = False


KINDS: Mapping[str, ProductKind] = {
    "bfloat16": ProductKind(storage=torch.bfloat16, output=torch.bfloat16, tolerance=0.05, capability=(8, 0)),
    "float16": ProductKind(storage=torch.float16, output=torch.float16, tolerance=0.02, capability=(7, 0)),
    "tf32": ProductKind(storage=torch.float32, output=torch.float32, tolerance=0.01, capability=(8, 0), precision="high"),
    "float32": ProductKind(storage=torch.float32, output=torch.float32, tolerance=1e-4, capability=(0, 0)),
    "float64": ProductKind(storage=torch.float64, output=torch.float64, tolerance=1e-10, capability=(0, 0)),
    "float8_e4m3fn": ProductKind(
        storage=torch.float8_e4m3fn, output=torch.bfloat16, tolerance=0.2, capability=(8, 9), step=16, by_columns=True
    ),
    "int8": ProductKind(storage=torch.int8, output=torch.int32, tolerance=0.0, capability=(7, 5), step=32, by_columns=True),
}
"""Accepted dtypes. ``tf32`` is float32 storage on the TF32 tensor cores, ``float32`` never is. float8 uses unit scales,
fast accumulation and bfloat16 output: other choices move its rate by tens of per cent. float8 and int8 have their second
operand by columns, as a layer has its weights: on Hopper cuBLAS has no other float8 product, and its int8 product by rows is
several times slower (129 TOPS at 8192 on an H200). Sizes of int8 are whole tiles of 32, its check is exact.

Tolerances are a few roundings of the output (unit roundoff 2^-8 for bfloat16, 2^-11 for float16) at four times the RMS; that of
float32 lies between its own error (1e-5) and that of TF32 (1e-3), so that one is never taken for the other; float8's fast
accumulation keeps about 14 bits of a sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmRate(Watched):
    """Dense matrix product rate; 1 TFLOPS is 10^12 FLOP/s, and of int8 10^12 integer operations a second (1 TOPS).

    ``tflops`` is the median rate of the size with the best one. ``bursts_tflops`` holds that size's median rate of each
    burst (each burst starts cold, so each includes the clock's boost), ``samples_tflops`` its single products. ``by_size``
    holds ``median p10 p90 best`` TFLOPS under each size. ``telemetry`` covers the whole measurement, rests included,
    sampled at 100 Hz; None without NVML.
    """

    tflops: float
    dtype: str
    best_size: int
    by_size: dict[str, dict[str, float]]
    bursts_tflops: list[float]
    samples_tflops: list[float]
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """One square product ready to run; calling it overwrites ``out``."""

    size: int
    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor
    scale: torch.Tensor

    def __call__(self) -> None:
        if self.a.dtype == torch.int8:
            torch._int_mm(self.a, self.b, out=self.out)  # noqa: SLF001 - torch's only int8 product
        elif self.a.dtype == torch.float8_e4m3fn:
            torch._scaled_mm(  # noqa: SLF001 - torch's only float8 product
                self.a, self.b, self.scale, self.scale, out_dtype=self.out.dtype, use_fast_accum=True, out=self.out
            )
        else:
            torch.mm(self.a, self.b, out=self.out)


def _simulated(call: Simulated) -> GemmRate:
    """Dense products in bursts."""
    rate, kwargs = call.rate(call.kwargs["dtype"]), call.kwargs
    best = kwargs["sizes"][len(kwargs["sizes"]) // 2]
    by_size = {
        str(size): {"median": value, "p10": 0.997 * value, "p90": 1.003 * value, "best": 1.004 * value}
        for size in kwargs["sizes"]
        for value in [rate if size == best else 0.97 * rate]
    }
    return GemmRate(
        tflops=rate,
        dtype=kwargs["dtype"],
        best_size=best,
        by_size=by_size,
        bursts_tflops=call.repeats(rate, kwargs.get("bursts", 1)),
        samples_tflops=call.repeats(rate, kwargs["iterations"]),
        device=call.device,
        telemetry=call.telemetry(),
    )


@simulated_by(_simulated)
def gemm(  # noqa: PLR0913 - the recipe of a threshold, all by keyword
    *,
    dtype: str,
    sizes: list[int],
    iterations: int,
    warmup_s: float,
    rest_s: float = 0.0,
    bursts: int = 1,
) -> GemmRate:
    """Rate of the square products ``sizes`` in ``dtype`` on the current device.

    Args:
        dtype: one of :data:`KINDS`.
        sizes: matrix orders n; 2 n^3 FLOP each.
        iterations: timed products per size.
        warmup_s: seconds of back-to-back products of a size before each burst of it. At full power a chip's limiter
            acts after some 50 ms, so this decides what is measured: the clock's rate (short) or the power cap's (long).
        rest_s: seconds without work before each warm-up.
        bursts: into how many equal parts, each with its own rest and warm-up, the timed products of a size are split.

    Raises:
        ValueError: an unknown dtype, with the valid ones; no size, or a size that is no multiple of the dtype's step.
        RuntimeError: the GPU has no matrix units for this dtype.
        ArithmeticError: a product lies outside the dtype's rounding error of a float64 reference.
    """
    require_known(dtype)
    if not sizes or min(sizes) < 1 or not 1 <= bursts <= iterations:
        raise ValueError(f"at least one size n >= 1 and 1 <= bursts <= iterations: {sizes}, {bursts}, {iterations}")
    kind = KINDS[dtype]
    require_units(dtype)
    with at_precision(kind.precision):
        products = [product_of(size, kind) for size in sizes]
        ends = [iterations * burst // bursts for burst in range(bursts + 1)]
        shares = [end - start for start, end in itertools.pairwise(ends)]
        bursts_s, telemetry = _time_sizes(products, shares, rest_s=rest_s, warmup_s=warmup_s)
        for product in products:
            check(product, kind)
    timed = {size: Timing(samples_s=[*itertools.chain(*parts_s)]) for size, parts_s in bursts_s.items()}
    rates = {size: _tflops(size, one.median_s) for size, one in timed.items()}
    best = max(rates, key=rates.__getitem__)
    return GemmRate(
        tflops=rates[best],
        dtype=dtype,
        best_size=best,
        by_size={str(size): _spread(size, one) for size, one in timed.items()},
        bursts_tflops=[timing.rounded(_tflops(best, statistics.median(part_s))) for part_s in bursts_s[best]],
        samples_tflops=[timing.rounded(_tflops(best, seconds)) for seconds in timed[best].samples_s],
        device=timing.device_name(),
        telemetry=telemetry,
    )


@contextmanager
def at_precision(precision: str) -> Iterator[None]:
    """Compute float32 products at this precision of torch's; restore the setting at the end."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def bf16_product(size: int) -> Callable[[], None]:
    """A bfloat16 product of order ``size`` to load the current device with; each call overwrites its output."""
    return product_of(size, KINDS["bfloat16"])


def require_known(dtype: str) -> None:
    """Refuse a dtype that is none of :data:`KINDS`.

    Raises:
        ValueError: with the valid dtypes.
    """
    if dtype not in KINDS:
        raise ValueError(f"unknown dtype {dtype!r}; valid: {', '.join(KINDS)}")


def require_units(dtype: str) -> None:
    """Refuse a GPU that has no matrix units for ``dtype``: its slower units would be measured instead.

    On a GPU without TF32 units, a TF32 product is silently a float32 product. A CPU is a rehearsal; nothing is refused.

    Raises:
        RuntimeError: with the compute capability that the dtype needs and that of the GPU.
    """
    needed = KINDS[dtype].capability
    if torch.cuda.is_available() and (own := torch.cuda.get_device_capability()) < needed:
        has, takes = (".".join(map(str, version)) for version in (own, needed))
        raise RuntimeError(
            f"{timing.device_name()} (compute capability {has}) has no matrix units for {dtype}; they came with {takes}"
        )


def product_of(size: int, kind: ProductKind) -> _Product:
    """A square product of order ``size``, ready to call; its operands are the same in every process.

    Raises:
        ValueError: ``size`` is no multiple of the kind's step.
    """
    if size % kind.step:
        raise ValueError(f"sizes of {kind.storage} products are multiples of {kind.step}, not {size}")
    device = timing.current_device()
    generator = torch.Generator(device).manual_seed(size)

    def operand() -> torch.Tensor:
        if kind.storage == torch.int8:
            return torch.randint(-128, 128, (size, size), dtype=torch.int8, device=device, generator=generator)
        drawn = torch.bfloat16 if kind.storage == torch.float8_e4m3fn else kind.storage
        return torch.randn((size, size), dtype=drawn, device=device, generator=generator).to(kind.storage)

    a, b = operand(), operand()
    if kind.by_columns:
        b = b.t()
    out = torch.empty((size, size), dtype=kind.output, device=device)
    return _Product(size=size, a=a, b=b, out=out, scale=torch.ones((), device=device))


def _time_sizes(
    products: list[_Product], shares: list[int], *, rest_s: float, warmup_s: float
) -> tuple[dict[int, list[list[float]]], Telemetry | None]:
    """Rest, warm up and time a share of each size's products in each burst; the seconds of each product, by size and burst.

    So no size inherits the power debt of another.

    At full power the chip's limiter cuts the clock after 50 to 100 ms, in the middle of 50 products of order 8192: one
    long window then reads 680 or 800 TFLOPS by chance, five short ones read 800 (docs/decisions/0007).
    """
    for product in products:
        product()  # loads and chooses its kernel now, not in a timed window
    timing.synchronize()
    bursts_s: dict[int, list[list[float]]] = {}
    with Sampler(timing.gpu_uuid(), interval_s=0.01) as sampler:
        start_s = time.monotonic()
        for index, product in enumerate(products):
            progress.report(f"size {product.size}", index / len(products))
            bursts_s[product.size] = []
            for share in shares:
                time.sleep(rest_s)
                timing.keep_busy(product, seconds=warmup_s)
                bursts_s[product.size].append(timing.time_each(product, iterations=share).samples_s)
        telemetry = sampler.summary(since_s=start_s)
    progress.report("checking the products", 1.0)
    return bursts_s, telemetry


def check(product: _Product, kind: ProductKind) -> None:
    """Compare the product with float64 at ``CHECKED`` x ``CHECKED`` places.

    Raises:
        ArithmeticError: off by more than the dtype's rounding, or not finite.
    """
    if not torch.isfinite(product.out).all():
        raise ArithmeticError(f"the {product.size} product holds values that are not finite")
    picked = torch.linspace(0, product.size - 1, min(CHECKED, product.size), device=product.a.device).long()
    reference = _rows(product.a, picked) @ _rows(product.b.t(), picked).t()
    error = (product.out[picked][:, picked].double() - reference).abs().max() / reference.square().mean().sqrt()
    if not error.item() <= kind.tolerance:
        raise ArithmeticError(
            f"the {product.size} product is wrong: off by {error.item():.3g} of its RMS value, "
            f"rounding explains {kind.tolerance:g}"
        )


def _rows(matrix: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
    """The picked rows in float64; torch does not index float8, so one-byte numbers are picked as bytes."""
    stored = matrix.view(torch.uint8) if matrix.itemsize == 1 else matrix
    return stored[picked].view(matrix.dtype).double()


def _tflops(size: int, seconds: float) -> float:
    return 2 * size**3 / seconds / 1e12


def _spread(size: int, timed: Timing) -> dict[str, float]:
    rates = [_tflops(size, seconds) for seconds in timed.samples_s]
    deciles = statistics.quantiles(rates, n=10, method="inclusive") if len(rates) > 1 else rates
    return {
        "median": _tflops(size, timed.median_s),
        "p10": deciles[0],
        "p90": deciles[-1],
        "best": max(rates),
    }
