"""A report that cannot be written when the run ends: the verdict must still be shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.plugin.junit import written_whole

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_gpucluster.plugin.end import End


class ReportErrorGuard:
    """Wraps the other sessionfinish hooks: an OSError in a report must not hide the verdict."""

    def __init__(self, end: End) -> None:
        """``end`` shows the error beside the verdict."""
        self._end = end

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, object, object]:
        """Show a report that could not be written beside the verdict; such a run is no success."""
        try:
            with written_whole(session.config):
                return (yield)
        except OSError as error:
            if self._end.verdict is None:
                raise
            self._end.add_disk_error(f"{error.filename or 'a report'} could not be written: {error.strerror}")
            session.exitstatus = int(session.exitstatus) or int(pytest.ExitCode.TESTS_FAILED)
            return None
