"""Two soaks of one run, the packaged one and a user's: each goes on only with what it took part in itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster.cluster.soak import NOTHING_EARLIER, Earlier
from pytest_gpucluster.plugin.whole_run import soak_reports

KEYS = [("bf16_soak", "node0-gpu0"), ("bf16_soak", "node0-gpu1"), ("wear", "node0-gpu0"), ("busbw_soak", None)]


@pytest.mark.parametrize(
    ("kept", "first", "second"),
    [
        (None, False, False),
        ([("bf16_soak", "node0-gpu0"), ("bf16_soak", "node0-gpu1"), ("busbw_soak", "cluster")], True, False),
        ([("wear", "node0-gpu0")], False, True),
        ([("bf16_soak", "node0-gpu0"), ("busbw_soak", "cluster"), ("wear", "node0-gpu0")], False, True),
        ([(key, place or "cluster") for key, place in KEYS], True, True),
    ],
)
def test_each_by_itself(monkeypatch: pytest.MonkeyPatch, kept: Any, *, first: bool, second: bool) -> None:
    """One whose works took no part begins at round 1, with all of its time; what was cut short is looked for once."""
    found = None if kept is None else Earlier(round=4, num_whole_rounds=3, elapsed_s=50.0, kept=dict.fromkeys(kept))
    looked: list[Any] = []
    monkeypatch.setattr(soak_reports, "_earlier", lambda *given: looked.append(given) or found)
    begun: list[Any] = []
    soak: Any = SimpleNamespace(go_on_with=begun.append)
    nothing: Any = None
    reports = soak_reports.Reports(nothing, nothing, dict.fromkeys(KEYS), nothing)
    reports.begin(soak, ["bf16_soak", "busbw_soak"])
    reports.begin(soak, ["wear"])
    assert begun == [found if goes_on else NOTHING_EARLIER for goes_on in (first, second)]
    assert [len(given[2]) for given in looked] == [3]
