"""Planted faults: where they act, how much, and that nothing of them stays."""

from __future__ import annotations

import time

import pytest

from pytest_gpucluster.selftest import planted

RECIPE = {"iterations": 3, "warmup_s": 0.0, "rest_s": 0.0}


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1, by a worker's environment variable."""
    monkeypatch.setenv("RANK", "1")


@pytest.mark.parametrize(("operation", "size"), [("bf16", 64), ("copy", 4096)])
def test_delays_strike_one_rank_and_some_repeats(monkeypatch: pytest.MonkeyPatch, operation: str, size: int) -> None:
    """Only where and when they are planted, and inside the timed window."""
    waits: list[float] = []
    monkeypatch.setattr(planted, "waiting", lambda: lambda seconds: waits.append(seconds) or time.sleep(0.02))
    plants = [{}, {"delay_percent": 25.0, "rank": 1}, {"delay_percent": 25.0, "rank": 0}, {}]
    found = planted.rates_with_delays(operation=operation, size=size, plants=plants, **RECIPE)
    assert [delay > 0 for delay in found.delay_us] == [False, True, False, False]
    assert found.delay_us[1] == pytest.approx(0.25 * found.own_us)
    assert waits == pytest.approx([found.delay_us[1] / 1e6] * RECIPE["iterations"])
    work = {"bf16": 2 * 64**3, "copy": 2 * 4096}[operation] / 1e12
    assert work / found.rates[1] >= 0.02
    assert all(rate > 0 for rate in found.rates)


def test_nothing_stays() -> None:
    """The next call of the same worker is sound, and what is slowed is not changed itself."""
    calls: list[str] = []
    call = lambda: calls.append("call")  # noqa: E731 -- compared below
    planted.slowed(call, lambda _: calls.append("wait"), 0.1)()
    assert calls == ["call", "wait"]
    assert planted.slowed(call, lambda _: calls.append("wait"), 0.0) is call
    planted.rates_with_delays(operation="copy", size=4096, plants=[{"delay_percent": 50.0, "rank": 1}], **RECIPE)
    after = planted.rates_with_delays(operation="copy", size=4096, plants=[{}], **RECIPE)
    assert after.delay_us == [0.0]


def test_waiting_waits() -> None:
    """On a CPU the host's clock."""
    wait_s = planted.waiting()
    started_s = time.perf_counter()
    wait_s(0.05)
    assert time.perf_counter() - started_s >= 0.05
