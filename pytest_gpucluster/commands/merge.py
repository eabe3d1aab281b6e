"""``gpucluster merge DIR... -o DIR``: the runs of many nodes as one results directory with one verdict.

With ``--exclude`` standard output has one line, sbatch's options for a job on the nodes that passed; all else goes to standard
error.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.verdict import Verdict
from pytest_gpucluster.records.reading import read_results
from pytest_gpucluster.reporting.lines import hostlist, hosts_from
from pytest_gpucluster.reporting.merge import merge
from pytest_gpucluster.reporting.node_runs import NEVER_REPORTED, beside_slurm, judge_nodes
from pytest_gpucluster.text import counted, one_line

GOOD, BAD = 0, 1


def main(chosen: argparse.Namespace) -> int:
    """Merge the runs; 0 for an acceptance or a rehearsal, else 1. With ``--exclude``: 0 where a node passed, else 1.

    Raises:
        ConfigurationError: the runs cannot be merged; nothing was written then.
    """
    hosts = hosts_from(chosen.hosts) if chosen.hosts is not None else ()
    same = {os.path.realpath(folder) for folder in chosen.folders}
    if len(same) < len(chosen.folders):
        raise ConfigurationError("one results directory is given twice")
    if chosen.exclude:
        return _exclude(chosen.folders, chosen.output, hosts)
    return GOOD if _merge(chosen.folders, chosen.output, hosts, to=sys.stdout).is_good else BAD


def _merge(folders: Sequence[Path], out: Path, hosts: Sequence[str], *, to: TextIO) -> Verdict:
    verdict = merge(folders, out, hosts=hosts)
    merged = read_results(out)["merged"]
    for title, lines in (("gap", merged["gaps"]), ("double", merged["doubles"])):
        to.writelines(f"{title}: {one_line(line)}\n" for line in lines)
    to.write(f"verdict {one_line(verdict.line)}\n")
    return verdict


def _exclude(folders: Sequence[Path], out: Path, hosts: Sequence[str]) -> int:
    """Merge what reported, name each node that did not pass, and print how sbatch takes the others."""
    nodes, unasked = beside_slurm(judge_nodes(folders))
    expected = [node.run.host_of(node.run.nodes[0]) if node.run and node.run.nodes else node.name for node in nodes]
    reported = [node.folder for node in nodes if node.run is not None and not node.is_apart]
    if reported:
        _merge(reported, out, [*dict.fromkeys((*expected, *hosts))], to=sys.stderr)
    if unasked:
        sys.stderr.write(f"what Slurm says of the nodes now is not known: {one_line(unasked)}\n")
    known = {name for node, host in zip(nodes, expected, strict=True) for name in (node.name, host)}
    absent = {name: NEVER_REPORTED for name in hosts if name not in known}
    bad = {**{node.name: node.why for node in nodes if node.why}, **absent}
    good = [node.name for node in nodes if not node.why]
    for name, why in bad.items():
        sys.stderr.write(f"excluded {name}: {why}\n")
    if not good:
        sys.stderr.write(f"none of {counted(len(bad), 'node')} passed: there is nothing to run the next job on\n")
        return BAD
    sys.stderr.write(f"passed: {len(good)} of {counted(len(good) + len(bad), 'node')}: {hostlist(good)}\n")
    options = [f"--nodes={len(good)}", f"--nodelist={hostlist(good)}", *([f"--exclude={hostlist(bad)}"] if bad else [])]
    sys.stdout.write(f"{' '.join(options)}\n")
    return GOOD
