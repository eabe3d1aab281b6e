"""A pytest plugin (``-p trained``) under which groups train, fine-tune and all-reduce as a test wants, at once.

``E2E_TRAINED`` is a JSON object of values by the number of ranks in the group: ``rate`` (tokens/s/GPU under DDP),
``sharded_rate`` (under FSDP), ``peak_gib`` and ``busbw_gb_s``. What it leaves out is healthy. ``checks`` are those of the
fine-tune by name: null for one that was not made, else the ranks at which it failed; ``loss_limit`` is its limit.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass, field
from typing import Any

import pytest

HEALTHY = {
    "rate": dict.fromkeys("1248", 19_000.0),
    "sharded_rate": dict.fromkeys("1248", 18_000.0),
    "peak_gib": {"1": 20.0, "2": 15.0, "4": 12.0},  # 12 GiB of them in layers of 0.5
    "busbw_gb_s": {"2": 442.21, "4": 434.99},
}
CHECKS = (
    "base_digest", "data_digest", "lock_step", "all_reduce", "adapter_digest", "finite", "adapters_moved", "restore",
    "generation", "graph_lock_step", "step_time_spread",
)  # fmt: skip
MODULES = {"finetune": "training", "train": "training", "all_reduce": "collectives"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What FSDP divides among the ranks."""

    world_size: int
    sharded_gib: float
    layer_gib: float
    strategy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What the criteria read, whichever measurement it comes from."""

    world_size: int
    tokens_per_s_per_gpu: float = 0.0
    peak_gib: float = 0.0
    outcome: Memory | None = None
    busbw_gb_s: float = 0.0
    spans_busbw_gb_s: list[float] = field(default_factory=list)
    size_bytes: int = 0
    time_us: float = 0.0
    nvls: str | None = None
    nccl_version: str | None = None
    shortened: str | None = None

    @property
    def evidence(self) -> dict[str, Any]:
        """How many they were."""
        return {"ranks": self.world_size}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the criteria read of a fine-tune."""

    checks: dict[str, Any]
    loss_limit: float
    left_out: dict[str, str]
    losses: tuple[float, ...] = (7.0,) * 149 + (0.1,)
    notes: tuple[str, ...] = ("a note of the run",)
    loss: float = 0.1
    first_loss: float = 7.0
    blind_floor_nats: float = 1.35
    step_below_limit: int = 50
    exact_match: float = 1.0
    heldout_loss: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Finetuned:
    """With what explains it."""

    outcome: Outcome

    @property
    def evidence(self) -> dict[str, Any]:
        """Nothing."""
        return {}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any conftest has imported the real ones."""
    for name, module in MODULES.items():
        setattr(importlib.import_module(f"pytest_gpucluster.measurements.{module}"), name, globals()[name])


def finetune(**_recipe: Any) -> Finetuned:
    """A fine-tune that learned."""
    wanted = json.loads(os.environ["E2E_TRAINED"])
    ranks = {**dict.fromkeys(CHECKS, "passed"), **wanted.get("checks", {})}
    checks = {
        name: {"passed": bad == "passed", "detail": f"{name} looked", "ranks": [] if bad == "passed" else bad}
        for name, bad in ranks.items()
        if bad is not None
    }
    left_out = {name: f"{name} does not apply" for name in ranks if name not in checks}
    return Finetuned(outcome=Outcome(checks=checks, loss_limit=wanted.get("loss_limit", 0.5), left_out=left_out))


def train(*, single_rank: bool = False, strategy: str = "auto", **_recipe: Any) -> Group:
    """A training."""
    is_sharded, ranks = strategy == "fsdp", _ranks(single_rank=single_rank)
    sharded = {"sharded_gib": 12.0, "layer_gib": 0.5} if is_sharded else {"sharded_gib": 0.0, "layer_gib": 0.0}
    return Group(
        world_size=ranks,
        tokens_per_s_per_gpu=_value("sharded_rate" if is_sharded else "rate", single_rank=single_rank),
        peak_gib=_value("peak_gib", single_rank=single_rank),
        outcome=Memory(world_size=ranks, strategy=strategy, **sharded),
    )


def all_reduce(*, size_bytes: int, **_recipe: Any) -> Group:
    """Bus bandwidth."""
    value = _value("busbw_gb_s", single_rank=False)
    return Group(world_size=_ranks(single_rank=False), busbw_gb_s=value, size_bytes=size_bytes)


def _ranks(*, single_rank: bool) -> int:
    return 1 if single_rank else int(importlib.import_module("torch.distributed").get_world_size())


def _value(kind: str, *, single_rank: bool) -> float:
    wanted = {**HEALTHY[kind], **json.loads(os.environ["E2E_TRAINED"]).get(kind, {})}
    return float(wanted[str(_ranks(single_rank=single_rank))])
