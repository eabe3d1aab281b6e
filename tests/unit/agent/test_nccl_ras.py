"""NCCL's RAS service at a hang: what it says of ranks that lag, from a stand-in that speaks the recorded protocol."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.agent.nccl_ras import ANSWER_S, REQUEST, VARIABLE, ask, free_address, summarize
from pytest_gpucluster.agent.worker_process import worker_environment
from pytest_gpucluster.protocol.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

RANK = Rank(rank=0, world_size=2, local_rank=0, local_world_size=2, group_rank=0)
BANNER = b"SERVER PROTOCOL 2\nOK\n"
SLACK_S = 20.0
"""What a busy machine may add to a deadline."""


def rank_of(number: int, **counts: int) -> dict[str, Any]:
    """One rank, with the keys that NCCL 2.28.9 has."""
    collectives = {"Broadcast": 0, "Reduce": 0, "AllGather": 0, "ReduceScatter": 0, "AllReduce": 6, **counts}
    status = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    place = {"host": "192.0.2.2", "pid": 635 + number, "cuda_dev": number, "nvml_dev": number}
    return {"rank": number, **place, "status": status, "collective_counts": collectives}


def document(*ranks: dict[str, Any], missing: tuple[dict[str, Any], ...] = ()) -> dict[str, Any]:
    """A status with one communicator."""
    communicator = {
        "hash": "9d2f537fcf450382",
        "size": len(ranks) + len(missing),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(missing),
        "ranks": list(ranks),
        "missing_ranks": list(missing),
    }
    return {
        "nccl_version": "2.28.9",
        "timestamp": "2026-11-22 12:00:00",
        "communicators_count": 1,
        "communicators": [communicator],
        "ras": {"collection_time_sec": 0.01, "timeouts_count": 0},
    }


LAGS = document(rank_of(0), rank_of(1, AllReduce=5))
SAID = "communicator 9d2f537fcf450382 of 2 ranks: rank 1 launched 5 AllReduce (GPU 1, pid 636 on 192.0.2.2); rank 0 launched 6"


@contextlib.contextmanager
def served(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A service on the loopback interface that treats one caller so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def once() -> None:
            with contextlib.suppress(OSError):
                line, _ = server.accept()
                with line:
                    serve(line)

        thread = threading.Thread(target=once, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)
        thread.join(SLACK_S)


def read_request(line: socket.socket) -> bytes:
    """The caller's three lines."""
    received = b""
    while len(received) < len(REQUEST):
        received += line.recv(1024)
    return received


def answers(data: bytes) -> Callable[[socket.socket], None]:
    """A service that sends this and closes."""

    def serve(line: socket.socket) -> None:
        assert read_request(line) == b"client protocol 3\nset format json\nverbose status\n"
        line.sendall(data)

    return serve


def test_the_rank_that_is_behind() -> None:
    """By the recorded protocol: three lines, a banner, JSON."""
    with served(answers(BANNER + json.dumps(LAGS).encode())) as address:
        assert ask(address) == SAID


def test_nobody_lags() -> None:
    """Then there is nothing to say."""
    with served(answers(BANNER + json.dumps(document(rank_of(0), rank_of(1))).encode())) as address:
        assert ask(address) == ""


def test_a_service_that_keeps_the_line_open() -> None:
    """A whole document counts at the deadline."""
    release = threading.Event()

    def serve(line: socket.socket) -> None:
        answers(BANNER + json.dumps(LAGS).encode())(line)
        release.wait(SLACK_S)

    with served(serve) as address:
        assert ask(address, within_s=2) == SAID
        release.set()


@pytest.mark.parametrize("sent", [b"", BANNER, BANNER + b'{"communicators": ['])
def test_a_service_that_hangs(sent: bytes) -> None:
    """The agent goes on after a second, whatever came before."""
    release = threading.Event()

    def serve(line: socket.socket) -> None:
        line.sendall(sent)
        release.wait(SLACK_S)

    with served(serve) as address:
        before_s = time.monotonic()
        assert ask(address) == ""
        assert ANSWER_S * 0.9 < time.monotonic() - before_s < ANSWER_S + SLACK_S
        release.set()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\xff\xfe{",
        BANNER + b"{}",
        BANNER + b"[1, 2]",
        BANNER + b'{"communicators": 3}',
        BANNER + b'{"communicators": [{}]}',
        BANNER + b'{"communicators": [{"hash": 1, "size": 2, "ranks": [{"rank": "x"}], "missing_ranks": []}]}',
        BANNER + b'{"communicators": [{"hash": 1, "size": 0, "ranks": {}, "missing_ranks": null}]}',
        BANNER + b'{"a": ' * 100_000,
        BANNER + json.dumps(LAGS).encode().replace(b'"AllReduce": 5', b'"AllReduce": NaN'),
        BANNER + json.dumps(LAGS).encode().replace(b'"AllReduce": 5', b'"AllReduce": Infinity'),
    ],
)
def test_garbage_says_nothing(data: bytes) -> None:
    """Whatever answers on that port cannot end the agent."""
    with served(answers(data)) as address:
        assert ask(address) == ""


@pytest.mark.parametrize("address", [None, "", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:99999"])
def test_nobody_is_there(address: str | None) -> None:
    """Gloo, an older NCCL, an address that is none; and a port on which nobody listens."""
    assert ask(address) == ""
    assert ask(free_address()) == ""


def test_many_ranks_are_collapsed() -> None:
    """Ranges of ranks, the first one's process, at most a few lines, and no control character of a hostname."""
    ranks = [rank_of(number, AllGather=3 if number in (4, 5, 9) else 4) for number in range(16)]
    ranks[4]["host"] = "node\x1b[31m\n7"
    (line,) = summarize(document(*ranks)).splitlines()
    assert "ranks 4-5, 9 launched 3 AllGather (GPU 4, pid 639 on node" in line
    assert line.endswith("ranks 0-3, 6-8, 10-15 launched 4")
    assert "\x1b" not in line
    many = document(*(rank_of(number, AllReduce=number) for number in range(12)))
    assert summarize(many).splitlines()[-1] == "... and 3 more"


def test_a_rank_that_is_missing() -> None:
    """Its process does not answer NCCL either."""
    said = summarize(document(rank_of(0), missing=(rank_of(1),)))
    assert said == "communicator 9d2f537fcf450382 of 2 ranks: rank 1 missing (GPU 1, pid 636 on 192.0.2.2)"


def test_every_worker_has_a_port_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the loopback interface, another one each time; an address of the site's own is left alone, and nobody asked."""
    monkeypatch.delenv(VARIABLE, raising=False)
    first, second = (worker_environment(RANK, tmp_path, nodes={})[VARIABLE] for _ in range(2))
    assert first.startswith("127.0.0.1:")
    assert second.startswith("127.0.0.1:")
    monkeypatch.setenv(VARIABLE, "localhost:28028")
    assert VARIABLE not in worker_environment(RANK, tmp_path, nodes={})
