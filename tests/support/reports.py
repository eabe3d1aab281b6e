"""Reads what a run left behind: results.json, the journal, the JUnit file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

from pytest_gpucluster.reporting.results import SCHEMA_FILE

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RESULTS = "gpucluster-results"
"""The default results folder."""
SCHEMA: dict[str, Any] = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A testcase of a JUnit file; ``outcome`` is passed, failure, error or skipped."""

    name: str
    outcome: str
    message: str
    body: str
    properties: Mapping[str, str]

    @property
    def text(self) -> str:
        """The message, and below it the body."""
        return f"{self.message}\n{self.body}"


def read_results(folder: Path) -> dict[str, Any]:
    """results.json as strict JSON.

    Raises:
        ValueError: a number that is not finite.
    """
    found: dict[str, Any] = json.loads((folder / "results.json").read_text(encoding="utf-8"), parse_constant=_refuse)
    return found


def read_journal(folder: Path) -> list[dict[str, Any]]:
    """The events of journal.jsonl so far; a last line without its end is left out, as a full disk may leave one."""
    file = folder / "journal.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def read_suite(file: Path) -> ET.Element:
    """The one ``testsuite`` of a JUnit file, read as strict XML."""
    (suite,) = ET.parse(file).getroot().iter("testsuite")  # noqa: S314 -- our own file
    return suite


def cases_of(suite: ET.Element) -> list[Case]:
    """The testcases in the order of the file."""
    return [_case(element) for element in suite.iter("testcase")]


def properties_of(element: ET.Element) -> dict[str, str]:
    """Value by name of all properties below an element."""
    return {one.attrib["name"]: one.attrib["value"] for one in element.iter("property")}


def _case(element: ET.Element) -> Case:
    outcome, message, body = "passed", "", ""
    for child in element:
        if child.tag in ("failure", "error", "skipped"):
            outcome, message, body = child.tag, child.get("message", ""), child.text or ""
    return Case(name=element.attrib["name"], outcome=outcome, message=message, body=body, properties=properties_of(element))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
