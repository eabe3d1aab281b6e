"""Draw the pictures of screens: the end of a kept run, the ends of demos, and a watch, as a terminal shows them today.

    python docs/images/draw.py [acceptance-4xH200] [demo-1x8-healthy] [demo-1x8] [demo-128x8] [interrupted] [usage-error]
        [watch] [watch-live] [watch-h200] [info-h100]

Run it after the kept run, the table or the fleet has changed. The picture of the kept run has the values of its results.json;
rows that do not apply and some others are left out, and it says how many. A demo is run, at a pseudo-terminal of 100 columns.
The watch shows the made node and the made run of its tests; watch-h200 and info-h100 what was printed on real GPUs, as kept.
"""  # noqa: INP001 -- a script

from __future__ import annotations

import io
import json
import os
import pty
import re
import shlex
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from pytest_gpucluster.commands.watch import live_lines, screen_lines
from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.places import Place
from pytest_gpucluster.reporting.table import Ending, Layout, criteria_table, verdict_block
from pytest_gpucluster.thresholds.limit import SIGNS, Limit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "docs" / "results" / "2026-11-22-h200x4-3ac51ee" / "four" / "results.json"
IMAGES = ROOT / "docs" / "images"
TARGET = IMAGES / "acceptance-4xH200.svg"
DEMOS = {
    "demo-1x8-healthy": "gpucluster demo",
    "demo-1x8": "gpucluster demo --bad node0-gpu5:throttled",
    "demo-128x8": "gpucluster demo --fleet 128x8 --bad node17:absent --bad node23-gpu3:slow --bad node41-gpu6:hbm",
    "interrupted": "gpucluster demo",
    "usage-error": "pytest --pyargs tests_acceptance --gpucluster-level quik",
}
USAGE_ERROR = "usage-error"
INTERRUPTED_AT = {"interrupted": "bf16_sustained"}
"""Ctrl-C is pressed when the bar names this criterion."""
DEMO_WIDTH = WATCH_WIDTH = 100
WATCH, WATCH_LIVE = "watch", "watch-live"
RESULTS = ROOT / "docs" / "results"
KEPT = {
    "watch-h200": ("$ gpucluster watch --once", RESULTS / "2026-11-23-h200x1-2508f65" / "watch.txt"),
    "info-h100": (
        "$ gpucluster info all | head -24",
        RESULTS / "2026-11-24-h100x1-30d1aab" / "raw" / "info.txt",
    ),
}
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
    console.print(Text.from_ansi("\n".join(table)))
    verdict = decide(every, Terms(rehearsal=False, level_reached=True))
    ending = Ending(mode=None, timings=results["timings"], folder="gpucluster-results", files=["results.json"])
    for line in verdict_block(verdict, ending, width=WIDTH, quiet=False):
        console.print(line)
    return exported(console, title="4 x H200, 2026-11-22, commit 3ac51ee", name="acceptance")


def demo_picture(name: str) -> str:
    """Run a demo, or another command that ends soon, and draw the end of what it shows.

    Raises:
        RuntimeError: it did not come to its end.
    """
    command = DEMOS[name]
    shown = at_terminal(shlex.split(command), interrupt_at=INTERRUPTED_AT.get(name))
    *_, end = shown.rpartition("= gpucluster =")
    if ("ERROR" if name == USAGE_ERROR else "verdict") not in end:
        raise RuntimeError(f"{command} has no verdict:\n{shown[-2000:]}")
    first = 0 if name == USAGE_ERROR else 1  # what stands before it is the rest of the rule
    lines = end.replace("\r", "").split("\n")[first:]
    console = Console(
        record=True, width=DEMO_WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False, highlight=False
    )
    console.print(Text(f"$ {command}", style="bold"))
    if first:
        console.print(Text("  [the plan and the progress]", style="dim"))
    console.print(Text.from_ansi("\n".join(lines).rstrip("\n")))
    title = "a simulated fleet: no GPU was measured" if first else "exit code 4: nothing was started"
    return exported(console, title=title, name=name)


