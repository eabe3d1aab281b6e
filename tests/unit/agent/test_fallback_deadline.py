"""The deadline of the reports that an agent writes grows with the journal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.agent.agent import REBUILD_S, rebuild_deadline_s

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(("megabytes", "at_least_s"), [(0, REBUILD_S), (27, 60.0), (110, 180.0)])
def test_a_longer_journal_has_more_time(tmp_path: Path, megabytes: int, at_least_s: float) -> None:
    """35,000 testcases are 27 MB, and took up to 30 s on a machine with other work."""
    journal = tmp_path / "journal.jsonl"
    with journal.open("wb") as file:
        file.truncate(megabytes * 1_000_000)
    assert rebuild_deadline_s(journal) >= at_least_s


def test_a_journal_that_is_not_there_has_the_least(tmp_path: Path) -> None:
    """The command says then that there is none."""
    assert rebuild_deadline_s(tmp_path / "journal.jsonl") == REBUILD_S
