"""Testcases that no test item stands for, added to pytest's own live JUnit report: the verdict, and what never ran."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_gpucluster.judging.verdict import (
    ACCEPTED,
    FAILED,
    PASSED,
    REHEARSED,
    REJECTED,
    SKIPPED,
    WITH_WAIVERS,
    Record,
    Verdict,
)
from pytest_gpucluster.reporting.junit_file import REHEARSAL_SUITE, SELFTEST_CASE, VERDICT_CASE
from pytest_gpucluster.reporting.results import lines

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class LiveJunit:
    """pytest's junitxml writer of this session; does nothing when ``--junitxml`` was not given."""

    def __init__(self, config: pytest.Config) -> None:
        """Find the writer by its class: pytest registers it without a name."""
        plugins = config.pluginmanager.get_plugins()
        self._writer: Any = next((plugin for plugin in plugins if type(plugin).__name__ == "LogXML"), None)

    def add_missing(self, nodeid: str, why: str) -> None:
        """A planned test that never ran is an error in the report, not an absence."""
        self._add(nodeid, "setup", "failed", why, [("failure_type", "missing")])

    def add_kept(self, nodeid: str, record: Record) -> None:
        """What a round of a soak found, where the run was ended before the test that would report it."""
        if record.outcome == FAILED:
            self._add(nodeid, "call", "failed", record.reason, [])
        else:
            self._add(nodeid, "setup", "failed", record.reason, [("failure_type", record.outcome)])

    def add_waivers(self, lines: Sequence[str]) -> None:
        """At the top of the file, as properties of the suite."""
        for line in lines if self._writer is not None else ():
            self._writer.add_global_property("waiver", line)

    def add_selftest(self, facts: Mapping[str, Any]) -> None:
        """The certificate as a testcase: an error where a plant was missed, skipped where not all could be shown."""
        told = "\n".join(lines(facts))
        findings = [(finding["what"], finding["words"]) for finding in facts["findings"]]
        properties = [("statement", facts["statement"]), *findings]
        if facts["outcome"] == PASSED:
            self._add(SELFTEST_CASE, "call", "passed", None, properties)
        elif facts["outcome"] == SKIPPED:
            self._add(SELFTEST_CASE, "setup", "skipped", ("", 0, told), properties)
        else:
            self._add(SELFTEST_CASE, "setup", "failed", told, properties)

    def add_verdict(self, verdict: Verdict, *, rehearsal: bool) -> None:
        """The last testcase: passed for ACCEPTED, failure for REJECTED, skipped for REHEARSED, else error."""
        if self._writer is None:
            return
        if rehearsal:
            self._writer.suite_name = REHEARSAL_SUITE
        properties = [("verdict", verdict.word)]
        if verdict.word in (ACCEPTED, WITH_WAIVERS):
            self._add(VERDICT_CASE, "call", "passed", None, properties)
        elif verdict.word == REJECTED:
            self._add(VERDICT_CASE, "call", "failed", verdict.line, properties)
        elif verdict.word == REHEARSED:
            self._add(VERDICT_CASE, "setup", "skipped", ("", 0, verdict.line), [*properties])
        else:
            self._add(VERDICT_CASE, "setup", "failed", verdict.line, properties)

    def _add(
        self,
        nodeid: str,
        when: Literal["setup", "call"],
        outcome: Literal["passed", "failed", "skipped"],
        longrepr: Any,
        properties: list[tuple[str, object]] | list[tuple[str, str]],
    ) -> None:
        if self._writer is None:
            return
        phases: list[tuple[Any, Any, Any]] = [(when, outcome, longrepr), ("teardown", "passed", None)]
        for phase, result, text in phases:
            report = pytest.TestReport(
                nodeid=nodeid,
                location=("", None, nodeid),
                keywords={},
                outcome=result,
                longrepr=text,
                when=phase,
                user_properties=list(properties),
            )
            self._writer.pytest_runtest_logreport(report)
