"""One run, three JUnit files: while it goes on, by pytest at its end, and from its journal. They say the same."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest
from _pytest.junitxml import LogXML

from pytest_gpucluster.judging.plan import Plan
from pytest_gpucluster.judging.verdict import Record, Terms, Verdict, decide
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin.junit import finish_junit, keep_less
from pytest_gpucluster.records.reading import run_identity
from pytest_gpucluster.reporting.junit import SELFTEST_CASE, VERDICT_CASE, junit_text, properties_of, suite_element
from pytest_gpucluster.reporting.rebuild import rebuild
from pytest_gpucluster.reporting.recorder import Recorder, RunStatus
from pytest_gpucluster.reporting.results import JunitForm, ReportedTest, RunReport, place_facts
from tests.support.entries import limit

if TYPE_CHECKING:
    from pathlib import Path

HOT = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname="gpu-node-0", uuid="GPU-6f1c", serial="1654", pci="61:00.0")
GONE = Place(id="node0-gpu1", node=0, gpu=1)
NODE = Place(id="node0", node=0, hostname="gpu-node-0")
PLACES = {place.id: place for place in (HOT, GONE, NODE)}
WAIVER = {"criterion": "loss", "place": None, "until": "2099-12-31", "who": "J. Doe", "why": "RMA", "where": "waivers.yaml:3"}
SELFTEST = {
    "outcome": "skipped",
    "statement": "three of four plants were found",
    "remarks": ["a slow GPU cannot be shown"],
    "objections": [],
    "findings": [{"what": "dead", "words": "4 of 4"}],
}
FACTS: dict[str, Any] = {
    "level": "quick",
    "profile": "h200-sxm",
    "expected": {"nodes": 1, "gpus_per_node": 2},
    "thresholds_sha256": "0" * 64,
    "changed_limits": [],
    "waivers": [{**WAIVER, "state": "used"}],
}
CRASH = "ZeroDivisionError: division by zero"
FAILURE = "tflops at node0-gpu0: 498 TFLOPS, not above 700 TFLOPS\n  why: the handover's limit"
TRACEBACK = "def test_crash():\n>   1 / 0\nE   " + CRASH
STARTED = tuple(
    replace(record, started=True)
    for record in (
        Record(criterion="rate", place=HOT.id, outcome="passed", value=742.5, limit=limit(), margin_percent=6.1),
        Record(criterion="tflops", place=HOT.id, outcome="failed", value=498.0, limit=limit(), reason=FAILURE),
        Record(criterion="lost", place=GONE.id, outcome="error", limit=limit(), reason="rank 1 was lost\nmore"),
        Record(criterion="rule", place=None, outcome="skipped", reason="needs 2 nodes, and 1 is expected"),
        Record(criterion="noise", place=HOT.id, outcome="noisy", value=701.0, limit=limit(), reason="too close"),
        Record(criterion="hint", place="node0", outcome="passed", value=1.0, limit=limit(), reason="low", advisory=True),
        Record(criterion="crash", place=None, outcome="error", reason=TRACEBACK, headline=CRASH),
        Record(criterion="twice", place=None, outcome="failed", reason="bad", teardown="its teardown failed: OSError"),
        Record(criterion="itself", place=None, outcome="not_selected", reason="it skipped itself: not today"),
        Record(criterion="loss", place=None, outcome="failed", waivable=True, waiver=WAIVER, reason="waived: by J. Doe"),
    )
)
NEVER_RUN = (
    Record(criterion="odd \x1b\ud800\ufffe", place=HOT.id, outcome="missing", reason="not run \x00: terminated by SIGTERM"),
    Record(criterion="else", place=None, outcome="not_selected", reason="not among the tests that were selected"),
)
KINDS = {
    "rate": ["passed"],
    "tflops": ["failure"],
    "lost": ["error"],
    "rule": ["skipped"],
    "noise": ["error"],
    "hint": ["passed"],
    "crash": ["error"],
    "twice": ["failure", "error"],
    "itself": ["skipped"],
    "loss": ["skipped"],
    r"odd \x1b\ud800\ufffe": ["error"],
}


@dataclass(frozen=True)
class Found:
    """A testcase as a reader sees it."""

    classname: str
    name: str
    kind: str
    message: str
    text: str
    properties: tuple[tuple[str, str], ...]


def nodeid(record: Record) -> str:
    """The test that judges this."""
    return f"tests/test_rates.py::TestRates::test_{record.criterion}[{record.place}]"


def cases_of(suite: ET.Element) -> list[Found]:
    """All but the verdict, which is another while the run goes on."""
    return [_found(element) for element in suite.iter("testcase") if element.get("name") != "gpucluster.verdict"]


def _found(element: ET.Element) -> Found:
    result = next((child for child in element if child.tag in ("failure", "error", "skipped")), None)
    return Found(
        classname=element.get("classname", ""),
        name=element.get("name", ""),
        kind=result.tag if result is not None else "passed",
        message=result.get("message", "") if result is not None else "",
        text=(result.text or "") if result is not None else "",
        properties=tuple((one.attrib["name"], one.attrib["value"]) for one in element.findall("properties/property")),
    )


def reports(record: Record) -> list[pytest.TestReport]:
    """What pytest tells its writer of a test; the texts are not those of the record."""
    when, outcome, text = {
        "passed": ("call", "passed", None),
        "failed": ("call", "failed", "pytest's own text"),
        "skipped": ("setup", "skipped", ("file.py", 3, "Skipped: pytest's own text")),
        "not_selected": ("call", "skipped", ("file.py", 3, "Skipped: pytest's own text")),
    }.get(record.outcome, ("setup", "failed", "pytest's own text"))
    phases: list[tuple[Any, Any, Any]] = [(when, outcome, text)]
    phases.append(("teardown", "failed" if record.teardown else "passed", "in the teardown" if record.teardown else None))
    return [
        pytest.TestReport(
            nodeid=nodeid(record),
            location=("tests/test_rates.py", 3, "test"),
            keywords={},
            outcome=result,
            longrepr=words,
            when=phase,
            user_properties=[("criterion", "changed meanwhile")],
            sections=[("Captured stdout call", "printed")],
            duration=1.5,
        )
        for phase, result, words in phases
    ]


def interrupted(record: Record) -> pytest.TestReport:
    """The last that pytest tells its writer of a test in whose body a signal came."""
    return pytest.TestReport(
        nodeid=nodeid(record), location=("", 3, "test"), keywords={}, outcome="passed", longrepr=None, when="setup"
    )


def written_by_pytest(file: Path, report: RunReport, *, prefix: str | None = None) -> ET.Element:
    """The file of pytest's writer, which saw the tests that were started."""
    writer = LogXML(str(file), prefix, logging="all")
    writer.pytest_sessionstart()
    for record in STARTED:
        for one in reports(record):
            writer.pytest_runtest_logreport(one)
    writer.pytest_runtest_logreport(interrupted(NEVER_RUN[0]))
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugins=lambda: [writer]))
    finish_junit(config, report)
    writer.pytest_sessionfinish()
    return ET.parse(file).getroot()[0]  # noqa: S314 -- our own file


