"""How many testcases a JUnit file has: one a place, one a node, or one a criterion. What is bad is never left out.

The readers of large clusters have limits: GitLab refuses files of 30 MB and was seen to refuse 250,000 XML elements
(https://docs.gitlab.com/ci/testing/unit_test_reports, gitlab-org/gitlab#507482).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pytest_gpucluster.judging.verdict import ERROR, Record
from pytest_gpucluster.text import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.places import Place

MOST_BY_PLACE = 20_000
"""With more testcases than these there is one a node, where nobody asks for another form."""
MOST_ELEMENTS = 200_000
"""With more XML elements than these the testcases have no properties: four fifths of what GitLab was seen to refuse."""

Kind = Literal["passed", "failure", "error", "skipped"]
Properties = tuple[tuple[str, str], ...]
WORST_FIRST: tuple[Kind, ...] = ("failure", "error", "skipped", "passed")
SAID: dict[Kind, str] = {"failure": "failed", "error": "not measured", "skipped": "skipped"}


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


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedCase:
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
    groups: dict[tuple[str, str], list[JudgedCase]] = {}
    for case in cases:
        nodeid = folded_nodeid(case.testcase.nodeid, places.get(case.record.place or ""), form)
        groups.setdefault((case.record.criterion, nodeid), []).append(case)
    return [_fold(nodeid, group, places) for (_, nodeid), group in groups.items()]


def _fold(nodeid: str, group: Sequence[JudgedCase], places: Mapping[str, Place]) -> Testcase:
    worst = min(group, key=_badness)
    one = worst.testcase
    others = [case for case in group if case.testcase.kind != "passed"]
    if len(group) == 1:
        return replace(one, nodeid=nodeid, properties=())
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
