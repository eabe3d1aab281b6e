"""From pytest's report to an outcome, and back into the report: what the verdict says and what pytest shows agree.

The text of a report is made fit at its end: reporters print it as it is, and no line of it may look like a line of ours.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from _pytest._code.code import ReprEntryNative, ReprFileLocation  # no public way

from pytest_gpucluster.errors import Blame, ConfigurationError, CriterionFailedError, MeasurementError, RanksFailedError
from pytest_gpucluster.judging.verdict import BAD, ERROR, FAILED, MISSING, NOISY, NOT_SELECTED, PASSED, SKIPPED, Record, worse
from pytest_gpucluster.text import barred, framed, one_line, shortened, visible

if TYPE_CHECKING:
    import pytest

    from pytest_gpucluster.judging.criterion import Criterion
    from pytest_gpucluster.judging.plan import Rule
    from pytest_gpucluster.plugin.pairing import Pairing


MADE_BY_A_HOOK = "a hook of another plugin or conftest.py made its report a failure"
XPASS = "[XPASS(strict)]"
"""How pytest begins the report of a test that passes under a strict xfail mark; its value is what counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemContext:
    """What is known about a test besides pytest's report.

    Attributes:
        rule: the rule of the profile that excludes its criterion, if one does.
        criterion: what the test judges by; None for a plain test.
        earlier: its outcome after an earlier phase.
        kept: a bad outcome recorded at its place before the test ran, by a round of a soak. The test cannot improve it.
        unmeasured: what its soak did not measure; None if it measured everything.
        attempts: how often it was run so far.
        hollow: why a pass of it shows nothing: its function did not run, or did not look at a measurement that failed.
    """

    pair: Pairing
    rule: Rule | None
    criterion: Criterion | None
    earlier: Record | None
    kept: Record | None = None
    unmeasured: str | None = None
    attempts: int = 1
    hollow: MeasurementError | None = None


def outcome_of(report: pytest.TestReport, call: pytest.CallInfo[None], test: ItemContext) -> Record | None:
    """The outcome that this phase settles, None if it settles nothing; ``report`` is corrected to agree with it."""
    found = _outcome_of(report, call, test)
    if test.attempts > 1 and not any(one is not None and one.outcome in BAD for one in (found, test.earlier, test.kept)):
        found = _repeated(report, test)
    return None if found is None else replace(found, started=True)


def _repeated(report: pytest.TestReport, test: ItemContext) -> Record:
    """What passes at a second try only is not green, and nobody can know which try was the true one."""
    reason = f"{test.pair.criterion} was run {test.attempts} times; a repeated test is not accepted"
    _make_error(report, reason)
    return _record(test, ERROR, reason)


def _outcome_of(report: pytest.TestReport, call: pytest.CallInfo[None], test: ItemContext) -> Record | None:
    if call.when == "teardown":
        return _after_teardown(report, call, test)
    error = call.excinfo.value if call.excinfo is not None else None
    found = (_after_setup if call.when == "setup" else _after_call)(report, error, test)
    if found is None or test.kept is None:
        return found
    if worse(test.kept, found) is found or test.kept.outcome == found.outcome == FAILED:
        return found  # what is judged at the end holds all rounds
    return _as_found(report, test.kept)


def show_waived(report: pytest.TestReport, reason: str) -> None:
    """A waived failure is neither red nor green: pytest's xfailed, in the JUnit file a skip with the reason."""
    _skip(report, reason)
    report.wasxfail = reason


def _after_setup(report: pytest.TestReport, error: BaseException | None, test: ItemContext) -> Record | None:
    if report.outcome == "passed":
        return None
    if test.rule is not None and report.outcome == "skipped":
        return replace(_record(test, SKIPPED, test.rule.text), cause=test.rule.cause)
    criterion = test.criterion
    if criterion is not None and criterion.judged is not None and criterion.judged.outcome == FAILED:  # by a fixture
        return _bad_by_value(report, error, test, criterion)
    return _not_measured(report, error, test)


def _as_found(report: pytest.TestReport, found: Record) -> Record:
    """Whatever became of the test, and of the rest of its soak: what was found stays found."""
    if found.outcome == FAILED:
        report.when = "call"  # also where the test was ended in its set-up
        _fail(report, found.reason or found.outcome)
    else:
        _make_error(report, found.reason or found.outcome)
    return found


