"""pytest's own JUnit writer, given the testcases that the run itself writes while it goes on."""

from __future__ import annotations

import contextlib
import platform
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from _pytest.junitxml import bin_xml_escape, xml_key  # no public way

from pytest_gpucluster.reporting.files import is_replaceable, whole_file
from pytest_gpucluster.reporting.junit import REHEARSAL_SUITE, folded_names, make_fit, names_of, strictly, suite_element
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    import pytest

    from pytest_gpucluster.reporting.results import RunReport

Names = tuple[str, str]
"""(classname, name) of a testcase."""
OUTPUT = ("system-out", "system-err")
BAD = ("failure", "error", "skipped")


def finish_junit(config: pytest.Config, report: RunReport) -> None:
    """Give pytest's writer the testcases of ``report``; does nothing when ``--junitxml`` was not given.

    Called when the session finishes, before pytest's writer writes its file. Of pytest's testcases stay the names, times,
    captured output and the properties that tests recorded; testcases that are not of a test stay whole.
    """
    writer = _writer_of(config)
    if writer is None:
        return
    suite = suite_element(report)
    if report.is_rehearsal:
        writer.suite_name = REHEARSAL_SUITE
    for one in suite.findall("properties/property"):
        writer.add_global_property(one.get("name"), one.get("value"))
    # A test that was interrupted in its body has a time and no name yet.
    theirs = [element for element in map(_finished, writer.node_reporters_ordered) if "name" in element.attrib]
    _fit(theirs, [case.nodeid for case in report.cases if bin_xml_escape(case.nodeid) != case.nodeid], prefix=writer.prefix)
    folded = {_prefixed(names, writer.prefix): _prefixed(into, writer.prefix) for names, into in folded_names(report).items()}
    elements = _merged(suite, theirs, prefix=writer.prefix, folded=folded)
    for element in elements if report.junit.is_strict else ():
        strictly(element)
    writer.node_reporters_ordered = [SimpleNamespace(to_xml=lambda element=element: element) for element in elements]
    writer.stats = Counter(next((child.tag for child in element if child.tag in BAD), "passed") for element in elements)
    writer.cnt_double_fail_tests = 0


@dataclass(frozen=True, slots=True)
class _Plain:
    """A finished testcase of pytest's writer, of which only names and time are left, in place of its elements."""

    classname: str
    name: str
    time: str

    def to_xml(self) -> ET.Element:
        """The testcase, for whoever writes it."""
        return ET.Element("testcase", {"classname": self.classname, "name": self.name, "time": self.time})


def keep_less(config: pytest.Config, own: Callable[[], Container[tuple[str, object]]]) -> None:
    """Have pytest's writer keep no second copy of what :func:`finish_junit` gives it at the end.

    Its testcases would be a third of a large run's memory. ``own``: the properties that the run has given the current test.
    """
    writer = _writer_of(config)
    if writer is None:
        return
    finalize = writer.finalize

    def finalized(report: pytest.TestReport) -> None:
        known, properties = own(), report.user_properties
        report.user_properties = [one for one in properties if one not in known]
        try:
            finalize(report)
        finally:
            report.user_properties = properties
        last = writer.node_reporters_ordered[-1]
        element = last.to_xml()
        if "id" not in vars(last) and not len(element) and {*element.attrib} == {"classname", "name", "time"}:
            names = sys.intern(element.attrib["classname"]), element.attrib["name"]
            writer.node_reporters_ordered[-1] = _Plain(*names, element.attrib["time"])

    writer.finalize = finalized


@contextlib.contextmanager
def written_whole(config: pytest.Config) -> Iterator[None]:
    """Have pytest's writer write beside its file, and put the new one in its place when it is whole.

    On a full disk the older one stays. A link, a device or a pipe is written through, as pytest does.

    Raises:
        OSError: there is no room for it.
    """
    writer = _writer_of(config)
    file = Path(writer.logfile) if writer is not None else None
    if writer is None or file is None or not is_replaceable(file):
        yield
        return
    with whole_file(file) as temporary:
        writer.logfile = str(temporary)
        try:
            yield
        finally:
            writer.logfile = str(file)


@contextlib.contextmanager
def with_fit_hostname() -> Iterator[None]:
    """Make the host's name fit while pytest's writer, which takes any bytes, writes it into its file."""
    read = platform.node
    setattr(platform, "node", lambda: one_line(read()))  # noqa: B010 -- mypy refuses the assignment
    try:
        yield
    finally:
        setattr(platform, "node", read)  # noqa: B010 -- as above


def leave_out_junit(config: pytest.Config) -> None:
    """Have pytest write no JUnit file in this session."""
    writer = config.stash.get(xml_key, None)
    if writer is not None:
        del config.stash[xml_key]
        config.pluginmanager.unregister(writer)


def _writer_of(config: pytest.Config) -> Any:
    """Pytest's own writer; None where ``--junitxml`` was not given."""
    return next((one for one in config.pluginmanager.get_plugins() if type(one).__name__ == "LogXML"), None)


def _finished(reporter: Any) -> ET.Element:
    if not isinstance(reporter, _Plain):
        reporter.finalize()
    element: ET.Element = reporter.to_xml()
    return element


def _merged(
    suite: ET.Element, theirs: list[ET.Element], *, prefix: str | None, folded: Mapping[Names, Names]
) -> list[ET.Element]:
    """Our testcases in their order, each with what pytest knows of it; before them those that only pytest has.

    Of a test that is ``folded`` into another testcase only the time is left.
    """
    waiting: dict[Names, list[ET.Element]] = {}
    times: dict[Names, float] = defaultdict(float)
    for element in theirs:
        if _names(element) in folded:
            times[folded[_names(element)]] += float(element.get("time", "0"))
        else:
            waiting.setdefault(_names(element), []).append(element)
    ours = suite.findall("testcase")
    for element in ours:
        element.attrib.update(zip(("classname", "name"), _prefixed(_names(element), prefix), strict=True))
        same = waiting.get(_names(element))
        if same:
            _take_over(element, same.pop(0))
        else:
            element.set("time", f"{times[_names(element)]:.3f}")
    return [*(element for left in waiting.values() for element in left), *ours]


def _fit(elements: Iterable[ET.Element], nodeids: Iterable[str], *, prefix: str | None) -> None:
    """Escape as our testcases do: pytest's writer escapes a name in another way, and a class name not at all."""
    escaped = {_prefixed((names[0], bin_xml_escape(names[1])), prefix): names[1] for names in map(names_of, nodeids)}
    for element in elements:
        element.set("name", escaped.get(_names(element), element.attrib["name"]))
        make_fit(element)


def _prefixed(names: tuple[str, str], prefix: str | None) -> tuple[str, str]:
    return f"{prefix}.{names[0]}" if prefix else names[0], names[1]


def _names(element: ET.Element) -> tuple[str, str]:
    return element.get("classname", ""), element.get("name", "")


def _take_over(ours: ET.Element, theirs: ET.Element) -> None:
    """Add what pytest knows of a test: time, attributes, captured output, the properties that the test recorded."""
    ours.attrib.update(theirs.attrib)
    properties = ours.find("properties")
    known = {one.get("name") for one in ours.findall("properties/property")}
    if properties is not None:
        properties.extend(one for one in theirs.findall("properties/property") if one.get("name") not in known)
    ours.extend(child for child in theirs if child.tag in OUTPUT)
