"""The model: a shaped random base or a real one, LoRA adapters on it, and the summed loss of predicted tokens.

The cross-entropy over the frozen head is computed in chunks of rows: the logits of a step are never all in memory. 8192
predictions over 152064 tokens are 5 GB of float32 logits, and their gradient is as large. Here each chunk's logits become its
loss and the gradient of its hidden states at once. A frozen head needs no more.

A frozen random transformer is a poor thing to adapt: it stops at the entropy of what it cannot look up. Four changes,
each true of every trained model, make the adapters learn to attend within a hundred steps; nothing is pre-trained:

1. the head is the embedding (tied, or a copy) with standard deviation max(0.02, H^-0.5): a frozen head separates
   logits by about H times that;
2. tokens of one class share ``clustering`` of their embedding's variance;
3. ``o_proj`` is ``v_proj`` transposed, times ``mimetic``: heads copy what they look at (mimetic initialisation,
   Trockman and Kolter, arXiv 2305.09828);
4. ``down_proj`` is scaled by ``damping``, so that the residual stream still carries the token after the MLPs.

What to attend to, and when, is left to the adapters. Without them the loss stays near ln(vocabulary).
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from finetune_smoke.data import calls, hub
from finetune_smoke.settings.config import Config, InputError

CHUNK = 1024
"""Rows of a chunk. Compiled chunks are all padded to this size, so that one shape is compiled."""

IGNORED = -100
"""The target of a row that predicts nothing and pads a chunk or a batch of fixed size."""


def chunk_terms(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed loss, its gradient by ``hidden``) of one chunk; the softmax in float32, as in cross_entropy."""
    kept = targets != IGNORED
    logits = (hidden @ weight.t()).float()
    logarithms = logits - logits.logsumexp(dim=1, keepdim=True)
    columns = torch.arange(logits.shape[1], device=logits.device)
    right = columns == targets.clamp(min=0)[:, None]
    loss = -(torch.where(right, logarithms, 0.0).sum(dim=1) * kept).sum()
    slopes = (logarithms.exp() - right.float()) * kept[:, None]
    return loss, slopes.to(hidden.dtype) @ weight


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, terms: Any) -> torch.Tensor:
        total = torch.zeros((), device=hidden.device)
        slopes = []
        for part, its_targets in zip(torch.split(hidden, CHUNK), torch.split(targets, CHUNK), strict=True):
            rows, wanted = part, its_targets
            short = CHUNK - len(part)
            if short and terms is not chunk_terms:  # compiled for one shape: filled with rows that predict nothing
                rows, wanted = functional.pad(part, (0, 0, 0, short)), functional.pad(its_targets, (0, short), value=IGNORED)
            loss, slope = terms(rows, weight, wanted)
            total = total + loss
            slopes.append(slope[: len(part)])
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.cat(slopes))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slopes,) = ctx.saved_tensors
        return slopes * gradients[0], None, None, None  # a scalar factor stays in float32 within the product


def linear_cross_entropy(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *, terms: Any = chunk_terms
) -> torch.Tensor:
    """Summed cross-entropy, float32, of ``hidden`` [rows, H] times the transpose of the frozen ``weight`` [V, H]."""
    result: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, targets, terms)  # type: ignore[no-untyped-call]  # torch's
    return result


class SummedLoss(nn.Module):
    """A causal language model that returns the summed cross-entropy of chosen tokens, in nats.

    Only the hidden states that predict something pass the head: most of a prompt needs no logits. The host computes the
    positions as indices, so nothing waits for the device. A frozen head without bias is applied in chunks.
    """

    def __init__(self, model: Any) -> None:
        """Wrap a transformers causal language model, bare or with peft's adapters."""
        super().__init__()
        self.model = model
        self.terms: Any = chunk_terms  # or that function compiled
        self.masks = _masks(self.inner.config)

    @property
    def inner(self) -> Any:
        """The transformers model under the adapters."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def hidden(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Last hidden states [positions, H] at the flat indices ``positions`` of the tokens ``ids`` [rows, tokens]."""
        output = self.inner.base_model(input_ids=ids, attention_mask=self.masks, use_cache=False)
        states: torch.Tensor = output.last_hidden_state
        return states.flatten(0, 1).index_select(0, positions)

    def logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [positions, vocabulary] at the flat indices ``positions`` of the tokens ``ids`` [rows, tokens]."""
        result: torch.Tensor = self.inner.get_output_embeddings()(self.hidden(ids, positions))
        return result

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Summed loss of ``targets`` [positions], computed in float32; a target of -100 counts nothing."""
        head = self.inner.get_output_embeddings()
        if type(head) is nn.Linear and head.bias is None and not head.weight.requires_grad:
            return linear_cross_entropy(self.hidden(ids, positions), head.weight, targets, terms=self.terms)
        return functional.cross_entropy(self.logits(ids, positions).float(), targets, reduction="sum")


def _masks(shape: Any) -> dict[str, None] | None:
    """Masks that keep Qwen2 from computing its own: rows are padded at the right, so plain causal attention suffices.

    By default transformers looks for packed rows in each forward, which waits for the device. Inside a CUDA graph it builds
    a mask, which the fused attention kernels for causal rows do not accept.
    """
    plain = set(getattr(shape, "layer_types", None) or []) == {"full_attention"}
    return {"full_attention": None} if plain and shape.model_type == "qwen2" else None


