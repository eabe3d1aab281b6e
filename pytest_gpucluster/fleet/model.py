"""The model of a simulated fleet: a call, and what one rank answers. Pure and deterministic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.fleet import (
    gpu_answers,
    group_answers,
    host_answers,
)
from pytest_gpucluster.fleet import (
    link_answers as pair_answers,
)
from pytest_gpucluster.fleet import (
    link_answers as rail_answers,
)
from pytest_gpucluster.fleet.simulated_call import PACKAGE, SimulatedCall
from pytest_gpucluster.protocol.messages import Failure, Success

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpucluster.fleet.hardware import Hardware
    from pytest_gpucluster.fleet.simulated_call import SimulatedGroup
    from pytest_gpucluster.protocol.messages import FunctionName, Reply


def _nothing(_call: SimulatedCall) -> None:
    """A function that is called for what it does to a real worker."""


ANSWERS: Mapping[str, Callable[[SimulatedCall], Any]] = {
    "inventory.identity:identity": gpu_answers.identity,
    "inventory.occupancy:read_occupancy": gpu_answers.occupancy,
    "inventory.occupancy:read_occupancy_again": gpu_answers.occupancy_again,
    "measurements.collective_sizes:by_size": group_answers.by_size,
    "measurements.collectives:all_reduce": group_answers.all_reduce,
    "measurements.collectives:collective": group_answers.collective,
    "measurements.collectives:nodes_reached": group_answers.nodes_reached,
    "measurements.dcgm:dcgm_program": host_answers.dcgm_program,
    "measurements.digest:digests": gpu_answers.digests,
    "measurements.file_rates:file_rates": host_answers.file_rates,
    "measurements.file_rates:file_requests": host_answers.file_requests,
    "measurements.gemm:gemm": gpu_answers.gemm,
    "measurements.hbm:hbm_bandwidth": gpu_answers.hbm_bandwidth,
    "measurements.hbm_pattern:hbm_pattern": gpu_answers.hbm_pattern,
    "measurements.health:clocks_under_load": gpu_answers.clocks_under_load,
    "measurements.health:gpu_counters": gpu_answers.gpu_counters,
    "measurements.health:gpu_state": gpu_answers.gpu_state,
    "measurements.host:host_clock": host_answers.host_clock,
    "measurements.host:host_errors": host_answers.host_errors,
    "measurements.host:host_state": host_answers.host_state,
    "measurements.host_parts:host_parts": host_answers.host_parts,
    "measurements.host_link:host_link": gpu_answers.host_link,
    "measurements.host_rates:host_memory": host_answers.host_memory,
    "measurements.host_rates:launch_latency": host_answers.launch_latency,
    "measurements.host:nic_paths": host_answers.nic_paths,
    "measurements.host:nic_state": host_answers.nic_state,
    "measurements.pair_matrix:pair_matrix": pair_answers.pair_matrix,
    "measurements.rails:net_interfaces": rail_answers.net_interfaces,
    "measurements.rails:rail": rail_answers.rail,
    "measurements.shared_paths:clear_path": host_answers.clear_path,
    "measurements.shared_paths:count_under_lock": host_answers.count_under_lock,
    "measurements.shared_paths:leave_mark": host_answers.leave_mark,
    "measurements.shared_paths:read_marks": host_answers.read_marks,
    "measurements.shared_paths:replace_file": host_answers.replace_file,
    "measurements.shared_paths:small_files": host_answers.small_files,
    "measurements.sustained:sustained": gpu_answers.sustained,
    "measurements.driver_errors:node_sxids": host_answers.node_sxids,
    "measurements.training:finetune": group_answers.finetune,
    "measurements.training:sharded_memory": group_answers.sharded_memory,
    "measurements.training:train": group_answers.train,
    "measurements.transport:transport": group_answers.transport,
    "measurements.driver_errors:gpu_xids": gpu_answers.gpu_xids,
    "worker.worker:leave_group": _nothing,
    "worker.worker:look_at_gpu": _nothing,
}
"""By ``module:function`` below this package."""
DYING = "measurements.sustained:sustained"
HANGING = "measurements.hbm_pattern:hbm_pattern"


def is_lost_in(hardware: Hardware, function: FunctionName, rank: int) -> bool:
    """Whether the rank's node is lost in this call by a planted fault: it never answers again."""
    return _name_of(function) == DYING and hardware.simulation.has(rank, "lost")


def failure(hardware: Hardware, function: FunctionName, rank: int) -> Failure | None:
    """How this call fails at the rank by a planted fault; None if it does not."""
    name = _name_of(function)
    if name == DYING and hardware.simulation.has(rank, "dead"):
        return Failure(kind="died", error="the worker died: SIGSEGV", blames="unknown", entered=True)
    if name == HANGING and hardware.simulation.has(rank, "hung"):
        return Failure(kind="hung", error="did not return within its deadline (simulated)", entered=True, state="R")
    return None


def answer(group: SimulatedGroup, function: FunctionName, *, rank: int, kwargs: dict[str, Any], turn: int = 0) -> Reply:
    """The rank's answer to a call that does not fail; ``group``: its process group, itself without one.

    ``turn``: how often the rank was called with this function before.

    A function that the model does not know is a failure: a simulated fleet makes no value up for it.
    """
    name = _name_of(function)
    if name not in ANSWERS:
        error = f"a simulated fleet has no value of {function.module}:{function.qualname}"
        return Failure(kind="raised", type="NotSimulatedError", error=error, blames="software", entered=True)
    try:
        value = ANSWERS[name](SimulatedCall(group=group, rank=rank, kwargs=kwargs, turn=turn))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # arguments that no packaged recipe has
        text = f"a simulated fleet cannot answer {function.qualname} with {kwargs}: {error!r}"
        return Failure(kind="raised", type="NotSimulatedError", error=text, blames="software", entered=True)
    return Success(value=value, entered=True)


def _name_of(function: FunctionName) -> str:
    return f"{function.module.removeprefix(PACKAGE + '.')}:{function.qualname}"
