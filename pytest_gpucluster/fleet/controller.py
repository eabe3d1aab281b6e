"""The controller of a simulated fleet: the real one, whose agents answer from a model."""

from __future__ import annotations

import functools
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from pytest_gpucluster.controller.call_maker import SLICE_S
from pytest_gpucluster.controller.controller import Controller
from pytest_gpucluster.controller.local_agents import may_fork
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.fleet.agents import FleetSettings, serve
from pytest_gpucluster.fleet.simulation import JOIN_S
from pytest_gpucluster.protocol.channel import hello_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpucluster.fleet.simulation import Simulation
    from pytest_gpucluster.protocol.secret import Secret


class FleetController(Controller):
    """Starts the simulated agents. What follows is the road of a real run."""

    def __init__(self, simulation: Simulation, *, rootdir: Path, secret: Secret | None = None) -> None:
        """Prepare a run of all ranks of ``simulation`` on this machine."""
        super().__init__(None, num_local=simulation.world_size, device="cuda", rootdir=rootdir, secret=secret)
        self._simulation = simulation

    def _command(self, secret_fd: int | None, controller_fd: int) -> list[str] | Callable[[], NoReturn]:
        assert secret_fd is not None  # a run without torchrun has a secret of its own
        settings = FleetSettings(
            simulation=self._simulation,
            address=self._link.address,
            secret_fd=secret_fd,
            controller_fd=controller_fd,
            target=self._target,
        )
        if may_fork():  # the agents have imported torch then, which takes longer than all else that a small fleet does
            return functools.partial(serve, settings)
        return [sys.executable, "-m", "pytest_gpucluster.fleet.agents", settings.to_json().decode()]

    def meet(self, *, within_s: float) -> None:
        """Wait until every present rank has joined, then :data:`JOIN_S` for those that are absent.

        Raises:
            MeasurementError: the simulated agents do not join ``within_s``, or have ended.
        """
        hellos = [hello_key(rank) for rank in self._simulation.present]
        deadline_s = time.monotonic() + within_s
        while not self._link.channel.arrived(hellos, within_s=SLICE_S):
            self._early_end.check()
            has_ended = self._agents is None or self._agents.have_ended
            if has_ended or time.monotonic() > deadline_s:
                raise MeasurementError("the simulated fleet did not join; see logs/agents.log", kind="lost")
        super().meet(within_s=JOIN_S)