@dataclass(frozen=True)
class Run:
    """The suites of one run's files."""

    live: ET.Element
    final: ET.Element
    rebuilt: ET.Element
    verdict: Verdict


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run with every outcome."""
    return run_in(tmp_path, JunitForm())


def run_in(tmp_path: Path, junit: JunitForm) -> Run:
    """A run with every outcome, of whose files this was asked."""
    plan = Plan()
    terms = Terms(rehearsal=False, level_reached=True)
    facts = {**FACTS, "selftest": SELFTEST, "environment": {}, "timings": {"total_s": 1.0}}
    recorder = Recorder(plan, status=lambda: RunStatus(terms=terms, places=PLACES, facts=facts, junit=junit))
    settings = {"junit": str(junit.form), "junit_strict": str(junit.is_strict)}
    for record in (*STARTED, NEVER_RUN[0]):
        plan.expect(record.criterion, record.place, nodeid=nodeid(record))
    recorder.open(tmp_path / "results", junit=tmp_path / "live.xml")
    recorder.write("started", versions={}, facts=FACTS, settings=settings)
    recorder.record_plan()
    recorder.write("bound", places=[place_facts(HOT), place_facts(GONE)], nodes=[place_facts(NODE)], unheard={})
    recorder.record_selftest(SELFTEST)
    for record in (*STARTED, *NEVER_RUN):
        recorder.record_outcome(record)
    recorder.catch_up()
    live = ET.parse(tmp_path / "live.xml").getroot()[0]  # noqa: S314 -- our own file
    verdict = decide(plan, terms)
    final = written_by_pytest(tmp_path / "final.xml", recorder.report(verdict))
    assert recorder.finish(verdict) is None
    recorder.close()
    rebuild(tmp_path / "results", junit=tmp_path / "rebuilt.xml")
    rebuilt = ET.parse(tmp_path / "rebuilt.xml").getroot()[0]  # noqa: S314 -- our own file
    return Run(live=live, final=final, rebuilt=rebuilt, verdict=verdict)


@pytest.mark.parametrize("set_by_s", [3600.0, -3600.0])
def test_a_clock_that_is_set_makes_no_run_longer(monkeypatch: pytest.MonkeyPatch, set_by_s: float) -> None:
    """Nor does a run end before it began."""
    terms, facts = Terms(rehearsal=False, level_reached=True), {**FACTS, "run": run_identity("aa"), "environment": {}}
    recorder, began_s = Recorder(Plan(), status=lambda: RunStatus(terms=terms, places=PLACES, facts=facts)), time.monotonic()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + set_by_s)
    ran = recorder.report(decide(Plan(), terms)).facts["run"]
    assert 0 <= ran["duration_s"] <= time.monotonic() - began_s + 1
    assert ran["ended"] >= ran["started"]


def test_the_three_files_agree(run: Run) -> None:
    """Testcase by testcase: names, kind, message, text, properties, in one order."""
    live = cases_of(run.live)
    assert cases_of(run.final) == live
    assert cases_of(run.rebuilt) == live
    kinds: dict[str, list[str]] = {}
    for found in live[1:]:
        kinds.setdefault(found.name.removeprefix("test_").partition("[")[0], []).append(found.kind)
    assert kinds == KINDS


@pytest.mark.parametrize("form", ["place", "node", "criterion"])
@pytest.mark.parametrize("schema", ["strict", "usual"])
def test_the_three_files_agree_in_every_form(tmp_path: Path, form: str, schema: str) -> None:
    """What was asked of the file is in the journal too."""
    is_strict = schema == "strict"
    run = run_in(tmp_path, JunitForm(form=form, is_strict=is_strict))
    live = cases_of(run.live)
    assert cases_of(run.final) == live
    assert cases_of(run.rebuilt) == live
    places = {"place": "[node0-gpu0]", "node": "[node0]", "criterion": ""}
    assert f"test_rate{places[form]}" in {case.name for case in live}
    for suite in (run.live, run.final, run.rebuilt):
        told = [*suite.findall("testcase/properties")]
        assert bool(told) != is_strict
        assert len(told) <= 2 or form == "place"


def test_what_a_testcase_says(run: Run) -> None:
    """Value and hardware also of what passed; one line as the message; the exception where a traceback is the reason."""
    found = {case.name: case for case in cases_of(run.live)}
    assert dict(found["test_rate[node0-gpu0]"].properties) == {
        "criterion": "rate",
        "place": "node0-gpu0",
        "hostname": "gpu-node-0",
        "rank": "0",
        "uuid": "GPU-6f1c",
        "serial": "1654",
        "pci": "61:00.0",
        "value": "742.5",
        "unit": "TFLOPS",
        "limit": "> 700 TFLOPS",
        "margin_percent": "6.1",
    }
    failed = found["test_tflops[node0-gpu0]"]
    assert (failed.message, failed.text) == (FAILURE.splitlines()[0], FAILURE)
    assert failed.classname == "tests.test_rates.TestRates"
    assert found["test_crash[None]"].message == CRASH
    assert dict(found["test_noise[node0-gpu0]"].properties)["failure_type"] == "noisy"


def test_every_testcase_has_a_class(run: Run) -> None:
    """GitLab, Jenkins and Azure group testcases by it; the verdict and the self-test are in no file, and are ours."""
    for suite in (run.live, run.final, run.rebuilt):
        names = {element.get("name"): element.get("classname") for element in suite.iter("testcase")}
        assert all(names.values())
        assert {names[name] for name in (VERDICT_CASE, SELFTEST_CASE)} == {"gpucluster"}


def test_the_last_testcase_is_the_verdict(run: Run) -> None:
    """That of the ended run in two of the files; INCOMPLETE or REJECTED in the file of a run that goes on."""
    last = [list(suite.iter("testcase"))[-1] for suite in (run.live, run.final, run.rebuilt)]
    found = [_found(element) for element in last]
    assert {one.name for one in found} == {"gpucluster.verdict"}
    assert found[1] == found[2]
    assert (found[1].kind, found[1].message) == ("failure", run.verdict.line)
    assert "the run has not ended" in found[0].message


def test_only_a_rebuilt_file_says_so(run: Run) -> None:
    """The waivers stand at the top of all three."""
    told = [[(one.get("name"), one.get("value")) for one in s.findall("properties/property")] for s in (run.live, run.final)]
    assert told[0] == told[1]
    assert [name for name, _ in told[0]] == ["waiver"]
    rebuilt = [one.get("name") for one in run.rebuilt.findall("properties/property")]
    assert rebuilt == ["rebuilt_from", "waiver"]


def test_counts_are_those_of_the_testcases(run: Run) -> None:
    """In the attributes of each suite."""
    for suite in (run.live, run.final, run.rebuilt):
        kinds = [_found(element).kind for element in suite.iter("testcase")]
        for kind, attribute in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert int(suite.attrib[attribute]) == kinds.count(kind)
        assert int(suite.attrib["tests"]) == len(kinds)


def test_pytest_adds_what_it_alone_knows(run: Run) -> None:
    """Time and captured output."""
    rate = next(element for element in run.final.iter("testcase") if element.get("name") == "test_rate[node0-gpu0]")
    assert float(rate.attrib["time"]) == 3.0
    assert "printed" in "".join(one.text or "" for one in rate.findall("system-out"))


def test_a_prefix_and_testcases_of_nobody(tmp_path: Path) -> None:
    """``--junitprefix`` is kept, and what only pytest knows stays in its file."""
    verdict = decide(STARTED, Terms(rehearsal=True, level_reached=True))
    cases = tuple(ReportedTest(nodeid=nodeid(record), record=record) for record in STARTED[:1])
    report = RunReport(cases=cases, verdict=verdict, places=PLACES, facts=FACTS, is_rehearsal=True)
    suite = written_by_pytest(tmp_path / "final.xml", report, prefix="site")
    names = [(element.get("classname"), element.get("name")) for element in suite.iter("testcase")]
    assert len(names) == len(STARTED) + 2
    assert names[-2:] == [
        ("site.tests.test_rates.TestRates", "test_rate[node0-gpu0]"),
        ("site.gpucluster", "gpucluster.verdict"),
    ]
    assert suite.get("name") == "gpucluster-rehearsal"


def test_any_text_is_xml() -> None:
    """What a test hands over must not end the run that writes about it."""
    record = replace(STARTED[1], reason="\ud800\x1b\x00\ufffe]]>&<\r\n", evidence={"odd": "\ud800"})
    verdict = decide([record], Terms(rehearsal=False, level_reached=True))
    case = ReportedTest(nodeid="t.py::t[\ud800\x01]", record=record)
    report = RunReport(cases=(case,), verdict=verdict, places=PLACES, facts={}, is_rehearsal=False)
    whole = ET.fromstring(junit_text(report))[0]  # noqa: S314 -- our own text
    assert cases_of(whole) == cases_of(suite_element(report))
    assert cases_of(whole)[0].message == r"\ud800\x1b\x00\ufffe]]>&<"


def test_an_acceptance_says_in_the_junit_what_it_asked_less() -> None:
    """Changed limits and terms stand at the suite and at the verdict's testcase, which shows the whole line."""
    record = Record(criterion="rate", place=None, outcome="passed")
    terms = Terms(
        rehearsal=False,
        level_reached=True,
        changed_limits=[f"limit{number}" for number in range(5)],
        changed_terms=["fabric sockets instead of infiniband"],
    )
    verdict = decide([record], terms)
    assert verdict.word == "ACCEPTED"
    case = ReportedTest(nodeid="test_a.py::test_rate", record=record)
    report = RunReport(cases=(case,), verdict=verdict, places=PLACES, facts={}, is_rehearsal=False)
    suite = suite_element(report)
    last = suite.findall("testcase")[-1]
    for element in (suite, last):
        named = [(one.get("name"), one.get("value")) for one in element.findall("properties/property")]
        assert [value for name, value in named if name == "changed_limit"] == [f"limit{number}" for number in range(5)]
        assert ("changed_term", "fabric sockets instead of infiniband") in named
    assert last.findtext("system-out") == verdict.line


