"""From outcomes to JUnit testcases: the one mapping for the file of a running, a finished and a rebuilt run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from xml.etree import ElementTree as ET

from junit_xml import TestCase, TestSuite, to_xml_report_string

from pytest_gpucluster.judging.culprits import first_seen, name_of
from pytest_gpucluster.judging.verdict import (
    ACCEPTED,
    ERROR,
    FAILED,
    MISSING,
    NOISY,
    NOT_SELECTED,
    PASSED,
    REHEARSED,
    REJECTED,
    SIMULATED,
    SKIPPED,
    WAIVED,
    WITH_WAIVERS,
    Record,
    counted_as,
    is_only_measured,
)
from pytest_gpucluster.reporting.results import selftest_lines
from pytest_gpucluster.text import first_line, visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pytest_gpucluster.judging.verdict import Verdict
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.reporting.results import ReportedTest, RunReport

VERDICT_CASE = "gpucluster.verdict"
SELFTEST_CASE = "gpucluster.selftest"
SUITE, REHEARSAL_SUITE = "pytest", "gpucluster-rehearsal"
OWN_TESTS = "only tests of your own were given, so no cluster is judged"
PLACE_PROPERTIES = ("hostname", "rank", "uuid", "serial", "pci")
NOT_MEASURED = (ERROR, NOISY, MISSING)
LINE = "\n<testcase "

Kind = Literal["passed", "failure", "error", "skipped"]
Properties = tuple[tuple[str, str], ...]
KINDS: dict[str, Kind] = {PASSED: "passed", FAILED: "failure", SKIPPED: "skipped", NOT_SELECTED: "skipped", WAIVED: "skipped"}
"""By how an outcome is counted; every other one is an error."""
VERDICT_KINDS: dict[str, Kind] = {ACCEPTED: "passed", WITH_WAIVERS: "passed", REJECTED: "failure", REHEARSED: "skipped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Testcase:
    """One testcase. ``message`` is one line, ``text`` says everything; ``output`` is there also if it passed."""

    nodeid: str
    kind: Kind
    message: str = ""
    text: str = ""
    error_type: str = ERROR
    properties: Properties = ()
    output: str | None = None

    @property
    def names(self) -> tuple[str, str]:
        """(classname, name)."""
        classname, name = names_of(self.nodeid)
        return visible(classname), visible(name)


def names_of(nodeid: str) -> tuple[str, str]:
    """``tests/test_a.py::test_b[x]`` as (classname, name), as pytest's own writer has them before it escapes characters."""
    address, bracket, parameters = nodeid.partition("[")
    names = address.split("::")
    names[0] = names[0].replace("/", ".").removesuffix(".py")
    names[-1] += bracket + parameters
    return ".".join(names[:-1]), names[-1]


def make_fit(element: ET.Element) -> None:
    """Escape what XML cannot hold, in an element and all below it."""
    for one in element.iter():
        one.text = one.text and visible(one.text)
        one.attrib.update({name: visible(value) for name, value in one.attrib.items()})


def junit_text(report: RunReport) -> str:
    """The whole file: one testcase an outcome, the self-test first, ``gpucluster.verdict`` last."""
    text = to_xml_report_string([_Suite(report)], prettyprint=False)  # the pretty one reads its own text once more
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text.replace("<testcase ", LINE)}\n'


def suite_element(report: RunReport) -> ET.Element:
    """The one ``testsuite`` of :func:`junit_text`."""
    return _Suite(report).build_xml_doc()


def properties_of(record: Record, place: Place | None) -> Properties:
    """The properties of a record's testcase: what was judged, where, on which hardware, with which value."""
    facts: dict[str, Any] = {"criterion": record.criterion, "place": record.place}
    facts.update({name: getattr(place, name, None) for name in PLACE_PROPERTIES})
    facts.update(value=record.value, unit=record.unit, limit=record.limit_text, margin_percent=record.margin_percent)
    facts["failure_type"] = record.outcome if record.outcome in NOT_MEASURED else None
    facts["advisory"] = record.message if record.advisory else None
    facts["remark"] = record.remark
    facts["judged"] = "false" if is_only_measured(record) else None
    return tuple((name, str(fact)) for name, fact in facts.items() if fact is not None)


def changes_of(verdict: Verdict) -> Properties:
    """What the run asked for less than was promised, and that its fleet was simulated: JUnit must say it by itself."""
    simulated = (("simulated", SIMULATED),) if verdict.simulated else ()
    limits = (("changed_limit", criterion) for criterion in verdict.changed_limits)
    return (*simulated, *limits, *(("changed_term", term) for term in verdict.changed_terms))


def requirements_of(facts: Mapping[str, Any]) -> Properties:
    """The ids that contracts ask for, each with a criterion that answers it: ``BM01-005 bf16_tflops``."""
    limits: Mapping[str, Any] = facts.get("limits", {})
    return tuple(("requirement", f"{one} {criterion}") for criterion, limit in limits.items() for one in limit["ids"])


