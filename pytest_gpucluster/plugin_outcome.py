"""From pytest's report to an outcome, and back into the report: what the verdict says and what pytest shows agree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import ConfigurationError, CriterionFailedError, MeasurementError, RanksFailedError
from pytest_gpucluster.verdict import ERROR, FAILED, MISSING, NOISY, NOT_SELECTED, PASSED, SKIPPED, Record

if TYPE_CHECKING:
    import pytest

    from pytest_gpucluster.criterion import Criterion
    from pytest_gpucluster.pairing import Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What is known about a test beside its report; ``kept`` is what a round of a soak found at its place before it ran."""

    pair: Pair
    rule: str | None
    criterion: Criterion | None
    earlier: Record | None
    kept: Record | None = None


def outcome_of(report: pytest.TestReport, call: pytest.CallInfo[None], told: Told) -> Record | None:
    """The outcome that this phase settles, None if it settles nothing; ``report`` is corrected to agree with it."""
    if call.when == "setup":
        return _after_setup(report, call, told)
    if call.when == "call":
        return _after_call(report, call, told)
    return _after_teardown(report, call, told)


def show_waived(report: pytest.TestReport, reason: str) -> None:
    """A waived failure is neither red nor green: pytest's xfailed, in the JUnit file a skip with the reason."""
    report.outcome = "skipped"
    report.wasxfail = reason
    report.longrepr = reason


def _after_setup(report: pytest.TestReport, call: pytest.CallInfo[None], told: Told) -> Record | None:
    if report.outcome == "passed":
        return None
    if told.kept is not None:
        return _as_kept(report, told.kept)
    if told.rule is not None and report.outcome == "skipped":
        return _record(told, SKIPPED, told.rule)
    return _not_measured(report, call, told)


def _as_kept(report: pytest.TestReport, kept: Record) -> Record:
    """The soak was cut short; what it had found stays found."""
    if kept.outcome == FAILED:
        report.when = "call"
        _fail(report, kept.reason or kept.outcome)
    else:
        _make_error(report, kept.reason or kept.outcome)
    return kept


def _after_call(report: pytest.TestReport, call: pytest.CallInfo[None], told: Told) -> Record:
    criterion = told.criterion
    error = call.excinfo.value if call.excinfo is not None else None
    if criterion is None or not told.pair.judges:
        return _plain_test(report, call, told)
    judged = criterion.judged
    if judged is not None and judged.outcome in (FAILED, NOISY):
        (_fail if judged.outcome == FAILED else _make_error)(report, criterion.message or judged.outcome)
        return judged
    if isinstance(error, AssertionError) and not hasattr(report, "wasxfail"):
        return _record(told, FAILED, report.longreprtext)
    if error is not None or report.outcome == "skipped":
        return _not_measured(report, call, told)
    if judged is None:
        return _never_judged(report, told)
    _pass(report)
    return judged


def _after_teardown(report: pytest.TestReport, call: pytest.CallInfo[None], told: Told) -> Record | None:
    if report.outcome != "failed" or call.excinfo is None:
        return None
    reason = f"its teardown failed: {call.excinfo.exconly()}"
    waived = told.earlier is not None and told.earlier.waiver is not None
    if told.earlier is not None and told.earlier.outcome in (FAILED, ERROR, MISSING, NOISY) and not waived:
        return None
    return replace(told.earlier, outcome=ERROR, reason=reason, waiver=None) if told.earlier else _record(told, ERROR, reason)


def _plain_test(report: pytest.TestReport, call: pytest.CallInfo[None], told: Told) -> Record:
    """A test without a criterion counts by what pytest says of it."""
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, (MeasurementError, ConfigurationError)):
        return _not_measured(report, call, told)
    if isinstance(error, RanksFailedError):
        _fail(report, str(error))
        return replace(_record(told, FAILED, str(error)), culprits=tuple(place.id for place in error.culprits))
    if report.outcome == "failed":
        return _record(told, FAILED, report.longreprtext)
    if report.outcome == "skipped":
        return _record(told, NOT_SELECTED, f"it skipped itself: {_skip_reason(report)}")
    return _record(told, PASSED, None)


def _not_measured(report: pytest.TestReport, call: pytest.CallInfo[None], told: Told) -> Record:
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, (MeasurementError, ConfigurationError)):
        _make_error(report, str(error))
        missing = isinstance(error, MeasurementError) and error.kind == "missing"
        guilty = tuple(place.id for place in getattr(error, "culprits", ()))
        refused = isinstance(error, MeasurementError) and error.kind in ("refused", "not_idle")
        return replace(_record(told, MISSING if missing else ERROR, str(error)), culprits=guilty, refused=refused)
    if report.outcome == "skipped":
        if not told.pair.judges:
            return _record(told, NOT_SELECTED, f"it skipped itself: {_skip_reason(report)}")
        reason = f"{told.pair.criterion} was not measured: its test skipped itself ({_skip_reason(report)})"
        _make_error(report, reason)
        return _record(told, ERROR, reason)
    if call.when == "call" and not isinstance(error, CriterionFailedError):
        report.when = "setup"
    _clear_xfail(report)
    report.outcome = "failed"
    return _record(told, ERROR, report.longreprtext)


def _never_judged(report: pytest.TestReport, told: Told) -> Record:
    reason = f"{told.pair.criterion} was never judged: its test has the criterion fixture and did not call criterion.require()"
    _make_error(report, reason)
    return _record(told, ERROR, reason)


def _make_error(report: pytest.TestReport, text: str) -> None:
    """Make a failure an ERROR: pytest calls it so when it ERROR when it did not happen in the call phase."""
    _clear_xfail(report)
    report.outcome = "failed"
    report.longrepr = text
    if report.when == "call":
        report.when = "setup"


def _fail(report: pytest.TestReport, text: str) -> None:
    _clear_xfail(report)
    report.outcome = "failed"
    report.longrepr = text


def _pass(report: pytest.TestReport) -> None:
    _clear_xfail(report)
    report.outcome = "passed"
    report.longrepr = None


def _clear_xfail(report: pytest.TestReport) -> None:
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def _record(told: Told, outcome: str, reason: str | None) -> Record:
    criterion, place = told.pair.key
    known = told.criterion
    return Record(
        criterion=criterion,
        place=place,
        outcome=outcome,
        unit=known.limit.unit if known is not None else None,
        limit=known.limit.text if known is not None else None,
        reason=reason,
    )


def _skip_reason(report: pytest.TestReport) -> str:
    """What ``pytest.skip`` was told, without file and line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return _last_line(report.longreprtext)


def _last_line(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