def test_what_passed_with_a_remark_shows_it() -> None:
    """As a property and as output: a passed testcase has no other text."""
    alone = "compared with itself over 5 rounds; no other GPU to compare with"
    hint = Record(criterion="hint", place=HOT.id, outcome="passed", reason="low: 3 %\n  why: x", advisory=True, started=True)
    rows = (hint, replace(hint, criterion="bits", advisory=False, reason=None, remark=alone))
    verdict = decide(rows, Terms(rehearsal=False, level_reached=True))
    cases = tuple(ReportedTest(nodeid=nodeid(row), record=row) for row in rows)
    suite = suite_element(RunReport(cases=cases, verdict=verdict, places=PLACES, facts=FACTS, is_rehearsal=False))
    first, second = suite.findall("testcase")[:2]
    properties = [{one.get("name"): one.get("value") for one in case.iter("property")} for case in (first, second)]
    assert (properties[0]["advisory"], properties[1]["remark"]) == ("advisory: low: 3 %", alone)
    assert ("remark" in properties[0], "advisory" in properties[1]) == (False, False)
    assert first.findtext("system-out") == "advisory: low: 3 %\n  why: x"
    assert second.findtext("system-out") == alone


@pytest.mark.parametrize(("kind", "value", "judged"), [("above", 0, "false"), ("above", 1, None), ("max", 0, None)])
def test_what_has_no_limit_was_not_judged(kind: Any, value: float, judged: str | None) -> None:
    """Whoever reads only the JUnit is told that the value was measured, and by no number."""
    record = Record(criterion="scratch_read", place=None, outcome="passed", value=5.0, limit=limit(kind, value))
    assert dict(properties_of(record, None)).get("judged") == judged


