"""The command that measures again is this run's, but for what chose its tests; what pytest's own sections leave out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.plugin.terminal import HiddenReports, shows_own, without_selection
from tests.support.entries import limit


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("--pyargs tests_acceptance", "--pyargs tests_acceptance"),
        ("-k memory --pyargs tests_acceptance", "--pyargs tests_acceptance"),
        ("--pyargs tests_acceptance -k", "--pyargs tests_acceptance"),
        ("-kmemory -x --lf -m health own.py", "-m health own.py"),
        ("--gpucluster-thresholds site.yaml own.py", "--gpucluster-thresholds site.yaml own.py"),
    ],
)
def test_without_selection(given: str, kept: str) -> None:
    """Limits, profile, marks and paths stay."""
    assert without_selection(given.split()) == kept.split()


def config(verbosity: int = 0, tb: str = "auto", chars: str = "fE") -> Any:
    """What a user asked of pytest."""
    return SimpleNamespace(get_verbosity=lambda: verbosity, option=SimpleNamespace(tbstyle=tb, reportchars=chars))


def test_what_a_user_asks_for_stays_pytests() -> None:
    """``-v`` and an explicit ``--tb``."""
    assert (shows_own(config()), shows_own(config(-1))) == (True, True)
    assert (shows_own(config(1)), shows_own(config(tb="short")), shows_own(config(tb="no"))) == (False, False, False)


RECORDS = {
    "judged": Record(criterion="judged", place=None, outcome="failed", limit=limit()),
    "lost": Record(criterion="lost", place=None, outcome="error"),
    "plain": Record(criterion="plain", place=None, outcome="failed"),
}


class Plan(dict[str, Record]):
    """The records, iterated as a plan is."""

    def __iter__(self) -> Any:
        """The records themselves."""
        return iter(self.values())

    def nodeid(self, record: Record) -> str:
        """Its criterion."""
        return record.criterion


def sections(asked: Any) -> tuple[set[str], set[str], set[str]]:
    """The tests that pytest's sections, its short summary, and its counts name."""
    reports = [SimpleNamespace(nodeid=name, sections=[], longrepr="text") for name in (*RECORDS, "foreign")]
    reporter = SimpleNamespace(stats={"failed": reports})
    plugin = HiddenReports(asked, SimpleNamespace(plan=Plan(RECORDS)))  # type: ignore[arg-type] -- a double

    def named() -> set[str]:
        return {report.nodeid for report in reporter.stats["failed"]}

    plugin.hide(reporter)
    in_sections = named()
    plugin.restore_for_short_summary(reporter)
    in_summary = named()
    plugin.restore(reporter)
    return in_sections, in_summary, named()


EVERY = {*RECORDS, "foreign"}
OTHERS = {"plain", "foreign"}


@pytest.mark.parametrize(
    ("asked", "in_sections", "in_summary"),
    [
        (config(), OTHERS, OTHERS),
        (config(-1), OTHERS, OTHERS),
        (config(chars="A"), OTHERS, EVERY),
        (config(1), EVERY, EVERY),
        (config(tb="long"), EVERY, EVERY),
    ],
)
def test_sections(asked: Any, in_sections: set[str], in_summary: set[str]) -> None:
    """Failures of criteria stand among the bad parts; those of plain tests stay pytest's; pytest counts all of them."""
    assert sections(asked) == (in_sections, in_summary, EVERY)
