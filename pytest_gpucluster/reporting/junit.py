"""From outcomes to JUnit testcases: the one mapping for the file of a running, a finished and a rebuilt run.

How many there are: one a place, one a node, or one a criterion; what is bad is never left out. The readers of large clusters
have limits: GitLab refuses files of 30 MB and was seen to refuse 250,000 XML elements
(https://docs.gitlab.com/ci/testing/unit_test_reports, gitlab-org/gitlab#507482).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree as ET

from junit_xml import TestCase, TestSuite

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging import waivers
from pytest_gpucluster.judging.culprits import find_culprits, first_seen, name_of
from pytest_gpucluster.judging.verdict import (
    ACCEPTED,
    ERROR,
    FAILED,
    NOT_SELECTED,
    PASSED,
    REHEARSED,
    REJECTED,
    SIMULATED,
    SKIPPED,
    UNMEASURED,
    WAIVED,
    WITH_WAIVERS,
    Record,
    Verdict,
    counted_as,
    is_only_measured,
)
from pytest_gpucluster.places import Place
from pytest_gpucluster.reporting.results import ReportedTest, RunReport, selftest_lines, words_of_parts
from pytest_gpucluster.text import counted, first_line, visible

MOST_BY_PLACE = 20_000
"""With more testcases than these there is one a node, where nobody asks for another form."""
MOST_ELEMENTS = 200_000
"""With more XML elements than these the testcases have no properties: four fifths of what GitLab was seen to refuse."""

Kind = Literal["passed", "failure", "error", "skipped"]
Properties = tuple[tuple[str, str], ...]
WORST_FIRST: tuple[Kind, ...] = ("failure", "error", "skipped", "passed")
SAID: dict[Kind, str] = {"failure": "failed", "error": "not measured", "skipped": "skipped"}
VERDICT_CASE = "gpucluster.verdict"
SELFTEST_CASE = "gpucluster.selftest"
OWN_CLASS = "gpucluster"
"""The class name of what is of no file: readers group testcases by it."""
SUITE, REHEARSAL_SUITE = "pytest", "gpucluster-rehearsal"
OWN_TESTS = "only tests of your own were given, so no cluster is judged"
PLACE_PROPERTIES = ("hostname", "rank", "uuid", "serial", "pci")
SHARED_PROPERTIES = frozenset({"criterion", "place", *PLACE_PROPERTIES, "unit", "limit"})
"""Those that every test of a place has, or every test of a criterion."""
LINE = "\n<testcase "
COUNTED = ("disabled", "errors", "failures", "tests", "time")
STRICT_NAMES = ("name", "time", "classname")
"""The attributes of a testcase that every schema knows."""

KINDS: dict[str, Kind] = {PASSED: "passed", FAILED: "failure", SKIPPED: "skipped", NOT_SELECTED: "skipped", WAIVED: "skipped"}
"""By how an outcome is counted; every other one is an error."""
VERDICT_KINDS: dict[str, Kind] = {ACCEPTED: "passed", WITH_WAIVERS: "passed", REJECTED: "failure", REHEARSED: "skipped"}


class Testcase(NamedTuple):
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
        has_class = classname or "::" in self.nodeid  # pytest gives a file outside its root folder no name
        return visible(classname) if has_class else OWN_CLASS, visible(name)


class JudgedCase(NamedTuple):
    """A testcase of one outcome, with its record, before it is folded with those of other places."""

    testcase: Testcase
    record: Record


def names_of(nodeid: str) -> tuple[str, str]:
    """``tests/test_a.py::test_b[x]`` as (classname, name), as pytest's own writer has them before it escapes characters."""
    address, bracket, parameters = nodeid.partition("[")
    names = address.split("::")
    names[0] = names[0].replace("/", ".").removesuffix(".py")
    names[-1] += bracket + parameters
    return ".".join(names[:-1]), names[-1]


