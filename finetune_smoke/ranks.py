"""The ranks of a run: use an existing process group or make one, and exchange numbers. Nothing is pickled."""

from __future__ import annotations

import dataclasses
import gc
import os
import traceback
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from finetune_smoke.settings.config import Config, InputError, OwnInputError

Value = TypeVar("Value")

SETUP_DEADLINE_S = 600.0
"""How long a rank waits for the others in a collective of a group made here; imports on a cold shared disk are slow."""

PATHS = frozenset({"model", "dataset", "checkpoint_dir", "output", "tensorboard", "scratch"})
"""Settings that may differ between nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This rank (0 to world_size - 1), its device, and the number of ranks, 1 without a group."""

    rank: int
    world_size: int
    device: torch.device

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The ``values`` of every rank, by rank: 64-bit integers, equally many on each."""
        return self._gather(torch.tensor(values, dtype=torch.int64))

    def gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """As ``gather`` for float64."""
        return self._gather(torch.tensor(values, dtype=torch.float64))

    def _gather(self, values: torch.Tensor) -> list[list[Value]]:
        if self.world_size == 1:
            return [values.tolist()]
        mine = values.to(self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(everyone, mine)
        return [row.tolist() for row in everyone]

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum ``values`` over the ranks, in place; does not wait for the device."""
        if self.world_size > 1:
            dist.all_reduce(values)
        return values

    def where(self, flag: bool) -> list[int]:  # noqa: FBT001 -- the flag is all that is asked
        """The ranks on which ``flag`` is true, the same list on all of them. A collective."""
        return [rank for rank, (raised,) in enumerate(self.gather([flag])) if raised]

    def wait(self) -> None:
        """Wait until the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def run_on_all_ranks(self, function: Callable[[], Value]) -> Value:
        """Call ``function`` on all ranks and return this rank's result, or raise on all ranks if one of them raises.

        Raises:
            OwnInputError: on the first rank whose ``function`` raised InputError.
            InputError: on the other ranks.
            Exception: any other exception of ``function``, on the rank that raised it.
        """
        problem: Exception | None = None
        try:
            value = function()
        except Exception as error:  # noqa: BLE001 -- any error: the other ranks must not wait for this one
            problem = error
        failed = self.where(problem is not None)
        if not failed:
            return value
        if problem is not None and not isinstance(problem, InputError):
            raise problem
        if problem is not None and failed[0] == self.rank:
            raise OwnInputError(str(problem)) from problem
        raise InputError(f"rank {failed[0]} cannot go on; its message says why")

    def run_on_rank_0(self, function: Callable[[], Value]) -> Value | None:
        """As ``run_on_all_ranks``, where rank 0 alone has something to do; None on the others."""
        return self.run_on_all_ranks(lambda: function() if self.rank == 0 else None)


def require_same_settings(config: Config, ranks: Ranks) -> None:
    """Raises InputError on every rank if other settings than paths differ: the ranks would wait for each other for ever."""
    settings = {name: repr(value) for name, value in dataclasses.asdict(config).items() if name not in PATHS}
    everyone = ranks.gather([zlib.crc32(value.encode()) for value in settings.values()])
    for rank, numbers in enumerate(everyone):
        other = [name for name, first, mine in zip(settings, everyone[0], numbers, strict=True) if first != mine]
        if other:
            what = f"rank {rank} was given another {' and '.join(other)} than rank 0"
            raise InputError(f"{what}: all ranks need the same options and --config file")


@contextmanager
def all_ranks() -> Iterator[Ranks]:
    """The ranks of this run: an initialised default group as it is, else that of torchrun's variables, else a single rank.

    A group that was made here (NCCL with CUDA, else gloo) is destroyed at the end, after everything that refers to it. If DDP
    were the last owner of a group, it would free the group while it holds the interpreter's lock. The group's threads may wait
    for that lock (seen with gloo: one exit in six hung).
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_ours = not dist.is_initialized()
    if is_ours and world_size == 1:
        with single_rank() as ranks:
            yield ranks
        return
    if is_ours:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        deadline = timedelta(seconds=SETUP_DEADLINE_S)
        dist.init_process_group("nccl" if cuda else "gloo", timeout=deadline, **_rendezvous(world_size))
    try:
        device = _device(cuda="nccl" in str(dist.get_backend()))
        yield Ranks(rank=dist.get_rank(), world_size=dist.get_world_size(), device=device)
    except BaseException as error:
        if is_ours:
            traceback.clear_frames(error.__traceback__)
        raise
    finally:
        _release()
        if is_ours:
            dist.destroy_process_group()


@contextmanager
def single_rank() -> Iterator[Ranks]:
    """This process as a single rank, whatever group it is in and whatever torchrun's variables say."""
    try:
        yield Ranks(rank=0, world_size=1, device=_device(cuda=torch.cuda.is_available()))
    finally:
        _release()


def _rendezvous(world_size: int) -> dict[str, Any]:
    """Arguments of ``init_process_group`` that give each start of torchrun's workers its own names in torchrun's store.

    From 2.5 on torchrun keeps its store over restarts, and torch no longer tells the starts apart in it. A rank would
    connect to the address of a rank that no longer exists (2.13, gloo: two restarts in three hung). On several nodes the
    launchers count restarts differently; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start its own store.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return {}
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    store = dist.TCPStore(host, port, world_size, is_master=False, timeout=timedelta(seconds=SETUP_DEADLINE_S))
    start = f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return {"store": dist.PrefixStore(start, store), "rank": rank, "world_size": world_size}


def _release() -> None:
    """Free unused objects, reference cycles included, and the GPU memory that torch caches."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing if CUDA was not started


def _device(*, cuda: bool) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def rank_list(ranks: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 3, 5``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
