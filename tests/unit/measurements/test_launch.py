"""The latency of launches on a CPU: its arithmetic and its refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pytest_gpucluster.measurements import host_rates as module
from pytest_gpucluster.measurements.host_rates import launch_latency


def test_what_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes a tick of 1 ms, so 10 launches take 100 us each, and a round trip 1000."""
    clock = iter(range(1000))
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock) / 1e3)
    found = launch_latency(launches=10, repeats=3)
    assert found.repeats_us == pytest.approx([100.0] * 3)
    assert (found.launch_us, found.round_trip_us) == pytest.approx((100.0, 1000.0))
    assert found.device == "cpu"


def test_a_lost_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never a time."""
    really: Any = torch.zeros
    monkeypatch.setattr(module.torch, "zeros", lambda *size, **how: really(*size, **how).sub_(1))
    with pytest.raises(ArithmeticError, match="30 launches added up to 29"):
        launch_latency(launches=10, repeats=1)


@pytest.mark.parametrize("wrong", [{"launches": 0}, {"repeats": 0}])
def test_nothing_to_measure(wrong: dict[str, int]) -> None:
    """Said."""
    with pytest.raises(ValueError, match="nothing to measure"):
        launch_latency(**{"launches": 1, "repeats": 1, **wrong})
