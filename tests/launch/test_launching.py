"""What starts the runs of these tests: a run that hangs says where, and none carries the tool that measures the tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.launching import Starter

if TYPE_CHECKING:
    from pathlib import Path

HANGING = """
import time

def test_that_hangs():
    open("inside", "w").close()
    time.sleep(150)
"""


@pytest.mark.e2e
def test_a_run_that_does_not_end_tells_where_it_stood(starter: Starter) -> None:
    """Without that, a hang which nobody can repeat could not be explained either."""
    starter.write(test_hanging=HANGING)
    launch = starter.pytest("-p", "no:gpucluster")
    launch.until((starter.folder / "inside").exists, within_s=60, what="hanging test")
    with pytest.raises(
        AssertionError, match=r"(?s)pytest did not end in 0.1 s.*File .*test_hanging.py\", line 6 in test_that_hangs"
    ):
        launch.end(within_s=0.1)
    assert launch.alive() == []


def test_runs_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt may leave the lock of coverage's tracer locked: the run that it measured never ended."""
    monkeypatch.setenv("COVERAGE_PROCESS_CONFIG", "...")
    assert "COVERAGE_PROCESS_CONFIG" not in Starter(tmp_path, "").environment
