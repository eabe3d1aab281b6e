"""A run that nothing on the command line asks for: it starts because a test uses one of our fixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.runs import run_pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]


@pytest.mark.parametrize(("fixtures", "passed"), [("cluster", 1), ("place, cluster", 2)])
def test_a_fixture_starts_a_run(tmp_path: Path, fixtures: str, passed: int) -> None:
    """With ``place`` the run is made while pytest collects, and must still start its agents."""
    body = f"def test_size({fixtures}):\n    assert cluster.world_size == 2\n"
    (tmp_path / "test_it.py").write_text(body, encoding="utf-8")
    run = run_pytest(tmp_path, "test_it.py", timeout_s=90)
    assert run.returncode == 0, run.stdout
    assert run.verdict_line.startswith(f"verdict INCOMPLETE: {passed} passed, ")
