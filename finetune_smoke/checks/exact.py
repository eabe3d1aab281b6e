"""Exact checks beside the loss, for faults that a smooth loss curve hides.

The loss shows 5 of 15 planted numeric faults. The lock-step audit finds wrong arithmetic of one rank. The digests find
faults after the all-reduce. The row check finds wrong or doubled data. A check names the ranks at fault where it can:
exactly, or by a majority of three and more ranks. A check that has nothing to compare, because there is a single rank, is
not recorded: what was not tested must not look passed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypedDict

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel

from finetune_smoke.digests import digest
from finetune_smoke.ranks import Ranks, rank_list
from finetune_smoke.settings.config import InputError


class CheckResult(TypedDict):
    """Outcome of one check; ``ranks`` are those at fault, empty where they are unknown."""

    passed: bool
    detail: str
    ranks: list[int]


Failures = dict[str, list[tuple[str, list[int]]]]
"""By check: what was wrong, and the ranks at fault as far as they are known."""


@dataclass(slots=True)
class Checks:
    """The results of all checks so far, equal on every rank. Passes are counted; all failures are kept."""

    ranks: Ranks
    failures: Failures = field(default_factory=dict)
    _passes: Counter[str] = field(default_factory=Counter)
    _remarks: dict[str, str] = field(default_factory=dict)
    _latest: dict[str, str | None] = field(default_factory=dict)
    _left_out: dict[str, str] = field(default_factory=dict)

    def record(self, name: str, *, problem: str | None, at_fault: Sequence[int] = (), remark: str | None = None) -> None:
        """Record one more result of check ``name``: its ``problem``, and who caused it, or None if it passed.

        ``remark`` is the detail of a passed check; default: how often it passed.
        """
        self._latest[name] = problem
        if problem is None:
            self._passes[name] += 1
            self._remarks[name] = remark or f"{self._passes[name]} of {self._passes[name]} looks"
        else:
            self.failures.setdefault(name, []).append((problem, list(at_fault)))

    def carry_over(self, failures: Failures) -> None:
        """Count ``failures``, which a checkpoint carried, as this run's own."""
        for name, found in failures.items():
            self.failures[name] = [*found, *self.failures.get(name, [])]

    def latest_problems(self, names: Iterable[str]) -> list[str]:
        """``name: problem`` for each check among ``names`` that failed when it last ran."""
        return [f"{name}: {problem}" for name in names if (problem := self._latest.get(name)) is not None]

    def leave_out(self, name: str, *, why: str) -> None:
        """Note why check ``name`` does not apply to this run. A failure of the check, earlier or later, still counts."""
        self._left_out[name] = why

    def has_result(self, name: str) -> bool:
        """Whether check ``name`` has passed, failed or been left out."""
        return bool(self._passes[name]) or name in self.failures or name in self._left_out

    def left_out(self) -> dict[str, str]:
        """The reason for each check that was left out and did not fail, by name."""
        return {name: why for name, why in sorted(self._left_out.items()) if name not in self.failures}

    def results(self) -> dict[str, CheckResult]:
        """The result of each check that ran at least once and was not left out, by name."""
        result: dict[str, CheckResult] = {}
        for name in sorted({*self._passes, *self.failures} - set(self.left_out())):
            failures, passes = self.failures.get(name, []), self._passes[name]
            if not failures:
                result[name] = {"passed": True, "detail": self._remarks[name], "ranks": []}
                continue
            looks = f" ({len(failures)} of {len(failures) + passes} looks failed)"
            at_fault = sorted({rank for _, ranks in failures for rank in ranks})
            result[name] = {"passed": False, "detail": failures[0][0] + looks, "ranks": at_fault}
        return result


def record_equal(checks: Checks, name: str, *, values: Sequence[int], what: str) -> None:
    """Record under ``name`` whether ``values`` are the same on all ranks; the problem's text begins with ``what``."""
    everyone = checks.ranks.gather(values)
    if len(everyone) > 1:
        problem, odd = difference([tuple(row) for row in everyone])
        checks.record(name, problem=problem and f"{what}: {problem}", at_fault=odd)


