"""Draw docs/images/acceptance-4xH200.svg, the end of a kept run as its terminal showed it.

Run it as ``python docs/images/draw_acceptance.py`` after the kept run has changed. Rows that do not apply, the single checks
of the fine-tune and some others are left out, and the picture says how many.
"""  # noqa: INP001 -- a script

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "docs" / "results" / "2026-11-22-h200x4-3ac51ee" / "four" / "terminal.txt"
TARGET = ROOT / "docs" / "images" / "acceptance-4xH200.svg"
COMMAND = "$ torchrun --nproc-per-node=4 -m pytest tests_acceptance"
SHOWN = [
    "bf16_tflops",
    "fp16_tflops",
    "fp8_tflops",
    "bf16_sustained",
    "silent_corruption",
    "hbm_bandwidth",
    "hbm_pattern",
    "ecc_uncorrected",
    "clocks_under_load",
    "host_to_device",
    "device_to_host",
    "busbw[all_reduce]",
    "straggler[bf16_tflops]",
    "straggler[hbm_bandwidth]",
    "finetune_loss",
    "finetune_exact_match",
    "finetune_checks",
    "training_throughput_gpu",
    "training_throughput_ddp_node",
    "training_throughput_fsdp_node",
    "training_scaling_node",
    "memory_scaling_node",
]
GREEN = "bold green"


def table(lines: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """The rows of the last table of a terminal's output, heading first, and the lines that follow it."""
    first = max(number for number, line in enumerate(lines) if line.startswith("criterion "))
    last = max(number for number, line in enumerate(lines) if line.startswith("verdict "))
    edges = [match.start() for match in re.finditer(r"\S+", lines[first])]
    cells = [
        [line[left:right].strip() for left, right in zip(edges, [*edges[1:], None], strict=True)]
        for line in lines[first : last - 1]
    ]
    rows: list[list[str]] = []
    for row in cells:
        if row[0]:
            rows.append(row)
        else:  # a cell that was broken into two lines
            rows[-1] = [" ".join(filter(None, both)) for both in zip(rows[-1], row, strict=True)]
    return rows, list(lines[last - 1 : last + 1])


def picture(lines: Sequence[str]) -> str:
    """The SVG text."""
    (heading, *rows), (seconds, verdict) = table(lines)
    shown = [row for row in rows if row[0] in SHOWN]
    widths = [max(len(row[column]) for row in (heading, *shown)) for column in range(len(heading))]
    width = sum(widths) + 2 * len(widths)
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, legacy_windows=False)
    console.print(Text(COMMAND, style="bold"))
    console.print(Text(f"  [the plan, the live list, {len(rows) - len(shown)} further rows]", style="dim"))
    console.print(Text(_padded(heading, widths), style="bold"))
    for row in shown:
        line = Text(_padded(row, widths))
        line.highlight_words([row[-1]], style="green")
        console.print(line)
    console.print(Text(seconds.partition(";")[0]))
    console.print(Text(verdict, style=GREEN))
    svg = console.export_svg(title="4 x H200, 2026-11-22, commit 3ac51ee", unique_id="acceptance")
    svg = re.sub(r"(?s)\s*@font-face \{.*?\}", "", svg)  # fonts from elsewhere: a picture in a README may load none
    # 0.602 em a character, as in most monospaced fonts: so the cells of rich, 12.2 px wide, stay in line.
    return svg.replace("Fira Code", "DejaVu Sans Mono").replace("font-size: 20px", "font-size: 20.26px")


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def main() -> int:
    """Write the picture."""
    TARGET.write_text(picture(RUN.read_text(encoding="utf-8").splitlines()), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
