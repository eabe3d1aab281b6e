"""What other plugins of pytest report of a run: pytest-json-ctrf, pytest-html, pytest-reportlog and Allure, beside JUnit.

Each reader gives the words that its reporter has for each test, and the words of the verdict.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VERDICT = "gpucluster.verdict"
OPTIONS = (
    "--junitxml=junit.xml",
    "--ctrf=ctrf.json",
    "--html=page.html",
    "--self-contained-html",
    "--report-log=log.jsonl",
    "--alluredir=allure",
)
"""One run, all reporters at once."""
GREEN = "passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """A test as a reporter has it: name, ``passed``, ``skipped`` or a word for bad, and the text."""

    name: str
    outcome: str
    text: str = ""


def of_junit(folder: Path) -> list[Reported]:
    """The testcases of the JUnit file."""
    found = []
    for case in ET.parse(folder / "junit.xml").getroot().iter("testcase"):  # noqa: S314 -- our own file
        bad = next((child for child in case if child.tag in ("failure", "error", "skipped")), None)
        text = "" if bad is None else f"{bad.get('message')}\n{bad.text}"
        found.append(Reported(name=case.attrib["name"], outcome=GREEN if bad is None else bad.tag, text=text))
    return found


def of_ctrf(folder: Path) -> list[Reported]:
    """The tests of the CTRF file; its summary counts them."""
    results = json.loads((folder / "ctrf.json").read_text(encoding="utf-8"))["results"]
    found = [Reported(name=one["name"], outcome=one["status"], text=one.get("message", "")) for one in results["tests"]]
    for word in (GREEN, "failed", "skipped"):
        assert results["summary"][word] == sum(one.outcome == word for one in found)
    return found


def of_html(folder: Path) -> list[Reported]:
    """The rows of the page of pytest-html, which has one for each phase that did not pass."""
    page = html.unescape((folder / "page.html").read_text(encoding="utf-8"))
    (blob,) = re.findall(r'data-jsonblob="(.*?)"></div>', page, re.DOTALL)
    tests = json.loads(blob)["tests"]
    return [
        Reported(name=one["testId"], outcome=one["result"].lower(), text=one["log"]) for rows in tests.values() for one in rows
    ]


def of_log(folder: Path) -> list[Reported]:
    """The tests of the report log, each by its worst phase."""
    found: dict[str, Reported] = {}
    for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["$report_type"] == "TestReport":
            name, outcome = event["nodeid"], event["outcome"]
            if name not in found or outcome != GREEN:
                found[name] = Reported(name=name, outcome=outcome, text=json.dumps(event["longrepr"]))
    return list(found.values())


def of_allure(folder: Path) -> list[Reported]:
    """The results that Allure's page is made from."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in (folder / "allure").glob("*-result.json")]
    return [
        Reported(name=one["name"], outcome=one["status"], text=one.get("statusDetails", {}).get("message", ""))
        for one in results
    ]


READERS: dict[str, Callable[[Path], list[Reported]]] = {
    "junit": of_junit,
    "ctrf": of_ctrf,
    "html": of_html,
    "reportlog": of_log,
    "allure": of_allure,
}


def verdict_of(folder: Path, reporter: str) -> Reported:
    """The one test of this reporter that is the verdict."""
    found = [one for one in READERS[reporter](folder) if VERDICT in one.name]
    assert len(found) == 1, f"{reporter}: {found}"
    return found[0]
