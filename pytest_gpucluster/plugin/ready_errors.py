"""Errors and failures of our own get their text at once: a traceback costs pytest 50 ms, and nobody would see it."""

from __future__ import annotations

import copy

import pytest

from pytest_gpucluster.errors import ConfigurationError, CriterionFailedError, MeasurementError
from pytest_gpucluster.judging.verdict import FAILED
from pytest_gpucluster.plugin.stash_keys import CRITERION, IN_BODY


class ReadyErrors:
    """A pytest plugin that makes the report of a test that was not measured, or failed by its value, in pytest's place."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
        """The report of a phase that ended with an error or failure of our own; None leaves the others to pytest."""
        error = call.excinfo.value if call.excinfo is not None else None
        if call.when == "teardown" or not (_is_error(error) or _is_failure(error, item)):
            return None
        ended_well = copy.copy(call)
        ended_well.excinfo = None
        report = pytest.TestReport.from_item_and_call(item, ended_well)
        report.outcome, report.longrepr = "failed", str(error)
        return report


def _is_error(error: BaseException | None) -> bool:
    return isinstance(error, (MeasurementError, ConfigurationError))


def _is_failure(error: BaseException | None, item: pytest.Item) -> bool:
    """Whether a criterion failed by value: its reason is the text of the report, whatever pytest would show."""
    criterion = item.stash.get(CRITERION, None)
    is_judged = criterion is not None and criterion.judged is not None and criterion.judged.outcome == FAILED
    return isinstance(error, CriterionFailedError) and is_judged and not item.stash.get(IN_BODY, False)
