"""A frozen product and a narrow one in one result: x W + n S + b, where n has as many columns as the adapter's rank.

The narrow product is memory bound: it writes as much as the wide one and computes a fiftieth. So it goes first, and the
wide one is accumulated onto it; cuBLAS reads the addend while it computes. Both are custom operators, because torch.compile
would split the addition off again. The addition would be a separate pass over the widest activations, with both sums
written for the backward (7 passes over gate and up instead of 3).
"""

from __future__ import annotations

import torch


def fused_product(
    x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, side: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` [n, i] times ``weight`` [i, o], plus ``narrow`` [n, r] times ``side`` [r, o], plus ``bias`` [o]."""
    result: torch.Tensor = _fused_product(x, weight, narrow, side, bias)
    return result


@torch.library.custom_op(
    "finetune_smoke::fused_product",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor narrow, Tensor side, Tensor? bias) -> Tensor",
)
def _fused_product(
    x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, side: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    out = narrow @ side if bias is None else torch.addmm(bias, narrow, side)
    return out.addmm_(x, weight)


@_fused_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_others: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])
