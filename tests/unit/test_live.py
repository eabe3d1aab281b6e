"""Reports while a run goes on, and from a journal: how often they are written, and that they are never too good."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.reporting.live import Live
from pytest_gpucluster.reporting.rebuild import rebuild

if TYPE_CHECKING:
    from pathlib import Path


def test_costly_writing_is_rare() -> None:
    """A hundred outcomes in no time are one write, and another when something long begins; nothing new is none."""
    written: list[float] = []

    def write() -> None:
        time.sleep(0.02)
        written.append(time.monotonic())

    live = Live(write)
    for _ in range(100):
        live.note()
    assert len(written) == 1
    live.catch_up()
    live.catch_up()
    assert len(written) == 2


def test_a_disk_that_refuses_costs_no_run() -> None:
    """It is noticed elsewhere; the next outcome tries again."""
    tried: list[int] = []

    def write() -> None:
        tried.append(1)
        raise OSError(28, "No space left on device")

    live = Live(write)
    live.note()
    time.sleep(0.05)
    live.note()
    assert len(tried) == 2


FACTS: dict[str, Any] = {
    "level": "quick",
    "profile": "h200-sxm",
    "expected": {"nodes": 1, "gpus_per_node": 1},
    "thresholds_sha256": "0" * 64,
    "changed_limits": [],
    "waivers": [],
}
TERMS = {"rehearsal": False, "level_reached": True, "objections": [], "changed_limits": []}
ROW = {"criterion": "tflops", "place": None}
PASSED = {**ROW, "outcome": "passed", "culprits": []}


def journal(folder: Path, *events: dict[str, Any]) -> None:
    """Of a run that measured its one criterion, and then what ``events`` say."""
    begun = [
        {"event": "started", "facts": FACTS, "versions": {}},
        {"event": "planned", "terms": TERMS, "expected": [{**ROW, "nodeid": "t", "outcome": "pending", "reason": None}]},
        {"event": "outcome", "record": PASSED},
    ]
    lines = [json.dumps({"at_s": 1.0, **event}) + "\n" for event in (*begun, *events)]
    (folder / "journal.jsonl").write_text("".join(lines), encoding="utf-8")


@pytest.mark.parametrize(
    ("events", "word"),
    [
        ([], "INCOMPLETE"),
        ([{"event": "verdict", "objections": []}], "ACCEPTED"),
        ([{"event": "verdict", "objections": ["more GPUs than expected"]}], "INCOMPLETE"),
    ],
)
def test_no_acceptance_without_a_verdict(tmp_path: Path, events: list[dict[str, Any]], word: str) -> None:
    """A controller that died when all was measured may have known what forbids an acceptance, and not have told."""
    journal(tmp_path, *events)
    assert rebuild(tmp_path).word == word
