"""The model of a simulated fleet: a call, and what one rank answers. Deterministic.

What a rank answers stands beside the measurement, under ``@simulated_by``, or under the measurement's name in
:mod:`~pytest_gpucluster.fleet.group_answers` or :mod:`~pytest_gpucluster.fleet.host_answers`.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pytest_gpucluster.fleet import group_answers, host_answers
from pytest_gpucluster.fleet.simulated_call import PACKAGE, SimulatedCall, SimulatedGroup
from pytest_gpucluster.fleet.simulation import Simulation
from pytest_gpucluster.protocol.functions import SIMULATED_MARK
from pytest_gpucluster.protocol.messages import Failure, FunctionName, Reply, Success
from pytest_gpucluster.protocol.plain_data import to_plain

NO_VALUE = ("clear_path", "leave_group", "look_at_gpu")
"""Functions that are called for what they do to a real worker."""
ANSWERS: Mapping[str, Callable[[SimulatedCall], Any]] = {
    name: made
    for answers in (group_answers, host_answers)
    for name, made in inspect.getmembers(answers, inspect.isfunction)
    if made.__module__ == answers.__name__ and not name.startswith("_")
} | dict.fromkeys(NO_VALUE, lambda _call: None)
"""By the name of the package's function that they answer for."""
MEASUREMENTS = f"{PACKAGE}.measurements"
DYING = "measurements.sustained:sustained"
HANGING = "measurements.hbm_pattern:hbm_pattern"


def is_lost_in(simulation: Simulation, function: FunctionName, rank: int) -> bool:
    """Whether the rank's node is lost in this call by a planted fault: it never answers again."""
    return _name_of(function) == DYING and simulation.has(rank, "lost")


def failure(simulation: Simulation, function: FunctionName, rank: int) -> Failure | None:
    """How this call fails at the rank by a planted fault; None if it does not."""
    name = _name_of(function)
    if name == DYING and simulation.has(rank, "dead"):
        return Failure(kind="died", error="the worker died: SIGSEGV", blames="unknown", entered=True)
    if name == HANGING and simulation.has(rank, "hung"):
        return Failure(kind="hung", error="did not return within its deadline (simulated)", entered=True, state="R")
    return None


def answer(group: SimulatedGroup, function: FunctionName, *, rank: int, kwargs: dict[str, Any], turn: int = 0) -> Reply:
    """The rank's answer to a call that does not fail; ``group``: its process group, itself without one.

    ``turn``: how often the rank was called with this function before.

    A function that the model does not know is a failure: a simulated fleet makes no value up for it.
    """
    found = _answer_of(function)
    if found is None:
        error = f"a simulated fleet has no value of {function.module}:{function.qualname}"
        return Failure(kind="raised", type="NotSimulatedError", error=error, blames="software", entered=True)
    try:
        value = found(SimulatedCall(group=group, rank=rank, kwargs=kwargs, turn=turn))
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:  # arguments that no packaged recipe has
        text = f"a simulated fleet cannot answer {function.qualname} with {kwargs}: {error!r}"
        return Failure(kind="raised", type="NotSimulatedError", error=text, blames="software", entered=True)
    return Success(value=value if isinstance(value, dict) else to_plain(value), entered=True)


def _answer_of(function: FunctionName) -> Callable[[SimulatedCall], Any] | None:
    """The answer by its name, or beside a packaged measurement; None where there is none. Nothing else is imported for it."""
    if function.module.startswith(f"{PACKAGE}.") and function.qualname in ANSWERS:
        return ANSWERS[function.qualname]
    module: Any = None
    if function.module.startswith(f"{MEASUREMENTS}."):
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(function.module)
    found: Callable[[SimulatedCall], Any] | None = getattr(getattr(module, function.qualname, None), SIMULATED_MARK, None)
    return found


def _name_of(function: FunctionName) -> str:
    return f"{function.module.removeprefix(PACKAGE + '.')}:{function.qualname}"
