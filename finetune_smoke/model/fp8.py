"""Frozen weights in float8 (e4m3, a float32 scale for each row), and products with them.

A Hopper GPU multiplies float8 about twice as fast as bf16. Activations and their gradients are rounded row by row; the
compiler does it while it computes them. One scale for a whole tensor was tried too, and was slower
(docs/finetune/results.md): it has to be known before the first number is rounded, which costs passes over all numbers.

``torch._scaled_mm`` takes its second operand in column-major order only. So each weight is stored twice: as it is, for the
forward, and transposed, for the gradient of the input. Both are as large as the bf16 weight was. On a CPU the same rounded
numbers are multiplied in the type of the activations.
"""

from __future__ import annotations

import torch
from torch import nn

LARGEST = 448.0
"""The largest finite value of float8_e4m3fn."""

TINY = 1e-12
"""The least maximum of a row that scales it, so that no scale is 0."""


Rounded = tuple[torch.Tensor, torch.Tensor]
"""(float8 [rows, columns], scales float32 [rows, 1]): the values are about their product."""


def rounded(values: torch.Tensor) -> Rounded:
    """``values`` [rows, columns] in float8, each row scaled so that its maximum becomes LARGEST."""
    scale = values.abs().amax(dim=1, keepdim=True).float().clamp(min=TINY) / LARGEST
    return (values.float() / scale).to(torch.float8_e4m3fn), scale


def product(x: Rounded, weight: Rounded, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [n, in] times the transpose of ``weight`` [out, in], as ``dtype``."""
    if x[0].device.type == "cuda":
        return torch._scaled_mm(  # noqa: SLF001 -- torch has no public float8 product
            x[0], weight[0].t(), scale_a=x[1], scale_b=weight[1].t(), out_dtype=dtype, use_fast_accum=True
        )
    return (x[0].to(dtype) * x[1].to(dtype)) @ (weight[0].to(dtype) * weight[1].to(dtype)).t()


def fits(weight: torch.Tensor) -> bool:
    """Whether a product with ``weight`` can run in float8: both sizes are multiples of 16."""
    return all(size % 16 == 0 for size in weight.shape)


class Frozen(nn.Module):
    """Replaces a linear: its weight in float8, as it is and transposed."""

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weight of ``linear``."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        for name, weight in (("frozen", linear.weight), ("turned", linear.weight.t())):
            small, scale = rounded(weight.detach())
            self.register_buffer(name, small.contiguous(), persistent=False)
            self.register_buffer(f"{name}_scale", scale.contiguous(), persistent=False)
