"""Calls from the workers of pytest-xdist to the one controller, which alone has the agents.

Each call is made once, for all GPUs at the same time, whoever asks first; the other workers, and one that takes the place
of a crashed one, get the same replies. So no GPU is measured twice, and none by two processes at a time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import threading
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.controller.controller import Call
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.protocol import functions, plain_data
from pytest_gpucluster.protocol.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pytest_gpucluster.controller.controller import Controller
    from pytest_gpucluster.controller.inline import InlineController
    from pytest_gpucluster.protocol.channel import Message

GONE = "not run: the pytest-xdist controller, which makes the calls, is gone"


class Relay:
    """The end in the process that has the controller: answers every worker in a thread of its own."""

    def __init__(self, controller: Controller | InlineController) -> None:
        """Listen; only processes of the same user are heard."""
        self.address = f"\0gpucluster-{secrets.token_hex(16)}"  # abstract: no file, and gone with this process
        self.collected: Message | None = None
        self._controller = controller
        self._busy = threading.Lock()
        self._replies: dict[str, Message] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.address)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Hear nobody new, and let a call that still runs end now."""
        self._controller.terminated = self._controller.terminated or "the end of the session"
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
            _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
            if user == os.getuid():
                threading.Thread(target=self._serve, args=(link,), daemon=True).start()
            else:
                link.close()

    def _serve(self, link: socket.socket) -> None:
        wire = Wire(link)
        with contextlib.closing(wire), contextlib.suppress(OSError):  # a worker that has ended needs no answer
            while (messages := wire.receive()) is not None:
                for message in messages:
                    wire.send({**self._answer(message), "number": message["number"]})

    def _answer(self, message: Message) -> Message:
        if message["t"] == "collected":
            self.collected = self.collected or message
            return {}
        key = json.dumps([message["call"], message["nth"]], sort_keys=True)
        with self._busy:
            if key not in self._replies:
                sys.path[:] = dict.fromkeys([*message["sys_path"], *sys.path])  # calls carry it, and nothing is collected here
                call = Call(**{**message["call"], "kwargs": plain_data.from_plain(message["call"]["kwargs"])})
                try:
                    self._replies[key] = {"replies": self._controller.call(call)}
                except Exception as error:  # noqa: BLE001 -- whatever it is, the test that asked must hear of it
                    return {"error": str(error), "kind": getattr(error, "kind", "refused")}
            return self._replies[key]


class RelayedController:
    """The end in a worker of pytest-xdist: stands in for the controller and passes its calls on."""

    def __init__(self, address: str, *, world_size: int, rootdir: Path) -> None:
        """Connect."""
        self.world_size = world_size
        self.rootdir = rootdir
        self.measuring_s = 0.0
        self._asked = 0
        self._made: Counter[str] = Counter()
        link = socket.socket(socket.AF_UNIX)
        link.connect(address)
        self._wire = Wire(link)

    def ask(self, message: Message) -> Message:
        """Send one message and wait for its answer; a late answer to one that was interrupted is none.

        Raises:
            MeasurementError: nobody answers any more.
        """
        self._asked += 1
        with contextlib.suppress(OSError):
            self._wire.send({**message, "number": self._asked})
            while (answers := self._wire.receive()) is not None:
                for answer in answers:
                    if answer["number"] == self._asked:
                        return answer
        raise MeasurementError(GONE, kind="missing")

    def meet(self, *, within_s: float) -> None:
        """The controller has met its agents before any test runs."""
        del within_s

    def refuse(self, rank: int, why: str) -> None:
        """The ranks of one node have the same software."""
        raise AssertionError(f"rank {rank} of this node: {why}")

    def assign_nodes(self, nodes: Mapping[int, int]) -> None:
        """The controller, which makes the calls, knows the nodes."""
        del nodes

    def name(self, function: Callable[..., Any]) -> Message:
        """How ``function`` is named to the agents' workers."""
        return functions.name_function(function, rootdir=self.rootdir)

    def call(self, call: Call) -> dict[int, Message]:
        """Let the controller make it, or answer with what it got when another worker asked for the same.

        Raises:
            MeasurementError: it could not be made at all.
        """
        data = {**asdict(call), "ranks": list(call.ranks), "kwargs": plain_data.to_plain(call.kwargs)}
        text = json.dumps(data, sort_keys=True)
        nth, self._made[text] = self._made[text], self._made[text] + 1
        answer = self.ask({"t": "call", "call": data, "nth": nth, "sys_path": [path for path in sys.path if path]})
        if "error" in answer:
            raise MeasurementError(answer["error"], kind=answer["kind"])
        return {int(rank): reply for rank, reply in answer["replies"].items()}
