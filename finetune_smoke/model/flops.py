"""Floating point operations of a LoRA step, for model FLOPs utilization (MFU).

Symbols and formulas: H hidden size, I MLP width, L layers, V vocabulary, q and k the widths of the query and of the
key projection, T row length, r LoRA rank.

    P  = L (2 H q + 2 H k + 3 H I) + H V              weights of the frozen matmuls; the embedding look-up is none
    Pa = L r (2 (H + q) + 2 (H + k) + 3 (H + I))      adapter weights on all seven linears
    A  = 2 T q L                                      attention scores and values, the causal half

    FLOPs per token = 4 P + 6 Pa + 3 A                forward 2P + 2Pa + A, to activations 2P + 2Pa + 2A, to weights 2Pa

Frozen weights get no gradient, hence 4 P and not the 6 P of full training. NVIDIA counts alike: 663 TFLOP/s at
24,824 tokens/s are 3.96 FLOPs per weight and token for Llama2-7B LoRA (NeMo 24.12 performance summary,
docs.nvidia.com/nemo-framework/user-guide/24.12/nemotoolkit/performance/performance_summary.html).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a decoder with gated MLP (Llama, Qwen2): all in elements."""

    hidden: int
    intermediate: int
    layers: int
    vocab: int
    query: int
    key: int


def shape_of(config: object) -> Shape | None:
    """The shape in a transformers config, or None if the architecture lacks one of the fields it is read from."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads")
    values = [getattr(config, name, None) for name in (*names, "num_key_value_heads")]
    if not all(isinstance(value, int) for value in values):
        return None
    hidden, intermediate, layers, vocab, heads, kv_heads = (int(value) for value in values if value is not None)
    head = getattr(config, "head_dim", None) or hidden // heads
    return Shape(hidden=hidden, intermediate=intermediate, layers=layers, vocab=vocab, query=heads * head, key=kv_heads * head)


def layer_weights(shape: Shape) -> int:
    """Weights of the frozen linears of all layers, without the output head: P - H V."""
    h, q, k = shape.hidden, shape.query, shape.key
    return shape.layers * (2 * h * q + 2 * h * k + 3 * h * shape.intermediate)


def adapter_weights(shape: Shape, rank: int) -> int:
    """Pa: weights of rank-``rank`` adapters on all seven linears of every layer."""
    h, q, k = shape.hidden, shape.query, shape.key
    return shape.layers * rank * (2 * (h + q) + 2 * (h + k) + 3 * (h + shape.intermediate))


def flops_per_token(shape: Shape, *, row_tokens: float, rank: int, predicted: float = 1.0) -> float:
    """Model FLOPs per token of one LoRA step over rows of ``row_tokens`` tokens.

    ``predicted`` is the share of tokens whose logits are computed (1 where every token is trained on): work that is
    left out must not count.
    """
    frozen = layer_weights(shape) + predicted * shape.hidden * shape.vocab
    attention = 2 * row_tokens * shape.query * shape.layers
    return 4 * frozen + 6 * adapter_weights(shape, rank) + 3 * attention


def wire_bytes(reduced_bytes: int, *, world_size: int, sharded_bytes: int = 0, gathers: int = 2) -> float:
    """Bytes that each of ``world_size`` GPUs sends in a step.

    The all-reduce of ``reduced_bytes`` of gradients sends 2 (n - 1) / n of them, whatever its algorithm; under FSDP each of
    the ``gathers`` all-gathers of ``sharded_bytes`` sends (n - 1) / n of those. Frozen weights have no gradients to scatter.
    """
    share = (world_size - 1) / world_size
    return share * (2 * reduced_bytes + gathers * sharded_bytes)