def test_the_same_error_is_written_once() -> None:
    """Every message names the cause; the text is at the first testcase, and the others say which that is."""
    lost = Record(criterion="sum", place=None, outcome="error", reason="rank 1: died\n  stack", cause="died", started=True)
    rows = (lost, replace(lost, criterion="max"), replace(lost, criterion="min", place="node0"))
    verdict = decide(rows, Terms(rehearsal=False, level_reached=True))
    cases = tuple(ReportedTest(nodeid=nodeid(row), record=row) for row in rows)
    found = cases_of(suite_element(RunReport(cases=cases, verdict=verdict, places=PLACES, facts=FACTS, is_rehearsal=False)))
    assert [case.message for case in found] == ["rank 1: died", *["rank 1: died (first seen in sum)"] * 2]
    assert ["stack" in case.text for case in found] == [True, False, False]
    assert all("rank 1: died" in case.text for case in found)


@pytest.mark.parametrize("family", ["xunit1", "xunit2"])
@pytest.mark.parametrize("logging", ["no", "all"])
@pytest.mark.parametrize("prefix", [None, "site"])
def test_what_pytest_need_not_keep(run: Run, tmp_path: Path, prefix: str | None, logging: Any, family: Any) -> None:
    """The file is the same, to what tests recorded and printed; of a test that only passed no element is kept."""
    report = RunReport(
        cases=tuple(ReportedTest(nodeid=nodeid(record), record=record) for record in STARTED),
        verdict=run.verdict, places=PLACES, facts={**FACTS, "environment": {}, "timings": {}}, is_rehearsal=False,
    )  # fmt: skip
    files = []
    for keeps_less in (False, True):
        writer = LogXML(str(tmp_path / "file.xml"), prefix, logging=logging, family=family)
        config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugins=lambda writer=writer: [writer]))
        own: set[tuple[str, object]] = set()
        if keeps_less:
            keep_less(config, lambda own=own: own)
        writer.pytest_sessionstart()
        for record in STARTED:
            ours = properties_of(record, PLACES.get(record.place or ""))
            own.clear()
            own.update(ours)
            for one in reports(record):
                one.user_properties = [*ours, *([("mine", "1")] if record.criterion == "hint" else [])]
                writer.pytest_runtest_logreport(one)
                assert one.user_properties[: len(ours)] == [*ours]  # other reporters see them all
        kept = [one for one in writer.node_reporters_ordered if isinstance(one.to_xml(), ET.Element)]
        assert len(kept) == len(writer.node_reporters_ordered)
        plain = [one for one in kept if type(one).__name__ == "_Plain"]
        is_expected = keeps_less and logging == "no" and family == "xunit2"
        assert bool(plain) == is_expected
        assert sum(len(one.to_xml().findall("properties/property")) for one in kept) == 1 or not keeps_less
        finish_junit(config, report)
        writer.pytest_sessionfinish()
        suite = ET.parse(tmp_path / "file.xml").getroot()[0]  # noqa: S314 -- our own file
        suite.attrib.pop("timestamp")
        suite.attrib.pop("time")
        files.append(ET.canonicalize(ET.tostring(suite)))
    assert files[0] == files[1]
    assert files[0].count('"mine"') == 1


def test_no_writer_keeps_nothing() -> None:
    """Without ``--junitxml``."""
    config: Any = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugins=list))
    keep_less(config, frozenset)


def test_properties_that_many_tests_have_are_one_object() -> None:
    """Of a place and of a criterion."""
    first, second = ({one[0]: one for one in properties_of(STARTED[0], HOT)} for _ in range(2))
    assert [name for name in first if first[name] is second[name]] == [
        "criterion", "place", "hostname", "rank", "uuid", "serial", "pci", "unit", "limit",
    ]  # fmt: skip
    assert first == second
