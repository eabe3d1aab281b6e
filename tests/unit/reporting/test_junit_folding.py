"""The JUnit file of a large cluster: readers take it, and nothing bad is folded away."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.plugin.junit import finish_junit
from pytest_gpucluster.reporting import junit
from pytest_gpucluster.reporting.junit import folded_names, folded_nodeid, junit_text, suite_element
from pytest_gpucluster.reporting.results import JunitForm, ReportedTest, RunReport
from tests.support import junit_readers
from tests.support.entries import limit
from tests.support.fleet_records import failed, fleet

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpucluster.places import Place

GPU_CRITERIA, NODE_CRITERIA = 41, 36
"""As many testcases as the packaged suite has at 128 x 8 at the standard level, about 47,000."""
LARGE_BYTES, LARGE_ELEMENTS = 15_000_000, 200_000


def records_of(places: dict[str, Place], *, gpu: int, node: int, bad: Iterable[str] = ()) -> list[Record]:
    """So many criteria at each GPU and node; ``bad`` places fail the first one."""
    planted = {*bad}
    found = []
    for number in range(max(gpu, node)):
        for place in places.values():
            if number >= (node if place.gpu is None else gpu):
                continue
            key = f"{'node' if place.gpu is None else 'gpu'}_rate_{number}"
            if number == 0 and place.id in planted:
                found.append(failed(key, place.id, 498.0 - len(found) % 97, started=True))
            else:
                found.append(Record(criterion=key, place=place.id, outcome="passed", value=742.5, limit=limit(), started=True))
    return found


def report_of(records: list[Record], places: dict[str, Place], **asked: Any) -> RunReport:
    """A finished run."""
    cases = tuple(ReportedTest(nodeid=f"tests/test_a.py::test_{one.criterion}[x-{one.place}]", record=one) for one in records)
    verdict = decide(records, Terms(rehearsal=False, level_reached=True))
    return RunReport(cases=cases, verdict=verdict, places=places, facts={}, is_rehearsal=False, junit=JunitForm(**asked))


def cases_of(text: str) -> dict[str, ET.Element]:
    """The testcases by name."""
    found = [*ET.fromstring(text).iter("testcase")]  # noqa: S314 -- our own file
    assert len({one.attrib["name"] for one in found}) == len(found)
    return {one.attrib["name"]: one for one in found}


def objections(text: str, *, jenkins: bool = False, buildkite: bool = False) -> list[str]:
    """What the readers object to."""
    found = [*junit_readers.gitlab(text), *junit_readers.azure(text)]
    found += junit_readers.jenkins(text) if jenkins else ()
    return [*found, *(junit_readers.buildkite(text) if buildkite else ())]


@pytest.fixture(scope="module")
def large() -> tuple[dict[str, Place], list[Record], list[str]]:
    """128 x 8, with 5 % of all GPUs bad."""
    places = fleet(128, 8)
    bad = [
        name for number, name in enumerate(name for name, place in places.items() if place.gpu is not None) if number % 20 == 7
    ]
    return places, records_of(places, gpu=GPU_CRITERIA, node=NODE_CRITERIA, bad=bad), bad


def test_a_large_cluster(large: tuple[dict[str, Place], list[Record], list[str]]) -> None:
    """Nothing is asked for: one testcase a criterion and node; small enough, the verdict last, and every bad part in it."""
    places, records, bad = large
    assert len(records) > 45_000
    text = junit_text(report_of(records, places))
    assert objections(text) == []
    root = ET.fromstring(text)  # noqa: S314 -- our own file
    assert len(text.encode()) <= LARGE_BYTES
    assert sum(1 for _ in root.iter()) <= LARGE_ELEMENTS
    cases = cases_of(text)
    assert len(cases) == (GPU_CRITERIA + NODE_CRITERIA) * 128 + 1
    assert [*cases][-1] == "gpucluster.verdict"
    said = "".join(cases["gpucluster.verdict"].itertext())
    assert len(bad) > 50
    for name in bad:
        (body,) = cases[f"test_gpu_rate_0[x-node{places[name].node}]"].findall("failure")
        assert places[name].named in (body.text or "")
        assert places[name].on_host in said
    parts = [one.attrib["value"] for one in root.findall("testsuite/properties/property") if one.get("name") == "place"]
    assert len(parts) == 1024
    assert all(place.uuid in part for place, part in zip(fleet(128, 8).values(), parts, strict=False) if place.uuid)
    assert [case.get("name") for case in cases.values() if case.find("properties") is not None] == ["gpucluster.verdict"]


def test_one_a_criterion_is_few_enough_for_all(large: tuple[dict[str, Place], list[Record], list[str]]) -> None:
    """Also for Buildkite and, if it is asked for, for the schema of Jenkins."""
    places, records, bad = large
    text = junit_text(report_of(records, places, form="criterion", is_strict=True))
    assert objections(text, jenkins=True, buildkite=True) == []
    cases = cases_of(text)
    assert len(cases) == GPU_CRITERIA + NODE_CRITERIA + 1
    (body,) = cases["test_gpu_rate_0[x]"].findall("failure")
    assert [name for name in bad if places[name].named not in (body.text or "")] == []
    told = {one.attrib["name"]: one.attrib["value"] for one in ET.fromstring(text).iter("property")}  # noqa: S314 -- as above
    assert told["verdict"] == "REJECTED"


@pytest.mark.parametrize(("most", "expected"), [(12, "test_gpu_rate_0[x-node0-gpu0]"), (11, "test_gpu_rate_0[x-node0]")])
def test_the_default_is_by_number(monkeypatch: pytest.MonkeyPatch, most: int, expected: str) -> None:
    """One testcase a place up to 20,000 of them, then one a node."""
    assert junit.MOST_BY_PLACE == 20_000
    monkeypatch.setattr(junit, "MOST_BY_PLACE", most)
    places = fleet(2, 3)
    cases = cases_of(junit_text(report_of(records_of(places, gpu=2, node=0), places)))
    assert len(records_of(places, gpu=2, node=0)) == 12
    assert expected in cases


def test_too_many_elements_have_no_properties(monkeypatch: pytest.MonkeyPatch) -> None:
    """One testcase a place was asked for: GitLab still takes it, and the suite says what is where."""
    places = fleet(2, 3)
    report = report_of(records_of(places, gpu=2, node=0), places, form="place")
    assert len([*ET.fromstring(junit_text(report)).iterfind(".//testcase/properties")]) == 13  # noqa: S314 -- our own file
    monkeypatch.setattr(junit, "MOST_ELEMENTS", 100)
    without = ET.fromstring(junit_text(report))  # noqa: S314 -- our own file
    assert len([*without.iterfind(".//testcase/properties")]) == 1
    assert len([one for one in without.iter("property") if one.get("name") == "place"]) == 6


@pytest.mark.parametrize("form", ["node", "criterion"])
def test_the_worst_is_named_and_every_bad_one_listed(form: str) -> None:
    """A failure before an error, the lowest value before others; who passed is not listed, and remarks are kept."""
    places = fleet(1, 5)
    bad = {"node0-gpu1": 690.0, "node0-gpu2": 498.0}
    records = [
        failed("rate", name, bad[name], limit=limit())
        if name in bad
        else Record(criterion="rate", place=name, outcome="error", reason="rank 3 was lost\nmore")
        if name == "node0-gpu3"
        else Record(criterion="rate", place=name, outcome="passed", value=742.0, limit=limit(), remark=f"remark of {name}")
        for name, place in places.items()
        if place.gpu is not None
    ]
    (case, _) = cases_of(junit_text(report_of(records, places, form=form))).values()
    (body,) = case.findall("failure")
    message, text = body.attrib["message"], body.text or ""
    assert message.startswith("2 of 5 failed, 1 of 5 not measured; the worst: gpu-node-0 gpu 2 ")
    assert "498" in message
    lines = text.split("\n\n")[0].splitlines()
    words = [("failed", 1), ("failed", 2), ("not measured", 3)]
    assert [line.split(" serial")[0] for line in lines] == [f"{word}: gpu-node-0 gpu {number}" for word, number in words]
    assert lines[2].endswith("(node0-gpu3): rank 3 was lost")
    output = case.findtext("system-out") or ""
    assert [f"remark of node0-gpu{number}" in output for number in range(5)] == [True, False, False, False, True]


@pytest.mark.parametrize("outcome", ["failed", "error", "noisy", "missing", "skipped"])
@pytest.mark.parametrize("form", ["node", "criterion"])
def test_no_outcome_hides_among_good_ones(outcome: str, form: str) -> None:
    """One of eight is not good, so the testcase is not green."""
    places = fleet(1, 8)
    records = records_of(places, gpu=1, node=0)
    records[5] = Record(criterion=records[5].criterion, place=records[5].place, outcome=outcome, reason=f"it is {outcome}")
    (case, _) = cases_of(junit_text(report_of(records, places, form=form))).values()
    kind = {"failed": "failure", "skipped": "skipped"}.get(outcome, "error")
    (found,) = case.findall(kind)
    assert "gpu-node-0 gpu 5" in found.attrib["message"]


def test_a_teardown_that_failed_is_listed() -> None:
    """It is a second testcase of its place."""
    places = fleet(1, 2)
    records = records_of(places, gpu=1, node=0)
    records[1] = failed("gpu_rate_0", "node0-gpu1", 498.0, teardown="its teardown failed: OSError")
    (case, _) = cases_of(junit_text(report_of(records, places, form="node"))).values()
    assert "its teardown failed: OSError" in "".join(case.itertext())


@pytest.mark.parametrize(
    ("nodeid", "name", "by_node", "by_criterion"),
    [
        ("a.py::test_b[node1-gpu0]", "node1-gpu0", "a.py::test_b[node1]", "a.py::test_b"),
        ("a.py::test_b[x-node1-gpu0]", "node1-gpu0", "a.py::test_b[x-node1]", "a.py::test_b[x]"),
        ("a.py::test_b[node1-gpu0-x]", "node1-gpu0", "a.py::test_b[node1-x]", "a.py::test_b[x]"),
        ("a.py::test_b[x-node1-gpu0-y]", "node1-gpu0", "a.py::test_b[x-node1-y]", "a.py::test_b[x-y]"),
        ("a.py::test_b[node1]", "node1", "a.py::test_b[node1]", "a.py::test_b"),
        ("a.py::test_b[node11-gpu0]", "node1-gpu0", "a.py::test_b[node11-gpu0]", "a.py::test_b[node11-gpu0]"),
        ("a.py::test_b[x]", "node1-gpu0", "a.py::test_b[x]", "a.py::test_b[x]"),
        ("a.py::test_b", None, "a.py::test_b", "a.py::test_b"),
    ],
)
def test_names(nodeid: str, name: str | None, by_node: str, by_criterion: str) -> None:
    """The place goes, or becomes its node; a place whose name only begins alike stays."""
    place = fleet(2, 2)[name] if name is not None else None
    assert [folded_nodeid(nodeid, place, form) for form in ("place", "node", "criterion")] == [nodeid, by_node, by_criterion]


def test_pytests_testcases_are_folded_too() -> None:
    """Of each only its time is left; ``--junitprefix`` is kept."""
    places = fleet(1, 2)
    report = report_of(records_of(places, gpu=1, node=0), places, form="criterion")
    theirs = [_Theirs(name, 1.5) for name in ("test_gpu_rate_0[x-node0-gpu0]", "test_gpu_rate_0[x-node0-gpu1]", "test_mine")]
    writer = LogXML(theirs)
    config: Any = _Config(writer)
    finish_junit(config, report)
    found = [(one.to_xml().get("name"), one.to_xml().get("time")) for one in writer.node_reporters_ordered]
    assert found == [("test_mine", "1.500"), ("test_gpu_rate_0[x]", "3.000"), ("gpucluster.verdict", "0.000")]
    assert len(folded_names(report)) == 2
    assert folded_names(report_of(records_of(places, gpu=1, node=0), places)) == {}


class _Theirs:
    """A testcase of pytest's writer."""

    def __init__(self, name: str, seconds: float) -> None:
        self._element = ET.Element("testcase", {"classname": "site.tests.test_a", "name": name, "time": f"{seconds:.3f}"})

    def finalize(self) -> None:
        """Nothing is left to do."""

    def to_xml(self) -> ET.Element:
        """The element."""
        return self._element


