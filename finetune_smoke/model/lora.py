"""Our forward and backward for peft's LoRA linears: y = x W' + b + s (x A') B', in few kernels.

Under autocast peft needs, for each linear, two casts of weights, a cast of the input, two narrow products, a scaling and
an addition. Here the scale is applied to the narrow side (rank columns), and no gradient of a frozen weight is computed. The
modules keep peft's names and are subclasses of peft's, so peft saves and loads them.

The narrow product is memory bound, so it goes first, and the wide one is accumulated onto it; cuBLAS reads the addend while
it computes. Both are one custom operator: torch.compile would split the addition off again, a separate pass over the widest
activations, with both sums written for the backward (7 passes over gate and up instead of 3).
"""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from peft.tuners.lora import LoraLayer
from torch import nn


@torch.library.custom_op(
    "finetune_smoke::fused_product",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor narrow, Tensor side, Tensor? bias) -> Tensor",
)
def fused_product(
    x: torch.Tensor, weight: torch.Tensor, narrow: torch.Tensor, side: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x`` [n, i] times ``weight`` [i, o], plus ``narrow`` [n, r] times ``side`` [r, o], plus ``bias`` [o]."""
    out = narrow @ side if bias is None else torch.addmm(bias, narrow, side)
    return out.addmm_(x, weight)


@fused_product.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, *_others: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


class Product(torch.autograd.Function):
    """y = x W' + b + s (x A') B' with frozen W and b; A and B float32, computed in the type of x."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 -- autograd takes operands by position
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """[..., in] -> [..., out]; saves x and the narrow product for the backward."""
        rows = x.reshape(-1, x.shape[-1])
        narrow = (rows @ a.to(x.dtype).t()) * scale
        out: torch.Tensor = fused_product(rows, weight.t(), narrow, b.to(x.dtype).t(), bias)
        ctx.save_for_backward(rows, narrow, weight, a, b)
        ctx.scale = scale
        return out.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of x, A and B."""
        rows, narrow, weight, a, b = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, weight.shape[0])
        inner = (gradient @ b.to(gradient.dtype)) * ctx.scale
        to_x = None
        if ctx.needs_input_grad[0]:
            to_x = fused_product(gradient, weight, inner, a.to(gradient.dtype), None)
            to_x = to_x.view(*gradients[0].shape[:-1], rows.shape[-1])
        return to_x, None, None, (inner.t() @ rows).to(a.dtype), (gradient.t() @ narrow).to(b.dtype), None


class OwnLinear(PeftLinear):  # type: ignore[misc]  # peft's types are not read
    """peft's LoRA linear, computed by ``Product``."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Base and adapter of ``x``."""
        base, (name,) = self.base_layer, self.lora_A.keys()
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        scale = self.scaling[name]
        result: torch.Tensor = Product.apply(x, base.weight, base.bias, a, b, scale)  # type: ignore[no-untyped-call]  # torch's
        return result


def take_over(model: nn.Module) -> bool:
    """Give every LoRA linear of ``model`` the forward above; returns whether that was possible.

    It is all or none: peft's own forward runs under autocast, which would change the types that ours sees. peft has other
    classes for anything but a plain linear (the transposed one of GPT-2).
    """
    adapted = [module for module in model.modules() if isinstance(module, LoraLayer)]
    plain = [type(each) is PeftLinear and type(each.base_layer) is nn.Linear and not each.fan_in_fan_out for each in adapted]
    if all(plain):
        for module in adapted:
            module.__class__ = OwnLinear
    return all(plain)
