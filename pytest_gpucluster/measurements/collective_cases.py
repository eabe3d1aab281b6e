"""Collectives: what each rank sends, what it has to receive, and the call. Checked element by element.

Each contribution repeats a random pattern of its own, seeded by who sends it and to whom. So a contribution that is
missing, doubled, shifted or swapped with another one changes what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from pytest_gpucluster.measurements import timing

EXACT: Mapping[str, int] = {"float32": 2**24, "float64": 2**53, "bfloat16": 2**8, "float16": 2**11, "int32": 2**31 - 1}
"""Accepted dtypes and the whole number up to which each counts without a gap."""

LARGEST = 250
"""Highest number of a pattern."""

PERIOD = 251
"""The patterns repeat after a prime number of elements, so that chunks of a power of two do not line up with them."""

PIECE = PERIOD << 18
"""Elements written or compared at once, to keep the temporary memory small."""


class CollectiveCase(NamedTuple):
    """One collective of one rank.

    Attributes:
        sent: the input; the larger of it and ``received`` is what nccl-tests calls the size.
        received: the output; the same tensor as ``sent`` for what works in place.
        own: a pattern for each equal chunk of ``sent``.
        expected: a pattern for each equal chunk of ``received``.
        call: launches the collective once.
        sums_in_place: each launch adds to what the launch before left, which overflows in time.
    """

    sent: torch.Tensor
    received: torch.Tensor
    own: Sequence[torch.Tensor]
    expected: Sequence[torch.Tensor]
    call: Callable[[], object]
    sums_in_place: bool = False

    def wrong_elements(self) -> int:
        """Launch once on the patterns; number of received elements that are not exactly right on this rank."""
        self.received.zero_()
        for chunk, pattern in zip(self.sent.chunk(len(self.own)), self.own, strict=True):
            for part in _parts(chunk):
                part.copy_(_repeated(pattern, part))
        self.call()
        wrong = 0
        for chunk, pattern in zip(self.received.chunk(len(self.expected)), self.expected, strict=True):
            for part in _parts(chunk):
                wrong += int((part != _repeated(pattern, part)).sum())
        return wrong


def case(operation: str, *, size_bytes: int, dtype: str) -> CollectiveCase:
    """The collective ``operation`` (one of :data:`CASES`) for this rank of the default group.

    Raises:
        ValueError: an unknown operation or dtype, fewer than two ranks, too many for an exact sum, too few bytes.
    """
    if operation not in CASES:
        raise ValueError(f"unknown operation {operation!r}; valid: {', '.join(CASES)}")
    if dtype not in EXACT:
        raise ValueError(f"unknown dtype {dtype!r}; valid: {', '.join(EXACT)}")
    ranks = dist.get_world_size()
    if not 2 <= ranks <= EXACT[dtype]:
        raise ValueError(f"{operation} in {dtype} needs 2 to {EXACT[dtype]} ranks, there are {ranks}")
    kind: torch.dtype = getattr(torch, dtype)
    chunks = 1 if operation in WHOLE else ranks
    elements = size_bytes // kind.itemsize // chunks
    if elements < 1:
        raise ValueError(f"size_bytes must hold {chunks} {dtype} at least, not {size_bytes}")
    buffer = torch.empty(elements * chunks, dtype=kind, device=timing.current_device())
    return CASES[operation](buffer, ranks, dist.get_rank())


def pattern(buffer: torch.Tensor, source: int, target: int = 0, *, largest: int = LARGEST) -> torch.Tensor:
    """One period of what ``source`` sends to ``target``: whole numbers from 1 to ``largest``, the same on every rank."""
    seeded = torch.Generator().manual_seed(source * 1_000_003 + target)
    return torch.randint(1, largest + 1, (PERIOD,), generator=seeded).to(buffer)


def _all_reduce(buffer: torch.Tensor, _ranks: int, rank: int) -> CollectiveCase:
    return CollectiveCase(
        sent=buffer,
        received=buffer,
        own=[pattern(buffer, rank, largest=_largest(buffer))],
        expected=[_total(buffer, 0)],
        call=lambda: dist.all_reduce(buffer),
        sums_in_place=True,
    )


def _all_gather(buffer: torch.Tensor, ranks: int, rank: int) -> CollectiveCase:
    sent = torch.empty_like(buffer[: buffer.numel() // ranks])
    return CollectiveCase(
        sent=sent,
        received=buffer,
        own=[pattern(buffer, rank)],
        expected=[pattern(buffer, source) for source in range(ranks)],
        call=lambda: dist.all_gather_into_tensor(buffer, sent),
    )


def _reduce_scatter(buffer: torch.Tensor, ranks: int, rank: int) -> CollectiveCase:
    """A target's patterns are of its own, so that the sums of two targets cannot be swapped."""
    received = torch.empty_like(buffer[: buffer.numel() // ranks])
    return CollectiveCase(
        sent=buffer,
        received=received,
        own=[pattern(buffer, rank, target, largest=_largest(buffer)) for target in range(ranks)],
        expected=[_total(buffer, rank)],
        call=lambda: dist.reduce_scatter_tensor(received, buffer),
    )


def _all_to_all(buffer: torch.Tensor, ranks: int, rank: int) -> CollectiveCase:
    received = torch.empty_like(buffer)
    return CollectiveCase(
        sent=buffer,
        received=received,
        own=[pattern(buffer, rank, target) for target in range(ranks)],
        expected=[pattern(buffer, source, rank) for source in range(ranks)],
        call=lambda: dist.all_to_all_single(received, buffer),
    )


def _broadcast(buffer: torch.Tensor, _ranks: int, rank: int) -> CollectiveCase:
    """From rank 0, in place; what the others held before must be gone."""
    root = pattern(buffer, 0)
    return CollectiveCase(
        sent=buffer,
        received=buffer,
        own=[root if rank == 0 else torch.zeros_like(root)],
        expected=[root],
        call=lambda: dist.broadcast(buffer, 0),
    )


def _send_recv(buffer: torch.Tensor, ranks: int, rank: int) -> CollectiveCase:
    """Each rank sends to the next one and receives from the one before, all at once, as nccl-tests does."""
    before, after = (rank - 1) % ranks, (rank + 1) % ranks
    received = torch.empty_like(buffer)

    def call() -> None:
        pair = [dist.P2POp(dist.isend, buffer, after), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return CollectiveCase(
        sent=buffer,
        received=received,
        own=[pattern(buffer, rank)],
        expected=[pattern(buffer, before)],
        call=call,
    )


CASES: Mapping[str, Callable[[torch.Tensor, int, int], CollectiveCase]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send_recv": _send_recv,
}
WHOLE = ("all_reduce", "broadcast", "send_recv")
"""What moves the whole buffer, not one chunk for each rank."""


def _largest(buffer: torch.Tensor) -> int:
    """Highest number of a pattern that all ranks add up without a gap."""
    return min(LARGEST, EXACT[str(buffer.dtype).removeprefix("torch.")] // dist.get_world_size())


def _total(buffer: torch.Tensor, target: int) -> torch.Tensor:
    """The sum of what all ranks send to ``target``."""
    patterns = [pattern(buffer, source, target, largest=_largest(buffer)) for source in range(dist.get_world_size())]
    return torch.stack(patterns).sum(0, dtype=torch.float64).to(buffer)


def _repeated(one: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return one.repeat(-(-like.numel() // len(one)))[: like.numel()]


def _parts(chunk: torch.Tensor) -> list[torch.Tensor]:
    return [chunk[start : start + PIECE] for start in range(0, chunk.numel(), PIECE)]
