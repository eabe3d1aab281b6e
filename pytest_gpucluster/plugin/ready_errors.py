"""Errors of our own get their text at once: a traceback of them costs pytest 50 ms, and nobody would see it."""

from __future__ import annotations

import copy

import pytest

from pytest_gpucluster.errors import ConfigurationError, MeasurementError


class ReadyErrors:
    """A pytest plugin that makes the report of a test which could not be measured, in pytest's place."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> pytest.TestReport | None:
        """The report of a phase that ended with an error of our own; None leaves the others, and teardowns, to pytest."""
        error = call.excinfo.value if call.excinfo is not None else None
        if call.when == "teardown" or not isinstance(error, (MeasurementError, ConfigurationError)):
            return None
        ended_well = copy.copy(call)
        ended_well.excinfo = None
        report = pytest.TestReport.from_item_and_call(item, ended_well)
        report.outcome, report.longrepr = "failed", str(error)
        return report
