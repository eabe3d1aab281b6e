"""``--gpucluster-inline``: the functions run in the pytest process, at one place, without a deadline, for a debugger.

An inline controller has no agents. A run with it is never an acceptance: nothing guards against a hang here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytest_gpucluster.agent.worker_process import WORKER_DEFAULTS
from pytest_gpucluster.controller.call import Call, CallClock, Observer
from pytest_gpucluster.places import Device
from pytest_gpucluster.protocol import functions, plain_data
from pytest_gpucluster.protocol.messages import Failure, FunctionName, Reply, ReportTarget, Success
from pytest_gpucluster.protocol.rank import Rank
from pytest_gpucluster.worker import worker
from pytest_gpucluster.worker.raised import failure_of

OBJECTION = "run inline, for a debugger (--gpucluster-inline)"
ENVIRONMENT = Rank.local(0, 1).variables(node=0)


class AgentlessController:
    """What a controller does that has no agents of its own, here and in a worker of pytest-xdist. It measures one node."""

    is_signed = True

    def __init__(self, *, rootdir: Path) -> None:
        """Start nothing."""
        self.rootdir = rootdir
        self.clock = CallClock()

    def meet(self, *, within_s: float) -> None:
        """Do nothing: there is no agent to wait for."""

    def hello_of(self, rank: int) -> None:
        """Without an agent there is no hello."""

    def refuse(self, rank: int, why: str) -> None:
        """The ranks of one node have the same software."""
        raise AssertionError(f"rank {rank} of this node: {why}")

    def assign_nodes(self, nodes: Mapping[int, int]) -> None:
        """Do nothing: there is one node, and who makes the calls knows its number."""

    def name(self, function: Callable[..., Any]) -> FunctionName:
        """How ``function`` is named; the same rules as for workers."""
        return functions.name_function(function, rootdir=self.rootdir)


class InlineController(AgentlessController):
    """Makes calls by running them in this process, as rank 0 of 1."""

    world_size = 1

    def __init__(self, *, device: Device, rootdir: Path) -> None:
        """Start nothing yet."""
        super().__init__(rootdir=rootdir)
        self.device = device
        self.terminated: str | None = None
        self._observer = Observer()

    def start(self, *, log: Path, target: ReportTarget | None = None, observer: Observer | None = None) -> None:
        """Set torchrun's variables for rank 0 of 1. There is no log and no agent that could write reports."""
        del log, target
        self._observer = observer or self._observer
        os.environ.update({**{name: value for name, value in WORKER_DEFAULTS.items() if name not in os.environ}, **ENVIRONMENT})

    def observe(self, observer: Observer, *, logs: Path) -> None:
        """From now on call this observer; there is no log."""
        del logs
        self._observer = observer

    def replicate(self, line: str) -> None:
        """Do nothing: there is no other node."""

    def terminate(self, by: str) -> None:
        """Remember the signal; the function that runs now is not interrupted."""
        self.terminated = by

    def call(self, call: Call) -> dict[int, Reply]:
        """Run the function here and now."""
        if self._observer.on_work is not None:
            self._observer.on_work(0.0)
        began_s = time.monotonic()
        reply = self._run(call)
        self.clock.add(call, began_s=began_s, ended_s=time.monotonic())
        self.clock.add_work(began_s=began_s, ended_s=time.monotonic())
        return {0: reply}

    def _run(self, call: Call) -> Reply:
        if call.variables:
            return Failure(
                kind="refused", blames="software", error="variables need a worker of its own, and inline there is none"
            )
        try:
            function = functions.find_function(call.function, trusted=True, rewrite=call.test_arguments is not None)
            device = self._device(call)
            if call.groups is not None:
                _join_group_of_one(device)
            else:
                worker.leave_group()
            if call.test_arguments is not None:
                function = worker.bind_test(function, call.test_arguments, device)
            return Success(value=plain_data.from_plain(plain_data.to_plain(function(**call.kwargs))))
        except Exception as error:  # noqa: BLE001 -- whatever the function raised is its result
            return failure_of(error)

    def quit(self, code: int, *, last_lines: str = "") -> None:
        """Leave the group, if there is one."""
        del code, last_lines
        worker.leave_group()

    def _device(self, call: Call) -> Any:
        import torch

        if self.device == "cpu" or call.any_device:
            return torch.device("cpu")
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)


def _join_group_of_one(device: Any) -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
