"""What the readers of JUnit files demand, as far as they say it. Each check gives what it objects to, in words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Iterator

GITLAB_BYTES = 30_000_000
"""A file must be smaller: https://docs.gitlab.com/ci/testing/unit_test_reports, "File requirements"."""
GITLAB_OBJECTS = 250_000
"""XML elements that versions from 17.6.1 on take: "XML exceeds permitted complexity: 301361/250000 objects", gitlab#507482."""
GITLAB_TESTCASES = 500_000
"""Testcases of one file that gitlab.com reads: gitlab#247886."""
GITLAB_TEXT = 8_000_000
"""Characters of one text: "very large system-output nodes (8MB +)" are not parsed, gitlab#25357 and #268035."""
AZURE_BYTES = 75 * 1024 * 1024
"""A larger file is not attached: azure-pipelines-agent#1128 (TCM_MAX_FILESIZE = 78643200) and #2361."""
BUILDKITE_TESTCASES = 5_000
"""Testcases of one upload: buildkite/docs#1648, "If the limit of 5000 is exceeded then an upload request will fail"."""

# The elements and attributes of junit-10.xsd of Jenkins' xunit plugin, at 031e285 of jenkinsci/xunit-plugin.
BAD = {"type", "message"}
ATTRIBUTES: dict[str, set[str]] = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {
        "name", "tests", "failures", "errors", "group", "time", "skipped", "timestamp", "hostname", "id", "package", "file",
        "log", "url",
    },
    "testcase": {"name", "time", "classname", "group"},
    "properties": set(), "property": {"name", "value"}, "failure": BAD, "error": BAD, "skipped": BAD,
    "system-out": set(), "system-err": set(),
}  # fmt: skip
CHILDREN: dict[str, set[str]] = {
    "testsuites": {"testsuite"},
    "testsuite": {"testsuite", "properties", "testcase", "system-out", "system-err"},
    "testcase": {"skipped", "error", "failure", "system-out", "system-err"},
    "properties": {"property"},
}


def gitlab(text: str) -> Iterator[str]:
    """Size, elements, testcases, long texts, and names: of duplicates "only the first test is used"."""
    root = ET.fromstring(text)  # noqa: S314 -- our own file
    cases = [*root.iter("testcase")]
    numbers = {
        "bytes": (len(text.encode()), GITLAB_BYTES),
        "elements": (sum(1 for _ in root.iter()), GITLAB_OBJECTS),
        "testcases": (len(cases), GITLAB_TESTCASES),
        "characters in a text": (max(len(one.text or "") for one in root.iter()), GITLAB_TEXT),
    }
    yield from (f"{number} {what}, and {most} are too many" for what, (number, most) in numbers.items() if number >= most)
    names = Counter((one.get("classname"), one.get("name")) for one in cases)
    yield from (f"{name} is there {number} times" for name, number in names.items() if number > 1)


def jenkins(text: str) -> Iterator[str]:
    """The xUnit schema."""
    for one in ET.fromstring(text).iter():  # noqa: S314 -- as above
        if one.tag not in ATTRIBUTES:
            yield f"no element {one.tag}"
            continue
        yield from (f"{one.tag} has no attribute {name}" for name in {*one.attrib} - ATTRIBUTES[one.tag])
        yield from (f"{one.tag} has no child {child.tag}" for child in one if child.tag not in CHILDREN.get(one.tag, set()))


def azure(text: str) -> Iterator[str]:
    """Size."""
    if len(text.encode()) > AZURE_BYTES:
        yield "the file is too large to be attached"


def buildkite(text: str) -> Iterator[str]:
    """The number of testcases, and the attributes that each must have."""
    cases = [*ET.fromstring(text).iter("testcase")]  # noqa: S314 -- as above
    if len(cases) > BUILDKITE_TESTCASES:
        yield f"{len(cases)} testcases"
    yield from (f"no {name}" for one in cases for name in ("classname", "name") if name not in one.attrib)
