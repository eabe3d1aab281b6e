"""``gpucluster report``: the reports of a run again, from its journal, and its page from whatever the run left.

Writes the reports of a run that never began because a node did not come: every expected row is missing, with the reason.

The expected set is that of a run with the same options; only pytest knows which tests a ``-k`` would leave out. Places have
the numbers of torchrun's node ranks, as in a run that the launcher starts. Hostnames come from the nodes that came, else from
``--hosts``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pytest_gpucluster.commands.arguments import nodeid_in_suite
from pytest_gpucluster.config.process import collector_off
from pytest_gpucluster.config.run_files import JOURNAL, METRICS, REPORT, RESULTS
from pytest_gpucluster.config.settings import OPTIONS, Settings, reaches, settings_from, unrecognized
from pytest_gpucluster.config.torchrun import Launch
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.plan import places_of, rule_against
from pytest_gpucluster.judging.verdict import MISSING, SKIPPED, Record, Verdict
from pytest_gpucluster.page.outputs import Wanted, page_about, write_outputs
from pytest_gpucluster.places import Place
from pytest_gpucluster.protocol.rank import ranges
from pytest_gpucluster.reporting.files import ResultsDirectory, require_unread, require_writable, results_lock
from pytest_gpucluster.reporting.journal import Journal, record_facts
from pytest_gpucluster.reporting.rebuild import rebuild, require_journal_of, take_over
from pytest_gpucluster.reporting.recorder import planned_facts
from pytest_gpucluster.reporting.results import place_facts
from pytest_gpucluster.run_setup import prepare
from pytest_gpucluster.session import Session
from pytest_gpucluster.text import one_line, visible

GOOD = ("ACCEPTED", "ACCEPTED_WITH_WAIVERS", "REHEARSED")


@collector_off()
def main(chosen: argparse.Namespace) -> int:
    """Write the reports; 0 where the verdict is good, else 1.

    With ``-o``, for a results.json, or for a directory that has no journal, only the page is made and no other file is touched.

    Raises:
        ConfigurationError: there is no run, its files are damaged, or a report cannot be written there.
        OSError: the disk refused a report.
    """
    folder: Path = chosen.folder
    from_journal = chosen.journal is not None or chosen.run is not None or chosen.junitxml is not None
    if chosen.output is not None and from_journal:
        raise ConfigurationError("-o makes the page alone, so it goes with none of --junitxml, --journal")
    if not from_journal and (chosen.output is not None or not (folder / JOURNAL).is_file()):
        return _page(folder, chosen.output)
    if chosen.junitxml is not None:
        read = [folder / JOURNAL, folder / RESULTS, folder / REPORT, folder / METRICS]
        require_unread(chosen.junitxml, [*read, *([chosen.journal] if chosen.journal is not None else [])])
    if chosen.journal is not None:
        take_over(folder, chosen.journal)
    if chosen.junitxml is not None:
        require_writable(chosen.junitxml)
    with results_lock(folder) if chosen.run is not None else contextlib.nullcontext():
        if chosen.run is not None:
            require_journal_of(chosen.run, folder)
        verdict = rebuild(folder, junit=chosen.junitxml, replaces_ended=chosen.run is not None)
        on_github = os.environ if chosen.run is not None else {}  # a run that was lost has no other to write its summary
        said = write_outputs(folder, Wanted(environment=on_github))
    for problem in said.problems:
        sys.stderr.write(f"gpucluster report: {problem}\n")
    sys.stdout.write("".join(f"{line}\n" for line in (*said.annotations, f"verdict {one_line(verdict.line)}")))
    return 0 if verdict.is_good else 1


def _page(source: Path, output: Path | None) -> int:
    file, run = page_about(source, output=output)
    sys.stdout.write(f"verdict {one_line(run.facts['verdict_line'])}\npage {visible(str(file))}\n")
    return 0 if run.word in GOOD else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Which nodes came. ``hostnames`` and ``hosts`` are by node rank; ``ended_by``: the signal that ended the wait."""

    hostnames: Mapping[int, str]
    num_nodes: int
    hosts: Sequence[str]
    waited_s: float
    ended_by: str | None = None

    @property
    def absent(self) -> list[int]:
        """The node ranks that did not come."""
        return [rank for rank in range(self.num_nodes) if rank not in self.hostnames]

    @property
    def text(self) -> str:
        """Which nodes are absent and why, in one line."""
        by = f"ended by {self.ended_by}; " if self.ended_by else ""
        return by + ("; ".join(self.reason(rank) for rank in self.absent) or "all nodes had joined")

    def hostname(self, node_rank: int) -> str | None:
        """The hostname that the node sent, else the one of ``--hosts``."""
        return self.hostnames.get(node_rank) or (self.hosts[node_rank] if node_rank < len(self.hosts) else None)

    def reason(self, node_rank: int) -> str:
        """Why the places of an absent node are missing."""
        host = self.hostname(node_rank)
        name = f"node {node_rank} ({host})" if host else f"node {node_rank}"
        return f"{name} {'had not joined' if self.ended_by else 'never joined'} within {self.waited_s:g} s"

    @property
    def reason_elsewhere(self) -> str:
        """Why the places of the nodes that came are missing too."""
        if self.ended_by:
            return f"not run: terminated by {self.ended_by} before all nodes had joined"
        nodes = "node" if len(self.absent) == 1 else "nodes"
        return f"not run: {nodes} {ranges(self.absent)} never joined"


