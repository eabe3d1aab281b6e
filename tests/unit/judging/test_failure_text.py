"""What a failure says: what, where, how much, where the limit is written, evidence, what next."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from pytest_gpucluster.judging import failure_text
from pytest_gpucluster.judging.failure_text import format_number, show_evidence
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin.live import describe
from tests.support.entries import limit, threshold

HOT = Place(id="node1-gpu3", node=1, gpu=3, rank=11, hostname="gpu-node-1", uuid="GPU-6f1c", pci="00000000:61:00.0")
EVIDENCE = {"SM MHz": 1290, "event reasons": ["hw_thermal_slowdown"], "C": 91}


@pytest.mark.parametrize(
    ("unit", "value", "words"),
    [("count", 1, "1, above 0"), ("errors", 2, "2 errors, above 0 errors"), ("", 3, "3, above 0")],
)
def test_a_count_of_nothing_named_has_no_unit(unit: str, value: float, words: str) -> None:
    """``1 count, above 0 count`` was said of yes and no."""
    asked = limit("max", 0, unit)
    assert failure_text.format_miss(asked, value) == words
    assert failure_text.format_asked(asked, value) == f"{words.replace('above', '<=')} asked"


def test_one_place() -> None:
    """Value, limit, by how much, file and line first; then the hardware, the evidence, why, and what to do next."""
    text = failure_text.describe_failure(
        threshold("bf16_tflops"), limit(), 498.0, at=failure_text.Located([HOT]), evidence=EVIDENCE
    )
    first, *rest = text.splitlines()
    assert first == f"bf16_tflops at {HOT.named}: 498 TFLOPS, not above 700 TFLOPS (28.9 % short; thresholds.yaml:41)"
    body = "\n".join(rest)
    for part in (
        "gpu-node-1",
        "rank 11",
        "GPU-6f1c",
        "SM MHz 1290",
        "hw_thermal_slowdown",
        "C 91",
        "why: the handover's limit",
    ):
        assert part in body

    assert not any(line.startswith("  next: ") for line in rest)


@pytest.mark.parametrize("is_noisy", [False, True])
def test_what_to_do_next(*, is_noisy: bool) -> None:
    """The same command for this test alone, as a shell reads it."""
    line = failure_text.next_step(["-k", "test_a[it's $x]"], is_noisy=is_noisy)
    assert line.startswith("  next: look for what disturbs it" if is_noisy else "  next: measure this again: ")
    assert shlex.split(line.partition("command with ")[2]) == ["-k", "test_a[it's $x]"]


def test_long_evidence_is_shortened() -> None:
    """Both ends of a loss curve are shown; all of it is in results.json."""
    curve = [[step, 0.5] for step in range(100)]
    text = failure_text.describe_failure(
        threshold("finetune_loss"), limit(), 1.0, at=failure_text.Located([]), evidence={"curve": curve}
    )
    assert "curve [0, 0.5] [1, 0.5] [2, 0.5] [3, 0.5] ... (92 more in results.json) ... [96, 0.5]" in text
    text = failure_text.describe_failure(
        threshold("finetune_loss"), limit(), 1.0, at=failure_text.Located([]), evidence={"curve": curve[:8]}
    )
    assert "more" not in text


def test_a_pair() -> None:
    """Both ends are named: the link between them is meant."""
    other = Place(id="node0-gpu0", node=0, gpu=0, rank=0, hostname="gpu-node-0")
    text = failure_text.describe_failure(threshold("p2p"), limit(), 1.0, at=failure_text.Located([other, HOT]), evidence={})
    assert text.startswith("p2p at gpu-node-0 gpu 0 (node0-gpu0) -> gpu-node-1 gpu 3 GPU-6f1c (node1-gpu3): 1 TFLOPS")
    assert "gpu-node-0" in text
    assert "gpu-node-1" in text


def test_the_whole_cluster() -> None:
    """Without a place there is none to name."""
    text = failure_text.describe_failure(threshold("busbw[all_reduce]"), limit(), 1.0, at=failure_text.Located([]), evidence={})
    assert "busbw[all_reduce] at the cluster: 1 TFLOPS" in text


@pytest.mark.parametrize(
    ("kind", "number", "value", "text"),
    [("above", 700, 498.0, "28.9 % short"), ("max", 10, 15.0, "50.0 % over"), ("max", 0, 3.0, "3 TFLOPS off")],
)
def test_by_how_much(kind: str, number: float, value: float, text: str) -> None:
    """Percent of the limit; of a limit of 0 the difference."""
    assert failure_text.shortfall(limit(kind, number), value) == text


@pytest.mark.parametrize(("value", "shown"), [(699.99, "699.99"), (700.0, "700"), (498.04, "498.0")])
def test_a_failing_value_never_looks_like_its_limit(value: float, shown: str) -> None:
    """It has as many digits as it takes to tell it from the limit."""
    text = failure_text.describe_failure(threshold(), limit(), value, at=failure_text.Located([]), evidence={})
    assert text.startswith(f"tflops at the cluster: {shown} TFLOPS, not above 700 TFLOPS (")
    assert describe(Record(criterion="c", place=None, outcome="failed", value=value, limit=limit()), None) == (
        f"failed: c at the cluster: {shown} TFLOPS, not above 700 TFLOPS"
    )
    noise = failure_text.describe_noise(threshold(), limit(), value, places=[], why="they differ")
    assert noise.startswith(f"tflops at the cluster is too close to call: {shown} TFLOPS, > 700 TFLOPS asked\n")


@pytest.mark.parametrize("outcome", ["failed", "noisy", "error"])
@pytest.mark.parametrize("kind", ["above", "below", "min", "max"])
@pytest.mark.parametrize("value", [-42.26, 5.999, 6.0, 6.001, 699.0])
def test_a_live_line_says_of_a_value_only_what_is_true(outcome: str, kind: Any, value: float) -> None:
    """That it misses its limit only where it does; else value and limit, or the reason."""
    one = limit(kind, 6, "%")
    record = Record(criterion="c", place=None, outcome=outcome, value=value, limit=one, reason="the siblings differ")
    line = describe(record, None)
    assert (f"{one.missed_word} 6 %" in line) == (outcome == "failed" and not one.holds(value))
    if outcome == "noisy":
        assert line == f"too close to call: c at the cluster: {format_number(value)} %, {one.text} asked"
    elif outcome == "error" or one.holds(value):
        assert line.endswith("at the cluster: the siblings differ")


@pytest.mark.parametrize(
    ("evidence", "shown"),
    [
        ({"single GPU": {"node1-gpu0": 18843.418520772528, "node1-gpu1": 13210.0000001}}, "node1-gpu0 18840; node1-gpu1 13210"),
        (
            {"single GPU": {f"gpu{number}": float(number) for number in range(9)}},
            "gpu3 3; ... (1 more in results.json) ...;",
        ),
        ({"found": [1.000000000001, "a", 2]}, "found 1.000 a 2"),
        ({"none": {}}, "none none"),
    ],
)
def test_numbers_of_evidence_have_four_digits(evidence: dict[str, Any], shown: str) -> None:
    """In a table of values by place too; a long one shows its ends."""
    assert shown in show_evidence(evidence)
    assert "{" not in show_evidence(evidence)