def _after_call(report: pytest.TestReport, error: BaseException | None, test: ItemContext) -> Record:
    criterion = test.criterion
    if criterion is None or not test.pair.judges:
        return _plain_test(report, error, test)
    bad = _bad_by_value(report, error, test, criterion)
    if bad is not None:
        return bad
    if error is not None and error is criterion.left_out and criterion.judged is None and criterion.first_error is None:
        _clear_xfail(report)
        _skip(report, str(error))
        return replace(_record(test, SKIPPED, str(error)), cause=criterion.left_out.cause)
    if error is not None or report.outcome == "skipped":
        return _not_measured(report, error, test)
    missing = _missing_part(test, criterion) or _failed_by_a_hook(report, test)
    if missing is not None:
        return _error(report, test, missing)
    assert criterion.judged is not None
    _clear_xfail(report)
    report.outcome, report.longrepr = "passed", None
    return criterion.judged


def _bad_by_value(
    report: pytest.TestReport, error: BaseException | None, test: ItemContext, criterion: Criterion
) -> Record | None:
    """A failure, or too close to call; waivable where all that should be measured was, and nothing else went wrong."""
    judged = criterion.judged
    is_judgement = error is None or isinstance(error, CriterionFailedError) or getattr(error, "kind", None) == "noisy"
    is_whole = is_judgement and criterion.first_error is None and test.unmeasured is None
    is_failed = judged is not None and judged.outcome == FAILED
    if not is_failed and isinstance(error, AssertionError) and not hasattr(report, "wasxfail"):
        return _crashed(report, test, FAILED)
    if judged is None or not (is_failed or (judged.outcome == NOISY and criterion.first_error is None)):
        return None
    return replace(_as_found(report, judged), waivable=judged.waivable and is_whole)


def _missing_part(test: ItemContext, criterion: Criterion) -> MeasurementError | None:
    """What was not measured, or not judged, though the test passed."""
    key = test.pair.criterion
    if criterion.first_error is not None:
        return criterion.first_error
    if test.hollow is not None:
        return test.hollow
    if criterion.judged is None:
        return MeasurementError(
            f"{key} was never judged: its test has the criterion fixture and did not call criterion.require()"
        )
    return None if test.unmeasured is None else MeasurementError(f"{key} was not measured to its end: {test.unmeasured}")


def _failed_by_a_hook(report: pytest.TestReport, test: ItemContext) -> MeasurementError | None:
    """Why the report of a phase that raised nothing is a failure; None where it is none, or says that xfail passed."""
    if report.outcome != "failed" or report.longreprtext.startswith(XPASS):
        return None
    text = f"{test.pair.criterion} did not pass: {MADE_BY_A_HOOK}: {report.longreprtext}"
    return MeasurementError(text, blame=Blame(part="software"))


def judged_late(criterion: Criterion | None, earlier: Record | None) -> str | None:
    """What its criterion was found to be after a test had passed, in its teardown or by a thread; None if nothing bad."""
    if criterion is None or earlier is None or earlier.outcome != PASSED:
        return None
    if criterion.first_error is not None:
        return str(criterion.first_error)
    return None if criterion.judged is None or criterion.judged.outcome == PASSED else criterion.judged.reason


def _after_teardown(report: pytest.TestReport, call: pytest.CallInfo[None], test: ItemContext) -> Record | None:
    """A teardown that did not come to its end is an error, also where xfail or a skip in it would hide that."""
    late = judged_late(test.criterion, test.earlier)
    if call.excinfo is not None:
        reason = f"its teardown failed: {call.excinfo.exconly()}"
    elif late is not None:
        reason = f"judged in its teardown: {late}"
    elif report.outcome == "failed":
        reason = f"its teardown failed: {MADE_BY_A_HOOK}: {report.longreprtext}"
    else:
        return None
    _clear_xfail(report)
    if report.outcome != "failed":
        report.outcome, report.longrepr = "failed", call.excinfo.exconly() if call.excinfo is not None else reason
    waived = test.earlier is not None and test.earlier.waiver is not None
    if test.earlier is not None and test.earlier.outcome in BAD and not waived:
        return replace(test.earlier, teardown=reason)
    if test.earlier is None:
        return _record(test, ERROR, reason)
    return replace(test.earlier, outcome=ERROR, reason=reason, advisory=False, waiver=None, waivable=False)


def _plain_test(report: pytest.TestReport, error: BaseException | None, test: ItemContext) -> Record:
    """A test without a criterion counts by what pytest says of it."""
    if isinstance(error, (MeasurementError, ConfigurationError)):
        return _error(report, test, error)
    if isinstance(error, RanksFailedError):
        _fail(report, str(error))
        return blamed(_record(test, FAILED, str(error)), error)
    if report.outcome == "failed":
        return _crashed(report, test, FAILED)
    if report.outcome == "skipped":
        return _skipped_itself(test, report)
    if test.hollow is not None:
        return _error(report, test, test.hollow)
    return _record(test, PASSED, None)