def random_base(config: Config, device: torch.device) -> Any:
    """A Qwen2 of the configured shape with shaped random weights: a closed form of ``config.seed``."""
    from transformers import AutoModelForCausalLM, Qwen2Config  # noqa: PLC0415 -- seconds; only where a model is made

    tokenizer = calls.Tokenizer()
    shape = Qwen2Config(
        vocab_size=config.vocab_size or len(tokenizer),
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        max_position_embeddings=max(config.row_tokens, 512),
        tie_word_embeddings=config.tie_embeddings,
        initializer_range=max(0.02, config.hidden_size**-0.5),
        pad_token_id=tokenizer.pad_id,
        bos_token_id=None,
        eos_token_id=tokenizer.end_id,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)  # the same base on every rank
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(shape, dtype=_dtype(device), attn_implementation="sdpa")
    _shape(model, config, tokenizer)
    return model


@torch.no_grad()
def _shape(model: Any, config: Config, tokenizer: calls.Tokenizer) -> None:
    """Steps 2 to 4 of the module's docstring, and the untied head as a copy of the embedding."""
    generator = torch.Generator().manual_seed(config.seed + 7)
    embedding = model.get_input_embeddings().weight
    for parts in calls.VALUES.values():
        for part in parts:
            rows = torch.tensor([token for text in part for token in tokenizer.encode(text)], device=embedding.device)
            shared = torch.randn(config.hidden_size, generator=generator) * model.config.initializer_range
            own = (1 - config.clustering) ** 0.5 * embedding[rows]
            embedding[rows] = own + config.clustering**0.5 * shared.to(embedding)
    head = config.hidden_size // config.heads
    repeat = config.heads // config.kv_heads
    for layer in model.base_model.layers:
        values = layer.self_attn.v_proj.weight.view(-1, head, config.hidden_size).repeat_interleave(repeat, 0)
        layer.self_attn.o_proj.weight.copy_(config.mimetic / repeat * values.flatten(0, 1).T)
        layer.mlp.down_proj.weight.mul_(config.damping)
    if not config.tie_embeddings:
        model.get_output_embeddings().weight.copy_(embedding)


def without_dropout(model: Any) -> str | None:
    """Switch off all dropout of ``model``, in place; returns a line with the dropout that was on, None if there was none.

    Dropout draws other numbers on every rank and in every pass, which a comparison of bits cannot tell from a fault.
    ``eval()`` is no alternative: gradient checkpointing needs a model in training.
    """
    found: dict[str, float] = {}
    for owner in (*model.modules(), model.config):
        names = ["p"] if isinstance(owner, nn.modules.dropout._DropoutNd) else [name for name in vars(owner) if "drop" in name]  # noqa: SLF001 -- the base class of torch's dropouts
        for name in names:
            value = getattr(owner, name)
            if isinstance(value, float) and value > 0:
                found["dropout" if name == "p" else name] = value
                setattr(owner, name, 0.0)
    values = ", ".join(f"{name} {value:g}" for name, value in sorted(found.items()))
    return f"dropout of the base ({values}) is off: ranks are compared to the bit" if found else None


def add_adapters(model: Any, config: Config) -> Any:
    """The model with rank-``lora_rank`` adapters in float32 on ``target_modules``; the base is frozen. Raises InputError."""
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 -- seconds; only where a model is made

    lora = LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        target_modules=_targets(model, config.target_modules),
        task_type="CAUSAL_LM",
    )
    device = next(model.parameters()).device
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        warnings.filterwarnings("ignore", ".*gradient_checkpointing.* is deprecated", FutureWarning)  # transformers 5.24
        torch.manual_seed(config.seed + 1)
        adapted = get_peft_model(model, lora)
        if config.gradient_checkpointing:
            adapted.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            adapted.enable_input_require_grads()
    return adapted


def _targets(model: Any, wanted: str) -> str | list[str]:
    """The names of the linears that get adapters; raises InputError for one that the model does not have."""
    if wanted == "all-linear":
        return wanted
    names = [name.strip() for name in wanted.split(",")]
    there = sorted({name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, nn.Linear)})
    missing = [name for name in names if name not in there]
    if missing:
        raise InputError(f"target_modules: this model has no linear {', '.join(missing)}; it has {', '.join(there)}")
    return names


NAMED = 3
"""How many missing weights a message names."""


def base_of(config: Config, device: torch.device) -> Any:
    """The frozen base: the model that ``config`` names, or the random one; bf16 on a GPU. Raises InputError."""
    return random_base(config, device) if config.model is None else load_model(config.model, device)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def load_model(name: str, device: torch.device) -> Any:
    """The causal language model in directory or hub repository ``name``; raises InputError, also for missing weights."""
    hub.check_place("model", name)
    from safetensors import SafetensorError  # noqa: PLC0415 -- as below
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 -- seconds; only where a model is loaded
    from transformers.utils import logging  # noqa: PLC0415 -- as above

    logging.disable_progress_bar()  # one a rank, and above a message of one line
    try:
        with torch.device(device):
            model, loading = AutoModelForCausalLM.from_pretrained(
                name, dtype=_dtype(device), attn_implementation="sdpa", output_loading_info=True, ignore_mismatched_sizes=True
            )
    except (OSError, ValueError) as error:
        raise InputError(hub.reason("model", name, error)) from error
    except SafetensorError as error:
        raise InputError(f"model {name}: a file of weights cannot be read: {error}; fetch it again") from error
    _require_whole(name, loading)
    return model.to(device)


def _require_whole(name: str, loading: Mapping[str, Any]) -> None:
    """Raises InputError if weights are missing from the files or have another shape: transformers fills in random numbers."""
    missing = sorted(loading["missing_keys"])
    if missing:
        raise InputError(f"model {name}: {len(missing)} weights are missing from its files: {_first(missing)}; fetch it again")
    other = [f"{key} {list(there)} in place of {list(needed)}" for key, there, needed in sorted(loading["mismatched_keys"])]
    if other:
        raise InputError(
            f"model {name}: {len(other)} weights have other shapes than its config.json says: {_first(other)}; fetch both again"
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
