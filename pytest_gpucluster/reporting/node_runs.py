"""Which nodes passed when each ran alone: from their results directories, and from what Slurm says of the nodes now.

A node passes where its own run measured something, nothing of that is bad or open, and nothing but its level or its selection
keeps the run from an acceptance. What is not selected was not asked for.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.inventory.slurm import SlurmNode, read_nodes
from pytest_gpucluster.judging.verdict import BAD, PASSED, SEVERITY, WORDS, counted_as
from pytest_gpucluster.reporting.merge import ALIKE, OneRun, read_run
from pytest_gpucluster.text import one_line

GONE = ("DOWN", "DRAIN", "FAIL", "NOT_RESPONDING")
"""States in which Slurm gives a node no job."""
NEVER_REPORTED = "it never reported"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRun:
    """One node's run. ``name``: in Slurm, which is that of its folder. ``why``: why it did not pass; "" where it did.

    ``is_apart``: it was judged otherwise than those of other nodes, so it cannot be merged with them.
    """

    name: str
    folder: Path
    why: str
    run: OneRun | None = None
    is_apart: bool = False


def judge_nodes(folders: Sequence[Path]) -> list[NodeRun]:
    """What became of each node, in the order of the folders.

    Raises:
        ConfigurationError: two folders have one name, or a folder is not there.
    """
    twice = [name for name, number in Counter(folder.name for folder in folders).items() if number > 1]
    if twice:
        raise ConfigurationError(f"two folders are called {twice[0]}: with --exclude a folder has its node's name in Slurm")
    return _set_apart([_judge(folder) for folder in folders])


def _set_apart(nodes: Sequence[NodeRun]) -> list[NodeRun]:
    """The same nodes; one that was judged otherwise than the others does not pass.

    A driver that is missing makes a rehearsal of a run, and another GPU another profile: that is the fault of this node. What
    measured GPUs counts, however few; of profiles and limits the one that most nodes have, and without a majority none.
    """
    runs = [node.run for node in nodes if node.run is not None]
    has_measured = any(_mode(run) is None for run in runs)
    runs = [run for run in runs if _mode(run) is None or not has_measured]
    usual = {name: _majority([run.state.facts.get(name) for run in runs]) for name in ALIKE}
    whys = ["" if node.run is None else _why_apart(node.run, usual, has_measured=has_measured) for node in nodes]
    paired = zip(nodes, whys, strict=True)
    return [replace(node, why="; ".join(filter(None, (why, node.why))), is_apart=True) if why else node for node, why in paired]


def _why_apart(run: OneRun, usual: Mapping[str, str | None], *, has_measured: bool) -> str:
    if has_measured and (mode := _mode(run)) is not None:
        return f"it ran as a {mode}, and others measured GPUs"
    for name, most in usual.items():
        own = run.state.facts.get(name)
        if most is not None and own != most:
            values = f": {own}, and most have {most}" if name == "profile" else ""
            return f"other {ALIKE[name]} than most nodes{values}"
    return ""


def _mode(run: OneRun) -> str | None:
    """How a run was made that measured no GPU; None for one that did."""
    terms = run.state.terms
    return "simulation" if terms.simulated else "rehearsal" if terms.rehearsal else None


def _majority(values: Sequence[str | None]) -> str | None:
    """What more than half of them are; None where nothing is."""
    most = Counter(values).most_common(1)
    return most[0][0] if most and 2 * most[0][1] > len(values) else None


def unusable(nodes: Mapping[str, SlurmNode]) -> dict[str, str]:
    """Why Slurm gives a node no job, by its name; nodes that can get one are not in it."""
    found = {}
    for name, node in nodes.items():
        states = [state for state in node.states if state in GONE]
        if states:
            found[name] = f"{'+'.join(states)} in Slurm" + (f": {one_line(node.reason)}" if node.reason else "")
    return found


def beside_slurm(runs: Sequence[NodeRun]) -> tuple[list[NodeRun], str]:
    """The same nodes with what Slurm says of them now, and why Slurm was not asked ("" where it was).

    A node that passed and was drained since did not pass; one that never reported gets its reason.
    """
    if shutil.which("scontrol") is None:
        return list(runs), ""
    nodes = read_nodes([run.name for run in runs])
    if isinstance(nodes, NotAvailable):
        return list(runs), nodes.why
    gone = unusable(nodes)
    return [_beside(run, gone.get(run.name)) for run in runs], ""


def _beside(run: NodeRun, state: str | None) -> NodeRun:
    if state is None or (run.why and run.run is not None):
        return run
    return replace(run, why=f"{run.why}; it is {state}" if run.why else f"it passed, and now it is {state}")


def _judge(folder: Path) -> NodeRun:
    if not folder.is_dir():
        raise ConfigurationError(f"there is no results directory {folder}")
    if not (folder / JOURNAL).exists():
        return NodeRun(name=folder.name, folder=folder, why=NEVER_REPORTED)
    try:
        run = read_run(folder)
    except (ConfigurationError, OSError) as error:
        return NodeRun(name=folder.name, folder=folder, why=f"its run cannot be read: {one_line(str(error))}")
    return NodeRun(name=folder.name, folder=folder, run=run, why=_why_not(run))


def _why_not(run: OneRun) -> str:
    if len(run.nodes) > 1:
        return f"its folder holds a run of {len(run.nodes)} nodes, and not of this node alone"
    bad = [record for record in run.state.records.values() if counted_as(record) in BAD]
    if bad:
        worst = max(bad, key=lambda record: SEVERITY.index(record.outcome))
        more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
        found = worst.evidence.get("found")
        said = found[0] if found and isinstance(found, (list, tuple)) else worst.message
        return f"{worst.criterion} {WORDS[worst.outcome]}: {one_line(str(said))}{more}"
    if not run.verdict.counts[PASSED]:
        return "nothing was measured and passed"
    return "; ".join(run.state.terms.objections)