def form_of(asked: str | None, number: int) -> str:
    """``place``, ``node`` or ``criterion``: what was asked for, else by how many testcases there are, one a place."""
    return asked or ("place" if number <= MOST_BY_PLACE else "node")


def are_few(testcases: Sequence[Testcase]) -> bool:
    """Whether the XML elements of these testcases, properties included, are few enough for every reader."""
    return sum(4 + len(one.properties) for one in testcases) <= MOST_ELEMENTS


def folded_nodeid(nodeid: str, place: Place | None, form: str) -> str:
    """The node id of the testcase that an outcome is in: of ``test_b[x-node3-gpu5]`` ``test_b[x-node3]`` or ``test_b[x]``."""
    address, bracket, parameters = nodeid.partition("[")
    if form == "place" or place is None or not bracket or not parameters.endswith("]"):
        return nodeid
    node = f"node{place.node}" if form == "node" else ""
    before, found, after = f"-{parameters[:-1]}-".partition(f"-{place.id}-")  # no pattern: each place would need its own
    joined = before + (f"-{node}-" if node else "-") + after if found else before
    words = joined[1:-1].removeprefix("-")
    return f"{address}[{words}]" if words else address


def folded(cases: Iterable[JudgedCase], places: Mapping[str, Place], form: str) -> list[Testcase]:
    """One testcase for all outcomes of a criterion at a node, or of a criterion, in their order.

    Its kind is that of the worst of them. Its message names the worst place, its text lists every place that did not pass.
    """
    keyed = ((folded_nodeid(one.testcase.nodeid, places.get(one.record.place or ""), form), one) for one in cases)
    groups = grouped(((case.record.criterion, nodeid), case) for nodeid, case in keyed)
    return [_fold(nodeid, group, places) for (_, nodeid), group in groups.items()]


def _fold(nodeid: str, group: Sequence[JudgedCase], places: Mapping[str, Place]) -> Testcase:
    worst = min(group, key=_badness)
    one = worst.testcase
    others = [case for case in group if case.testcase.kind != "passed"]
    if len(group) == 1:
        return one._replace(nodeid=nodeid)
    outputs = [f"{_where(case, places)}: {case.testcase.output}" for case in group if case.testcase.output is not None]
    listed = [f"{SAID[case.testcase.kind]}: {_said(case, places)}" for case in others]
    kinds = Counter(case.testcase.kind for case in others)
    counts = ", ".join(f"{kinds[kind]} of {len(group)} {SAID[kind]}" for kind in WORST_FIRST if kinds[kind])
    return Testcase(
        nodeid=nodeid,
        kind=one.kind,
        message=f"{counts}; the worst: {_said(worst, places)}" if others else "",
        text="\n".join([*listed, "", f"{_where(worst, places)}:", one.text]),
        error_type=one.error_type,
        output="\n".join(outputs) or None,
    )


def _badness(case: JudgedCase) -> tuple[int, float]:
    """Smaller is worse: by kind, then by how far outside its limit the value is."""
    margin = case.record.margin_percent
    return WORST_FIRST.index(case.testcase.kind), margin if margin is not None else 0.0


def _said(case: JudgedCase, places: Mapping[str, Place]) -> str:
    """The message of a testcase, which names its place."""
    where, message = _where(case, places), case.testcase.message
    return message if where in message else f"{where}: {message}"


def _where(case: JudgedCase, places: Mapping[str, Place]) -> str:
    name = case.record.place
    return "the cluster" if name is None else places[name].named if name in places else name


def make_fit(element: ET.Element) -> None:
    """Escape what XML cannot hold, in an element and all below it."""
    for one in element.iter():
        one.text = one.text and visible(one.text)
        one.attrib.update({name: visible(value) for name, value in one.attrib.items() if not value.isprintable()})


def junit_text(report: RunReport) -> str:
    """The whole file: one testcase an outcome, a node or a criterion, the self-test first, ``gpucluster.verdict`` last."""
    suite = suite_element(report)
    root = ET.Element("testsuites", {name: suite.attrib[name] for name in COUNTED if name in suite.attrib})
    root.append(suite)
    text = ET.tostring(root, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text.replace("<testcase ", LINE)}\n'


