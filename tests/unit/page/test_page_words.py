"""The words of the page: a reader sees no data structures, no keys of files, each limit has its unit, no word twice."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster.judging.verdict import PASSED, Record
from pytest_gpucluster.page.criteria_view import plain
from pytest_gpucluster.page.document import TEMPLATES, document_of
from pytest_gpucluster.page.outputs import markdown_of
from pytest_gpucluster.page.render import model_of, page_from
from tests.support.entries import limit
from tests.support.fleet_records import failed, fleet, outcomes
from tests.support.pages import Page
from tests.support.result_files import RUN, document, of_version_2, text_of

PLACES = fleet(2, 4)
FACT = {"kind": "host", "name": "CPU governor", "among": "", "usual": None, "alike": 0, "demanded": None, "outliers": []}
UNREAD = [{"node": "node0", "part": "node0", "value": "no such file"}, {"node": "node1", "part": "gpu2", "value": "no"}]
PAIR = [{"source": "node0-gpu0", "target": "node0-gpu1", "gb_s": 390.5}, {"source": "node0-gpu1", "target": "node0-gpu0"}]
RECORDS = [
    *outcomes(PLACES, [failed("bf16_tflops", "node1-gpu2", 543.25, evidence={"rounds": [1.5, 2.25], "by": {"a": {"b": [1]}}})]),
    Record(
        criterion="nvlink_errors", place="node0", outcome=PASSED, value=0.0, limit=limit("max", 0, "count"),
        evidence={"within": ["node0-gpu1: crc_data, +6379 in 209 s", "node0-gpu2: crc_data, +1"]},
    ),
    Record(
        criterion="drift_coverage", place=None, outcome=PASSED, value=46.0, limit=limit("min", 10, "count"),
        evidence={"facts": [{**FACT, "unread": UNREAD}]},
    ),
    Record(
        criterion="gpu_pairs", place="node0", outcome=PASSED, value=0.0, limit=limit("max", 0, "count"),
        evidence={"pairs": PAIR},
    ),
    Record(
        criterion="bf16_soak", place="node0-gpu1", outcome=PASSED, value=0.5, limit=limit("max", 5, "%"),
        evidence={"first round TFLOPS": 684.5, "last round TFLOPS": 682.25, "rounds count": 3},
    ),
]  # fmt: skip
FACTS: dict[str, Any] = {
    "simulated": {"nodes": 2, "gpus_per_node": 4, "gpu": "h200-sxm", "seed": 0, "faults": ["node1-gpu2:slow", "node0:late"]},
    "changed_limits": ["bf16_tflops"],
    "changed_entries": {"bf16_tflops": {"above": {"any": 650}, "recipe": {"sizes": [4096, 8192]}}},
    "timings": {"total_s": 61.5, "startup_s": 4.25},
    "environment": {"versions": {"torch": "2.11.0"}, "gpus": ["NVIDIA H200"], "launched_by": "torchrun"},
}


DATA = re.compile(
    r"[^\n]{0,40}(?:\[[\"'{\[]|\[\d+[.,]|\{[\"']|[\"'] *: |[:,] (?:None|True|False)\b|\bnull\b|\btrue\b)[^\n]{0,20}"
)
"""How JSON and Python write lists, mappings and constants."""


def page_of(version: int) -> Page:
    """The page of all of that."""
    members = document(RECORDS, PLACES, **FACTS)
    if version == 2:
        members = {**of_version_2(members, RECORDS, PLACES), "run": {**RUN, "command": ["pytest", "--x=two words", "a;b"]}}
        members["limits"]["bf16_tflops"]["recipe"] = {"counters": {"crc": {"total": 0, "keys": ["a", "b"]}}, "warm": True}
    return Page(page_from(model_of(document_of(text_of(members)))))


@pytest.mark.parametrize("version", [1, 2])
def test_no_data_structures(version: int) -> None:
    """Lists and mappings are words with commas; nobody reads JSON, Python, or the names of keys."""
    text = page_of(version).text
    assert DATA.findall(text) == []
    assert "node0-gpu1: crc_data, +6379 in 209 s, node0-gpu2" in text
    assert "faults: node1-gpu2:slow, node0:late" in text
    assert not re.search(r"total_s|startup_s|launched_by", text)
    assert "61.5 s" in text


def test_every_limit_has_its_unit() -> None:
    """Beside a bad part, and in the list of all criteria, whose columns have heads."""
    read = page_of(2)
    assert "> 700 TFLOPS" in next(one for one in read.all("article", class_="part")).text
    row = next(one for one in read.all("summary") if one.text.startswith("bf16_tflops"))
    assert "543.2 TFLOPS" in row.text
    assert "> 700 TFLOPS" in row.text
    heads = read.all("div", class_="heads")
    assert [one.text.split() for one in heads] == [["Criterion", "Outcome", "Worst", "value", "Limit", "Headroom"]]


def test_no_word_twice_and_numbers_that_agree_with_their_nouns() -> None:
    """A part that is its node has one name; one place is no places; a single value is not the worst."""
    text = page_of(1).text
    assert "not read at node0, node1 gpu2" in text
    assert "1 places" not in text
    alone = Record(criterion="finetune_loss", place=None, outcome=PASSED, value=0.125, limit=limit("below", 0.5, "nats/token"))
    read = Page(page_from(model_of(document_of(text_of(document([alone], PLACES))))))
    assert [one.text for one in read.all("p", class_="small") if "worst" in one.text] == []


ONE_OF_MANY = re.compile(
    r"(?<![\d.,-])1 (?:[a-z]+ )?(?:checks|criteria|places|rows|GPUs|hosts|nodes|values|facts|texts|others)\b"
)
"""A noun of many behind the number one."""


@pytest.mark.parametrize("others", [[], [PASSED]])
@pytest.mark.parametrize("outcome", [PASSED, "failed", "error", "missing", "noisy", "not_selected", "skipped"])
def test_one_of_a_thing_is_no_plural(outcome: str, others: list[str]) -> None:
    """On the page, in the summary, and in tickets: one check, one row, one fact; and its verb agrees."""
    rows = limit("max", 0, "rows")
    records = [
        Record(
            criterion=f"c{at}", place="node0-gpu0", outcome=word, value=1.0, limit=rows, reason="why", culprits=("node0-gpu0",)
        )
        for at, word in enumerate([outcome, *others])
    ]
    drift = {"facts": [{**FACT, "unread": [], "usual": "a", "alike": 2}]}
    if others:
        records += [replace(records[0], criterion="drift", place=None, limit=limit("max", 0, "count"), evidence=drift)]
    model = model_of(document_of(text_of(document(records, fleet(1, 1)))))
    for text in (Page(page_from(model)).text, markdown_of(model), *(part.ticket for part in model.parts)):
        words = " ".join(text.split())
        assert ONE_OF_MANY.findall(words) == []
        assert not re.search(r"\b1 (?:check of 1 criterion )?(?:were|are)\b", words)
    if outcome == "failed":
        assert "1 row " in markdown_of(model)


def test_the_command_can_be_copied() -> None:
    """A word with a blank or a sign of the shell is quoted."""
    assert shlex.join(["pytest", "--x=two words", "a;b"]) in page_of(2).text


def test_rounds_are_whole() -> None:
    """The axis of rounds has no half ones."""
    svg = [one.text for one in page_of(1).elements if one.name == "text" and "tick" in one.attributes.get("class", "")]
    assert "1" in svg
    assert not {"1.5", "2.5"} & {*svg}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"n=4096": 786.0, "C": 61}, "n=4096: 786.0; C: 61"),
        ([], "none"),
        ({}, "none"),
        ({"a": None, "b": True, "c": False}, "a: none; b: yes; c: no"),
        ({"sizes": [4096, 8192]}, "sizes: 4096, 8192"),
        ([[0, 2.4], [10, 0.5]], "(0, 2.4), (10, 0.5)"),
        ({"a": {"b": [1, 2], "c": {"d": 3}}}, "a: (b 1, 2; c (d 3))"),
        ([{"source": "x", "gb_s": 1e-17}, {"source": "y"}], "(source x; gb_s 1e-17), (source y)"),
        ("text", "text"),
    ],
)
def test_values_in_words(value: object, text: str) -> None:
    """Every number keeps all of its digits."""
    assert plain(value) == text


def test_words_are_not_cut_on_a_narrow_screen() -> None:
    """Heads of tables break between words only, and what has no value stands in one column on a phone."""
    css = (TEMPLATES / "style.css").read_text(encoding="utf-8")
    phone = css.partition("@media screen and (max-width: 720px)")[2]  # A4 without its margins is 718 px wide
    phone = phone.partition("@page")[0]
    assert ".without div { grid-template-columns: minmax(0, 1fr)" in phone
    assert "th { overflow-wrap: break-word; }" in css
    assert ".part thead { display: none; }" in phone  # a bad part's value and limit stand below its criterion
    assert '.part td:last-child::before { content: "siblings: "; }' in phone
    assert ".strip .tick { font-size: 18px; }" in phone
    assert "table.ranks { width: max-content; }" in phone  # a serial number stands in one line; the table scrolls
    assert ".criterion > summary .room, .heads { display: none; }" in phone  # the limit stays beside the value
    halo = next(line for line in css.splitlines() if ".mark-text" in line)
    assert "paint-order: stroke" in halo


def test_a_criterion_without_a_recipe() -> None:
    """It has none, which is recorded: an older file alone does not say."""
    members = of_version_2(document(RECORDS, PLACES), RECORDS, PLACES)
    members["limits"]["hbm_bandwidth"]["recipe"] = {}
    read = Page(page_from(model_of(document_of(text_of(members)))))
    criterion = next(one for one in read.all("details", class_="criterion") if one.text.startswith("hbm_bandwidth"))
    assert "Recipenone" in criterion.text
    assert "not recorded" not in criterion.text


def test_a_host_without_gpus_is_named_once() -> None:
    """The same for a part whose name is empty or that of its node."""
    record = replace(RECORDS[-3], evidence={"facts": [{**FACT, "usual": "on", "alike": 1, "outliers": UNREAD, "unread": []}]})
    text = Page(page_from(model_of(document_of(text_of(document([record], PLACES)))))).text
    assert "node0: no such file, node1 gpu2: no" in text


def test_each_criterion_says_what_it_asks_before_it_is_unfolded() -> None:
    """Its name is an id of this project; a customer who signs reads the sentence. Why, recipe and source are inside."""
    for one in page_of(2).all("details", class_="criterion"):
        name = one.text.split()[0]
        assert f"{name} is as promised." in one.text
    summaries = [one.text for one in page_of(2).all("summary") if "is as promised." in one.text]
    assert len(summaries) == len({record.criterion for record in RECORDS})
