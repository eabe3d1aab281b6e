"""A JUnit file from outcomes, by the junit-xml package; the live one is pytest's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from junit_xml import TestCase, TestSuite, to_xml_report_string

from pytest_gpucluster.judging.verdict import (
    ACCEPTED,
    ERROR,
    FAILED,
    MISSING,
    NOISY,
    NOT_SELECTED,
    REHEARSED,
    REJECTED,
    SKIPPED,
    WAIVED,
    WITH_WAIVERS,
    Record,
    Verdict,
    counted_as,
)
from pytest_gpucluster.reporting.results import lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.places import Place

VERDICT_CASE = "gpucluster.verdict"
SELFTEST_CASE = "gpucluster.selftest"
SUITE, REHEARSAL_SUITE = "pytest", "gpucluster-rehearsal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One outcome and the test that owed it."""

    nodeid: str
    record: Record


def junit_text(  # noqa: PLR0913 -- all that a report holds
    cases: Iterable[Case],
    verdict: Verdict,
    places: Mapping[str, Place],
    *,
    rehearsal: bool,
    waivers: Sequence[str] = (),
    selftest: Mapping[str, Any] | None = None,
) -> str:
    """The whole file: one testcase an outcome, ``gpucluster.verdict`` last; what was not selected is left out.

    ``waivers``: a line about each, at the top of the file. ``selftest``: what one found, the first testcase.
    """
    testcases = [] if selftest is None else [_selftest_case(selftest)]
    testcases += [_testcase(case) for case in cases if case.record.outcome != NOT_SELECTED]
    hosts = sorted({place.hostname for place in places.values() if place.hostname})
    suite = TestSuite(
        REHEARSAL_SUITE if rehearsal else SUITE,
        [*testcases, _verdict_case(verdict)],
        hostname=hosts[0] if hosts else None,
        properties={"rebuilt_from": "journal.jsonl", **{f"waiver {n}": line for n, line in enumerate(waivers, start=1)}},
    )
    return str(to_xml_report_string([suite]))


def split_nodeid(nodeid: str) -> tuple[str, str]:
    """``tests/test_a.py::test_b[x]`` as (classname, name), the way pytest's own writer does."""
    address, bracket, parameters = nodeid.partition("[")
    names = address.split("::")
    names[0] = names[0].replace("/", ".").removesuffix(".py")
    names[-1] += bracket + parameters
    return ".".join(names[:-1]), names[-1]


def _testcase(case: Case) -> TestCase:
    classname, name = split_nodeid(case.nodeid)
    testcase = TestCase(name, classname=classname)
    outcome = SKIPPED if counted_as(case.record) == WAIVED else case.record.outcome
    _mark(testcase, outcome, case.record.reason or case.record.outcome)
    return testcase


def _selftest_case(facts: Mapping[str, Any]) -> TestCase:
    told = "\n".join(lines(facts))
    testcase = TestCase(SELFTEST_CASE, classname="", stdout=told)
    _mark(testcase, facts["outcome"], told)
    return testcase


def _verdict_case(verdict: Verdict) -> TestCase:
    testcase = TestCase(VERDICT_CASE, classname="")
    outcome = {ACCEPTED: "passed", WITH_WAIVERS: "passed", REJECTED: FAILED, REHEARSED: SKIPPED}.get(verdict.word, ERROR)
    _mark(testcase, outcome, verdict.line)
    return testcase


def _mark(testcase: Any, outcome: str, reason: str) -> None:
    message = reason.splitlines()[0] if reason else outcome
    if outcome == FAILED:
        testcase.add_failure_info(message=message, output=reason)
    elif outcome in (ERROR, MISSING, NOISY):
        testcase.add_error_info(message=message, output=reason, error_type=outcome)
    elif outcome == SKIPPED:
        testcase.add_skipped_info(message=message)
