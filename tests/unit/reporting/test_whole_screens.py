"""The whole end of a run as a person sees it: table, bad parts, what to do next, verdict. Kept, and looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.reporting.bad_parts import MOST_LINES, Shown, describe_bad_parts
from pytest_gpucluster.reporting.table import Ending, Layout, criteria_table, verdict_block
from tests.support.entries import limit
from tests.support.fleet_records import failed, fleet, outcomes, selector_of
from tests.support.screens import kept_screen

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from pytest_gpucluster.places import Place

SCREENS = Path(__file__).with_name("screens")
SUBJECTS = {"clocks_under_load": "health", "bf16_tflops": "compute", "hbm_bandwidth": "memory", "busbw[all_reduce]": "fabric"}
SUBJECTS |= {"finetune_loss": "training", "finetune_exact_match": "training"}
HOT = {"event reasons": ["hw_thermal_slowdown"], "C": 91.0, "W": 412.0, "SM MHz": 1290.0}
TIMINGS = {"total_s": 194.0, "startup_s": 8.2, "measuring_s": 181.0, "other_s": 4.8}
BUS = limit("above", 400, "GB/s")
LIMITS = {"finetune_loss": limit("below", 0.5, "nats/token"), "finetune_exact_match": limit("min", 0.9, "ratio")}


def whole(name: str, value: float, places: Mapping[str, Place]) -> Record:
    """A criterion of the whole cluster: it needs every node."""
    absent = next((place.id for place in places.values() if place.rank is None and place.gpu is not None), None)
    if absent is None:
        return Record(criterion=name, place=None, outcome="passed", value=value, limit=LIMITS[name])
    node = absent.partition("-")[0]
    reason = f"not run: {absent} is missing: no such node joined"
    return Record(criterion=name, place=None, outcome="missing", reason=reason, culprits=(node,), blames="node")


def a_run(nodes: int, *bad: Record, absent: Iterable[int] = ()) -> tuple[dict[str, Place], list[Record]]:
    """Every outcome of so many nodes of 8 GPUs: of each GPU, each node, and the cluster."""
    places = fleet(nodes, 8, absent=absent)
    planted = {(record.criterion, record.place): record for record in bad}
    rows = outcomes(
        places, [record for record in bad if record.criterion in ("clocks_under_load", "bf16_tflops", "hbm_bandwidth")]
    )
    for place in places.values():
        if place.gpu is None:
            why = f"not run: {place.id} is missing: no such node joined"
            good = Record(criterion="busbw[all_reduce]", place=place.id, outcome="passed", value=478.2, limit=BUS)
            gone = replace(good, outcome="missing", value=None, limit=None, reason=why, culprits=(place.id,), blames="node")
            rows.append(planted.get((good.criterion, place.id), good if place.hostname is not None else gone))
    return places, [*rows, whole("finetune_loss", 0.0013, places), whole("finetune_exact_match", 1.0, places)]


SLOW = failed("bf16_tflops", "node0-gpu3", 498, evidence=HOT), failed("clocks_under_load", "node0-gpu3", 1, evidence=HOT)
RUNS = {
    "run-1x8-healthy": lambda: a_run(1),
    "run-1x8-one-bad": lambda: a_run(1, *SLOW),
    "run-64x8-bad-gpu-and-node": lambda: a_run(64, *SLOW, failed("busbw[all_reduce]", "node41", 371, limit=BUS)),
    "run-128x8-absent-node": lambda: a_run(128, *SLOW, absent=[17]),
}


def screen(places: Mapping[str, Place], records: list[Record], *, width: int) -> tuple[list[str], list[str]]:
    """All lines, and those about bad parts among them."""
    verdict = decide(records, Terms(rehearsal=False, level_reached=True, shape=f"{len(places) // 9} x 8 NVIDIA H200"))
    folder, files = "gpucluster-results", ["results.json", "journal.jsonl", "junit.xml"]
    shown: dict[str, Any] = {"places": places, "tests": selector_of(records), "device": "cuda", "width": width}
    command = ("pytest", "--pyargs", "tests_acceptance")
    parts = describe_bad_parts(records, Shown(**shown, command=command, drain_reason="gpucluster-20261123"))
    ending = verdict_block(verdict, Ending(mode=None, timings=TIMINGS, folder=folder, files=files), width=width, quiet=False)
    table = criteria_table(records, places, subjects=SUBJECTS, layout=Layout(width=width))
    lines = [line.plain for line in parts]
    return [*table, *lines, *(line.plain for line in ending)], lines


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", RUNS)
def test_the_end_of_a_run(name: str, width: int) -> None:
    """As it was looked at. It fits, has no colours, and says of at most 60 lines what is bad."""
    lines, bad = screen(*RUNS[name](), width=width)
    assert lines == kept_screen(SCREENS / f"{name}-{width}.txt", lines)
    assert max(map(len, lines)) <= width
    assert len(bad) <= MOST_LINES
    assert "\x1b" not in "".join(lines)
    (verdict,) = (line for line in lines if line.startswith("verdict "))
    assert verdict.split()[1].rstrip(":") == {"run-1x8-healthy": "ACCEPTED"}.get(name, "REJECTED")