class LogXML:
    """Stands for pytest's writer, which is known by this name."""

    prefix = "site"

    def __init__(self, reporters: list[_Theirs]) -> None:
        """What it would write."""
        self.node_reporters_ordered: list[Any] = reporters

    def add_global_property(self, name: str, value: str) -> None:
        """Nobody reads it here."""


class _Config:
    """Has the writer."""

    def __init__(self, writer: LogXML) -> None:
        self._writer = writer
        self.pluginmanager = self

    def get_plugins(self) -> list[LogXML]:
        """The writer alone."""
        return [self._writer]


def test_the_readers_object() -> None:
    """Each check above sees what it looks for."""
    case = '<testcase name="a"/>'
    assert [*junit_readers.buildkite(f"<testsuite>{case}</testsuite>")] == ["no classname"]
    assert [*junit_readers.buildkite('<s><testcase name="a" classname=""/></s>')] == []
    assert [*junit_readers.buildkite("<s>" + '<testcase name="a" classname=""/>' * 5001 + "</s>")] == ["5001 testcases"]
    assert any("2 times" in one for one in junit_readers.gitlab(f"<s>{case}{case}</s>"))
    assert any("elements" in one for one in junit_readers.gitlab("<s>" + "<p/>" * 250_000 + "</s>"))
    assert any("text" in one for one in junit_readers.gitlab(f"<s>{'x' * 8_000_000}</s>"))
    assert any("bytes" in one for one in junit_readers.gitlab("<s>" + f"<p>{'x' * 7_500_000}</p>" * 4 + "</s>"))
    places = fleet(1, 1)
    loose = ET.tostring(suite_element(report_of(records_of(places, gpu=1, node=0), places)), encoding="unicode")
    assert {*junit_readers.jenkins(loose)} == {"testcase has no child properties", "testsuite has no attribute disabled"}
    assert [*junit_readers.azure("x" * junit_readers.AZURE_BYTES)] == []
    assert [*junit_readers.azure("x" * (junit_readers.AZURE_BYTES + 1))] != []


@pytest.mark.parametrize("form", ["place", "node", "criterion"])
@pytest.mark.parametrize("is_strict", [False, True])
def test_junitparser_reads_the_same(form: str, *, is_strict: bool) -> None:
    """A library that other tools read JUnit with counts what the suite says, and has the verdict and every bad place."""
    junitparser = pytest.importorskip("junitparser", reason="junitparser is not installed (dependency group tests)")
    places = fleet(3, 4)
    report = report_of(records_of(places, gpu=3, node=2, bad=["node1-gpu2", "node2"]), places, form=form, is_strict=is_strict)
    (suite,) = junitparser.JUnitXml.fromstring(junit_text(report).encode())
    cases = [*suite]
    bad = [one for one in cases if any(isinstance(result, junitparser.Failure) for result in one.result)]
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (len(cases), len(bad), 0, 0)
    assert cases[-1].name == "gpucluster.verdict"
    assert cases[-1] in bad
    told = "\n".join(str(result.text) for one in bad for result in one.result)
    assert "node1-gpu2" in told
    assert "node2" in told
