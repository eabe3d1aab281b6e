"""Plain torch.distributed on every rank."""

# ruff: noqa: ANN001, ANN201, D101, D103 -- written as users write

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist


@pytest.mark.distributed(per="cluster")
def test_sum(process_group, rank, world_size, device):
    total = torch.full((2,), float(rank), device=device)
    dist.all_reduce(total, group=process_group)
    assert total.tolist() == [sum(range(world_size))] * 2


@dataclass
class Seen:
    rank: int


@pytest.mark.distributed
def test_objects(rank, world_size):
    found = [None] * world_size
    dist.all_gather_object(found, Seen(rank))
    assert found == [Seen(other) for other in range(world_size)]


@pytest.mark.distributed(per="gpu")
def test_alone(world_size, rank):
    assert (rank, world_size) == (0, 1)


@pytest.mark.distributed(per="node")
def test_in_node(world_size):
    assert world_size == int(os.environ["LOCAL_WORLD_SIZE"])


@pytest.mark.distributed(per="domain")
def test_in_domain(world_size):
    assert world_size == int(os.environ["LOCAL_WORLD_SIZE"])


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("word", ["twice"])
@pytest.mark.distributed
def test_parameters(rank, factor, word):
    total = torch.tensor([rank * factor])
    dist.all_reduce(total)
    assert (total.item(), word) == (12, "twice")


@pytest.mark.distributed(per="gpu", deadline_s=float("nan"))
def test_deadline_nan(rank):
    assert rank == 0


@pytest.mark.distributed(per="gpu", deadline_s=0)
def test_deadline_0(rank):
    assert rank == 0


@pytest.mark.distributed(per="gpu", deadline_s="5")
def test_deadline_text(rank):
    assert rank == 0


@pytest.mark.distributed
async def test_asynchronous(rank):
    assert rank < 0


@pytest.mark.distributed
def test_returns(rank):
    if rank == 2:
        return rank < 0
    return None


@pytest.mark.filterwarnings("error::pytest.PytestReturnNotNoneWarning")
@pytest.mark.distributed
def test_returns_where_a_warning_is_an_error(rank):
    return rank < 0


@pytest.mark.distributed
def test_one_wrong(rank):
    found = 40 + rank
    dist.barrier()
    assert found == (41 if rank == 2 else found)


@pytest.mark.distributed
def test_all_wrong(world_size):
    found = world_size + 1
    dist.barrier()  # so that nobody is released before it could say what it saw
    assert found == world_size


@pytest.mark.distributed
def test_one_skips(rank):
    if rank == 3:
        pytest.skip("I would rather not")


@pytest.mark.distributed
def test_all_skip():
    pytest.skip("nothing to do here")


@pytest.mark.distributed
def test_one_dies(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.distributed
def test_after_death(rank, world_size):
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == world_size


@pytest.mark.distributed(per="rack")
def test_wrong_mark(rank):
    assert rank


@pytest.mark.distributed
@torch.no_grad()
def test_decorated(rank):
    assert not torch.is_grad_enabled()


@pytest.mark.parametrize("rank", [7])
@pytest.mark.distributed
def test_rank_by_parameter(rank):
    assert rank == 7
