"""Two JUnit files of one run, compared case by case."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import NamedTuple
from xml.etree import ElementTree as ET

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.reporting.junit import OWN_CLASS
from pytest_gpucluster.text import counted, one_line

KINDS = ("failure", "error", "skipped")
COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}
FORBIDDEN = (b"<!DOCTYPE", b"<!ENTITY")
REBUILT = "rebuilt_from"
Property = tuple["str | None", "str | None"]


class Case(NamedTuple):
    """A testcase: its kinds (none: passed), the texts of each kind, and its properties."""

    kinds: tuple[str, ...]
    texts: tuple[tuple[str | None, str], ...]
    properties: tuple[Property, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseFile:
    """A JUnit file: testcases by (classname, name), the suite's name and properties, and what its attributes count."""

    cases: dict[tuple[str, str], Case]
    suite: str
    properties: tuple[Property, ...]
    wrong_counts: tuple[str, ...]


def read_cases(content: bytes) -> CaseFile:
    """The testcases of a JUnit file of one suite. Times and hostnames are left out: the journal does not have them.

    Raises:
        ConfigurationError: it is no such file.
    """
    if any(word in content for word in FORBIDDEN):
        raise ConfigurationError("it declares a document type, which no JUnit file does")
    try:
        suites = [*ET.fromstring(content).iter("testsuite")]  # noqa: S314 -- no entities, as looked up above
    except (ET.ParseError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"it is no whole XML: {one_line(str(error))}") from None
    if len(suites) != 1:
        raise ConfigurationError(f"it has {counted(len(suites), 'suite')}, and a run writes one")
    suite = suites[0]
    cases: dict[tuple[str, str], Case] = {}
    seen: Counter[tuple[str, str]] = Counter()  # the file of merged runs has a testcase of each of them
    found = [(element, _case(element)) for element in suite.findall("testcase")]
    for element, case in found:
        key = (element.get("classname") or OWN_CLASS, element.get("name", ""))  # an older version had none of its own
        seen[key] += 1
        cases[(key[0], f"{key[1]} ({seen[key]})") if seen[key] > 1 else key] = case
    return CaseFile(
        cases=cases,
        suite=suite.get("name", ""),
        properties=tuple(one for one in _properties(suite.find("properties")) if one[0] != REBUILT),
        wrong_counts=tuple(_wrong_counts(suite, [case for _, case in found])),
    )


def difference_of_files(kept: CaseFile, made: CaseFile, *, own_files: Iterable[str]) -> tuple[str | None, bool]:
    """The first thing that differs, in words, and whether it is wording only, which another version may have otherwise.

    Args:
        kept: the file of the run.
        made: the file that the journal gives.
        own_files: the test files of the run. A test of theirs that judges no criterion stands in ``kept`` only.
    """
    fault = next(chain(_of_outcomes(kept, made), _additions(kept, made, own_files), kept.wrong_counts), None)
    if fault is not None:
        return fault, False
    return next(_of_wording(kept, made), None), True


def _of_outcomes(kept: CaseFile, made: CaseFile) -> Iterator[str]:
    for key, case in made.cases.items():
        if key not in kept.cases:
            yield f"the testcase {_words(key)} is missing"
        elif kept.cases[key].kinds != case.kinds:
            said, is_so = (" and ".join(one.kinds) or "passed" for one in (kept.cases[key], case))
            yield f"the testcase {_words(key)} is {said}, and the journal gives {is_so}"


def _additions(kept: CaseFile, made: CaseFile, own_files: Iterable[str]) -> Iterator[str]:
    stems, judged = {PurePath(name).stem for name in own_files}, {classname for classname, _ in made.cases}
    for key, case in kept.cases.items():
        is_of_site = key[0].rpartition(".")[2] in stems and key[0] not in judged
        if key not in made.cases and (not is_of_site or any(name == "criterion" for name, _ in case.properties)):
            yield f"the testcase {_words(key)} does not follow from the journal"


def _of_wording(kept: CaseFile, made: CaseFile) -> Iterator[str]:
    for key, case in made.cases.items():
        if kept.cases[key] != case:
            yield f"the texts or values of the testcase {_words(key)} are not those of the journal"
    if [one for one in kept.cases if one in made.cases] != [*made.cases]:
        yield "the testcases stand in another order than the journal gives"
    if (kept.suite, kept.properties) != (made.suite, made.properties):
        yield "the name or the properties of the suite are not those of the journal"


def _case(element: ET.Element) -> Case:
    children = [child for child in element if child.tag in KINDS]
    return Case(
        kinds=tuple(child.tag for child in children),
        texts=tuple((child.get("message"), (child.text or "").strip()) for child in children),
        properties=tuple(_properties(element.find("properties"))),
    )


def _properties(element: ET.Element | None) -> Iterable[Property]:
    return ((one.get("name"), one.get("value")) for one in (element if element is not None else ()))


def _wrong_counts(suite: ET.Element, cases: list[Case]) -> Iterable[str]:
    """Attributes of the suite that do not count what is in it."""
    kinds = Counter(kind for case in cases for kind in case.kinds)
    for name, number in {"tests": len(cases), **{name: kinds[kind] for name, kind in COUNTS.items()}}.items():
        if suite.get(name) not in (None, str(number)):
            yield f"the suite says {name}={one_line(suite.get(name, ''))}, and has {number}"


def _words(key: tuple[str, str]) -> str:
    return one_line(".".join(key))