def expect(launch: Launch, settings: Settings) -> Session:
    """The run that these options describe, with its expected set; nothing is started. ``launch``: the variables of rank 0.

    Raises:
        ConfigurationError: options, thresholds or GPUs do not fit, with the message that pytest would print.
    """
    setup = prepare(settings, launch, start=Path.cwd())
    session = Session(setup, rootdir=Path.cwd())
    for threshold in setup.criteria.values():
        if reaches(settings.level, threshold.level):
            for place in places_of(threshold, setup.inventory):
                where = place.id if place is not None else None
                nodeid = nodeid_in_suite(threshold.key, where, root=Path.cwd())
                session.plan.expect(threshold.key, where, nodeid=nodeid)
    session.fix_plan()
    return session


def read_options(pytest_arguments: Sequence[str]) -> tuple[Settings, Path | None]:
    """Read our settings and the path of the JUnit file from pytest's arguments, as pytest would read them.

    ``PYTEST_ADDOPTS`` counts; options in an ini file do not.

    Raises:
        ConfigurationError: a value is not understood, or an option is one of ours but for a letter or two.
    """
    parser = argparse.ArgumentParser(prog="gpucluster launch ... -- pytest", add_help=False, allow_abbrev=False)
    for option in OPTIONS:
        parser.add_argument(option.name, **option.keywords)
    parser.add_argument("--junitxml", "--junit-xml")
    added = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    given, others = parser.parse_known_args([*added, *pytest_arguments])
    if wrong := unrecognized(others, guessed_only=True):
        raise ConfigurationError(wrong)
    here, junit = Path.cwd(), given.junitxml
    return settings_from(given, start=here), here / os.path.expandvars(Path(junit).expanduser()) if junit else None


def write_reports(session: Session, absence: Absence, *, junit: Path | None) -> Verdict:
    """Write the journal, ``results.json`` and JUnit (in the results directory, and at ``junit``).

    Raises:
        ConfigurationError: the results directory cannot be written, or another run holds it.
        OSError: a file cannot be written.
    """
    directory = ResultsDirectory(session.setup.settings.results_dir)
    journal = Journal(directory.path / JOURNAL)
    try:
        _write_journal(journal, session, absence)
        verdict = session.decide()
        journal.write("verdict", verdict=verdict.word, line=verdict.line, objections=session.state.objections)
        rebuild(directory.path)
        if junit is not None:
            rebuild(directory.path, junit=junit)
    finally:
        journal.close()
        directory.close()
    return verdict


def _write_journal(journal: Journal, session: Session, absence: Absence) -> None:
    journal.write("started", **session.state.started())
    journal.write("planned", **planned_facts(session.plan, session.state.terms))
    places = {place.id: place for place in _named(session, absence)}
    journal.write("bound", places=[place_facts(place) for place in places.values()], nodes=[], unheard={})
    for row in session.plan.pending():
        outcome = _outcome(row, session, absence, node=places[row.place].node if row.place is not None else None)
        session.plan.set_outcome(outcome)
        journal.write("outcome", record=record_facts(outcome))


def _named(session: Session, absence: Absence) -> list[Place]:
    """Every expected place and node, with its hostname where one is known."""
    return [replace(place, hostname=absence.hostname(place.node)) for place in session.setup.inventory.everything]


def _outcome(row: Record, session: Session, absence: Absence, *, node: int | None) -> Record:
    """Skipped where a rule says so, else missing; ``node`` None: the whole cluster."""
    rule = rule_against(session.setup.criteria[row.criterion], session.setup.inventory)
    if rule is not None:
        return replace(row, outcome=SKIPPED, reason=rule.text, cause=rule.cause)
    if node is None or node not in absence.absent:
        return replace(row, outcome=MISSING, reason=absence.reason_elsewhere)
    reason = absence.reason(node)
    return replace(row, outcome=MISSING, reason=reason, culprits=(f"node{node}",), blames="node", cause=reason)
