"""Faults planted on purpose (``--fault NAME[:RANK]``), to test the checks. ``config.FAULTS`` describes each."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from finetune_smoke.data.batches import Row, Source
from finetune_smoke.settings.config import InputError, parse_fault

SLOWER_S = 0.1
SLOWER_FORWARDS = 3
GPU_CYCLES_PER_S = 1.8e9  # about an H200's SM clock
SCALE = 8
ONCE_AT_STEP = 10
FAR = 77_777


@dataclass(frozen=True, slots=True)
class Fault:
    """The fault that this rank plants; ``name`` is "none" on ranks without a fault."""

    name: str

    def slow_down(self, seen_ms: Sequence[float], device: torch.device) -> None:
        """Slow the forward down; ``seen_ms`` are the times of earlier forwards in ms, this delay included."""
        if self.name == "straggler":
            # Each earlier forward was delayed by at least SLOWER_S.
            healthy_s = max(0.0, min(seen_ms, default=0.0) / 1e3 - SLOWER_S)
            seconds = max(SLOWER_S, SLOWER_FORWARDS * healthy_s)
            if device.type == "cuda":
                torch.cuda._sleep(int(seconds * GPU_CYCLES_PER_S))  # type: ignore[no-untyped-call]  # noqa: SLF001 -- only waits
                return
            end_s = time.thread_time() + seconds
            while time.thread_time() < end_s:  # a sleep would not count as time of the forward
                pass

    @torch.no_grad()
    def spoil_base(self, weight: torch.Tensor) -> None:
        """Flip one bit of one base weight."""
        if self.name == "base":
            weight.view(-1)[:1].view(torch.uint8)[:1] ^= 1

    def freeze(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Freeze all adapter tensors but the last."""
        if self.name == "frozen":
            for parameter in list(parameters.values())[:-1]:
                parameter.requires_grad = False

    def wrong_indices(self, demanded: range, rank: int) -> range:
        """The rows to read instead of ``demanded``: those of rank 0, or of rank 1 on rank 0."""
        if self.name != "dupdata":
            return demanded
        shift = -rank if rank else 1
        return range(demanded.start + shift * len(demanded), demanded.stop + shift * len(demanded))

    def wrong_answers(self, rows: list[Row], demanded: range, source: Source) -> list[Row]:
        """``rows``, each with the answer of a distant row."""
        if self.name != "wrongdata":
            return rows
        answered = []
        for row, other in zip(rows, (source.row(index + FAR) for index in demanded), strict=True):
            begin, cut = row.predicted[0], other.predicted[0]
            answered.append(Row(row.ids[:begin] + other.ids[cut:], [at - cut + begin for at in other.predicted]))
        return answered

    def watch_gradients(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Corrupt this rank's own gradients from now on, before they are averaged over the ranks."""
        if self.name in {"bitflip", "bitflip-exp", "scale", "zero", "noise", "signflip"}:
            self._corrupt(parameters)

    @torch.no_grad()
    def enter_step(
        self, parameters: Mapping[str, torch.nn.Parameter], frozen: Iterable[torch.Tensor], *, step: int, last: int
    ) -> None:
        """Plant the faults that begin in the ``last`` step; ``frozen`` are the weights that are not trained."""
        if self.name == "bitflip-late" and step == last:
            self._corrupt(parameters)
        elif self.name == "base-late" and step == last:
            weights = list(frozen)
            weights[len(weights) // 2].view(-1)[:1].view(torch.uint8)[:1] ^= 1  # of a decoder layer

    def _corrupt(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        rng = random.Random(0)
        everywhere = [parameter for parameter in parameters.values() if parameter.requires_grad]
        for parameter in everywhere[:1] if self.name.startswith("bitflip") else everywhere:
            parameter.register_hook(functools.partial(self._corrupted, rng=rng))  # type: ignore[no-untyped-call]  # torch's

    def _corrupted(self, gradient: torch.Tensor, rng: random.Random) -> torch.Tensor:
        if self.name == "noise":
            return gradient + torch.randn_like(gradient) * gradient.abs().mean()
        if self.name.startswith("bitflip"):
            bit = rng.choice([27, 28, 29]) if self.name == "bitflip-exp" else rng.randrange(23)
            return _flipped(gradient.clone(), rng.randrange(gradient.numel()), bit)
        return gradient * {"scale": SCALE, "zero": 0, "signflip": -1}[self.name]

    @torch.no_grad()
    def spoil_averages(self, parameters: Mapping[str, torch.nn.Parameter], step: int) -> None:
        """Corrupt the averaged gradients on this rank."""
        gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
        if self.name in {"post-scale", "post-signflip"}:
            for gradient in gradients:
                gradient.mul_(SCALE if self.name == "post-scale" else -1)
        elif self.name == "post-bitflip":
            _flipped(gradients[0], step % gradients[0].numel(), step % 23)
        elif self.name == "post-bitflip-once" and step == ONCE_AT_STEP:
            _flipped(gradients[0], 0, 22)

    @torch.no_grad()
    def spoil_replay(self, gradients: torch.Tensor) -> None:
        """Corrupt the ``gradients`` of a replayed pass; the eager audit stays healthy."""
        if self.name == "graph-bitflip":
            _flipped(gradients, gradients.numel() // 2, 22)

    def truncate(self, adapter: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The adapter to save, without its first tensor."""
        return dict(list(adapter.items())[1:]) if self.name == "truncate-ckpt" else adapter


GLOBAL = frozenset({"none", "lr0", "frozen", "noallreduce"})


def planted(text: str, *, rank: int, world_size: int) -> Fault:
    """The fault ``NAME[:RANK]`` on ``rank``; raises InputError for a rank that does not exist."""
    name, at_fault = parse_fault(text)
    if at_fault is not None and at_fault >= world_size:
        raise InputError(f"fault {text!r}: there are ranks 0 to {world_size - 1}")
    here = name in GLOBAL or rank == (world_size - 1 if at_fault is None else at_fault)
    return Fault(name if here else "none")


def _flipped(values: torch.Tensor, index: int, bit: int) -> torch.Tensor:
    """``values`` (float32) with one bit of one element flipped in place."""
    values.view(-1)[index : index + 1].view(torch.int32).bitwise_xor_(1 << bit)
    return values
