"""``gpucluster merge DIR... -o DIR``: the runs of many nodes as one results directory with one verdict."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.records.reading import read_results
from pytest_gpucluster.reporting.merge import merge
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    import argparse

GOOD, BAD = 0, 1


def main(chosen: argparse.Namespace) -> int:
    """Merge the runs; 0 for an acceptance or a rehearsal, else 1.

    Raises:
        ConfigurationError: the runs cannot be merged; nothing was written then.
    """
    hosts = [name.strip() for name in (chosen.hosts or "").split(",")] if chosen.hosts is not None else []
    if not all(hosts):
        raise ConfigurationError(f"--hosts {chosen.hosts!r} names an empty host; say A,B,...")
    same = {folder.resolve() for folder in chosen.folders}
    if len(same) < len(chosen.folders):
        raise ConfigurationError("one results directory is given twice")
    verdict = merge(chosen.folders, chosen.output, hosts=hosts)
    merged = read_results(chosen.output)["merged"]
    for title, lines in (("gap", merged["gaps"]), ("double", merged["doubles"])):
        for line in lines:
            sys.stdout.write(f"{title}: {one_line(line)}\n")
    sys.stdout.write(f"verdict {one_line(verdict.line)}\n")
    return GOOD if verdict.is_good else BAD
