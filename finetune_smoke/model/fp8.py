"""Frozen weights in float8 (e4m3, a float32 scale for each row), and products with them.

A Hopper GPU multiplies float8 about twice as fast as bf16. Activations and their gradients are rounded row by row as
they come: the compiler does it while it makes them. One scale for a whole tensor was tried too; it has to be known before the
first number is rounded, costs passes over all of them, and was slower in all (docs/finetune/results.md).
``torch._scaled_mm`` takes its second operand in column-major order only, so a weight lies here both as it is, for the
forward, and turned, for the gradient of the input; together they are as large as the bf16 weight was.
On a CPU the same rounded numbers are multiplied in the type of the activations.
"""

from __future__ import annotations

import torch
from torch import nn

LARGEST = 448.0
"""The largest finite value of float8_e4m3fn."""

TINY = 1e-12
"""Below this a row counts as zero; a scale must not be 0."""


Rounded = tuple[torch.Tensor, torch.Tensor]
"""(float8 [rows, columns], float32 [rows, 1]): the numbers are about their product."""


def rounded(values: torch.Tensor) -> Rounded:
    """``values`` [rows, columns] in float8, each row scaled so that its largest is the largest there is."""
    scale = values.abs().amax(dim=1, keepdim=True).float().clamp(min=TINY) / LARGEST
    return (values.float() / scale).to(torch.float8_e4m3fn), scale


def product(x: Rounded, weight: Rounded, dtype: torch.dtype) -> torch.Tensor:
    """``x`` [n, in] times the transpose of ``weight`` [out, in], as ``dtype``."""
    if x[0].device.type == "cuda":
        return torch._scaled_mm(  # noqa: SLF001 -- torch has no other door to float8 products
            x[0], weight[0].t(), scale_a=x[1], scale_b=weight[1].t(), out_dtype=dtype, use_fast_accum=True
        )
    return (x[0].to(dtype) * x[1].to(dtype)) @ (weight[0].to(dtype) * weight[1].to(dtype)).t()


def fits(weight: torch.Tensor) -> bool:
    """Whether a product with ``weight`` can run in float8: both sizes are multiples of 16."""
    return all(size % 16 == 0 for size in weight.shape)


class Frozen(nn.Module):
    """A linear's weight in float8, both ways round, in place of the linear."""

    def __init__(self, linear: nn.Linear) -> None:
        """Round the weight of ``linear``."""
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        for name, weight in (("frozen", linear.weight), ("turned", linear.weight.t())):
            small, scale = rounded(weight.detach())
            self.register_buffer(name, small.contiguous(), persistent=False)
            self.register_buffer(f"{name}_scale", scale.contiguous(), persistent=False)
