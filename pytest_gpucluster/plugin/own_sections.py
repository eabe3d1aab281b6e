"""pytest's sections of errors and failures, without those that the block of bad parts shows: each failure stands once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.judging.verdict import FAILED

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_gpucluster.session import Session

SECTIONS = ("error", "failed")
PLAIN_SUMMARY = "fE"
"""pytest's own choice of what its short summary names."""


def shows_own(config: pytest.Config) -> bool:
    """Whether our block has the whole texts: neither ``-v`` nor a ``--tb`` asks pytest for them."""
    return bool(config.get_verbosity() <= 0 and config.option.tbstyle == "auto")


class OwnSections:
    """A pytest plugin with two hooks around pytest's summary. With ``-v`` or ``--tb`` pytest's sections stay as they are."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        """Hide nothing yet."""
        self._config = config
        self._session = session
        self._hidden: dict[str, list[Any]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_terminal_summary")
    def pytest_hide_own(self, terminalreporter: Any) -> Generator[None, object, object]:
        """Called before pytest's sections: leave out the reports whose text is ours and that captured no output."""
        if shows_own(self._config):
            ours = self._judged()
            for section in SECTIONS:
                reports = terminalreporter.stats.get(section, [])
                others = [one for one in reports if one.nodeid not in ours or one.sections or not isinstance(one.longrepr, str)]
                if len(others) < len(reports):
                    self._hidden[section] = reports
                    terminalreporter.stats[section] = others
        try:
            return (yield)
        finally:
            self._restore(terminalreporter)

    @pytest.hookimpl(tryfirst=True, specname="pytest_terminal_summary")
    def pytest_show_own(self, terminalreporter: Any) -> None:
        """Called after pytest's sections and before its short summary, which names every test where ``-r`` asks for that."""
        if self._config.option.reportchars != PLAIN_SUMMARY:
            self._restore(terminalreporter)

    def _judged(self) -> set[str]:
        """The tests whose failures the block of bad parts shows in full; what a plain test says stays pytest's to show."""
        records = self._session.plan
        return {records.nodeid(one) for one in records if not (one.outcome == FAILED and one.limit is None)}

    def _restore(self, terminalreporter: Any) -> None:
        terminalreporter.stats.update(self._hidden)
        self._hidden = {}
