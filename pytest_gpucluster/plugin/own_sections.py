"""pytest's sections of errors and failures, without those that the table's causes tell once for all tests they took along."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_gpucluster.session import Session

SECTIONS = ("error", "failed")


class OwnSections:
    """A pytest plugin with two hooks around pytest's summary. With ``-v`` pytest's sections stay as they are."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        """Hide nothing yet."""
        self._config = config
        self._session = session
        self._hidden: dict[str, list[Any]] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True, specname="pytest_terminal_summary")
    def pytest_hide_own(self, terminalreporter: Any) -> Generator[None, object, object]:
        """Called before pytest's sections: leave out the reports whose text is ours and that captured no output."""
        if self._config.get_verbosity() <= 0:
            ours = {self._session.plan.nodeid(record) for record in self._session.plan}
            for section in SECTIONS:
                reports = terminalreporter.stats.get(section, [])
                others = [one for one in reports if one.nodeid not in ours or one.sections or not isinstance(one.longrepr, str)]
                if len(others) < len(reports):
                    self._hidden[section] = reports
                    terminalreporter.stats[section] = others
        try:
            return (yield)
        finally:
            self.pytest_show_own(terminalreporter)

    @pytest.hookimpl(tryfirst=True, specname="pytest_terminal_summary")
    def pytest_show_own(self, terminalreporter: Any) -> None:
        """Called after pytest's sections and before its short summary, which names every test."""
        terminalreporter.stats.update(self._hidden)
        self._hidden = {}
