"""Every ordered pair of three ranks over gloo, on the loopback."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from pytest_gpucluster.measurements import pair_matrix
from tests.support.loopback_ranks import fork_ranks, results_of_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANKS = 3
SLOW = (1, 2)
LINE = "gpu-node-0:1:1 [0] NCCL INFO Channel 00/1 : {source}[0] -> {target}[0] via {path}\n"


def test_each_rank_sends_its_own_bytes() -> None:
    """Shifted by any number of bytes, or of another rank, they do not match; zero is no byte of it."""
    device = torch.device("cpu")
    sent = [pair_matrix._pattern(rank, 1000, device) for rank in range(16)]
    assert len({tuple(one.tolist()) for one in sent}) == 16
    assert all(int(one.min()) > 0 for one in sent)
    assert not any(torch.equal(sent[0][shift:], sent[0][: 1000 - shift]) for shift in (1, 4, 37, 250, 256))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of the ranks, by case."""
    return results_of_ranks(__file__, tmp_path_factory.mktemp("ranks"), ranks=RANKS)


@pytest.mark.long
@pytest.mark.e2e
def test_the_matrix_is_whole_and_the_same_on_all(ranks: list[dict[str, Any]]) -> None:
    """A rate and a latency for each ordered pair, none for a rank itself; gloo logs no way."""
    found = ranks[0]["healthy"]
    assert [rank["healthy"] for rank in ranks] == [found] * RANKS
    for name in ("gb_s", "latency_us"):
        for row, values in enumerate(found[name]):
            assert [value is None for value in values] == [column == row for column in range(RANKS)]
            assert all(value > 0 for value in values if value is not None)
    assert found["paths"] == found["peer_access"] == [[None] * RANKS] * RANKS
    assert len(found["gb_s"]) == RANKS


@pytest.mark.long
@pytest.mark.e2e
def test_one_slow_direction(ranks: list[dict[str, Any]]) -> None:
    """Its one end says so: it counts, and only for that ordered pair."""
    rates = {(row, column): rate for row, rates in enumerate(ranks[0]["slow"]["gb_s"]) for column, rate in enumerate(rates)}
    assert rates[SLOW] == pytest.approx(100_000 / 0.5 / 1e9)
    assert all(rate > rates[SLOW] for pair, rate in rates.items() if rate is not None and pair != SLOW)


@pytest.mark.long
@pytest.mark.e2e
def test_wrong_bytes_are_an_error_that_names_the_pair(ranks: list[dict[str, Any]]) -> None:
    """On every rank."""
    assert [rank["wrong"] for rank in ranks] == ["ArithmeticError: wrong bytes arrived: rank 1 -> rank 2"] * RANKS


@pytest.mark.long
@pytest.mark.e2e
def test_the_ways_are_those_that_the_senders_logged(ranks: list[dict[str, Any]]) -> None:
    """Only lines of the new group count."""
    paths = ranks[2]["logged"]["paths"]
    assert paths == [
        [None, "P2P/CUMEM", "P2P/CUMEM"],
        ["P2P/CUMEM", None, "SHM/direct/direct"],
        ["P2P/CUMEM", "P2P/CUMEM", None],
    ]


@pytest.mark.long
@pytest.mark.e2e
def test_nothing_to_send_is_refused(ranks: list[dict[str, Any]]) -> None:
    """Before anything is sent."""
    assert all(rank["nothing"].startswith("ValueError: ") for rank in ranks)


# --- the ranks ---


def outcome(**changed: Any) -> Any:
    """The matrix as plain data, or the text of its error."""
    try:
        return asdict(pair_matrix.pair_matrix(**{"size_bytes": 100_000, "iterations": 2, "warmup": 1, **changed}))
    except (ArithmeticError, ValueError) as error:
        return f"{type(error).__name__}: {error}"


def with_slow_end(rank: int) -> Any:
    """Rank 2 says that a transfer from rank 1 took half a second."""
    real: Callable[..., Any] = pair_matrix._time_pair

    def time_pair(pair: tuple[int, int], *others: Any) -> Any:
        transfer_s, trip_s, wrong = real(pair, *others)
        return (0.5 if (pair, rank) == (SLOW, 2) else transfer_s), trip_s, wrong

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_matrix, "_time_pair", time_pair)
        return outcome()


def with_wrong_byte(rank: int) -> Any:
    """The last byte of every transfer from rank 1 to rank 2 is changed on the way."""
    real: Callable[..., Any] = pair_matrix._move

    def move(buffer: torch.Tensor, peer: int, group: Any, *, sends: bool) -> None:
        real(buffer, peer, group, sends=sends)
        if not sends and (peer, rank) == SLOW:
            buffer[-1] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_matrix, "_move", move)
        return outcome()


def with_log(folder: Path, rank: int) -> Any:
    """NCCL's log of each rank; the pair 1 -> 2 is on shared memory, and another group had sockets before."""
    log = folder / f"nccl.{socket.gethostname().partition('.')[0]}.{os.getpid()}"
    log.write_text("".join(LINE.format(source=rank, target=target, path="NET/Socket/0") for target in range(RANKS)))
    real = dist.new_group

    def new_group(members: list[int]) -> Any:
        with log.open("a") as file:
            for target in {*range(RANKS)} - {rank}:
                way = "SHM/direct/direct" if (rank, target) == SLOW else "P2P/CUMEM"
                file.write(LINE.format(source=rank, target=target, path=way))
        return real(members)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GPUCLUSTER_NCCL_LOG", str(folder / "nccl.%h.%p"))
        patch.setattr(dist, "new_group", new_group)
        return outcome()


def program(rank: int, folder: Path) -> dict[str, Any]:
    """What a rank does: every case in turn."""
    return {
        "healthy": outcome(),
        "slow": with_slow_end(rank),
        "wrong": with_wrong_byte(rank),
        "logged": with_log(folder, rank),
        "nothing": outcome(size_bytes=0),
    }


if __name__ == "__main__":
    fork_ranks(program, ranks=RANKS)
