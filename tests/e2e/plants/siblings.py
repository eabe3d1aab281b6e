"""A pytest plugin (``-p siblings``) under which GPUs have siblings: instant measurements with the rates that a test wants.

``E2E_SIBLINGS`` is a JSON object: ``slow`` (rank -> share of the healthy rate), ``model`` (rank -> another device name),
``dies`` (ranks that cannot be measured), ``unclocked`` (ranks whose SM clock cannot be read). All other ranks are healthy and
differ by a tenth of a per cent.
"""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass
from typing import Any

import pytest

MODULES = {"gemm": "gemm", "sustained": "sustained", "hbm_bandwidth": "hbm", "host_link": "host_link", "train": "training"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the comparison reads of each measurement, and what the floor of the memory bandwidth does."""

    tflops: float
    of_peak_at_clock_ratio: float | None
    tb_s: float
    copy_tb_s: float
    triad_tb_s: float
    read_tb_s: float
    write_tb_s: float
    repeats_tb_s: list[float]
    tokens_per_s_per_gpu: float
    h2d_gb_s: float
    d2h_gb_s: float
    repeats_h2d_gb_s: list[float]
    repeats_d2h_gb_s: list[float]
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched(Rates):
    """The rates of a watched GPU."""

    @property
    def evidence(self) -> dict[str, Any]:
        """A clock, a temperature and a power."""
        return {"SM MHz": 1500.0, "C": 60.0, "W": 690.0, "event reasons": []}


@dataclass(frozen=True, slots=True, kw_only=True)
class Link(Rates):
    """The rates of a watched link."""

    def evidence(self, way: str) -> dict[str, Any]:
        """A clock, and the direction."""
        return {"SM MHz": 1500.0, "way": way}


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before any conftest has imported the real ones."""
    for name, module in MODULES.items():
        setattr(importlib.import_module(f"pytest_gpucluster.measurements.{module}"), name, globals()[name])


def gemm(**_recipe: Any) -> Watched:
    """Matrix products."""
    return _rates(Watched)


def sustained(**_recipe: Any) -> Watched:
    """Matrix products for long."""
    return _rates(Watched)


def hbm_bandwidth(**_recipe: Any) -> Watched:
    """Memory bandwidth."""
    return _rates(Watched)


def train(**_recipe: Any) -> Watched:
    """A training of its own."""
    return _rates(Watched)


def host_link(**_recipe: Any) -> Link:
    """The link to the host."""
    return _rates(Link)


def _rates(kind: Any) -> Any:
    wanted = json.loads(os.environ["E2E_SIBLINGS"])
    rank = int(os.environ["RANK"])
    if rank in wanted.get("dies", ()):
        raise ArithmeticError("planted: the product is wrong")
    share = wanted.get("slow", {}).get(str(rank), 1.0) * (1 + 0.001 * (rank % 2))
    return kind(
        tflops=700 * share,
        of_peak_at_clock_ratio=None if rank in wanted.get("unclocked", ()) else 0.8 * share,
        tb_s=4 * share,
        **{f"{kind}_tb_s": 4 * share for kind in ("copy", "triad", "read", "write")},
        repeats_tb_s=[4 * share] * 3,
        tokens_per_s_per_gpu=18000 * share,
        h2d_gb_s=55 * share,
        d2h_gb_s=54 * share,
        repeats_h2d_gb_s=[55 * share] * 3,
        repeats_d2h_gb_s=[54 * share] * 3,
        device=wanted.get("model", {}).get(str(rank), "NVIDIA H200"),
    )
