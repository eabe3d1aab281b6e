"""Calls from the workers of pytest-xdist to the one controller, which alone has the agents.

Each call is made once, for all GPUs at the same time, for the worker that asks first. The other workers, and one that
replaces a crashed worker, get the same replies. So no GPU is measured twice, and none by two processes at a time.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
from msgspec.structs import replace

from pytest_gpucluster.controller.call import Call
from pytest_gpucluster.controller.inline import AgentlessController
from pytest_gpucluster.errors import ErrorKind, MeasurementError
from pytest_gpucluster.protocol import plain_data
from pytest_gpucluster.protocol.codec import TypedMessage, Wire, read_one_of
from pytest_gpucluster.protocol.messages import Reply, Success, read_reply
from pytest_gpucluster.protocol.rank import is_own_user

if TYPE_CHECKING:
    from pytest_gpucluster.controller.controller import Controller
    from pytest_gpucluster.controller.inline import InlineController

GONE = "not run: the pytest-xdist controller, which makes the calls, is gone"


class Collected(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="collected"):
    """The tests that a worker has collected, as (node id, criterion, place id); or the usage error that refused them."""

    number: int = 0
    expected: tuple[tuple[str, str, str | None], ...]
    refused: str | None


class RelayedCall(TypedMessage, frozen=True, kw_only=True, tag_field="t", tag="call"):
    """A call, and how often the worker made the same one before."""

    number: int = 0
    call: Call
    nth: int = 0
    sys_path: tuple[str, ...] = ()


class RelayAnswer(TypedMessage, frozen=True, kw_only=True):
    """The replies by rank, or why there are none; both are missing after :class:`Collected`."""

    number: int
    replies: dict[str, str] | None = None
    error: str | None = None
    kind: ErrorKind = "refused"


class Relay:
    """The end in the process that has the controller: answers every worker in a thread of its own."""

    def __init__(self, controller: Controller | InlineController) -> None:
        """Listen; processes of other users are refused."""
        self.address = f"\0gpucluster-{secrets.token_hex(16)}"  # abstract: no file, and gone with this process
        self.collected: Collected | None = None
        self._controller = controller
        self._busy = threading.Lock()
        self._replies: dict[str, dict[int, Reply]] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accept no worker any more, and end a call that still runs."""
        if self._controller.terminated is None:
            self._controller.terminate("the end of the session")
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._busy:
            pass

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            if is_own_user(link):
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()
            else:
                link.close()

    def _serve(self, link: socket.socket) -> None:
        wire = Wire(link)
        with contextlib.closing(wire), contextlib.suppress(OSError):  # a worker that has ended needs no answer
            while (messages := wire.receive()) is not None:
                for data in messages:
                    message = read_one_of((Collected, RelayedCall), data)
                    wire.send(self._answer(cast("Collected | RelayedCall", message)))

    def _answer(self, message: Collected | RelayedCall) -> RelayAnswer:
        if isinstance(message, Collected):
            self.collected = self.collected or message
            return RelayAnswer(number=message.number)
        with self._busy:
            try:
                replies = self._call(message)
            except Exception as error:  # noqa: BLE001 -- whatever it is, the test that asked must report it
                return RelayAnswer(number=message.number, error=str(error), kind=getattr(error, "kind", "refused"))
        return RelayAnswer(number=message.number, replies={str(rank): _as_text(reply) for rank, reply in replies.items()})

    def _call(self, message: RelayedCall) -> dict[int, Reply]:
        """Make the call, unless another worker has had it made."""
        key = _key_of(replace(message, number=0, sys_path=()))
        if key not in self._replies:
            sys.path[:] = dict.fromkeys([*message.sys_path, *sys.path])  # calls carry it, and nothing is collected here
            self._replies[key] = self._controller.call(replace(message.call, kwargs=plain_data.from_plain(message.call.kwargs)))
        return self._replies[key]


def _key_of(message: RelayedCall) -> str:
    return json.dumps(msgspec.to_builtins(message), sort_keys=True)


def _as_text(reply: Reply) -> str:
    plain = replace(reply, value=plain_data.to_plain(reply.value)) if isinstance(reply, Success) else reply
    return plain.to_json().decode()


class RelayedController(AgentlessController):
    """The end in a worker of pytest-xdist: passes its calls on.

    ``is_signed``: pytest-xdist measures one node, whose controller makes a secret of its own.
    """

    def __init__(self, address: str, *, world_size: int, rootdir: Path) -> None:
        """Connect."""
        super().__init__(rootdir=rootdir)
        self.world_size = world_size
        self._num_asked = 0
        self._num_made: Counter[str] = Counter()
        link = socket.socket(socket.AF_UNIX)
        link.connect(address)
        self._wire = Wire(link)

    def ask(self, message: Collected | RelayedCall) -> RelayAnswer:
        """Send one message and wait for its answer; a late answer to an interrupted message is skipped.

        Raises:
            MeasurementError: the relay has ended.
        """
        self._num_asked += 1
        with contextlib.suppress(OSError):
            self._wire.send(replace(message, number=self._num_asked))
            while (answers := self._wire.receive()) is not None:
                for answer in map(RelayAnswer.read, answers):
                    if answer.number == self._num_asked:
                        return answer
        raise MeasurementError(GONE, kind="missing")

    def call(self, call: Call) -> dict[int, Reply]:
        """Let the controller make the call, or get the replies that another worker's same call had.

        Raises:
            MeasurementError: the call could not be made at all.
        """
        message = RelayedCall(call=replace(call, ranks=[*call.ranks], kwargs=plain_data.to_plain(call.kwargs)))
        key = _key_of(message)
        nth, self._num_made[key] = self._num_made[key], self._num_made[key] + 1
        answer = self.ask(replace(message, nth=nth, sys_path=tuple(path for path in sys.path if path)))
        if answer.error is not None:
            raise MeasurementError(answer.error, kind=answer.kind)
        return {int(rank): read_reply(reply.encode()) for rank, reply in (answer.replies or {}).items()}