def folded_names(report: RunReport) -> dict[tuple[str, str], tuple[str, str]]:
    """(classname, name) of the testcase that a test is part of in this file, by those that pytest gives the test."""
    form = form_of(report.junit.form, sum(map(_count, report.cases)))
    if form == "place":
        return {}
    placed = ((case.nodeid, report.places.get(case.record.place or "")) for case in report.cases)
    return {names_of(nodeid): names_of(folded_nodeid(nodeid, place, form)) for nodeid, place in placed}


def strictly(element: ET.Element) -> None:
    """Take out of a suite, or of a testcase, what the xUnit schema of Jenkins forbids (junit-10.xsd of its xunit plugin)."""
    for case in element.iter("testcase"):
        for properties in case.findall("properties"):
            case.remove(properties)
        for name in {*case.attrib} - {*STRICT_NAMES}:
            del case.attrib[name]
    element.attrib.pop("disabled", None)


def properties_of(record: Record, place: Place | None) -> Properties:
    """The properties of a record's testcase: what was judged, where, on which hardware, with which value."""
    facts: dict[str, Any] = {"criterion": record.criterion, "place": record.place}
    facts.update({name: getattr(place, name, None) for name in PLACE_PROPERTIES})
    facts.update(value=record.value, unit=record.unit, limit=record.limit_text, margin_percent=record.margin_percent)
    facts["failure_type"] = record.outcome if record.outcome in UNMEASURED else None
    facts["advisory"] = record.message if record.advisory else None
    facts["remark"] = record.remark
    facts["judged"] = "false" if is_only_measured(record) else None
    facts["part"] = record.part if record.part > 1 else None
    known = ((name, str(fact)) for name, fact in facts.items() if fact is not None)
    return tuple(_shared(*one) if one[0] in SHARED_PROPERTIES else one for one in known)


@functools.lru_cache(maxsize=1 << 14)
def _shared(name: str, fact: str) -> tuple[str, str]:
    """One object for a property that many tests have."""
    return name, fact


def changes_of(verdict: Verdict) -> Properties:
    """What the run asked for less than was promised, and that its fleet was simulated: JUnit must say it by itself."""
    simulated = (("simulated", SIMULATED),) if verdict.terms.simulated else ()
    limits = (("changed_limit", criterion) for criterion in verdict.terms.changed_limits)
    return (*simulated, *limits, *(("changed_term", term) for term in verdict.terms.changed_terms))


def requirements_of(facts: Mapping[str, Any]) -> Properties:
    """The ids that contracts ask for, each with a criterion that answers it: ``BM01-005 bf16_tflops``."""
    limits: Mapping[str, Any] = facts.get("limits", {})
    return tuple(("requirement", f"{one} {criterion}") for criterion, limit in limits.items() for one in limit["ids"])


def suite_element(report: RunReport) -> ET.Element:
    """The one ``testsuite`` of :func:`junit_text`.

    With the properties that junit-xml cannot carry: of testcases, and several of one name.
    """
    form = form_of(report.junit.form, sum(map(_count, report.cases)))
    is_by_suite = form != "place" or report.junit.is_strict
    judged = _judged(report, with_properties=not is_by_suite)
    own = [one.testcase for one in judged] if form == "place" else folded(judged, report.places, form)
    if not (is_by_suite or are_few(own)):
        is_by_suite, own = True, [one._replace(properties=()) for one in own]
    selftest = [_selftest_testcase(report.facts["selftest"])] if "selftest" in report.facts else []
    testcases = [*selftest, *own, verdict_testcase(report)]
    places = sorted(report.places.values(), key=lambda place: (place.rank != 0, place.node))
    host = next((place.hostname for place in places if place.hostname), None)  # that of rank 0, which writes
    name = REHEARSAL_SUITE if report.is_rehearsal else SUITE
    suite: ET.Element = TestSuite(name, [*map(_junit_xml_case, testcases)], hostname=host).build_xml_doc()
    for element, testcase in zip(suite.findall("testcase"), testcases, strict=True):
        _add_properties(element, testcase.properties)
    _add_properties(suite, _suite_properties(report, is_by_suite=is_by_suite))
    if report.junit.is_strict:
        strictly(suite)
    make_fit(suite)
    return suite