def difference(values: Sequence[object]) -> tuple[str | None, tuple[int, ...]]:
    """How ``values``, one for each rank, differ (None if they do not), and the ranks outside a majority of three or more."""
    (usual, votes), *others = Counter(values).most_common()
    if not others:
        return None, ()
    if len(values) == 2:
        return "ranks 0 and 1 differ; it takes three to say which is wrong", ()
    if votes * 2 <= len(values):
        return f"{len(values)} ranks hold {len(others) + 1} different values, none of them in the majority", ()
    odd = tuple(rank for rank, value in enumerate(values) if value != usual)
    return f"{rank_list(odd)} of {len(values)} not like the others", odd


NO_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention without cuDNN's: its backward may be unrepeatable, and it plans anew for each length of rows, in 0.2 s."""


@contextmanager
def deterministic() -> Iterator[None]:
    """Use repeatable kernels within the block; restore the earlier setting afterwards.

    ``warn_only`` is off: with it the backward of a fused attention warns and stays unrepeatable (2 different results in 6
    runs with rows of 2048 tokens on an H200, 1 with this). cuDNN's attention is left out: its backward may be unrepeatable.
    torch raises RuntimeError for a kernel that has no repeatable form.
    """
    mode, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        with sdpa_kernel(NO_CUDNN):
            yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


FEWEST_REPLAYS = 2
MOST_REPLAYS = 10
"""Replays of a graph: 2 where all agree, else 10. A kernel that differs once in ten replays then shows it on 2 of 3 ranks."""

Pass = Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]]
"""Forward and backward over rows that are the same on every rank; returns the loss and this rank's own gradients."""


def audit(checks: Checks, *, step: int, work: Pass) -> None:
    """Lock-step audit: every rank does the same ``work``, and the bits of loss and gradients must agree.

    Records ``lock_step`` and, with several ranks, ``all_reduce``. After a difference the work is repeated, to find the
    ranks that do not even agree with themselves. A single rank is compared with itself.

    Raises:
        InputError: the model has a kernel that no setting makes repeatable.
    """
    try:
        with deterministic():
            once, gradients = _look(checks, work)
            again = _look(checks, work)[0] if len(once) == 1 or _differ([once]) else once
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        raise InputError(f"the lock-step audit (--audit-every 0 leaves it out) needs repeatable kernels: {error}") from error
    _judge_lock_step(checks, step, once, again)
    if checks.ranks.world_size > 1:
        _audit_all_reduce(checks, step, torch.cat([gradient.reshape(-1) for gradient in gradients]))


def _judge_lock_step(checks: Checks, step: int, once: list[list[int]], again: list[list[int]]) -> None:
    """Record ``lock_step``. ``once`` and ``again`` hold [loss, gradients] digests by rank, of the first pass and its repeat."""
    unsteady = [rank for rank, (first, second) in enumerate(zip(once, again, strict=True)) if first != second]
    part = 0 if len({row[0] for row in once}) > 1 else 1
    problem, odd = difference([row[part] for row in once])
    if unsteady:
        repeat = f"{rank_list(unsteady)} does not repeat itself"
        problem, odd = (f"{problem}; {repeat}", odd) if problem else (repeat, tuple(unsteady))
    what = f"{('loss', 'gradients')[part]} of the same rows at step {step}"
    checks.record("lock_step", problem=problem and f"{what}: {problem}", at_fault=odd)


def audit_replays(checks: Checks, *, step: int, work: Pass) -> None:
    """Audit replayed steps: two replays of ``work`` must give the same bits on all ranks. Records ``graph_lock_step``.

    A captured step has the fast kernels, which need not repeat themselves to the bit. So after a difference all ranks
    replay more often. If several ranks, or half of them, differ from themselves, a faulty GPU cannot be told from an
    unrepeatable kernel. The check is then left out, and does not count as passed.
    """
    replays: list[list[list[int]]] = []
    while len(replays) < FEWEST_REPLAYS or (len(replays) < MOST_REPLAYS and _differ(replays)):
        replays.append(_look(checks, work)[0])
    _judge_replays(checks, step, replays)


def _look(checks: Checks, work: Pass) -> tuple[list[list[int]], Sequence[torch.Tensor]]:
    """The digests of [loss, gradients] of ``work`` by rank, and this rank's gradients."""
    loss, gradients = work()
    return checks.ranks.gather([digest([loss]), digest(gradients)]), gradients