def _skipped_itself(test: ItemContext, report: pytest.TestReport) -> Record:
    why = "its xfail mark let it fail" if hasattr(report, "wasxfail") else "it skipped itself"
    left_out = _record(test, NOT_SELECTED, f"{why}: {_skip_reason(report)}")
    return replace(left_out, cause="skipped itself")


def _not_measured(report: pytest.TestReport, error: BaseException | None, test: ItemContext) -> Record:
    if isinstance(error, (MeasurementError, ConfigurationError)):
        return _error(report, test, error)
    if report.outcome == "skipped":
        if not test.pair.judges:
            return _skipped_itself(test, report)
        reason = f"{test.pair.criterion} was not measured: its test skipped itself ({_skip_reason(report)})"
        _make_error(report, reason)
        return _record(test, ERROR, reason)
    if report.when == "call" and not isinstance(error, CriterionFailedError):
        report.when = "setup"
    _clear_xfail(report)
    report.outcome = "failed"
    return _crashed(report, test, ERROR)


def _error(report: pytest.TestReport, test: ItemContext, error: MeasurementError | ConfigurationError) -> Record:
    _make_error(report, str(error))
    missing = isinstance(error, MeasurementError) and error.kind == "missing"
    record = _record(test, MISSING if missing else ERROR, str(error))
    return blamed(record, error) if isinstance(error, MeasurementError) else replace(record, blames=error.blames)


def blamed(record: Record, error: MeasurementError | RanksFailedError) -> Record:
    """The record with what its error blames."""
    blame = error.blame
    return replace(
        record,
        culprits=tuple(place.id for place in error.culprits),
        blames=blame.part,
        cause=blame.cause,
        among=tuple(place.id for place in blame.among),
        advice=blame.advice,
        is_disturbed=getattr(error, "kind", None) == "not_idle",
    )


def _make_error(report: pytest.TestReport, text: str) -> None:
    """Make a failure an ERROR: pytest calls it so when it did not happen in the call phase."""
    _fail(report, text)
    if report.when == "call":
        report.when = "setup"


def _fail(report: pytest.TestReport, text: str) -> None:
    _clear_xfail(report)
    report.outcome = "failed"
    report.longrepr = text


def _skip(report: pytest.TestReport, reason: str) -> None:
    report.outcome = "skipped"
    report.longrepr = (report.location[0], report.location[1] or 0, f"Skipped: {reason}")  # ``-rs`` asks for all three


def _clear_xfail(report: pytest.TestReport) -> None:
    if hasattr(report, "wasxfail"):
        del report.wasxfail


def _record(test: ItemContext, outcome: str, reason: str | None) -> Record:
    criterion, place = test.pair.key
    limit = test.criterion.limit if test.criterion is not None else None
    return Record(criterion=criterion, place=place, outcome=outcome, limit=limit, reason=reason and shortened(reason))


def _crashed(report: pytest.TestReport, test: ItemContext, outcome: str) -> Record:
    """The outcome of a test that an exception ended: its traceback is the reason, the exception is the headline."""
    crash = getattr(report.longrepr, "reprcrash", None)
    headline = shortened(crash.message) if crash is not None else None
    return replace(_record(test, outcome, report.longreprtext), headline=headline, blames="software")


def _skip_reason(report: pytest.TestReport) -> str:
    """The reason that ``pytest.skip`` was given, without file and line."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    return next((line.strip() for line in reversed(report.longreprtext.splitlines()) if line.strip()), "")


def make_fit(report: Any) -> None:
    """Escape unfit characters in what a TestReport or CollectReport says, and set in the lines of an error."""
    report.longrepr = _fit_error(report.longrepr)
    report.sections = [(one_line(title), visible(content)) for title, content in report.sections]
    if hasattr(report, "wasxfail"):
        report.wasxfail = one_line(report.wasxfail)


def _fit_error(error: Any) -> Any:
    """A text, the place and the reason of a skip, or a traceback, which is changed in place."""
    if error is None or isinstance(error, str):
        return error and framed(error)
    if isinstance(error, tuple):
        return tuple(one_line(part) if isinstance(part, str) else part for part in error)
    return _fit_part(error)


def _fit_part(part: Any) -> Any:
    if isinstance(part, str):
        return visible(part)
    if isinstance(part, (list, tuple)):
        return type(part)(_fit_part(one) for one in part)
    if isinstance(part, ReprEntryNative):
        part.lines = [barred("".join(part.lines).rstrip("\n")) + "\n"]
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            setattr(part, field.name, _fit_part(getattr(part, field.name)))
    if isinstance(part, ReprFileLocation):
        part.message = framed(part.message)  # the summary shows it whole where CI is set
    return part