def _suite_properties(report: RunReport, *, is_by_suite: bool) -> Properties:
    """Those of the whole file; ``is_by_suite``: its testcases have none of their own."""
    rebuilt = [("rebuilt_from", "journal.jsonl")] if report.is_rebuilt else []
    verdict = [("verdict", report.verdict.word)] if is_by_suite else []
    waived = (("waiver", line) for line in waivers.lines_of(report.facts.get("waivers", [])))
    ran = ((f"part {number}", words) for number, words in enumerate(words_of_parts(report.facts), start=1))
    parts = (("place", place.label) for place in report.places.values() if is_by_suite and place.gpu is not None)
    return (*rebuilt, *verdict, *waived, *changes_of(report.verdict), *requirements_of(report.facts), *ran, *parts)


def _judged(report: RunReport, *, with_properties: bool) -> Iterator[JudgedCase]:
    """A testcase of each outcome, in the order of the plan; the file may have no properties but those of its suite."""
    earlier = first_seen(case.record for case in report.cases)
    for case in report.cases:
        first = earlier.get((case.record.criterion, case.record.place))
        properties = properties_of(case.record, report.places.get(case.record.place or "")) if with_properties else ()
        for testcase in _testcases_of(case, properties, first=first):
            yield JudgedCase(testcase, case.record)


def _count(case: ReportedTest) -> int:
    """How many testcases :func:`_testcases_of` makes."""
    return 0 if _never_ran(case.record) else 1 + (case.record.teardown is not None)


def _never_ran(record: Record) -> bool:
    return record.outcome == NOT_SELECTED and not record.started


def _testcases_of(case: ReportedTest, properties: Properties, *, first: Record | None) -> Iterator[Testcase]:
    """The testcase of an outcome; a second one if a test that was bad also failed in its teardown; none if it never ran.

    ``first``: the record that had the same error before, whose testcase has the whole text.
    """
    record = case.record
    if _never_ran(record):
        return
    counted = counted_as(record)
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


def verdict_testcase(report: RunReport) -> Testcase:
    """The testcase of the verdict, the same for every reporter. Its text names every bad part of a rejected cluster."""
    verdict = report.verdict
    why = f"{OWN_TESTS}: {verdict.line}" if verdict.is_not_asked_for else verdict.line
    return Testcase(
        nodeid=VERDICT_CASE,
        kind="skipped" if verdict.is_not_asked_for else VERDICT_KINDS.get(verdict.word, "error"),
        message=why,
        text="\n".join([why, *_bad_parts(report)]),
        properties=(("verdict", verdict.word), *changes_of(verdict)),
        output=verdict.line,
    )


def _bad_parts(report: RunReport) -> list[str]:
    """Of a rejected cluster: a line for each part that is to blame, and for each bad outcome that blames none."""
    if report.verdict.word != REJECTED:
        return []  # the verdict's line says what is open
    lines, blamed = [], set()
    for one in find_culprits((case.record for case in report.cases), report.places):
        where = report.places[one.place].label if one.place is not None else counted(len(one.places), "place")
        lines.append(f"bad: {where}: {', '.join(one.criteria)}: {next(iter(one.evidence), one.advice)}")
        blamed |= {id(record) for record in one.records}
    left = (case.record for case in report.cases if id(case.record) not in blamed)
    bad = (record for record in left if KINDS.get(counted_as(record), "error") in ("failure", "error"))
    return [*lines, *(f"bad: {name_of(record)}: {record.message}" for record in bad)]


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
