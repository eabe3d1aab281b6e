"""The summary in Markdown and the annotations: what is bad with its numbers, never too long, and foreign text stays text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.page.document import document_of
from pytest_gpucluster.page.outputs import Written, annotations_of, markdown_of, termination_of
from pytest_gpucluster.page.render import model_of
from tests.support.entries import limit
from tests.support.fleet_records import failed, fleet, outcomes
from tests.support.result_files import document, text_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.judging.verdict import Record
    from pytest_gpucluster.page.render import PageModel
    from pytest_gpucluster.places import Place

PLACES = fleet(2, 4)
BAD = [failed("bf16_tflops", "node1-gpu2", 543.254829), failed("hbm_bandwidth", "node0-gpu1", 3.875)]
WRITTEN = {"bf16_tflops": Written(file="site/thresholds.yaml", line=41), "hbm_bandwidth": Written(file="a,b:c", line=7)}


def model(records: Sequence[Record], places: Mapping[str, Place] = PLACES) -> PageModel:
    """The view of a run."""
    return model_of(document_of(text_of(document(records, places))))


def test_the_summary() -> None:
    """Verdict, bad parts with value, limit and siblings, headroom of the handover's criteria, what is not proven."""
    text = markdown_of(model(outcomes(PLACES, BAD)))
    assert text.startswith("# REJECTED\n\n2 of 24 checks failed; named: gpu-node-1 GPU 2, gpu-node-0 GPU 1.\n")
    for words in (
        "### gpu-node-1 GPU 2: GPU",
        "Serial number 1654923000006",
        "| bf16_tflops | 543.3 TFLOPS | > 700 TFLOPS | 768.2 to 799.6, median 783.9 (7 places) |",
        "| Matrix products (BF16) | 543.3 TFLOPS | node1-gpu2 | > 700 TFLOPS | -22 % | 1 of 8 failed |",
        "| GPU memory bandwidth | 3.875 TB/s | node0-gpu1 | > 4.1 TB/s | -5.5 % | 1 of 8 failed |",
        "* No self-test: No faults were planted",
        "Next: ",
    ):
        assert words in text


def test_every_number_of_a_bad_part() -> None:
    """To the digits that are shown."""
    text = markdown_of(model(outcomes(PLACES, BAD)))
    numbers = [float(found) for found in re.findall(r"\d+\.?\d*", text)]
    for record in BAD:
        assert record.value is not None
        assert record.limit is not None
        assert any(number == pytest.approx(record.value, rel=1e-3) for number in numbers)
        assert record.limit.value in numbers


def test_a_good_run() -> None:
    """Nothing is bad."""
    text = markdown_of(model(outcomes(PLACES)))
    assert "# ACCEPTED" in text
    assert "No part is bad." in text


def test_it_is_never_too_long() -> None:
    """A thousand bad parts with long reasons stay below 1 MiB; those that are left out are counted."""
    places = fleet(32, 8)
    bad = [failed("bf16_tflops", name, 543.0, advice="x" * 5000) for name in places if "-" in name]
    spread = [replace(one, criterion=f"c{index}") for index, one in enumerate(bad)]
    text = markdown_of(model(outcomes(places, spread), places))
    assert len(text.encode()) < 2**20
    assert "And 56 more, in report.html." in text


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x>",
        "a|b\nc",
        "[x](javascript:y)",
        "@everyone",
        "`code`",
        "\x1b[31m",
        "# head\n## more",
        "\u202e",
        "![x](http://y)",
    ],
)
def test_foreign_text_stays_text(text: str) -> None:
    """No HTML, no column, no line, no link, no mention."""
    places = {name: replace(place, hostname=f"h{text}") for name, place in PLACES.items()}
    bad = failed(f"c{text}", "node1-gpu2", 543.25, advice=text, reason=text)
    plain = markdown_of(model(outcomes(PLACES, [failed("c", "node1-gpu2", 543.25, advice="x", reason="x")])))
    found = markdown_of(model(outcomes(places, [bad]), places))
    assert found.count("\n") == plain.count("\n")
    assert "<img" not in found
    assert re.search(r"(?<!\\)\[[^\]]*\]\(", found) is None
    assert "@everyone" not in found
    heads = [line for line in found.splitlines() if line.startswith("#")]
    assert len(heads) == len([line for line in plain.splitlines() if line.startswith("#")])


