"""What a GPU asks for, in words, and what to do about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpucluster.health.gpu import ADVICE, DIAGNOSE, REPAIRS, RESET, advice_for, needs_of
from pytest_gpucluster.inventory.nvml import ACTIONS, GpuRepair
from pytest_gpucluster.inventory.reading import NotAvailable

HEALTHY = GpuRepair(
    recovery_action="none",
    channel_repair_pending=False,
    tpc_repair_pending=False,
    memory_unrepairable=False,
    sram_threshold_exceeded=False,
)
REFUSED = NotAvailable("Not Supported")


def test_every_action_but_none_has_its_advice() -> None:
    """Also one that a newer driver invents."""
    assert set(ADVICE) == set(ACTIONS.values()) - {"none"}
    assert advice_for("none") is None
    assert advice_for("unknown_42") is not None


def test_healthy_gpu_needs_nothing() -> None:
    """No fact, no advice."""
    needs = needs_of(HEALTHY)
    assert (needs.facts, needs.advice, needs.unknown) == ((), None, ())


@pytest.mark.parametrize("flag", REPAIRS)
def test_each_flag(flag: str) -> None:
    """Raised, it is a need; refused, it is not known; beside a raised one, both are told."""
    raised, refused = needs_of(replace(HEALTHY, **{flag: True})), needs_of(replace(HEALTHY, **{flag: REFUSED}))
    assert (raised.facts, raised.advice, raised.unknown) == ((REPAIRS[flag][0],), REPAIRS[flag][1], ())
    assert (refused.facts, refused.unknown) == ((), (f"{flag} is not available: Not Supported",))
    other = next(name for name in REPAIRS if name != flag)
    both = needs_of(replace(HEALTHY, **{flag: REFUSED, other: True}))
    assert (len(both.facts), len(both.unknown)) == (1, 1)


def test_the_worst_need_decides_what_to_do() -> None:
    """A GPU that must be replaced is not reset first."""
    assert needs_of(replace(HEALTHY, memory_unrepairable=True, channel_repair_pending=True)).advice == DIAGNOSE
    assert needs_of(replace(HEALTHY, tpc_repair_pending=True)).advice == RESET
