"""Draw docs/images/acceptance-4xH200.svg: the end of a kept run, as a terminal shows it today.

Run it as ``python docs/images/draw_acceptance.py`` after the kept run or the table has changed. The values are those of its
results.json. Rows that do not apply and some others are left out, and the picture says how many.
"""  # noqa: INP001 -- a script

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.places import Place
from pytest_gpucluster.reporting.table import Layout, criteria_table
from pytest_gpucluster.reporting.verdict_block import Ending, verdict_block
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "docs" / "results" / "2026-11-22-h200x4-3ac51ee" / "four" / "results.json"
TARGET = ROOT / "docs" / "images" / "acceptance-4xH200.svg"
COMMAND = "$ torchrun --nproc-per-node=4 -m pytest tests_acceptance"
WIDTH = 108
SHOWN = {
    "health": ("ecc_uncorrected", "clocks_under_load"),
    "compute": ("bf16_tflops", "fp16_tflops", "fp8_tflops", "bf16_sustained", "silent_corruption"),
    "memory": ("hbm_bandwidth", "hbm_pattern"),
    "links": ("host_to_device", "device_to_host"),
    "fabric": ("busbw[all_reduce]",),
    "training": (
        "finetune_loss",
        "finetune_exact_match",
        "finetune_check",
        "training_throughput_gpu",
        "training_throughput_fsdp_node",
        "training_scaling_node",
    ),
}
KINDS = {sign: kind for kind, sign in SIGNS.items()}


def record_of(row: Mapping[str, Any]) -> Record:
    """An outcome of a results.json that has its limit as a text only."""
    limit = None
    if row["limit"] is not None:
        sign, number, unit = row["limit"].split(" ", 2)
        limit = Limit(kind=KINDS[sign], value=float(number), unit=unit)
    place = row["place"]
    facts = {name: row[name] for name in ("criterion", "outcome", "value", "reason")}
    return Record(place=None if place is None else place["id"], limit=limit, **facts)


def picture(results: Mapping[str, Any]) -> str:
    """The SVG text."""
    rows = results["criteria"]
    places = {row["place"]["id"]: Place(**row["place"]) for row in rows if row["place"] is not None}
    every = [record_of(row) for row in rows]
    subjects = {record.criterion: subject for record in every for subject in SHOWN if _family(record) in SHOWN[subject]}
    order = [*SHOWN]
    shown = sorted(
        (record for record in every if record.criterion in subjects), key=lambda record: order.index(subjects[record.criterion])
    )
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False, highlight=False)
    console.print(Text(COMMAND, style="bold"))
    left_out = len({record.criterion for record in every} - subjects.keys())
    console.print(Text(f"  [the plan, the progress, {left_out} further criteria]", style="dim"))
    table = criteria_table(shown, places, subjects=subjects, layout=Layout(width=WIDTH, color=True))
    console.print(Text.from_ansi(table.rstrip("\n")))
    verdict = decide(every, Terms(rehearsal=False, level_reached=True))
    ending = Ending(mode=None, timings=results["timings"], folder="gpucluster-results", files=["results.json"])
    for line in verdict_block(verdict, ending, width=WIDTH, quiet=False):
        console.print(Text(line.text, style=" ".join(line.markup)))
    svg = console.export_svg(title="4 x H200, 2026-11-22, commit 3ac51ee", unique_id="acceptance")
    svg = re.sub(r"(?s)\s*@font-face \{.*?\}", "", svg)  # fonts from elsewhere: a picture in a README may load none
    # 0.602 em a character, as in most monospaced fonts: so the cells of rich, 12.2 px wide, stay in line.
    return svg.replace("Fira Code", "DejaVu Sans Mono").replace("font-size: 20px", "font-size: 20.26px")


def _family(record: Record) -> str:
    """The name by which :data:`SHOWN` picks: of a fine-tune's single checks, that of all."""
    name = record.criterion
    return "finetune_check" if name.startswith("finetune_check[") else name


def main() -> int:
    """Write the picture."""
    TARGET.write_text(picture(json.loads(RUN.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
