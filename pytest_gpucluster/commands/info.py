"""``gpucluster info``: what this machine tells of its GPUs, links, adapters, host and software. Nothing is run on a GPU."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from pytest_gpucluster.commands.info_findings import find, must_be_seen, unseen
from pytest_gpucluster.commands.info_tables import without_gaps
from pytest_gpucluster.commands.info_views import show
from pytest_gpucluster.inventory.machine import read_machine
from pytest_gpucluster.reporting.lines import wrapped
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    import argparse

GOOD, BAD, UNSEEN = 0, 1, 3
WHOLE = ("summary", "all")
"""Views of the whole machine: all that could not be seen is told."""


def main(chosen: argparse.Namespace) -> int:
    """Print one view: 0 nothing is wrong, 1 something is, 3 what the view is about could not be seen."""
    machine = read_machine()
    found, hidden = find(machine), unseen(machine)
    missing = {name: why for name, why in hidden.items() if name in must_be_seen(chosen.view)}
    code = BAD if found else UNSEEN if missing else GOOD
    if chosen.json:
        findings = [{"part": one.part, "what": one.what, "advice": one.advice} for one in found]
        sys.stdout.write(json.dumps({**machine, "findings": findings, "unseen": hidden}, indent=1) + "\n")
        return code
    console = Console(highlight=False, markup=False, emoji=False)
    for part in without_gaps(show(machine, chosen.view)):
        console.print(part)
    told = hidden if chosen.view in WHOLE else missing
    for name, why in told.items():
        console.print(Text(f"not seen: {name}: {one_line(why)}", style="yellow"))
    for one in found:
        console.print(Text(f"{one.part}: {one_line(one.what)}", style="bold red"))
        for line in wrapped(f"next: {one_line(one.advice)}", width=console.width, indent="  ", later="    "):
            console.print(Text(line))
    return code
