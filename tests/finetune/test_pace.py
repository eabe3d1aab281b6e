"""Whose time a forward's is, the GPU's or that of the host core that issues its kernels."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from finetune_smoke import pace

if TYPE_CHECKING:
    from finetune_smoke.state import Run

ISSUED_S = 0.02


def rank(device: str, *, gpu_s: float) -> Run:
    """A rank whose device goes on for so many seconds after the last launch."""
    first = True

    def wait() -> None:
        nonlocal first
        if not first:
            time.sleep(gpu_s)
        first = not first

    ranks = SimpleNamespace(device=SimpleNamespace(type=device), wait=wait)
    return cast("Run", SimpleNamespace(ranks=ranks))


def launched() -> None:
    """Work whose kernels take a host core so long to issue."""
    time.sleep(ISSUED_S)


@pytest.mark.parametrize("gpu_s", [0.0, ISSUED_S])
def test_issuing_is_told_apart(gpu_s: float) -> None:
    """Of a GPU that is done at the last launch, and of one that works on as long again."""
    found = pace._timed(rank("cuda", gpu_s=gpu_s), launched)
    assert found.ms == pytest.approx(1e3 * (ISSUED_S + gpu_s), rel=0.5)
    assert found.issuing_ms == pytest.approx(1e3 * ISSUED_S, rel=0.5)
    assert (found.issuing_ms > pace.MOST_ISSUING * found.ms) == (gpu_s == 0)


def test_a_cpu_has_no_launches() -> None:
    """It computes while the call runs, and its own time of a core is what counts."""

    def busy() -> None:
        end = time.thread_time() + ISSUED_S
        while time.thread_time() < end:
            pass

    found: Any = pace._timed(rank("cpu", gpu_s=0.0), busy)
    assert found.issuing_ms == 0
    assert found.ms == pytest.approx(1e3 * ISSUED_S, rel=0.5)
