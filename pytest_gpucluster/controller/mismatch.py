"""Finds ranks that hang because they entered different collectives, or the same one on tensors that do not match.

PyTorch's own matcher (``torch.distributed.flight_recorder``) compares with the first rank and needs the whole record of every
rank; decision 23 says why it is not used. Pure: failures in, ranks and words out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpucluster.protocol.messages import Failure

DIFFER_BY_RANK = frozenset({"send", "recv"})
SAME_TENSORS = frozenset(
    {"all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor"}
)
"""Collectives whose input has the same size and data type on every rank. The others may differ, or have inputs on one rank."""


def find(waiting: Mapping[int, Failure]) -> dict[str, list[int]]:
    """The collectives that these ranks wait in, with the ranks of each, the largest group first.

    Args:
        waiting: ranks of one process group that entered equally many collectives and did not return.

    Returns:
        Fewer than two entries if the ranks match as far as is known.
    """
    names = {failure.collective for failure in waiting.values()}
    if names & DIFFER_BY_RANK:
        return {}
    told = {rank: _tensor(failure) if names <= SAME_TENSORS else "" for rank, failure in waiting.items()}
    known = all(told.values())
    ranks_of: dict[str, list[int]] = {}
    for rank in sorted(waiting):
        words = f"{waiting[rank].collective} of {told[rank]}" if known else waiting[rank].collective
        ranks_of.setdefault(words, []).append(rank)
    return dict(sorted(ranks_of.items(), key=lambda item: -len(item[1])))


def odd_ranks(found: Mapping[str, list[int]]) -> list[int]:
    """The ranks outside the largest group, if that is more than half of all; otherwise nobody can say who is wrong."""
    sizes = [len(ranks) for ranks in found.values()]
    if len(sizes) < 2 or 2 * sizes[0] <= sum(sizes):
        return []
    return sorted(rank for ranks in list(found.values())[1:] for rank in ranks)


def _tensor(failure: Failure) -> str:
    """What the flight recorder's last line says of the input: ``Float [4]``."""
    last = failure.flight.strip().rpartition("\n")[2]
    return last.partition(": ")[2].partition(", ")[2]
