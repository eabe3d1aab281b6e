"""Every ordered pair of GPUs in a node: bandwidth, latency, and the way that NCCL took. Disjoint pairs work at once.

Method: send and receive over a group of its own, so that NCCL logs its channels anew. Back-to-back transfers between two
events, all ranks lined up before. **The time of a pair is that of its slower end.** What arrives is verified, untimed.

One adapter of each node at a time: what a GPU of one node and a GPU of another send to each other through it.

The call that runs this names the adapter in the environment of its workers, which are new: NCCL and gloo read it once.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.inventory.nics import NetInterface, read_net_interfaces
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.measurements import progress, timing
from pytest_gpucluster.measurements.collectives import gather_texts
from pytest_gpucluster.measurements.timing import Budget
from pytest_gpucluster.measurements.transport import parse_nccl_log, read_log
from pytest_gpucluster.protocol.functions import without_device
from pytest_gpucluster.protocol.rank import ordered_rounds
from pytest_gpucluster.text import counted

PERIOD = 251
"""The test pattern repeats after a prime number of bytes, so that shifted chunks do not match."""
STEP = 37
"""How far the patterns of two neighbouring ranks are apart: each source has its own."""
BYTES_A_PAIR = 512
"""Room for what a rank tells the others about one peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairMatrix:
    """What each rank of a node sends to each other one; a row for each source, a column for each target, None on the diagonal.

    ``gb_s`` is 10^9 bytes a second, one way. ``latency_us`` is half a round trip of a small one. ``paths`` is what NCCL
    logged (``P2P/CUMEM``, ``SHM/direct/direct``), None where it logged nothing. ``peer_access`` is CUDA's word whether the
    source may reach the target's memory, None where this process does not see the other GPU. ``shortened`` is how
    many pairs had one timed transfer only, to keep the budget.
    """

    gb_s: list[list[float | None]]
    latency_us: list[list[float | None]]
    paths: list[list[str | None]]
    peer_access: list[list[bool | None]]
    device: str
    shortened: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfers:
    """What is sent, how often, and within how many seconds; None: as long as it takes."""

    size_bytes: int
    small_bytes: int
    iterations: int
    warmup: int
    budget_s: float | None = None


def pair_matrix(
    *, size_bytes: int, small_bytes: int = 8, iterations: int = 5, warmup: int = 2, budget_s: float | None = None
) -> PairMatrix:
    """Send between all ranks of the default group, one ordered pair after the other, disjoint pairs at once.

    Args:
        size_bytes: bytes of a transfer whose bandwidth counts.
        small_bytes: bytes of one whose latency counts.
        iterations: timed transfers of each pair, back to back.
        warmup: untimed ones before. The first of a pair connects it.
        budget_s: where a round takes more than its part of these seconds, all later pairs have one timed transfer.

    Raises:
        ValueError: fewer than two ranks, nothing to send, no iteration.
        ArithmeticError: wrong bytes arrived; names the pairs, and is raised on every rank.
    """
    ranks, own = dist.get_world_size(), dist.get_rank()
    if ranks < 2 or min(size_bytes, small_bytes, iterations, warmup) < 1:
        raise ValueError(f"two ranks, and sizes and counts of at least 1 are needed; there are {counted(ranks, 'rank')}")
    case = Transfers(size_bytes=size_bytes, small_bytes=small_bytes, iterations=iterations, warmup=warmup, budget_s=budget_s)
    before = read_log()
    group = dist.new_group(list(range(ranks)))
    try:
        rows = time_rounds(case, group, ordered_rounds(ranks))
    finally:
        dist.destroy_process_group(group)
    own_rows = {"rows": rows, "paths": _logged_paths(read_log()[len(before) :], own), "peers": _peer_access(ranks)}
    answers = gather_texts(json.dumps(own_rows, separators=(",", ":")), limit_bytes=BYTES_A_PAIR * 2 * ranks)
    return _merged([json.loads(answer) for answer in answers], case)


def time_rounds(case: Transfers, group: Any, rounds: Sequence[Sequence[tuple[int, int]]]) -> list[list[float]]:
    """Let the ordered pairs of each round send to each other, round after round.

    Returns:
        Of each pair that this rank is an end of: source, target, seconds of a transfer, seconds of a round trip, wrong bytes,
        and 1.0 where the budget left one timed transfer, else 0.0.
    """
    full, budget, round_s, quickest_s = case, Budget(case.budget_s), 0.0, math.inf
    own, device = dist.get_rank(), timing.current_device()
    line = torch.ones(1, device=device)
    sent = _pattern(own, case.size_bytes, device)
    received = torch.empty_like(sent)
    rows = []
    for number, pairs in enumerate(rounds):
        progress.report(f"round {number + 1} of {len(rounds)}", number / len(rounds))
        left_s, slowest_s = budget.left_s(round_s)
        quickest_s = min(quickest_s, slowest_s) if number else math.inf
        if number and case is full and quickest_s * (len(rounds) - number) > left_s:
            case = replace(case, iterations=1, warmup=1)
        pair = next((pair for pair in pairs if own in pair), None)
        received.zero_()
        began_s = time.perf_counter()
        dist.all_reduce(line, group=group)  # lines the ranks up
        if pair is not None:
            rows.append([*pair, *_time_pair(pair, case, group, (sent, received)), float(case is not full)])
        round_s = time.perf_counter() - began_s
    timing.synchronize()
    return rows