class _Suite(TestSuite):  # type: ignore[misc]  # junit-xml ships no types
    """The suite of a report, with the properties that junit-xml cannot carry: of testcases, and several of one name."""

    def __init__(self, report: RunReport) -> None:
        self._testcases = list(_testcases(report))
        places = sorted(report.places.values(), key=lambda place: (place.rank != 0, place.node))
        hosts = [
            place.hostname for place in places if place.hostname
        ]  # the one that writes is that of rank 0, as pytest has it
        name = REHEARSAL_SUITE if report.is_rehearsal else SUITE
        super().__init__(name, [_junit_xml_case(one) for one in self._testcases], hostname=hosts[0] if hosts else None)
        waivers = tuple(("waiver", line) for line in report.waivers)
        self._properties: Properties = (*waivers, *changes_of(report.verdict), *requirements_of(report.facts))
        if report.is_rebuilt:
            self._properties = (("rebuilt_from", "journal.jsonl"), *self._properties)

    def build_xml_doc(self, encoding: str | None = None) -> ET.Element:
        """Add the properties to the elements that junit-xml makes, and escape what XML cannot hold."""
        suite: ET.Element = super().build_xml_doc(encoding)
        for element, testcase in zip(suite.findall("testcase"), self._testcases, strict=True):
            _add_properties(element, testcase.properties)
        _add_properties(suite, self._properties)
        make_fit(suite)
        return suite


def _testcases(report: RunReport) -> Iterator[Testcase]:
    if "selftest" in report.facts:
        yield _selftest_testcase(report.facts["selftest"])
    earlier = first_seen(case.record for case in report.cases)
    for case in report.cases:
        first = earlier.get((case.record.criterion, case.record.place))
        yield from _testcases_of(case, report.places, first=first)
    yield _verdict_testcase(report.verdict)


def _testcases_of(case: ReportedTest, places: Mapping[str, Place], *, first: Record | None) -> Iterator[Testcase]:
    """The testcase of an outcome; a second one if a test that was bad also failed in its teardown; none if it never ran.

    ``first``: the record that had the same error before, whose testcase has the whole text.
    """
    record = case.record
    if record.outcome == NOT_SELECTED and not record.started:
        return
    counted = counted_as(record)
    properties = properties_of(record, places.get(record.place or ""))
    yield Testcase(
        nodeid=case.nodeid,
        kind=KINDS.get(counted, "error"),
        message=record.message if first is None else f"{record.message} (first seen in {name_of(first)})",
        text=(record.text or counted) if first is None else f"{record.message}\n  whole text: see {name_of(first)}",
        error_type=counted,
        properties=properties,
        output="\n".join(filter(None, (record.text if record.advisory else None, record.remark))) or None,
    )
    if record.teardown is not None:
        message = first_line(record.teardown)
        yield Testcase(nodeid=case.nodeid, kind="error", message=message, text=record.teardown, properties=properties)


def _selftest_testcase(facts: Mapping[str, Any]) -> Testcase:
    findings = ((finding["what"], finding["words"]) for finding in facts["findings"])
    told = "\n".join(selftest_lines(facts))
    return Testcase(
        nodeid=SELFTEST_CASE,
        kind=KINDS.get(facts["outcome"], "error"),
        message=facts["statement"],
        text=told,
        properties=(("statement", facts["statement"]), *findings),
        output=told,
    )


def _verdict_testcase(verdict: Verdict) -> Testcase:
    why = f"{OWN_TESTS}: {verdict.line}" if verdict.is_not_asked_for else verdict.line
    return Testcase(
        nodeid=VERDICT_CASE,
        kind="skipped" if verdict.is_not_asked_for else VERDICT_KINDS.get(verdict.word, "error"),
        message=why,
        text=why,
        properties=(("verdict", verdict.word), *changes_of(verdict)),
        output=verdict.line,
    )


def _junit_xml_case(testcase: Testcase) -> TestCase:
    classname, name = testcase.names
    case = TestCase(name, classname=classname, stdout=testcase.output)
    if testcase.kind == "failure":
        case.add_failure_info(message=testcase.message, output=testcase.text)
    elif testcase.kind == "error":
        case.add_error_info(message=testcase.message, output=testcase.text, error_type=testcase.error_type)
    elif testcase.kind == "skipped":
        case.add_skipped_info(message=testcase.message, output=testcase.text)
    return case


def _add_properties(element: ET.Element, properties: Properties) -> None:
    """Add a first child ``properties``, if there are any."""
    if properties:
        node = ET.Element("properties")
        node.extend(ET.Element("property", {"name": name, "value": value}) for name, value in properties)
        element.insert(0, node)
