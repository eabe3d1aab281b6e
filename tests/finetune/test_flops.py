"""The FLOPs of a LoRA step."""

from __future__ import annotations

import operator
from types import SimpleNamespace

import pytest
import torch

from finetune_smoke.model import build
from finetune_smoke.model.flops import Shape, adapter_weights, flops_per_token, layer_weights, shape_of, wire_bytes
from finetune_smoke.settings.config import preset

QWEN2_7B = Shape(hidden=3584, intermediate=18944, layers=28, vocab=152064, query=3584, key=512)


def test_qwen2_7b_shape() -> None:
    """7.070e9 weights in frozen matmuls, 161.5e6 in adapters, 30.5 GFLOP a token at 2048."""
    assert layer_weights(QWEN2_7B) + 3584 * 152064 == pytest.approx(7.070e9, rel=1e-3)
    assert adapter_weights(QWEN2_7B, 64) == pytest.approx(161.5e6, rel=1e-3)
    assert flops_per_token(QWEN2_7B, row_tokens=2048, rank=64) == pytest.approx(30.5e9, rel=2e-3)


def test_head_counts_only_where_it_is_used() -> None:
    """Tokens of a prompt pass no head: 4 H V of work each that must not count."""
    full, none = (flops_per_token(QWEN2_7B, row_tokens=2048, rank=64, predicted=share) for share in (1.0, 0.0))
    assert full - none == 4 * 3584 * 152064


def test_adapter_weights_are_those_that_peft_makes() -> None:
    """Formula against the model itself."""
    config = preset("tiny")
    made = build.random_base(config, torch.device("cpu"))
    shape = shape_of(made.config)
    adapted = build.add_adapters(made, config)
    assert shape is not None
    assert sum(each.numel() for each in adapted.parameters() if each.requires_grad) == adapter_weights(shape, 64)


def test_the_7b_shape_trains_161_5_million() -> None:
    """As the reference says of rank 64 on Qwen2-7B: peft's own tensors, counted without allocating any."""
    config = preset("7b-shape")
    made = build.random_base(config, torch.device("meta"))
    assert shape_of(made.config) == QWEN2_7B
    adapted = build.add_adapters(made, config)
    count = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert count == 161_480_704 == adapter_weights(QWEN2_7B, 64)


@pytest.mark.parametrize("name", ["reference", "reference-throughput", "optimized"])
def test_other_presets_of_that_shape_train_the_same(name: str) -> None:
    """Every option that shapes the model or its adapters is that of the 7B shape."""
    shape = ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "vocab_size", "tie_embeddings")
    told = operator.attrgetter(*shape, "lora_rank", "target_modules")
    assert told(preset(name)) == told(preset("7b-shape"))


def test_wire_volume_of_a_step() -> None:
    """DDP: 0.65 GB of gradients, of which a GPU of 4 sends 1.5 times as much; FSDP: 13 GB of layers, three quarters, twice."""
    gradients, layers = 4 * adapter_weights(QWEN2_7B, 64), 2 * layer_weights(QWEN2_7B)
    assert gradients == pytest.approx(0.646e9, rel=1e-3)
    assert wire_bytes(gradients, world_size=1) == 0
    assert wire_bytes(gradients, world_size=4) == 1.5 * gradients
    assert wire_bytes(gradients, world_size=4, sharded_bytes=layers) == pytest.approx(1.5 * gradients + 1.5 * 13.05e9, rel=1e-3)
    assert wire_bytes(0, world_size=2, sharded_bytes=layers, gathers=8) == 4 * layers


def test_shape_of_an_unusual_architecture_is_unknown() -> None:
    """No MFU rather than a wrong one."""
    assert shape_of(SimpleNamespace(hidden_size=8, vocab_size=10)) is None


def test_head_width_of_its_own_is_read() -> None:
    """Some models have heads wider than hidden / heads."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 100, "head_dim": 32}
    found = shape_of(SimpleNamespace(**sizes, num_attention_heads=4, num_key_value_heads=2))
    assert found == Shape(hidden=64, intermediate=128, layers=2, vocab=100, query=128, key=64)