def test_annotations() -> None:
    """The verdict first, then each bad part where its limit is written; signs of the command are escaped."""
    lines = annotations_of(model(outcomes(PLACES, BAD)), WRITTEN)
    assert lines == [
        "::error title=REJECTED::2 of 24 checks failed; named: gpu-node-1 GPU 2, gpu-node-0 GPU 1.",
        "::error file=site/thresholds.yaml,line=41,title=gpu-node-1 GPU 2%3A GPU::bf16_tflops 543.3 TFLOPS, limit > 700",
        "::error file=a%2Cb%3Ac,line=7,title=gpu-node-0 GPU 1%3A GPU::hbm_bandwidth 3.875 TB/s, limit > 4.1",
    ]
    assert annotations_of(model(outcomes(PLACES)), WRITTEN)[0].startswith("::notice title=ACCEPTED::")


def test_an_annotation_is_one_line_and_ten_are_all() -> None:
    """GitHub shows ten; a message with a newline or a command in it starts no other command."""
    places = {name: replace(place, hostname="h\n::error::x\r%0A") for name, place in fleet(12, 4).items()}
    bad = [failed("bf16_tflops", f"node{node}-gpu1", 600.0 + node) for node in range(12)]
    spread = [replace(one, criterion=f"c{index}") for index, one in enumerate(bad)]
    lines = annotations_of(model(outcomes(places, spread), places), WRITTEN)
    assert len(lines) == 10
    assert all("\n" not in line and "\r" not in line and line.startswith("::error ") for line in lines)


def test_the_termination_message() -> None:
    """The verdict is first, then why, then a line for each bad part; a good run has the first two."""
    lines = termination_of(model(outcomes(PLACES, BAD))).splitlines()
    assert lines == [
        "REJECTED: 22 passed, 2 failed on 2 nodes x 4 NVIDIA H200",
        "2 of 24 checks failed; named: gpu-node-1 GPU 2, gpu-node-0 GPU 1.",
        "gpu-node-1 GPU 2, Serial number 1654923000006: bf16_tflops 543.3 TFLOPS, limit > 700",
        "gpu-node-0 GPU 1, Serial number 1654923000001: hbm_bandwidth 3.875 TB/s, limit > 4.1",
    ]
    assert termination_of(model(outcomes(PLACES))).splitlines()[1:] == ["All that applies passed: 24 checks."]


@pytest.mark.parametrize("number", [1, 4, 5, 30, 31, 80])
def test_what_is_not_named_of_a_part_is_counted(number: int) -> None:
    """In the message, in the annotation, and below the table of the summary; a count has no unit."""
    bad = [failed(f"c{index}", "node0-gpu1", 3, limit=limit("max", 0, "count")) for index in range(number)]
    made = model(outcomes(PLACES, bad))
    (line,) = termination_of(made).splitlines()[2:]
    annotation = annotations_of(made, {})[1]
    assert "c0 3, limit <= 0" in line
    for text in (line, annotation):
        assert len(re.findall(r"\bc\d+ 3", text)) == min(number, 4)
        assert (f":{' ' * (text is line)}{number} bad: " in text) == (number > 4)
        assert text.endswith(f"; and {number - 4} more") == (number > 4)
    text = markdown_of(made)
    names = re.findall(r"\bc\d+\b", text.partition("## What the handover")[0].partition("## Bad parts")[2])
    more = re.search(r"Also: .* and (\d+) more", text)
    assert len({*names}) + (int(more[1]) if more else 0) == number
    assert len({*re.findall(r"\bc\d+\b", made.parts[0].ticket)}) == number


@pytest.mark.parametrize("number", [1, 20, 40, 41, 60, 256])
@pytest.mark.parametrize("word", ["c", "ü", "日本", "𝄞", "a\nb\r", "\udce9"])
def test_the_termination_message_is_never_too_long(number: int, word: str) -> None:
    """4,096 bytes of UTF-8 at most, whatever names and texts are made of; what has no room is counted."""
    made = model(outcomes(PLACES, BAD))
    for length in (1, 40, 1000, 9000):
        long = word * (length // len(word) + 1)
        parts = tuple(replace(made.parts[0], name=f"{long} {index}") for index in range(number))
        text = termination_of(replace(made, parts=parts))
        assert len(text.encode()) <= 4096
        first, _, *lines = text.splitlines()
        assert first.startswith("REJECTED: ")
        counted = re.fullmatch(r"and (\d+) more, in the results directory", lines[-1])
        kept = len(lines) - (counted is not None)
        assert kept + (int(counted[1]) if counted is not None else 0) == number
        assert kept >= min(number, 5)


def test_a_verdict_line_without_an_end() -> None:
    """Is cut, and the parts still have room."""
    made = model(outcomes(PLACES, BAD))
    text = termination_of(replace(made, banner=replace(made.banner, line="REJECTED: " + "ü" * 9000)))
    assert len(text.encode()) <= 4096
    assert text.startswith("REJECTED: ")
    assert "hbm_bandwidth 3.875" in text
