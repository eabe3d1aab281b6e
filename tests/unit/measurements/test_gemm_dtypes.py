"""Products in every dtype on a CPU: which GPUs are refused, how operands lie, and that no precision is taken for another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpucluster.measurements import gemm, sustained, timing
from tests.support.products import skip_without_cpu_product


def a_gpu(monkeypatch: pytest.MonkeyPatch, *, capability: tuple[int, int]) -> None:
    """Let torch say that there is a GPU of this compute capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(timing, "device_name", lambda: "NVIDIA A100-SXM4-80GB")


@pytest.mark.parametrize(
    ("capability", "refused"),
    [
        ((9, 0), set()),
        ((10, 3), set()),
        ((8, 9), set()),
        ((8, 0), {"float8_e4m3fn"}),
        ((7, 5), {"float8_e4m3fn", "bfloat16", "tf32"}),
        ((6, 1), {"float8_e4m3fn", "bfloat16", "tf32", "float16", "int8"}),
    ],
)
def test_a_gpu_without_the_units_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], refused: set[str]
) -> None:
    """From Ada and Hopper on FP8, from Ampere on BF16 and TF32, from Turing on INT8, from Volta on FP16."""
    a_gpu(monkeypatch, capability=capability)
    for dtype in gemm.KINDS:
        if dtype in refused:
            with pytest.raises(RuntimeError, match=rf"has no matrix units for {dtype}; they came with \d\.\d"):
                gemm.require_units(dtype)
        else:
            gemm.require_units(dtype)


def test_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """TF32 would silently be float32: the call ends with both versions, before a product is made."""
    a_gpu(monkeypatch, capability=(7, 5))
    monkeypatch.setattr(gemm, "product_of", lambda *_: pytest.fail("a product was made"))
    with pytest.raises(RuntimeError, match=r"A100-SXM4-80GB \(compute capability 7.5\) has no .* tf32; they came with 8.0"):
        gemm.gemm(dtype="tf32", sizes=[32], iterations=1, warmup_s=0)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_operands_of_one_byte(dtype: str) -> None:
    """The first lies by rows and the second by columns, which is all that cuBLAS takes on Hopper; sizes are whole tiles."""
    product = gemm.product_of(64, gemm.KINDS[dtype])
    assert (product.a.stride(), product.b.stride(), product.out.stride()) == ((64, 1), (1, 64), (64, 1))
    assert product.a.itemsize == product.b.itemsize == 1
    step = gemm.KINDS[dtype].step
    with pytest.raises(ValueError, match=rf"products are multiples of {step}, not {64 + step // 2}"):
        gemm.product_of(64 + step // 2, gemm.KINDS[dtype])


def as_tf32(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with 10 bits of mantissa, as the tensor cores read it."""
    return (matrix.view(torch.int32) + (1 << 12)).bitwise_and(~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("dtype", ["float32", "tf32"])
def test_tf32_is_not_taken_for_float32(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """NVIDIA_TF32_OVERRIDE=1 would give seven times the rate: as float32 it is an error, as TF32 it is right."""
    right = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, *, out: right(as_tf32(a), as_tf32(b), out=out))
    recipe: dict[str, Any] = {"sizes": [256], "iterations": 1, "warmup_s": 0}
    if dtype == "float32":
        with pytest.raises(ArithmeticError, match="product is wrong: off by "):
            gemm.gemm(dtype=dtype, **recipe)
    else:
        assert gemm.gemm(dtype=dtype, **recipe).tflops > 0


@pytest.mark.parametrize(
    ("dtype", "function", "harm"),
    [
        ("int8", "_int_mm", lambda out: out[5].add_(1)),
        ("float8_e4m3fn", "_scaled_mm", lambda out: out[:, 5].mul_(1.5)),
        ("float16", "mm", lambda out: out[:, 5].mul_(1.05)),
        ("float64", "mm", lambda out: out[5].mul_(1 + 1e-9)),
    ],
)
def test_a_wrong_product_is_an_error(monkeypatch: pytest.MonkeyPatch, dtype: str, function: str, harm: Any) -> None:
    """One row or column, by little: int8 by one, float64 by a billionth."""
    right = getattr(torch, function)

    def wrong(*operands: Any, out: torch.Tensor, **keywords: Any) -> None:
        right(*operands, out=out, **keywords)
        harm(out)

    monkeypatch.setattr(torch, function, wrong)
    with skip_without_cpu_product(dtype), pytest.raises(ArithmeticError, match="the 64 product is wrong"):
        gemm.gemm(dtype=dtype, sizes=[64], iterations=1, warmup_s=0)


def test_a_lasting_load_refuses_a_size_too() -> None:
    """Sizes are checked where products are made, so every measurement raises the same error."""
    with pytest.raises(ValueError, match="multiples of 32, not 40"):
        sustained.sustained(dtype="int8", size=40, seconds=0.1, slice_s=0.05)