def watch_picture() -> str:
    """A watch of a node with a hot GPU and a lost one, and of a run on two nodes."""
    from tests.support.watched import settled, write_run  # noqa: PLC0415 -- main() puts the checkout on the path

    console = Console(
        record=True, width=WATCH_WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False, highlight=False
    )
    with tempfile.TemporaryDirectory() as folder:
        shown = settled(write_run(Path(folder) / "run", nodes=2, done=0.9), holder=4711)
    for line in (Text("$ gpucluster watch", style="bold"), *screen_lines(shown, width=WATCH_WIDTH)):
        console.print(line)
    return exported(console, title="made values: no GPU was measured", name=WATCH)


def live_picture() -> str:
    """The boxes of a live watch: the same node and run, with what use and power were before."""
    from tests.support.watched import reading, settled, write_run  # noqa: PLC0415 -- as watch_picture()

    console = Console(
        record=True, width=WATCH_WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False, highlight=False
    )
    with tempfile.TemporaryDirectory() as folder:
        shown = settled(write_run(Path(folder) / "run", nodes=2, done=0.9), holder=4711)
    past = tuple(reading(seconds=100 + 2 * number) for number in range(12))
    for line in live_lines(replace(shown, history=past), width=WATCH_WIDTH, height=50):
        console.print(line)
    return exported(console, title="made values: no GPU was measured", name=WATCH_LIVE)


def kept_picture(name: str) -> str:
    """What a command printed on a real machine."""
    command, file = KEPT[name]
    console = Console(
        record=True, width=WATCH_WIDTH, file=io.StringIO(), force_terminal=True, legacy_windows=False, highlight=False
    )
    console.print(Text(command, style="bold"))
    console.print(Text("\n".join(line.rstrip() for line in file.read_text(encoding="utf-8").splitlines())))
    return exported(console, title=f"as printed: {file.relative_to(RESULTS).parts[0]}", name=name)


def at_terminal(words: Sequence[str], *, interrupt_at: str | None = None) -> str:
    """What a command shows at a pseudo-terminal, in an empty folder, which it names as its own.

    Args:
        words: ``gpucluster`` or ``pytest`` and its arguments.
        interrupt_at: Ctrl-C is pressed once this text is there.
    """
    shown: list[bytes] = []
    keys = [b"\x03"] if interrupt_at is not None else []

    def read(descriptor: int) -> bytes:
        shown.append(os.read(descriptor, 1 << 16))
        if keys and str(interrupt_at).encode() in shown[-1]:
            os.write(descriptor, keys.pop())
        return b"." if shown[-1] else b""  # what pty.spawn writes to stdout: a sign of life

    with tempfile.TemporaryDirectory() as folder:
        variables = {"COLUMNS": str(DEMO_WIDTH), "LINES": "40", "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}
        assigned = [f"{variable}={value}" for variable, value in variables.items()]
        module = {"gpucluster": "pytest_gpucluster.cli"}.get(words[0], words[0])
        pty.spawn(["env", "-C", folder, *assigned, sys.executable, "-m", module, *words[1:]], read)
        text = b"".join(shown).decode()
        return text.replace(f"{folder}/", "").replace(f"{sys.prefix}/", "")


def exported(console: Console, *, title: str, name: str) -> str:
    """What the console has recorded as an SVG text that loads nothing."""
    svg = console.export_svg(title=title, unique_id=name)
    svg = re.sub(r"(?s)\s*@font-face \{.*?\}", "", svg)  # fonts from elsewhere: a picture in a README may load none
    # 0.602 em a character, as in most monospaced fonts: so the cells of rich, 12.2 px wide, stay in line.
    return svg.replace("Fira Code", "DejaVu Sans Mono").replace("font-size: 20px", "font-size: 20.26px")


def _family(record: Record) -> str:
    """The name by which :data:`SHOWN` picks: of a fine-tune's single checks, that of all."""
    name = record.criterion
    return "finetune_check" if name.startswith("finetune_check[") else name


def main() -> int:
    """Write the pictures that are named, or all."""
    sys.path.insert(0, str(ROOT))
    for name in sys.argv[1:] or [TARGET.stem, *DEMOS, WATCH, WATCH_LIVE, *KEPT]:
        if name in KEPT:
            text = kept_picture(name)
        elif name in (WATCH, WATCH_LIVE):
            text = watch_picture() if name == WATCH else live_picture()
        else:
            text = picture(json.loads(RUN.read_text(encoding="utf-8"))) if name == TARGET.stem else demo_picture(name)
        (IMAGES / f"{name}.svg").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
