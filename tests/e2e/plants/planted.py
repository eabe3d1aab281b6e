"""A pytest plugin (``-p planted``) that replaces measurements by faulty ones, as ``E2E_PLANT`` says.

``E2E_PLANT`` is a JSON object: measurement -> what goes wrong on rank 1. The replacement calls the real measurement with
the fault in the arithmetic or the collective of it, so that value, error or silence arise as they would on bad hardware.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

SLOWER_S = 0.5
GUILTY = 1
MODULES = {"gemm": "gemm", "hbm_bandwidth": "hbm", "finetune": "training"}


def module_of(name: str) -> ModuleType:
    """Where a measurement is at home; it brings torch, so it is loaded only when needed."""
    return importlib.import_module(f"pytest_gpucluster.measurements.{MODULES.get(name, 'collectives')}")


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any conftest has imported the real ones."""
    for name in _wanted():
        setattr(module_of(name), name, globals()[name])


def _wanted() -> dict[str, str]:
    return dict(json.loads(os.environ.get("E2E_PLANT", "{}")))


def gemm(**recipe: Any) -> Any:
    """Matrix products."""
    return _measure("gemm", recipe)


def hbm_bandwidth(**recipe: Any) -> Any:
    """Memory bandwidth."""
    return _measure("hbm_bandwidth", recipe)


def all_reduce(**recipe: Any) -> Any:
    """Bus bandwidth."""
    return _measure("all_reduce", recipe)


def nodes_reached(**recipe: Any) -> Any:
    """Reachability."""
    return _measure("nodes_reached", recipe)


def finetune(**recipe: Any) -> Any:
    """Training; without a fault on this rank, an instant one that learned, as this is not about training."""
    return _measure("finetune", recipe)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """What a criterion reads of an outcome."""

    loss: float = 0.1
    first_loss: float = 7.0
    blind_floor_nats: float = 1.3
    step_below_limit: int = 50
    exact_match: float = 1.0
    heldout_loss: float = 0.1
    losses: tuple[float, ...] = (7.0, 0.1)
    notes: tuple[str, ...] = ()
    checks: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def _measure(name: str, recipe: dict[str, Any]) -> Any:
    how = _wanted()[name] if int(os.environ["RANK"]) == GUILTY else "healthy"
    with FAULTS[how](name):
        if name != "finetune":
            return getattr(module_of(name), name)(**recipe)
        importlib.import_module("torch.distributed").barrier()
        return module_of(name).Finetuned(outcome=Learned(), telemetry=None)


def _note_time(name: str) -> None:
    """When the fault struck, in seconds since 1970, for the test to compare with the journal."""
    Path(f"struck-{name}").write_text(str(time.time()), encoding="utf-8")


@contextlib.contextmanager
def _healthy(_name: str) -> Iterator[None]:
    yield


@contextlib.contextmanager
def _slow(name: str) -> Iterator[None]:
    """Every product, copy or launch takes longer, inside what is timed."""
    module: Any = module_of(name)
    if name == "gemm":
        patched = mock.patch.object(module._Product, "__call__", _slowed(module._Product.__call__))
    elif name == "hbm_bandwidth":
        timed = module._timed
        patched = mock.patch.object(module, "_timed", lambda call, *counts: timed(_slowed(call), *counts))
    else:
        patched = mock.patch.object(module.dist, "all_reduce", _slowed(module.dist.all_reduce))
    with patched:
        yield


def _slowed(call: Callable[..., Any]) -> Callable[..., Any]:
    def slower(*arguments: Any, **keywords: Any) -> Any:
        time.sleep(SLOWER_S)
        return call(*arguments, **keywords)

    return slower


@contextlib.contextmanager
def _raises(name: str) -> Iterator[None]:
    print("a word before the end")  # noqa: T201 -- the report quotes a rank's last output
    _note_time(name)
    raise ArithmeticError("planted: the product is wrong")
    yield


@contextlib.contextmanager
def _hangs(name: str) -> Iterator[None]:
    """Never comes back; the others may wait for it in a collective."""
    _note_time(name)
    time.sleep(600)
    yield


@contextlib.contextmanager
def _exits(name: str) -> Iterator[None]:
    _note_time(name)
    os._exit(0)
    yield


@contextlib.contextmanager
def _killed(name: str) -> Iterator[None]:
    """Dies when the third collective begins, the others being inside."""
    count = 0
    module: Any = module_of(name)
    real = module.dist.all_reduce

    def dying(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            time.sleep(0.2)
            _die(name)
        return real(*arguments, **keywords)

    with mock.patch.object(module.dist, "all_reduce", dying):
        yield


def _die(name: str) -> NoReturn:
    _note_time(name)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("survived SIGKILL")


FAULTS = {"healthy": _healthy, "slow": _slow, "raises": _raises, "hangs": _hangs, "exits": _exits, "killed": _killed}