def _time_pair(
    pair: tuple[int, int], case: Transfers, group: Any, buffers: tuple[torch.Tensor, torch.Tensor]
) -> tuple[float, float, float]:
    """Seconds of a transfer and of a small round trip at this end, and the wrong bytes that arrived here."""
    source, target = pair
    is_source = dist.get_rank() == source
    sent, received = buffers
    small = torch.zeros(case.small_bytes, dtype=torch.uint8, device=sent.device)

    def transfer() -> None:
        _move(sent if is_source else received, target if is_source else source, group, sends=is_source)

    def round_trip() -> None:
        for sends in (is_source, not is_source):
            _move(small, target if is_source else source, group, sends=sends)

    transfer_s, trip_s = (_span_s(call, case) for call in (transfer, round_trip))
    wrong = 0 if is_source else int((received != _pattern(source, case.size_bytes, sent.device)).sum())
    return transfer_s, trip_s, wrong


def _span_s(call: Callable[[], None], case: Transfers) -> float:
    for _ in range(case.warmup):
        call()
    return timing.time_span(call, launches=case.iterations)


def _move(buffer: torch.Tensor, peer: int, group: Any, *, sends: bool) -> None:
    operation = dist.P2POp(dist.isend if sends else dist.irecv, buffer, peer, group=group)
    for work in dist.batch_isend_irecv([operation]):
        work.wait()


def _pattern(rank: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    """What a rank sends."""
    period = ((torch.arange(PERIOD, device=device) + STEP * rank) % PERIOD + 1).to(torch.uint8)
    return period.repeat(-(-size_bytes // PERIOD))[:size_bytes]


def _logged_paths(text: str, own: int) -> dict[str, str]:
    """The kinds of channel from this rank to each other one, by the target. NCCL logs them at the sender."""
    kinds = grouped((channel.target, channel.kind) for channel in parse_nccl_log(text) if channel.source == own)
    return {str(target): " ".join(sorted({*found})) for target, found in kinds.items()}


def _peer_access(ranks: int) -> list[bool | None]:
    """Whether this GPU may reach that of each other rank, as far as this process sees those."""
    uuids = gather_texts(timing.gpu_uuid() or "")
    if not torch.cuda.is_available():
        return [None] * ranks
    seen = {f"GPU-{torch.cuda.get_device_properties(index).uuid}": index for index in range(torch.cuda.device_count())}
    own = torch.cuda.current_device()
    return [torch.cuda.can_device_access_peer(own, seen[uuid]) if seen.get(uuid, own) != own else None for uuid in uuids]


def _merged(by_rank: list[dict[str, Any]], case: Transfers) -> PairMatrix:
    """The whole matrix, the same on every rank.

    Raises:
        ArithmeticError: wrong bytes arrived.
    """
    ranks = range(len(by_rank))
    times: dict[tuple[int, int], list[list[float]]] = grouped(
        ((int(source), int(target)), values) for one in by_rank for source, target, *values in one["rows"]
    )
    bad = [f"rank {source} -> rank {target}" for (source, target), ends in sorted(times.items()) if any(end[2] for end in ends)]
    if bad:
        raise ArithmeticError(f"wrong bytes arrived: {', '.join(bad)}")
    transfer_s = {pair: max(end[0] for end in ends) for pair, ends in times.items()}
    trip_s = {pair: max(end[1] for end in ends) for pair, ends in times.items()}
    return PairMatrix(
        gb_s=_square(ranks, {pair: case.size_bytes / seconds / 1e9 for pair, seconds in transfer_s.items()}),
        latency_us=_square(ranks, {pair: seconds / 2 * 1e6 for pair, seconds in trip_s.items()}),
        paths=[[by_rank[source]["paths"].get(str(target)) for target in ranks] for source in ranks],
        peer_access=[one["peers"] for one in by_rank],
        shortened=sum(any(end[3] for end in ends) for ends in times.values()),
        device=timing.device_name(),
    )


def _square(ranks: Iterable[int], values: dict[tuple[int, int], float]) -> list[list[float | None]]:
    return [[values.get((source, target)) for target in ranks] for source in ranks]


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
        shortened=sum(map(bool, (row[5] for row in rows))),
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
