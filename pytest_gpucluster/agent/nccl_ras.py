"""NCCL's own view of a hang: which ranks of which communicator are behind, asked from its RAS service on this machine.

Since 2.24 every process with NCCL answers on the port that ``NCCL_RAS_ADDR`` names, from a thread of its own, for all ranks of
its job; as JSON since 2.28.7. Where nothing answers (gloo, an older NCCL) nothing is said.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.protocol.rank import rank_list
from pytest_gpucluster.text import one_line

VARIABLE = "NCCL_RAS_ADDR"
LOOPBACK = "127.0.0.1"
REQUEST = b"client protocol 3\nset format json\nverbose status\n"
ANSWER_S = 1.0
MOST_BYTES = 16 << 20
CHUNK_BYTES = 1 << 16
SHOWN = 8


def free_address() -> str:
    """An address on the loopback interface whose port nobody uses now, so that no other run or job answers there.

    Raises:
        OSError: there is no port left.
    """
    with socket.socket() as trial:
        trial.bind((LOOPBACK, 0))
        return f"{LOOPBACK}:{trial.getsockname()[1]}"


def ask(address: str | None, *, within_s: float = ANSWER_S) -> str:
    """Which ranks lag in which communicator, in lines; empty if nobody answers in time, or no rank lags."""
    if address is None:
        return ""
    try:
        return summarize(_status(_answer(address, time.monotonic() + within_s)))
    except (OSError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return ""


def _answer(address: str, deadline_s: float) -> bytes:
    """All that the service sends until it closes the line, or until the deadline."""
    host, _, port = address.rpartition(":")
    received = bytearray()
    with socket.create_connection((host, int(port)), timeout=max(0.01, deadline_s - time.monotonic())) as line:
        line.sendall(REQUEST)
        while (left_s := deadline_s - time.monotonic()) > 0 and len(received) < MOST_BYTES:
            line.settimeout(left_s)
            try:
                data = line.recv(CHUNK_BYTES)
            except TimeoutError:
                break
            if not data:
                break
            received += data
    return bytes(received)


def _status(answer: bytes) -> Any:
    """The JSON document behind the lines of the protocol."""
    text = answer.decode("utf-8", "replace")
    return json.JSONDecoder().raw_decode(text[text.index("{") :])[0]


def summarize(status: Mapping[str, Any]) -> str:
    """The communicators in which ranks lag or are missing, one lag a line."""
    lines = [line for communicator in status["communicators"] for line in _lags(communicator)]
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([*map(one_line, lines[:SHOWN]), *more])


def _lags(communicator: Mapping[str, Any]) -> Iterator[str]:
    """Where the ranks of one communicator differ in how many operations of a kind they launched; and who is not there."""
    name = f"communicator {communicator['hash']} of {communicator['size']} ranks"
    ranks = {int(one["rank"]): one for one in communicator["ranks"]}
    for kind in sorted({kind for one in ranks.values() for kind in one["collective_counts"]}):
        by_count = grouped((int(one["collective_counts"].get(kind, 0)), rank) for rank, one in ranks.items())
        most = max(by_count)
        for count in sorted(by_count):
            if count != most:
                where = _where(ranks[min(by_count[count])])
                behind = f"{rank_list(by_count[count])} launched {count} {kind}{where}"
                yield f"{name}: {behind}; {rank_list(by_count[most])} launched {most}"
    missing = [int(one["rank"]) for one in communicator["missing_ranks"]]
    if missing:
        yield f"{name}: {rank_list(missing)} missing{_where(communicator['missing_ranks'][0])}"


def _where(rank: Mapping[str, Any]) -> str:
    """Which process: NCCL numbers the ranks of each communicator anew."""
    return f" (GPU {rank['cuda_dev']}, pid {rank['pid']} on {rank['host']})"
