"""Our own arithmetic: LoRA linears, the chunked loss, gradients in buckets."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional

from finetune_smoke.data.calls import Tokenizer
from finetune_smoke.model import build, gradients, lora
from finetune_smoke.settings.config import Config, preset
from tests.support.finetune.runs import QUICK


def adapted(config: Config | None = None) -> Any:
    """A small model with peft's adapters, their B matrices filled so that they count."""
    config = config or preset("tiny", **QUICK)
    base = build.random_base(config, torch.device("cpu"))
    made = build.add_adapters(base, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
            if name.endswith("bias"):  # Qwen2's are 0 at the start, which would hide them
                parameter.normal_(generator=generator)
    return made


def loss_and_gradients(made: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of some tokens."""
    ids = torch.arange(48).view(2, 24)
    value = build.SummedLoss(made)(ids, torch.arange(30), torch.arange(1, 31))
    return value, list(torch.autograd.grad(value, [each for each in made.parameters() if each.requires_grad]))


def test_own_linears_compute_what_pefts_do() -> None:
    """Loss and every gradient, in float32 to rounding; with and without bias, under the same names."""
    theirs = adapted()
    ours = copy.deepcopy(theirs)
    assert lora.take_over(ours)
    assert {type(each) for each in ours.modules() if hasattr(each, "lora_A")} == {lora.OwnLinear}
    expected, found = loss_and_gradients(theirs), loss_and_gradients(ours)
    assert found[0].item() == pytest.approx(expected[0].item(), rel=1e-6)
    for mine, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5 * float(other.abs().max()))
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_input_that_needs_no_gradient_gets_none() -> None:
    """The first layer's, whose embedding is frozen; and one that does gets peft's."""
    theirs = adapted()
    linear = theirs.get_base_model().model.layers[0].self_attn.q_proj
    x = torch.randn(2, 5, 64, requires_grad=True)
    (expected,) = torch.autograd.grad(linear(x).square().sum(), [x])
    lora.take_over(theirs)
    (found,) = torch.autograd.grad(linear(x).square().sum(), [x])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    linear(x.detach()).square().sum().backward()
    assert linear.lora_A["default"].weight.grad is not None


def test_one_linear_of_another_kind_leaves_all_to_peft() -> None:
    """Linears half under autocast and half not would see each other's types."""
    made = adapted()
    made.get_base_model().model.layers[0].mlp.up_proj.fan_in_fan_out = True
    assert not lora.take_over(made)
    assert not any(isinstance(each, lora.OwnLinear) for each in made.modules())


@pytest.mark.parametrize("rows", [1, 7, 21, 25])
@pytest.mark.parametrize("alike", [False, True])
def test_loss_in_chunks_is_the_loss(rows: int, alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: FBT001 -- a case
    """Value and gradient, with a chunk that is not full, and with all filled up to one size, as where they are compiled."""
    monkeypatch.setattr(build, "CHUNK", 7)
    sizes: list[int] = []

    def alike_terms(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(hidden))
        return build.chunk_terms(hidden, weight, targets)

    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(rows, 16, generator=generator, requires_grad=True)
    weight = torch.randn(50, 16, generator=generator)
    targets = torch.randint(50, (rows,), generator=generator)
    targets[::3] = build.IGNORED
    expected = functional.cross_entropy(hidden @ weight.t(), targets, reduction="sum")
    found = build.linear_cross_entropy(hidden, weight, targets, terms=alike_terms if alike else build.chunk_terms)
    torch.testing.assert_close(found, expected)
    scale = torch.tensor(0.3)
    (mine,), (other,) = (torch.autograd.grad(each * scale, [hidden]) for each in (found, expected))
    torch.testing.assert_close(mine, other)
    assert set(sizes) == ({7} if alike else set())


def test_factor_of_a_bf16_loss_keeps_its_precision() -> None:
    """1 / tokens rounded to bf16 would scale every gradient by up to 0.4 %."""
    hidden = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    weight, targets = torch.eye(16).bfloat16(), torch.arange(4)
    value = build.linear_cross_entropy(hidden, weight, targets)
    one, part = (
        torch.autograd.grad(value * scale, [hidden], retain_graph=True)[0] for scale in (1.0, torch.tensor(1.0 / 1021))
    )
    torch.testing.assert_close(part.float() * 1021, one.float(), rtol=2**-8, atol=0)
    assert float((part.float() * 1021 / one.float()).mean()) == pytest.approx(1, abs=1e-3)


def test_head_with_a_bias_is_applied_as_it_is() -> None:
    """The chunked loss knows frozen heads without one."""
    made = build.SummedLoss(adapted(preset("tiny", **{**QUICK, "tie_embeddings": False})))
    ids, positions, targets = torch.arange(48).view(2, 24), torch.arange(30), torch.arange(1, 31)
    plain = made(ids, positions, targets)
    made.inner.lm_head.bias = nn.Parameter(torch.zeros(len(Tokenizer())), requires_grad=False)
    torch.testing.assert_close(made(ids, positions, targets), plain)
    made.inner.lm_head.bias.data[5] = 9.0
    assert made(ids, positions, targets) > plain + 10


def test_rows_need_no_mask() -> None:
    """Qwen2 gets no masks and gives the same logits; other architectures compute their own masks."""
    made = build.SummedLoss(adapted())
    assert made.masks == {"full_attention": None}
    ids, positions = torch.arange(48).view(2, 24), torch.arange(48)
    expected = made.logits(ids, positions)
    made.masks = None
    torch.testing.assert_close(made.logits(ids, positions), expected)
    made.inner.config.model_type = "llama"
    assert build.SummedLoss(made.model).masks is None


class Sent:
    """Stands in for torch's all-reduce of two equal ranks: keeps place and size of each part, and how much was ready."""

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat
        self.parts: list[tuple[int, int, int]] = []

    def __call__(self, part: torch.Tensor, **_: Any) -> SimpleNamespace:
        """Double the part when it is waited for."""
        self.parts.append((part.storage_offset(), part.numel(), int((self.flat != 0).sum())))
        return SimpleNamespace(wait=lambda: part.mul_(2))


@pytest.mark.parametrize("bucket_bytes", [4, 100, 1 << 20])
def test_buckets_are_sent_beside_the_backward(bucket_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last layer's first, before the first layer has a gradient; passes before the last send nothing; all is sent once."""
    weights = [torch.nn.Parameter(torch.ones(4, 4)) for _ in range(5)]
    ours = gradients.flat_gradients(weights)
    ours.bind()
    sent = Sent(ours.flat)
    monkeypatch.setattr(gradients.dist, "all_reduce", sent)
    monkeypatch.setattr(gradients, "BUCKET_BYTES", bucket_bytes)

    def backward() -> None:
        x = torch.ones(1, 4)
        for weight in weights[1:]:  # the first has no gradient
            x = x @ weight
        torch.autograd.backward(x.sum(), inputs=weights[1:])

    with gradients.in_buckets(ours, cast("Any", SimpleNamespace(world_size=2))) as buckets:
        assert buckets is not None
        backward()
        assert sent.parts == []
        once = ours.flat.clone()
        ours.zero()
        buckets.expect()
        backward()
        early = list(sent.parts)
        buckets.finish()
    assert torch.equal(ours.flat, 2 * once)
    places = [(at, size) for at, size, _ in sent.parts]
    assert sorted(places, reverse=True) == places  # the last part of the buffer first
    assert sum(size for _, size in places) == ours.flat.numel()
    assert [at for at, _, ready in early] == [at for at, size in places if at >= 16]
    assert all(ready == ours.flat.numel() - at for at, _, ready in early)  # what lies before has no gradient yet
    backward()
    assert len(sent.parts) == len(places)  # the hooks are gone


def test_a_single_rank_sends_nothing() -> None:
    """And has no hooks."""
    ours = gradients.flat_gradients([torch.nn.Parameter(torch.ones(2))])
    with gradients.in_buckets(ours, cast("Any", SimpleNamespace(world_size=1))) as buckets:
        assert buckets is None
