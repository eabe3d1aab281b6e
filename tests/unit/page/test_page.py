"""The page: every number is on it, every foreign text stays text, nothing is loaded, and it can be read by everybody."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from pytest_gpucluster.judging.verdict import ERROR, FAILED, NOISY, NOT_SELECTED, PASSED, SKIPPED, Record, Terms
from pytest_gpucluster.page.criteria_view import host_of
from pytest_gpucluster.page.document import TEMPLATES, document_of
from pytest_gpucluster.page.render import embedded_results, model_of, page_from
from tests.support.entries import limit
from tests.support.fleet_records import failed, fleet, outcomes
from tests.support.pages import Page, colours_of, contrast
from tests.support.result_files import RUN, document, large_run, of_version_2, text_of

PLACES = fleet(2, 4)
SIZES = [{"dtype": "float32", "bytes": 8 << (10 * n), "busbw_gb_s": 1.5 + 100.25 * n} for n in range(4)]
PAIRS = [
    {"source": f"node0-gpu{a}", "target": f"node0-gpu{b}", "gb_s": 390.5 + a} for a in range(4) for b in range(4) if a != b
]
FACTS = [
    {
        "kind": "host",
        "name": "kernel",
        "among": "",
        "usual": "6.8",
        "alike": 1,
        "demanded": None,
        "unread": [],
        "outliers": [{"node": "node1", "part": "", "value": "5.15"}],
    },
    {"kind": "host", "name": "SMT", "among": "", "usual": "on", "alike": 2, "demanded": None, "unread": [], "outliers": []},
]
MORE = [
    Record(
        criterion="busbw[all_reduce]",
        place="node0",
        outcome=PASSED,
        value=480.125,
        limit=limit("above", 400, "GB/s"),
        evidence={"sizes": SIZES},
    ),
    Record(criterion="busbw[send_recv]", place="node0", outcome=PASSED, value=361.5, limit=limit("above", 0, "GB/s")),
    Record(
        criterion="gpu_pairs",
        place="node0",
        outcome=PASSED,
        value=0.0,
        limit=limit("max", 0, "count"),
        evidence={"pairs": PAIRS},
    ),
    Record(
        criterion="finetune_loss",
        place=None,
        outcome=PASSED,
        value=0.109625,
        limit=limit("below", 0.5, "nats/token"),
        evidence={"curve [step, loss]": [[0, 2.4], [10, 0.5], [20, 0.109625]]},
    ),
    Record(
        criterion="drift_coverage",
        place=None,
        outcome=PASSED,
        value=36.0,
        limit=limit("min", 10, "count"),
        evidence={"facts": FACTS},
    ),
    Record(
        criterion="ecc_growth",
        place="node0-gpu1",
        outcome=PASSED,
        value=0.0,
        limit=limit("max", 0, "errors"),
        evidence={"within": ["corrected: 3"]},
    ),
    Record(criterion="latency", place=None, outcome=NOISY, value=21.875, limit=limit("below", 20, "us"), reason="noisy"),
    Record(criterion="transport", place=None, outcome=ERROR, reason="hung: Python stacks of rank 3\n  File x"),
    Record(criterion="rails", place=None, outcome=NOT_SELECTED, reason="not selected"),
    Record(criterion="slurm", place=None, outcome=SKIPPED, reason="needs a job of Slurm"),
    Record(
        criterion="hints",
        place=None,
        outcome=PASSED,
        value=1.0,
        limit=limit("max", 0, "count"),
        advisory=True,
        reason="one hint",
    ),
]
BAD = failed("bf16_tflops", "node1-gpu2", 543.254829, evidence={"SM MHz": 1755.53125, "W": 420.0, "C": 58})
RECORDS = [*outcomes(PLACES, [BAD]), *MORE]
BUSY = [
    Record(
        criterion="host_to_device",
        place="node1-gpu2",
        outcome=ERROR,
        reason="host not idle: python (pid 1620, root)",
        culprits=("node1",),
        blames="host",
    )
]


def page(records: list[Record] | None = None, *, version: int = 1, terms: Terms | None = None, **facts: Any) -> str:
    """The page of these outcomes."""
    known = RECORDS if records is None else records
    members = document(known, PLACES, terms=terms, **facts)
    members = of_version_2(members, known, PLACES) if version == 2 else members
    return page_from(model_of(document_of(text_of(members))))


HTML = page()
READ = Page(HTML)


def numbers_of(value: Any) -> list[float]:
    """Every number of JSON data."""
    if isinstance(value, dict):
        return [number for one in value.values() for number in numbers_of(one)]
    if isinstance(value, list):
        return [number for one in value for number in numbers_of(one)]
    return [value] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def shown_numbers(html: str) -> set[float]:
    """Every number that a reader of the page finds in its text or as the exact value of what is shown."""
    read = Page(html)
    return {float(found) for found in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", read.text)} | set(read.exact)


@pytest.mark.parametrize("version", [1, 2])
def test_every_number_of_the_results_is_on_the_page(version: int) -> None:
    """Each value, limit and number of the evidence, with all of its digits."""
    html = page(version=version)
    wanted = {float(record.value) for record in RECORDS if record.value is not None}
    wanted |= {float(record.limit.value) for record in RECORDS if record.limit is not None}
    wanted |= {float(number) for record in RECORDS for number in numbers_of(dict(record.evidence))}
    assert wanted - shown_numbers(html) == set()


def test_a_number_that_is_not_there_is_not_found() -> None:
    """The check above fails for a page of another run."""
    assert 543.254829 in shown_numbers(HTML)
    assert 543.254829 not in shown_numbers(page([replace(BAD, value=543.25483)]))


def test_the_results_are_in_the_page_whole() -> None:
    """What the page holds are the bytes of results.json, whose digest stands on it."""
    content = text_of(document(RECORDS, PLACES))
    held = embedded_results(page_from(model_of(document_of(content))))
    assert held == content
    assert READ.text.count(hashlib.sha256(content).hexdigest()) == 2


def test_sections_in_the_order_of_the_handover() -> None:
    """The verdict, then what is not proven, before what is."""
    ids = [one.attributes["id"] for one in READ.all("section")]
    assert ids == ["verdict", "open", "handover", "bad", "pictures", "criteria", "records", "sign"]


def test_what_is_not_proven() -> None:
    """Each kind of gap has its sentence; what is not there has none."""
    html = page(changed_limits=["bf16_tflops"], changed_terms=["1 node"], remarks=["its limits were never tried on B200"])
    titles = [one.text for one in Page(html).all("h3") if one.path[-1] == "li"]
    expected = [
        "Not measured",
        "Too close to call",
        "Not selected",
        "Without a limit",
        "Advisory misses",
        "Changed limits",
        "Changed terms",
        "Remarks",
        "No self-test",
        "Does not apply",
    ]
    assert titles == expected
    good = [one.text for one in Page(page(outcomes(PLACES))).all("h3") if one.path[-1] == "li"]
    assert good == ["No self-test"]


def test_a_bad_part_with_all_that_a_technician_needs() -> None:
    """Host, PCI, serial, value, limit, siblings; the ticket says the same."""
    part = next(one for one in READ.all("article", class_="part"))
    for words in (
        "gpu-node-1 GPU 2",
        "543.3 TFLOPS",
        "> 700",
        "7 places",
        "1654923000006",
        "00000000:3b:00.0",
        "high confidence",
    ):
        assert words in part.text
    assert "| bf16_tflops | 543.3 TFLOPS | > 700 |" in READ.all("pre", class_="ticket")[0].text


def test_a_rehearsal_has_no_gpu() -> None:
    """Its ranks are of the CPU, on this page too; and the limits file may name the cluster."""
    places = fleet(1, 2, device="cpu")
    rows = outcomes(places)
    members = of_version_2(document(rows, places, cluster="halle-3"), rows, places)
    text = Page(page_from(model_of(document_of(text_of(members))))).text
    assert "1 node, 2 CPU ranks" in text
    assert "halle-3" in text


def test_what_is_not_recorded_is_said() -> None:
    """Version 1 has no dates and no reasons for its limits; version 2 has both, the dates as people read them."""
    old, new = READ.text, Page(page(version=2)).text
    assert "Not recorded: Cluster, Started, Ended, Run by, Started on, Run id, Command" in old
    assert "Why, recipe and source of the limit: not recorded" in old
    moments = [str(RUN[name]).replace("T", " ") for name in ("started", "ended")]
    for words in (*moments, "ada", "why of bf16_tflops", "thresholds.yaml:41", "REQ-7", "U17", "b" * 64):
        assert str(words) in new
    assert "not recorded" not in new.partition("Every criterion")[2].partition("Records")[0]


@pytest.mark.parametrize(
    ("terms", "records", "words"),
    [
        (Terms(rehearsal=False, level_reached=True), outcomes(PLACES), ("ACCEPTED", "All that applies passed: 24 checks.")),
        (Terms(rehearsal=False, level_reached=True), RECORDS, ("REJECTED", "1 of 34 checks failed; named: gpu-node-1 GPU 2.")),
        (Terms(rehearsal=False, level_reached=True), MORE, ("INCOMPLETE", ": 1 not measured, 1 too close to call")),
        (Terms(rehearsal=True, level_reached=True), outcomes(PLACES), ("REHEARSED", "accepts nothing")),
        (Terms(rehearsal=False, level_reached=True), [], ("INCOMPLETE", "Nothing was expected")),
        (
            Terms(rehearsal=False, level_reached=False, objections=("cut short: the run was interrupted",)),
            outcomes(PLACES),
            ("INCOMPLETE", "The level is lower than the profile asks for; cut short: the run was interrupted."),
        ),
        (Terms(rehearsal=False, level_reached=True), BUSY, ("INCOMPLETE", "named: gpu-node-1 (the host is to blame).")),
    ],
)
def test_the_reason_of_the_verdict(terms: Terms, records: list[Record], words: tuple[str, str]) -> None:
    """One word, and one sentence that says why."""
    read = Page(page(records, terms=terms))
    assert read.all("h1")[0].text == words[0]
    assert words[1] in read.all("p", class_="reason")[0].text


def test_reasons_of_many_hosts_are_counted() -> None:
    """A tool that no host has is not a line for each of them."""
    rows = [
        Record(criterion="cabling", place=f"node{index}", outcome=SKIPPED, reason=f"needs lldpcli on host-{index}")
        for index in range(40)
    ]
    members = document([*outcomes(PLACES), *rows], fleet(40, 4))
    shown = Page(page_from(model_of(document_of(text_of(members)))))
    gap = next(one.text for one in shown.all("li") if one.text.startswith("Does not apply"))
    assert "host-23" in gap
    assert "host-24" not in gap
    assert "16 other reasons, each with its criterion below" in gap


@pytest.mark.parametrize(("records", "is_open"), [(BUSY, True), ([BAD], False)])
def test_evidence_in_words_is_open_where_no_value_stands_beside_it(records: list[Record], *, is_open: bool) -> None:
    """What keeps a host busy is all that is known of it."""
    found = [one.attributes for one in Page(page(records)).all("details") if one.text.startswith("Evidence in words")]
    assert ["open" in attributes for attributes in found] == [is_open]


PLAIN = Record(criterion="sum", place="node1-gpu2", outcome=FAILED, reason="assert 1 == 2", culprits=("node1-gpu2",))


@pytest.mark.parametrize(("records", "classes"), [(BUSY, "part is-open"), ([BAD], "part"), ([PLAIN], "part")])
def test_only_what_failed_is_red(records: list[Record], classes: str) -> None:
    """A GPU that another program holds was not measured, and nothing is wrong with it."""
    assert [one.attributes["class"] for one in Page(page(records)).all("article")][-1] == classes
    assert ".part.is-waived, .part.is-open { border-left-color: var(--open); }" in HTML


def test_only_an_acceptance_is_green() -> None:
    """The banner of anything else is not."""
    simulated = {"nodes": 2, "gpus_per_node": 4, "gpu": "h200-sxm", "seed": 0, "faults": []}
    tones = {
        "good": page(outcomes(PLACES)),
        "bad": HTML,
        "open": page(outcomes(PLACES), terms=Terms(rehearsal=True, level_reached=True)),
    }
    for tone, html in tones.items():
        assert Page(html).all("section", id="verdict")[0].attributes["class"] == f"banner b-{tone}"
    assert "b-good" not in page(outcomes(PLACES), simulated=simulated).partition("</style>")[2].partition("<h1>")[0]


HOSTILE = [
    "<script>alert(1)</script>",
    "</style><script>x</script>",
    "</script><img src=x onerror=alert(1)>",
    '"><svg onload=x>',
    "' onmouseover='x",
    "{{ 7*7 }}{% raw %}",
    "-->",
    "<!--",
    "\x00\x1b[31m",
    "\u202etxt.exe",
    "\ud800",
    "javascript:alert(1)",
    "שלום עולם",
    "a" * 300_000,
    "]]>",
    "&lt;b&gt;",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_foreign_text_stays_text(text: str) -> None:
    """As host, serial number, criterion, unit, reason, evidence, fact of the run: no new element, no new attribute."""
    places = {
        name: replace(place, hostname=f"h{text}", serial=text, uuid=text, pci=text, board={text[:90]: text})
        for name, place in PLACES.items()
    }
    asked = limit("above", 700, text[:90])
    bad = failed(
        f"c{text}", "node1-gpu2", 543.25, limit=asked, reason=text, evidence={text: text, "within": [text]}, advice=text
    )
    odd = Record(criterion=f"e{text}", place=None, outcome=ERROR, reason=f"Python stacks {text}", remark=text)
    members = document([*outcomes(places), bad, odd], places, profile=text, remarks=[text], changed_limits=[text])
    html = page_from(model_of(document_of(text_of(members))))
    read, plain = Page(html), Page(page([*outcomes(PLACES), replace(bad, criterion="c"), replace(odd, criterion="e")]))
    assert {one.name for one in read.elements} == {one.name for one in plain.elements}
    assert len(read.all("script")) == len(plain.all("script"))
    assert read.comments == []
    assert {key for one in read.elements for key in one.attributes} == {key for one in plain.elements for key in one.attributes}
    shown = text[:100].encode("unicode_escape").decode() if not text[:100].isprintable() else text[:100]
    assert shown in read.text
    assert re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\ud800-\udfff]", html) is None
    assert len(html) < 6_000_000


def test_nothing_is_loaded_and_nothing_else_may_run() -> None:
    """No address, no handler, no inline style; the policy names the digests of our style and our script, and nothing else."""
    policy = READ.all("meta", **{"http-equiv": "Content-Security-Policy"})[0].attributes["content"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for name, file in (("style", "style.css"), ("script", "page.js")):
        shown = re.findall(rf"<{name}>(.*?)</{name}>", HTML, re.DOTALL)
        assert len(shown) == 1
        digest = base64.b64encode(hashlib.sha256(shown[0].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
        assert shown[0] == (TEMPLATES / file).read_text(encoding="utf-8").strip()
    for one in READ.elements:
        assert not {
            key for key in one.attributes if key.startswith("on") or key in ("style", "src", "srcset", "action", "formaction")
        }
        assert one.attributes.get("href", "#").startswith("#")
    assert "url(" not in (TEMPLATES / "style.css").read_text(encoding="utf-8")
    assert "http" not in HTML.replace("http-equiv", "")


def test_the_page_is_whole_without_its_script() -> None:
    """What needs the script is hidden until it runs; all else stands in the page."""
    for one in [*READ.all("button"), *READ.all("form")]:
        assert "hidden" in one.attributes
    assert {one.name for one in READ.elements if "hidden" in one.attributes} == {"button", "form"}
    assert len(READ.all("details", class_="criterion")) == len({record.criterion for record in RECORDS})


def test_everybody_can_read_it() -> None:
    """What axe-core calls serious: language, title, headings, heads of tables, names of pictures, labels, ids, focus."""
    assert READ.all("html")[0].attributes["lang"] == "en"
    assert READ.all("title")[0].text.startswith("REJECTED")
    levels = [int(one.name[1]) for one in READ.elements if re.fullmatch(r"h[1-6]", one.name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for one in READ.all("svg"):
        assert one.attributes["role"] == "img"
        assert one.attributes["aria-label"]
    assert len([one for one in READ.all("title") if one.path[-1:] == ("svg",)]) == len(READ.all("svg"))
    assert all(one.attributes.get("scope") in ("col", "row") for one in READ.all("th"))
    for one in READ.all("input"):
        assert "label" in one.path
    ids = [one.attributes["id"] for one in READ.elements if "id" in one.attributes]
    assert len(ids) == len(set(ids))
    assert {one.attributes["href"][1:] for one in READ.all("a")} <= set(ids)
    for one in READ.all("div", class_="scroll"):
        assert one.attributes["tabindex"] == "0"
        assert one.attributes["aria-label"]
    assert all(one.text.strip() for name in ("summary", "h2", "h3", "a", "button") for one in READ.all(name))
    assert [one for one in READ.all("dt") if one.path[-1] not in ("dl", "div")] == []


PAIRS_OF_COLOURS = [(ink, paper) for paper in ("paper", "sheet") for ink in ("ink", "quiet", "link", "good", "bad", "open")] + [
    (ink, tint) for ink, tint in (("good", "good-tint"), ("bad", "bad-tint"), ("open", "open-tint"), ("quiet", "none-tint"))
]
PAIRS_OF_COLOURS += [
    (ink, tint) for ink in ("ink", "quiet", "good", "bad", "open") for tint in ("good-tint", "bad-tint", "open-tint")
]


@pytest.mark.parametrize("theme", range(3), ids=["light", "dark", "print"])
def test_texts_stand_out(theme: int) -> None:
    """Each text has a contrast of 4.5 at least to what it stands on; marks of pictures 3, or a shape besides the colour."""
    colours = colours_of((TEMPLATES / "style.css").read_text(encoding="utf-8"))[theme]
    weak = {pair: round(contrast(colours[pair[0]], colours[pair[1]]), 2) for pair in PAIRS_OF_COLOURS}
    assert {pair: ratio for pair, ratio in weak.items() if ratio < 4.5} == {}
    assert {name for name in ("dot", "bad", "limit") if contrast(colours[name], colours["paper"]) < 3} == set()
    assert contrast("#1a1f26", colours["m1"]) >= 4.5


def test_figures() -> None:
    """Every picture that the run has evidence for, and none that it has none for."""
    headings = [one.text for one in Page(HTML.partition('id="pictures"')[2].partition('id="criteria"')[0]).all("h3")]
    wanted = [
        "Nodes and GPUs",
        "Pairs and rails",
        "Bus bandwidth by message size",
        "Loss of the fine-tune",
        "Errors counted over the run",
        "What differs between nodes",
        "Stacks of processes that hung or crashed",
    ]
    assert headings == wanted
    assert "node1: 5.15" in READ.text
    assert "corrected: 3" in READ.text
    bare = {one.text for one in Page(page(outcomes(PLACES))).all("h3")}
    assert not bare & set(wanted[1:])


def test_figures_of_version_2() -> None:
    """Its keys say quantity and unit."""
    clock = {"SM clock MHz": 1755.5, "power W": 420.5, "temperature C": 58}
    curve = {"loss curve as [step, loss] nats/token": [[0, 2.4], [10, 0.5]]}
    seen = (clock, clock, curve)
    more = [Record(criterion=f"c{n}", place=None, outcome=PASSED, value=1.0, evidence=one) for n, one in enumerate(seen)]
    headings = [one.text for one in Page(page([*outcomes(PLACES), *more], version=2)).all("h3")]
    for words in ("Clocks, power and temperature", "Loss of the fine-tune"):
        assert words in headings


def test_the_map_names_what_is_bad() -> None:
    """Each place is a cell with its least headroom, or what failed there."""
    titles = [one.text for one in READ.all("title") if one.path[-1] == "rect"]
    assert any(text.startswith("gpu-node-1 GPU 2: 1 failed: -22.4 % at bf16_tflops (543.3, > 700 TFLOPS)") for text in titles)
    assert any(text.startswith("gpu-node-0 GPU 0: least headroom") for text in titles)
    absent = fleet(2, 4, absent=[1])
    members = document(outcomes(absent), absent)
    gone = Page(page_from(model_of(document_of(text_of(members)))))
    assert len(gone.all("rect", class_="gone")) == 4


def test_a_page_of_1024_gpus_is_small() -> None:
    """Its share of 3 MB, with every bad part in full and every value to be read; bins where dots would be too many."""
    records, places = large_run(criteria=9, rates=5)
    content = text_of(of_version_2(document(records, places), records, places))
    html = page_from(model_of(document_of(content)))
    assert len(html.encode()) <= 3_000_000 * 0.35
    for words in ("gpu-node-3 GPU 5", "gpu-node-17 GPU 0", "gpu-node-40 GPU 2", "gpu-node-99 GPU 6", "node77"):
        assert f"<h3>{words}</h3>" in html
    assert embedded_results(html) in (content, None)
    read = Page(html.partition('<section id="handover">')[2].partition("</section>")[0])
    strip = read.all("svg", class_="strip")[0]
    assert 0 < len(read.all("rect", class_="bin")) <= 64
    assert strip.attributes["aria-label"].startswith("Matrix products (BF16): 1016 values, worst 543.2 at node3-gpu5")
    assert len(read.all("circle", class_="is-bad")) == 1


def hosts_of(html: str, anchor: str) -> dict[str, list[str]]:
    """The hosts in the table of values of a criterion, by where its rows stand: everywhere, on screen or on paper."""
    section = html.partition(f'id="{anchor}"')[2].partition('<details class="criterion"')[0]
    bodies = re.findall(r'<tbody(?: class="([a-z-]+)")?>(.*?)</tbody>', section, flags=re.DOTALL)
    return {kind: re.findall(r'<th scope="row">([^<]+)', rows) for kind, rows in bodies}


def test_rows_that_are_alike_are_printed_once() -> None:
    """On screen each host has its row; on paper hosts with the same values share one. What differs stands first, in both."""
    records, places = large_run(criteria=6, rates=1)
    found = hosts_of(page_from(model_of(document_of(text_of(document(records, places))))), "c1")
    assert found[""] == ["gpu-node-17", "node77"]
    assert sorted([*found[""], *found["not-printed"]]) == sorted({host_of(place) for place in places.values()})
    assert found["only-printed"] == ["gpu-node-[0-16,18-76,78-127]"]


def test_rows_of_a_small_page_are_all_printed() -> None:
    """Nothing is folded where every number carries its exact value."""
    assert {*hosts_of(HTML, "c0")} == {""}


def test_an_absent_node_colours_no_criterion() -> None:
    """Each row counts what answered, and how many places are absent; only what is bad besides is open or bad."""
    absent = fleet(3, 4, absent=[1])
    rows = outcomes(absent, [failed("bf16_tflops", "node2-gpu0", 498)])
    (first, *others) = sorted(model_of(document_of(text_of(document(rows, absent)))).criteria, key=lambda one: one.tone)
    assert (first.row.criterion, first.tone, first.row.outcome) == ("bf16_tflops", "bad", "1 of 8 failed, 4 absent")
    assert {one.tone for one in others} == {"good"}
    assert {one.row.outcome for one in others} == {"8 ok, 4 absent"}


def test_a_node_that_is_absent_is_one_line() -> None:
    """In the table of values one word for all of its GPUs, and in the texts its name in place of theirs."""
    absent = fleet(3, 4, absent=[1])
    html = page_from(model_of(document_of(text_of(document(outcomes(absent), absent)))))
    assert html.count('colspan="4">missing') == 3
    assert "<b>node1</b>" not in html  # each of its GPUs has a text of its own
    gone = [replace(one, reason="not run: node1 is absent") if one.reason else one for one in outcomes(absent)]
    texts = page_from(model_of(document_of(text_of(document(gone, absent)))))
    assert texts.count("<b>node1</b><pre>not run: node1 is absent</pre>") == 3


def test_a_ticket_about_many_criteria_is_short() -> None:
    """An absent node takes every criterion along, and none is bad: twelve are named, the others counted."""
    absent = fleet(2, 4, absent=[1])
    rows = [replace(one, criterion=f"c{number} {one.criterion}") for number in range(10) for one in outcomes(absent)]
    (part,) = [one for one in model_of(document_of(text_of(document(rows, absent)))).parts if len(one.more_criteria) > 12]
    assert len(part.more_criteria) == 30
    named = [line for line in part.ticket.splitlines() if line.startswith("* Also: ")]
    assert named == [f"* Also: {', '.join(sorted(part.more_criteria)[:12])} and 18 more"]


def test_the_signatures_stand_beside_the_verdict() -> None:
    """Who signs reads it there once more, and that only an acceptance accepts."""
    words = {html: Page(html).all("section", id="sign")[0].text for html in (HTML, page(outcomes(PLACES)))}
    assert "REJECTED. Signed, it is a record: only ACCEPTED accepts the cluster." in words[HTML]
    assert "ACCEPTED. Read above what is not proven." in words[page(outcomes(PLACES))]


def test_many_bad_parts() -> None:
    """All are on the page: 40 in full, the others with a line."""
    places = fleet(100, 4)
    bad = [failed("bf16_tflops", f"node{node}-gpu1", 600.0 + node) for node in range(0, 96, 2)]
    members = document(outcomes(places, bad), places)
    read = Page(page_from(model_of(document_of(text_of(members)))))
    assert len(read.all("article", class_="part")) == 40
    assert "8 more" in [one.text for one in read.all("summary")]
    assert "gpu-node-94 GPU 1" in read.text


def test_waivers_and_outcomes_that_are_waived() -> None:
    """Who answers for a failure stands with what is not proven, and in the table of waivers."""
    waiver = {
        "criterion": "bf16_tflops",
        "place": "node1-gpu2",
        "until": "2027-01-31",
        "who": "Ada",
        "why": "spare is on its way",
        "where": "waivers.yaml:3",
        "state": "used",
    }
    waived = replace(BAD, waiver={"who": "Ada", "why": "spare is on its way", "until": "2027-01-31"}, waivable=True)
    read = Page(page(outcomes(PLACES, [waived]), waivers=[waiver]))
    assert read.all("h1")[0].text == "ACCEPTED WITH WAIVERS"
    assert "spare is on its way" in read.all("section", id="open")[0].text
    assert "waivers.yaml:3" in read.all("section", id="records")[0].text
    assert read.all("article", class_="is-waived")


def test_json_in_evidence_keeps_its_digits() -> None:
    """A number is never rounded by the way it is written."""
    value = 0.1 + 0.2
    html = page([replace(BAD, evidence={"x": [value, {"y": 1e-17}]})])
    assert json.dumps(value) in html
    assert "1e-17" in html


def test_failed_is_not_only_a_colour() -> None:
    """A bad cell of the map has a cross, a bad row its word."""
    assert len(READ.all("path", class_="cross")) == len(READ.all("rect", class_="bad"))
    assert FAILED in READ.text
