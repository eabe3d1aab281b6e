"""One adapter of each node at a time: what a GPU of one node and a GPU of another send to each other through it.

The call that runs this names the adapter in the environment of its workers, which are new: NCCL and gloo read it once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from pytest_gpucluster.inventory.nics import read_net_interfaces
from pytest_gpucluster.measurements import timing
from pytest_gpucluster.measurements.pair_matrix import Transfers, time_rounds
from pytest_gpucluster.measurements.transport import parse_nccl_log, read_log
from pytest_gpucluster.protocol.functions import without_device
from pytest_gpucluster.protocol.rank import ordered_rounds
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from pytest_gpucluster.inventory.nics import NetInterface
    from pytest_gpucluster.inventory.reading import NotAvailable

_RDMA = re.compile(r"\[\d+\](?P<name>[\w.+-]+:\d+)/(?:IB|RoCE)\b")
_SOCKET = re.compile(r"\[\d+\](?P<name>[\w.+-]+):[^\s<]+<\d+>")
_USING = re.compile(r"NCCL INFO NET/(?P<network>IB|Socket) : Using (?P<devices>\[0\].*?)(?:; OOB .*)?$", re.MULTILINE)

SMALL_BYTES = 8
"""Of a transfer whose latency counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RailEnd:
    """One end of an ordered pair of ranks: its own seconds of a transfer and of a small round trip."""

    source: int
    target: int
    transfer_s: float
    round_trip_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RailRates:
    """What one rank measured through the adapter ``name``: an end of each of its pairs.

    ``used`` is what NCCL's log says that it used (``mlx5_0:1``, ``eth0``), ``kinds`` its channels to other ranks; both are
    empty with gloo. ``shortened`` is how many pairs of this rank had one timed transfer only.
    """

    name: str
    ends: list[RailEnd]
    used: list[str]
    kinds: list[str]
    size_bytes: int
    small_bytes: int
    world_size: int
    backend: str
    device: str
    shortened: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetInterfaces:
    """The network interfaces of a host that can carry sockets."""

    interfaces: list[NetInterface] | NotAvailable


@without_device
def net_interfaces() -> NetInterfaces:
    """Read the network interfaces of this host."""
    return NetInterfaces(interfaces=read_net_interfaces())


def rail(  # noqa: PLR0913 - the recipe of a threshold, all by keyword
    *,
    name: str,
    size_bytes: int,
    iterations: int = 5,
    warmup: int = 2,
    partners: int = 3,
    budget_s: float | None = None,
) -> RailRates:
    """Send between the ranks of the default group, one of each node; each has up to ``partners`` partners, in both directions.

    Args:
        name: the adapter (``mlx5_0:1``, ``eth0``) that this process's environment already names.
        size_bytes: bytes of a transfer whose bandwidth counts.
        iterations: timed transfers of each pair, back to back.
        warmup: untimed ones before. The first of a pair connects it.
        partners: how many other nodes each node sends to.
        budget_s: as of :func:`pair_matrix.pair_matrix`.

    Raises:
        ValueError: fewer than two ranks.
        ArithmeticError: wrong bytes arrived here.
        RuntimeError: NCCL used another adapter, or its log does not say which one: this adapter was not measured.
    """
    ranks = dist.get_world_size()
    if ranks < 2:
        raise ValueError(f"a rail needs two nodes; there are {counted(ranks, 'rank')}")
    case = Transfers(size_bytes=size_bytes, small_bytes=SMALL_BYTES, iterations=iterations, warmup=warmup, budget_s=budget_s)
    rows = time_rounds(case, dist.group.WORLD, ordered_rounds(ranks, most=partners))
    bad = [int(row[0]) for row in rows if row[4]]
    if bad:
        raise ArithmeticError(f"wrong bytes arrived through {name} from rank {', '.join(map(str, bad))}")
    log = read_log()
    used, kinds = adapters_used(log), sorted({one.kind for one in parse_nccl_log(log) if one.source != one.target})
    if dist.get_backend() == "nccl":
        require_adapter(name, used, kinds)
    return RailRates(
        name=name,
        ends=[RailEnd(source=int(row[0]), target=int(row[1]), transfer_s=row[2], round_trip_s=row[3]) for row in rows],
        used=used,
        kinds=kinds,
        size_bytes=size_bytes,
        small_bytes=SMALL_BYTES,
        world_size=ranks,
        shortened=sum(map(bool, (row[5] for row in rows))),
        backend=dist.get_backend(),
        device=timing.device_name(),
    )


def adapters_used(log: str) -> list[str]:
    """The adapters that NCCL says in its log to use, each once."""
    found: dict[str, None] = {}
    for line in _USING.finditer(log):
        pattern = _RDMA if line["network"] == "IB" else _SOCKET
        found.update(dict.fromkeys(one["name"] for one in pattern.finditer(line["devices"])))
    return list(found)


def require_adapter(name: str, used: list[str], kinds: list[str]) -> None:
    """Check that NCCL used this adapter alone, by its log.

    Raises:
        RuntimeError: it did not, or the log does not say.
    """
    over_network = [kind for kind in kinds if kind.startswith("NET/")]
    if used != [name] or not over_network or over_network != kinds:
        found = f"uses {', '.join(used) or 'no adapter that its log names'} with {', '.join(kinds) or 'no channel'}"
        raise RuntimeError(f"{name} was not measured: NCCL {found}")
