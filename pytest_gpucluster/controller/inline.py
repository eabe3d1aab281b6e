"""``--gpucluster-inline``: the functions run in the pytest process, at one place, without a deadline, for a debugger.

It stands in for the controller and has no agents. Never an acceptance: nothing guards against a hang here.
"""

from __future__ import annotations

import os
import socket
import time
import traceback
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.agent.agent import WORKER_DEFAULTS
from pytest_gpucluster.protocol import functions, plain_data
from pytest_gpucluster.worker import worker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pytest_gpucluster.agent.fallback_report import Estate
    from pytest_gpucluster.controller.controller import Call, Output, Progress
    from pytest_gpucluster.protocol.channel import Message

OBJECTION = "run inline, for a debugger (--gpucluster-inline)"
ENVIRONMENT = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "GPUCLUSTER_NODE": "0",
}


class InlineController:
    """Answers calls by running them here, as rank 0 of 1."""

    is_signed = True
    world_size = 1

    def __init__(self, *, device: str, rootdir: Path) -> None:
        """Prepare this process as a worker would be prepared."""
        self.device = device
        self.rootdir = rootdir
        self.terminated: str | None = None
        self.measuring_s = 0.0
        self.on_progress: Progress | None = None
        self.on_output: Output | None = None
        self.on_call: Callable[[], None] | None = None

    def start(self, *, log: Path, estate: Estate | None = None) -> None:
        """Set torchrun's variables for rank 0 of 1; no log and no deputy: all happens in this process."""
        del log, estate
        os.environ.update({**{name: value for name, value in WORKER_DEFAULTS.items() if name not in os.environ}, **ENVIRONMENT})

    def keep_copy(self, line: str) -> None:
        """There is no other node."""
        del line

    def meet(self, *, within_s: float) -> None:
        """There is nobody to wait for."""
        del within_s

    def terminate(self, by: str) -> None:
        """Remember the signal; the function that runs now is not interrupted."""
        self.terminated = by

    def refuse(self, rank: int, why: str) -> None:
        """One process cannot differ from itself."""
        raise AssertionError(f"rank {rank} of an inline run: {why}")

    def assign_nodes(self, nodes: Mapping[int, int]) -> None:
        """There is one node, and :data:`ENVIRONMENT` has its number."""
        del nodes

    def name(self, function: Callable[..., Any]) -> Message:
        """How ``function`` is named; the same rules as for workers."""
        return functions.name_function(function, rootdir=self.rootdir)

    def who(self, rank: int) -> None:
        """No agent, so nothing that one said."""

    def hostname_of(self, rank: int) -> str | None:
        """This host."""
        return socket.gethostname() if rank == 0 else None

    def call(self, call: Call) -> dict[int, Message]:
        """Run the function here and now."""
        if self.on_call is not None:
            self.on_call()
        started_s = time.monotonic()
        try:
            function = functions.find_function(call.function, trusted=True, rewrite=call.test_arguments is not None)
            device = self._device(call)
            if call.groups is not None:
                _join_alone(device)
            if call.test_arguments is not None:
                function = worker.bind_test(function, list(call.test_arguments), device)
            reply = {"ok": True, "value": plain_data.to_plain(function(**call.kwargs))}
        except Exception as error:  # noqa: BLE001 -- whatever the function raised is its result
            reply = {
                "ok": False,
                "kind": "raised",
                "type": type(error).__name__,
                "error": str(error),
                "traceback": "".join(traceback.format_exception(type(error), error, error.__traceback__)),
            }
        if not call.is_startup:
            self.measuring_s += time.monotonic() - started_s
        return {0: {"output": "", "collectives": 0, "collective": "", **reply}}

    def quit(self, code: int) -> None:
        """Leave the group, if there is one."""
        del code
        worker.leave_group()

    def _device(self, call: Call) -> Any:
        import torch

        if self.device == "cpu" or call.any_device:
            return torch.device("cpu")
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)


def _join_alone(device: Any) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
