"""Whose time a forward's is, the GPU's or that of the host core that issues its kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from finetune_smoke import pace

if TYPE_CHECKING:
    from finetune_smoke.state import Run

ISSUED_S = 0.02


class Rank:
    """A rank whose device goes on for ``after_s`` after the last launch; a clock that only this moves."""

    def __init__(self, device: str, *, after_s: float) -> None:
        self.device, self.after_s = SimpleNamespace(type=device), after_s
        self.now_s = 0.0
        self.busy = False

    def clock(self) -> float:
        """Seconds of either clock."""
        return self.now_s

    def forward(self) -> None:
        """Issue the kernels."""
        self.now_s += ISSUED_S
        self.busy = True

    def wait(self) -> None:
        """Until the device is done, if it is at work."""
        self.now_s += self.after_s * self.busy
        self.busy = False


def timed(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> pace.Forward:
    """What its forward takes."""
    monkeypatch.setattr(pace, "time", SimpleNamespace(perf_counter=rank.clock, thread_time=rank.clock))
    return pace._timed(cast("Run", SimpleNamespace(ranks=rank)), rank.forward)


@pytest.mark.parametrize(("after_s", "launch_bound"), [(0.0, True), (0.002, True), (0.01, False), (0.2, False)])
def test_issuing_is_told_apart(after_s: float, *, launch_bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU that is done soon after the last launch, and of one that works on."""
    found = timed(Rank("cuda", after_s=after_s), monkeypatch)
    assert found.ms == pytest.approx(1e3 * (ISSUED_S + after_s))
    assert found.issuing_ms == pytest.approx(1e3 * ISSUED_S)
    assert (found.issuing_ms > pace.MOST_ISSUING * found.ms) == launch_bound


def test_a_cpu_has_no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes while the call runs."""
    assert timed(Rank("cpu", after_s=0.0), monkeypatch) == pace.Forward(ms=pytest.approx(1e3 * ISSUED_S))
