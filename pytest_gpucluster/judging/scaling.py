"""How a rate and the memory of a GPU change with the number of GPUs. Pure: numbers in, percentages and GiB out.

Weak scaling: every GPU has the same work whatever their number, so each should keep its rate, and

    efficiency = rate per GPU of many / mean rate per GPU of few.

FSDP's memory: a rank holds 1 / n of what is sharded and all of what is not, and gathers layer after layer whole. With the
activations A and the peak of a single rank, peak(1) = whole + sharded + A,

    peak(n) = whole + sharded / n + gathered layers + A = peak(1) - sharded (1 - 1/n) + gathered layers.

Sharding to 1 / n is ZeRO's stage 3 (Rajbhandari et al., SC20, arXiv 1910.02054, section 5). PyTorch's FSDP2 holds two
gathered layers at its peak: the one in use and the next one, which the backward fetches ahead (or, in the forward,
the buffer the layer was received into: torch.distributed.fsdp, ``_fsdp_param_group.py``, ``wait_for_unshard``).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

GATHERED_LAYERS = 2


def efficiency_percent(rate: float, *, of: Sequence[float]) -> float:
    """``rate`` in per cent of the mean of the rates ``of``, all in one unit.

    Raises:
        ValueError: nothing to compare with, or a mean that is not above zero.
    """
    base = statistics.fmean(of) if of else 0.0
    if not base > 0:
        raise ValueError(f"a rate cannot be compared with {list(of)}")
    return 100.0 * rate / base


def kept_percent(rate: float, *, of: Sequence[float], most: float) -> float:
    """As :func:`efficiency_percent`, but a rate ``of`` above ``most`` counts as ``most``: more could not be kept.

    Raises:
        ValueError: nothing to compare with, or a mean that is not above zero.
    """
    return efficiency_percent(rate, of=[min(one, most) for one in of])


def sharded_peak_gib(*, single_rank_gib: float, sharded_gib: float, layer_gib: float, ranks: int) -> float:
    """The peak of one of ``ranks`` that share a model by FSDP, in GiB.

    Args:
        single_rank_gib: the peak of a single rank, with the same work for each rank.
        sharded_gib: what is sharded, all of it.
        layer_gib: the sharded part of one layer, which is gathered at once.
        ranks: 1 gathers nothing.

    Raises:
        ValueError: fewer than one rank, or a single rank's peak below what is sharded: the values are not of one model.
    """
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, not {ranks}")
    if single_rank_gib < sharded_gib:
        peak = f"its peak was {single_rank_gib:.3g} GiB"
        raise ValueError(f"a rank alone holds {sharded_gib:.3g} GiB that can be sharded, and {peak}")
    gathered_gib = 0.0 if ranks == 1 else GATHERED_LAYERS * layer_gib
    return single_rank_gib - sharded_gib * (1 - 1 / ranks) + gathered_gib


def deviation_percent(measured: float, predicted: float, *, of: float) -> float:
    """The distance of ``measured`` from ``predicted``, in per cent of ``of``; never negative. All in one unit."""
    return 100.0 * abs(measured - predicted) / of
