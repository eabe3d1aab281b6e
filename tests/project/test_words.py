"""The words of messages: one thing is not written as several."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.judging.failure_text import format_asked, format_miss, unit_beside
from pytest_gpucluster.judging.verdict import SKIPPED, WORDS, count_of
from pytest_gpucluster.text import counted
from pytest_gpucluster.thresholds.limit import Limit
from tests.support import REPOSITORY
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NOUNS = (
    "alarms blocks cells checks connections cores CPUs criteria differences errors exceptions facts fabrics files GPUs groups "
    "hosts inodes launches limits links nodes outcomes pages parts places problems processes ranks reasons remarks "
    "repeats results rounds rows samples steps suites tasks testcases tests threads values windows"
)
WORDS_BETWEEN = "bad|clean|different|expected|false|free|good|more|NVIDIA|NVLink|open|other|total|unknown|visible"
COUNTS = re.compile(rf" (?:(?:{WORDS_BETWEEN}) )?(?:{NOUNS.replace(' ', '|')})\b")
NEVER_ONE = {
    "health/shared_paths.py: {path} free inodes": "a path is no number",
    "judging/culprits.py: {len(names)} places": "more than two",
    "judging/noise.py: {len(first.samples)} repeats": "fewer than FEWEST are judged as they are",
    "judging/noise.py: {seen.count} repeats": "as above",
    "judging/noise.py: {len(samples)} repeats": "as above",
    "judging/noise.py: {spread.count} repeats": "as above",
    "judging/siblings.py: {len(samples)} repeats": "as above",
    "judging/promises.py: {'two' if len(some) == 2 else len(some)} GPUs": "one serial number of several",
    "measurements/transport.py: {found.num_nodes} nodes": "between two nodes",
    "page/criteria_view.py: {len(noted)} places": "more than MOST_PLACES",
}
"""What needs no singular, and why."""


def numbers_before_plurals(source: str) -> Iterator[str]:
    """``{number} nodes`` of f-strings, where the number may be one. Of ``1 of 1 nodes`` nothing is said: the rest is many."""
    for text in ast.walk(ast.parse(source)):
        if not isinstance(text, ast.JoinedStr):
            continue
        for before, number, after in zip([None, *text.values], text.values, text.values[1:], strict=False):
            if not isinstance(number, ast.FormattedValue) or not isinstance(after, ast.Constant):
                continue
            is_part = isinstance(before, ast.Constant) and str(before.value).endswith(("of ", "of the "))
            shown = ast.unparse(number.value)
            if COUNTS.match(str(after.value)) and not is_part and not re.fullmatch(r"[\w.]*[A-Z_]{4,}(\[\w+\])?", shown):
                yield f"{{{shown}}}{COUNTS.match(str(after.value))[0]}"


def test_one_is_not_several() -> None:
    """A message that counts takes its noun from :func:`counted`, and so has it right for one."""
    folder = REPOSITORY / "pytest_gpucluster"
    found = [
        f"{file.relative_to(folder)}: {one}"
        for file in sorted(folder.rglob("*.py"))
        for one in numbers_before_plurals(file.read_text(encoding="utf-8"))
    ]
    assert {*found} == {*NEVER_ONE}


def test_numbers_before_plurals_are_seen() -> None:
    """Not those that count a part of many, nor a constant."""
    source = 'f"{len(x)} nodes, {y} other files of {z} hosts, {MOST_NODES} nodes, {y} nodelists"'
    assert list(numbers_before_plurals(source)) == ["{len(x)} nodes", "{y} other files"]


@pytest.mark.parametrize(("value", "shown"), [(0, "0"), (1, "1"), (2, "2"), (1.5, "1.500")])
@pytest.mark.parametrize("unit", sorted({entry.unit for entry in packaged().criteria(None).values()}))
def test_a_value_stands_beside_its_unit_in_the_right_number(unit: str, value: float, shown: str) -> None:
    """``1 row`` and ``2 rows``; a unit that is no plain plural stays as it is, and yes or no has none."""
    plurals = {"GPUs": "GPU", "errors": "error", "links": "link", "nodes": "node", "reasons": "reason", "rows": "row"}
    noun = "" if unit == "count" else f" {plurals.get(unit, unit) if value == 1 else unit}"
    assert unit_beside(unit, shown) == noun
    limit = Limit(kind="max", value=0, unit=unit)
    if value:
        assert format_miss(limit, value).startswith(f"{format_asked(limit, value).partition(',')[0]}, ")
        assert format_miss(limit, value).split(",")[0].endswith(noun)


@pytest.mark.parametrize("outcome", WORDS)
def test_outcomes_are_counted_in_words(outcome: str) -> None:
    """One that does not apply has a verb of its own; the others are participles."""
    assert count_of(outcome, 2) == f"2 {WORDS[outcome]}"
    assert count_of(outcome, 1) == ("1 does not apply" if outcome == SKIPPED else f"1 {WORDS[outcome]}")


def test_counted() -> None:
    """One, none and several."""
    assert [counted(number, "row") for number in (0, 1, 2)] == ["0 rows", "1 row", "2 rows"]
    assert counted(1, "line was", "lines were") == "1 line was"


MOST_WORDS = 25
NEWCOMERS = [
    *(
        REPOSITORY / "docs" / f"{name}.md"
        for name in ("tutorial", "handover", "quick-reference", "info", "commands", "records")
    ),
    *(REPOSITORY / "docs" / f"{name}.md" for name in ("report", "resume", "watch", "glossary", "how-it-works", "thresholds")),
    *(REPOSITORY / "docs" / f"{name}.md" for name in ("troubleshooting", "writing-a-criterion", "scaling", "security", "dcgm")),
    *(REPOSITORY / "docs" / "how-to").glob("*.md"),
    *(REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md")),
]
"""The pages by which somebody begins, hands over, or adds something."""
NO_PROSE = re.compile(r"(?ms)^ *```.*?^ *```$|^\s*[|#!<].*?$")


def long_sentences(text: str) -> list[str]:
    """Sentences, or parts between colons and semicolons, of more than MOST_WORDS words. Code and a link are a word each."""
    prose = NO_PROSE.sub("\n", text)
    prose = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", prose))
    parts = (
        part for block in re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) ", prose) for part in re.split(r"[.!?:;]\W*\s", f"{block} ")
    )
    return [" ".join(part.split()) for part in parts if len(re.findall(r"\S*\w\S*", part)) > MOST_WORDS]


@pytest.mark.parametrize("page", NEWCOMERS, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_sentences_are_short(page: Path) -> None:
    """A page for whoever is new says one thing after the other."""
    assert long_sentences(page.read_text(encoding="utf-8")) == []


def test_long_sentences_are_seen() -> None:
    """Over lines too; not tables and code, and a list is as many sentences as it has items."""
    words = " ".join(["word"] * 20)
    text = f"{words}\n{words}.\n\n| {words} {words} |\n\n```sh\n{words} {words}\n```\n\n* {words}\n* {words}\n"
    assert long_sentences(text) == [f"{words} {words}"]
