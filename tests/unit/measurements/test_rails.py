"""One adapter at a time: what NCCL's log says of it, and four ranks over gloo on the loopback."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory.nics import NetInterface, read_net_interfaces
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.measurements import pair_matrix
from tests.support.loopback_ranks import fork_ranks, results_of_ranks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

RANKS = 4
SLOW = 2
LINE = "gpu-node-0:4242:4301 [1] NCCL INFO "


@pytest.mark.parametrize(
    ("log", "used"),
    [
        ("NET/IB : Using [0]mlx5_3:1/IB [RO]; OOB eth0:10.0.0.5<0>", ["mlx5_3:1"]),
        ("NET/IB : Using [0]mlx5_3:1/RoCE [RO]; OOB eth0:10.0.0.5<0>", ["mlx5_3:1"]),
        ("NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB/SHARP [RO]; OOB eth0:10.0.0.5<0>", ["mlx5_0:1", "mlx5_1:1"]),
        ("NET/Socket : Using [0]eth0:10.0.0.5<0>", ["eth0"]),
        ("NET/Socket : Using [0]eth0:10.0.0.5<0> [1]eth1:fe80::1%eth1<0>", ["eth0", "eth1"]),
        ("NET/IB : No device found.", []),
        ("Bootstrap : Using eth0:10.0.0.5<0>", []),
    ],
)
def test_the_adapters_that_nccl_names(log: str, used: list[str]) -> None:
    """In the formats of NCCL 2.2x (its net_ib.cc and net_socket.cc), composed for this test."""
    assert pair_matrix.adapters_used(f"{LINE}cudaDriverVersion 12080\n{LINE}{log}\n{LINE}Using network IB\n") == used


@pytest.mark.parametrize(
    ("used", "kinds"),
    [
        (["mlx5_0:1"], ["NET/IB/GDRDMA"]),
        (["mlx5_3:1", "mlx5_0:1"], ["NET/IB/GDRDMA"]),
        (["eth0"], ["NET/Socket"]),
        ([], ["NET/IB/GDRDMA"]),
        (["mlx5_3:1"], []),
        (["mlx5_3:1"], ["P2P/CUMEM"]),
        (["mlx5_3:1"], ["NET/IB/GDRDMA", "SHM/direct/direct"]),
    ],
)
def test_another_adapter_is_no_measurement(used: list[str], kinds: list[str]) -> None:
    """Nor is one beside it, a silent log, or a way that is not the network."""
    pair_matrix.require_adapter("mlx5_3:1", ["mlx5_3:1"], ["NET/IB/GDRDMA"])
    with pytest.raises(RuntimeError, match=r"mlx5_3:1 was not measured: NCCL uses"):
        pair_matrix.require_adapter("mlx5_3:1", used, kinds)


def interface(root: Path, name: str, *inner: str, **files: str) -> None:
    """An interface of a made machine."""
    folder = root / "class" / "net" / name
    for one in (".", *inner):
        (folder / one).mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        (folder / file).write_text(f"{text}\n")


def test_the_interfaces_of_a_host(tmp_path: Path) -> None:
    """Those of devices that are up; a virtual one only where there are no others; never loopback or bridge."""
    assert isinstance(read_net_interfaces(root=tmp_path), NotAvailable)
    interface(tmp_path, "lo", operstate="unknown")
    interface(tmp_path, "docker0", "bridge", operstate="up", speed="-1")
    interface(tmp_path, "veth1", operstate="up", speed="10000")
    assert read_net_interfaces(root=tmp_path) == [NetInterface(name="veth1", rate_gbit_s=10.0)]
    interface(tmp_path, "eth1", "device", operstate="down", speed="-1")
    interface(tmp_path, "eth0", "device", operstate="up", speed="25000")
    interface(tmp_path, "eth2", "device", operstate="up", speed="-1")
    found = read_net_interfaces(root=tmp_path)
    assert isinstance(found, list)
    assert found[0] == NetInterface(name="eth0", rate_gbit_s=25.0)
    assert [one.name for one in found] == ["eth0", "eth2"]
    assert isinstance(found[1].rate_gbit_s, NotAvailable)


@pytest.mark.e2e
@pytest.mark.long
def test_ranks_on_the_loopback(tmp_path: Path) -> None:
    """Each pair has both ends, the slow rank is slow with every partner, and wrong bytes name who sent them."""
    found = results_of_ranks(__file__, tmp_path, ranks=RANKS)
    pairs = sorted((end["source"], end["target"]) for rank in found for end in rank["rail"]["ends"])
    assert pairs == sorted(2 * [(one, other) for one in range(RANKS) for other in range(RANKS) if one != other])
    ends = [end for rank in found for end in rank["rail"]["ends"]]
    assert {SLOW in (end["source"], end["target"]) for end in ends if end["transfer_s"] == 0.5} == {True}
    assert sum(end["transfer_s"] == 0.5 for end in ends) == 6
    assert {rank["rail"]["name"] for rank in found} == {"lo"}
    wrong = "ArithmeticError: wrong bytes arrived through lo from rank 2"
    assert [rank["wrong"] == wrong for rank in found] == [rank != SLOW for rank in range(RANKS)]


# --- the ranks ---


def outcome() -> Any:
    """The measurement as plain data, or the text of its error."""
    try:
        return asdict(pair_matrix.rail(name="lo", size_bytes=100_000, iterations=2, warmup=1))
    except ArithmeticError as error:
        return f"{type(error).__name__}: {error}"


def with_slow_rank(rank: int) -> Any:
    """Rank 2 says of each transfer that it took half a second."""
    real: Callable[..., Any] = pair_matrix._time_pair

    def time_pair(*arguments: Any) -> Any:
        transfer_s, trip_s, wrong = real(*arguments)
        return (0.5 if rank == SLOW else transfer_s), trip_s, wrong

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_matrix, "_time_pair", time_pair)
        return outcome()


def with_wrong_bytes(rank: int) -> Any:
    """The last byte of every transfer from rank 2 is changed on the way."""
    real: Callable[..., Any] = pair_matrix._move

    def move(buffer: Any, peer: int, group: Any, *, sends: bool) -> None:
        real(buffer, peer, group, sends=sends)
        if not sends and peer == SLOW != rank:
            buffer[-1] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pair_matrix, "_move", move)
        return outcome()


def program(rank: int, _folder: Path) -> dict[str, Any]:
    """What a rank does."""
    return {"rail": with_slow_rank(rank), "wrong": with_wrong_bytes(rank)}


if __name__ == "__main__":
    fork_ranks(program, ranks=RANKS)
