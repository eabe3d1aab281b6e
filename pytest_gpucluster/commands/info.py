"""``gpucluster info``: what this machine shows of its GPUs, links, adapters, host and software, and what is wrong with it.

Nothing is run on a GPU. What is wrong is found in the plain data of ``read_machine`` (``health/defects.py``).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.health.defects import find, unseen
from pytest_gpucluster.inventory.machine import read_machine, read_surroundings
from pytest_gpucluster.records.parts_list import csv_text, json_text, parts_of

GOOD, BAD, UNSEEN = 0, 1, 3
"""The exit codes: nothing is wrong, something is, what the view is about could not be seen."""
WHOLE = ("summary", "all")
"""Views of the whole machine: all that could not be seen is shown."""
SURROUNDED = ("offered", "kubernetes", "all")
"""Views for which programs of the host are run."""


def main(chosen: argparse.Namespace) -> int:
    """Print one view: 0 nothing is wrong, 1 something is, 3 what the view is about could not be seen."""
    machine = read_machine()
    if chosen.inventory:
        return _inventory(machine, as_json=chosen.json)
    if chosen.json or chosen.view in SURROUNDED:
        machine |= read_surroundings()
    found, hidden = find(machine), unseen(machine)
    missing = {name: why for name, why in hidden.items() if name in must_be_seen(chosen.view)}
    code = BAD if found else UNSEEN if missing else GOOD
    if chosen.json:
        findings = [dataclasses.asdict(one) for one in found]
        sys.stdout.write(json.dumps({**machine, "findings": findings, "unseen": hidden}, indent=1) + "\n")
        return code
    # What this loads, rich too, costs a third of the time of --json.
    from pytest_gpucluster.commands.info_views import print_view  # noqa: PLC0415 -- as above

    print_view(machine, chosen.view, unseen=hidden if chosen.view in WHOLE else missing, found=found)
    return code


def _inventory(machine: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the parts serial by serial; 3 where a serial is not known, each with its reason on stderr."""
    parts = parts_of(machine)
    sys.stdout.write(json_text(parts) if as_json else csv_text(parts))
    unread = [f"gpucluster info: not seen: {one.label}: {one.unread}\n" for one in parts if not one.serial]
    sys.stderr.writelines(unread)
    return UNSEEN if unread else GOOD


def must_be_seen(view: str) -> frozenset[str]:
    """The sources without which a view shows nothing."""
    of_host = dict.fromkeys(("host", "software", "offered", "kubernetes"), frozenset[str]())
    return {"ib": frozenset({"nics"}), **of_host}.get(view, frozenset({"gpus"}))
