"""What a GPU asks for, in words, and what to do about it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pytest_gpucluster.health.gpu import ADVICE, DIAGNOSE, REPAIRS, RESET, advice_for, judge_recovery, judge_repair
from pytest_gpucluster.inventory.nvml import ACTIONS, GpuRepair
from pytest_gpucluster.inventory.reading import NotAvailable, healthy

HEALTHY = healthy(GpuRepair)
REFUSED = NotAvailable("Not Supported")


def test_every_action_but_none_has_its_advice() -> None:
    """Also one that a newer driver invents."""
    assert set(ADVICE) == set(ACTIONS.values()) - {"none"}
    assert advice_for("none") is None
    assert advice_for("unknown_42") is not None


def test_healthy_gpu_needs_nothing() -> None:
    """No fact, no advice."""
    needs = judge_repair(HEALTHY)
    assert (needs.facts, needs.advice, needs.doubts) == ((), None, ())


@pytest.mark.parametrize("flag", REPAIRS)
def test_each_flag(flag: str) -> None:
    """Raised, it is a need; refused, it is not known; beside a raised one, both are shown."""
    raised, refused = judge_repair(replace(HEALTHY, **{flag: True})), judge_repair(replace(HEALTHY, **{flag: REFUSED}))
    assert (raised.facts, raised.advice, raised.doubts) == ((REPAIRS[flag][0],), REPAIRS[flag][1], ())
    assert (refused.facts, refused.doubts) == ((), (f"{flag} is not available: Not Supported",))
    other = next(name for name in REPAIRS if name != flag)
    both = judge_repair(replace(HEALTHY, **{flag: REFUSED, other: True}))
    assert (len(both.facts), len(both.doubts)) == (1, 1)


def test_the_worst_need_decides_what_to_do() -> None:
    """A GPU that must be replaced is not reset first."""
    assert judge_repair(replace(HEALTHY, memory_unrepairable=True, channel_repair_pending=True)).advice == DIAGNOSE
    assert judge_repair(replace(HEALTHY, tpc_repair_pending=True)).advice == RESET


@pytest.mark.parametrize(("action", "judged"), [("none", 0), ("gpu_reset", 1), ("unknown_42", 1), (REFUSED, None)])
def test_recovery_action(action: str | NotAvailable, judged: int | None) -> None:
    """Any action but none is bad, and says what to do; a refused one is unknown."""
    found = judge_recovery(replace(HEALTHY, recovery_action=action))
    assert found.judged == judged
    assert (found.advice is not None) is (judged == 1)
