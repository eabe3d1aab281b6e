"""What became worse of a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster.health.growth import state_changes, throttled_s
from pytest_gpucluster.inventory.nvlinks import GpuFabric, NvLink
from pytest_gpucluster.inventory.nvml import GpuRepair
from pytest_gpucluster.inventory.reading import NotAvailable, healthy

REFUSED = NotAvailable("Not Supported")
REPAIR = healthy(GpuRepair)
FLAGS = ("channel_repair_pending", "tpc_repair_pending", "memory_unrepairable", "sram_threshold_exceeded")
SET = {"ecc_enabled": True, "mig": False, "compute_mode": "default"}
FABRIC = GpuFabric(state="completed", error=None, cluster_uuid="0", clique=0, troubles=[])
UP = NvLink(link=0, is_up=True, speed_gb_s=26.562, effective_ber=None, symbol_ber=None)
DOWN = replace(UP, is_up=False)


def gpu(**changes: Any) -> Any:
    """A healthy GPU of one link, but for these readings."""
    rows = {"remapped_rows_pending": False, "remapped_rows_failed": False, **SET}
    return SimpleNamespace(**{"repair": REPAIR, "fabric": FABRIC, "nvlinks": [UP], **rows, **changes})


def seen(first: Any, last: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What is bad, and what is unknown."""
    found = state_changes(first, last)
    return found.facts, found.doubts


WORSE: list[tuple[dict[str, Any], str]] = [
    ({"nvlinks": [DOWN]}, "link 0 went down"),
    ({"nvlinks": []}, "link 0 went down"),
    ({"nvlinks": [replace(UP, speed_gb_s=13.0)]}, "link 0 at 13 GB/s, was at 26.562"),
    ({"repair": replace(REPAIR, recovery_action="gpu_reset")}, "recovery_action is gpu_reset, was none"),
    *(({"repair": replace(REPAIR, **{flag: True})}, f"{flag} is True, was False") for flag in FLAGS),
    ({"remapped_rows_failed": True}, "remapped_rows_failed is True, was False"),
    ({"fabric": replace(FABRIC, state="in_progress")}, "fabric state is in_progress, was completed"),
    ({"fabric": replace(FABRIC, error="Timeout")}, "fabric error is Timeout, was None"),
    ({"fabric": replace(FABRIC, clique=3)}, "fabric clique is 3, was 0"),
    ({"fabric": replace(FABRIC, cluster_uuid="1")}, "fabric cluster_uuid is 1, was 0"),
    ({"fabric": replace(FABRIC, troubles=["unhealthy"])}, "fabric: unhealthy"),
    ({"ecc_enabled": False}, "ecc_enabled is False, was True"),
    ({"mig": True}, "mig is True, was False"),
    ({"compute_mode": "exclusive_process"}, "compute_mode is exclusive_process, was default"),
]
UNKNOWN: list[dict[str, Any]] = [
    {"nvlinks": REFUSED},
    {"nvlinks": [replace(UP, is_up=REFUSED)]},
    {"nvlinks": [replace(UP, speed_gb_s=REFUSED)]},
    {"repair": replace(REPAIR, recovery_action=REFUSED)},
    *({"repair": replace(REPAIR, **{flag: REFUSED})} for flag in FLAGS),
    {"remapped_rows_pending": REFUSED},
    {"fabric": REFUSED},
    *({name: REFUSED} for name in SET),
]


def test_nothing_changed() -> None:
    """Nothing is worse."""
    assert seen(gpu(), gpu()) == ((), ())


@pytest.mark.parametrize(("change", "fact"), WORSE)
def test_worse(change: dict[str, Any], fact: str) -> None:
    """Counted and shown; no fault where it was so before, and none where it becomes well."""
    assert seen(gpu(), gpu(**change)) == ((fact,), ())
    assert seen(gpu(**change), gpu(**change)) == ((), ())
    if "clique" not in fact and "cluster_uuid" not in fact:
        assert seen(gpu(**change), gpu()) == ((), ())


@pytest.mark.parametrize("change", UNKNOWN)
def test_refused_at_the_end_alone(change: dict[str, Any]) -> None:
    """Not known; a reading that was refused before is judged elsewhere."""
    found = state_changes(gpu(), gpu(**change))
    assert (found.count, len(found.doubts), found.judged) == (0, 1, None)
    assert "not available: Not Supported" in found.doubts[0]
    assert seen(gpu(**change), gpu(**change)) == seen(gpu(**change), gpu()) == ((), ())


def test_seconds_throttled() -> None:
    """What each limiter took since; what shrank or was not told before is left out; a refusal says why."""
    first, last = gpu(throttled_s={"power": 1.5, "heat": 2.0}), gpu(throttled_s={"power": 4.0, "heat": 1.0, "board": 3.0})
    assert throttled_s(first, last) == {"power": 2.5}
    assert throttled_s(gpu(throttled_s=REFUSED), last) == REFUSED
    assert throttled_s(first, gpu(throttled_s=REFUSED)) == REFUSED


@pytest.mark.parametrize(("name", "bad"), [("ecc_enabled", False), ("mig", True), ("compute_mode", "prohibited")])
def test_what_somebody_set_during_the_run(name: str, bad: Any) -> None:
    """A setting is to blame and no part; beside a fault of the GPU that one is. What was so before, or is good now, is not."""
    assert state_changes(gpu(), gpu(**{name: bad})).kind == "settings"
    assert state_changes(gpu(), gpu(**{name: bad}, nvlinks=[DOWN])).kind == "gpu"
    for first, last in ((bad, bad), (bad, SET[name]), (REFUSED, bad)):
        assert seen(gpu(**{name: first}), gpu(**{name: last})) == ((), ())