def _differ(replays: Sequence[Sequence[Sequence[int]]]) -> bool:
    return len({tuple(row) for replay in replays for row in replay}) > 1


def _judge_replays(checks: Checks, step: int, replays: Sequence[Sequence[Sequence[int]]]) -> None:
    """Judge the replays: ``replays`` has, for each replay of the same rows, the [loss, gradients] digests by rank."""
    by_rank = list(zip(*replays, strict=True))
    unsteady = [rank for rank, seen in enumerate(by_rank) if _differ([seen])]
    what = f"replays of the same rows at step {step}"
    if len(unsteady) > 1 or len(unsteady) * 2 >= len(by_rank):
        why = f"{what}: {rank_list(unsteady)} of {len(by_rank)} differ from themselves: the graph's kernels cannot be compared"
        checks.leave_out("graph_lock_step", why=why)
        return
    problem, odd = difference([tuple(row) for row in replays[0]])
    if unsteady:
        problem, odd = f"{rank_list(unsteady)} does not repeat itself", tuple(unsteady)
    checks.record("graph_lock_step", problem=problem and f"{what}: {problem}", at_fault=odd)


def _audit_all_reduce(checks: Checks, step: int, vector: torch.Tensor) -> None:
    """Record ``all_reduce``: the mean of equal vectors is that vector, to one rounding of 2^-24 for each rank."""
    world_size = checks.ranks.world_size
    dist.broadcast(vector, 0)
    mean = vector.clone()
    dist.all_reduce(mean)
    mean /= world_size
    within = (mean - vector).abs() <= vector.abs() * (world_size * 2.0**-24)
    what = f"step {step}: wrong elements in a mean of equal gradients"
    record_zero(checks, "all_reduce", count=int((~within).sum()), what=what)


def record_zero(checks: Checks, name: str, *, count: int, what: str) -> None:
    """Record under ``name`` whether ``count``, a number of ``what``, is 0 on every rank."""
    counts = [number for (number,) in checks.ranks.gather([count])]
    bad = [rank for rank, number in enumerate(counts) if number]
    problem = f"{what}: {counts[bad[0]]} on {rank_list(bad)}" if bad else None
    checks.record(name, problem=problem, at_fault=bad)


def record_rows_read(checks: Checks, *, step: int, read: tuple[int, int], demanded: tuple[int, int]) -> None:
    """Record ``data_digest``: each rank read the rows that the step demands, and no two ranks read the same rows.

    ``read`` and ``demanded`` are (number of the first row, digest of the contents). Rows are identified by their numbers,
    because texts may be equal.
    """
    everyone = checks.ranks.gather([*read, *demanded])
    wrong = [rank for rank, row in enumerate(everyone) if row[:2] != row[2:]]
    readers = Counter(first for first, *_ in everyone)
    doubled = [rank for rank, (first, *_) in enumerate(everyone) if readers[first] > 1]
    problem = None
    if wrong:
        problem = f"step {step}: {rank_list(wrong)} read other rows than the step demands"
    elif doubled:
        problem = f"step {step}: {rank_list(doubled)} read the same rows"
    checks.record("data_digest", problem=problem, at_fault=wrong or doubled)


def record_finite(checks: Checks, *, values: Sequence[float], weights: Iterable[torch.Tensor] = ()) -> None:
    """Record ``finite``: losses and gradient norms (``values``) and ``weights`` are finite on every rank."""
    count = sum(not math.isfinite(value) for value in values) + not_finite(weights)
    record_zero(checks, "finite", count=count, what="losses, gradient norms or adapter weights that are not finite")


def not_finite(tensors: Iterable[torch.Tensor]) -> int:
    """How many values of ``tensors`` are NaN or infinite; waits for the device once."""
    counts = [(~tensor.detach().isfinite()).sum() for tensor in tensors]
    return int(torch.stack(counts).sum()) if counts else 0


def record_moved(checks: Checks, *, before: torch.Tensor, now: torch.Tensor) -> None:
    """Record ``adapters_moved``: every adapter tensor has other ``fingerprints`` than at the start."""
    what = f"adapter tensors of {now.numel()} that never changed"
    record_zero(checks, "adapters_moved", count=int((before == now).sum()), what=what)
