"""Writes the reports of a run that never began because a node did not come: every expected row is missing, with the reason.

The expected set is that of a run with the same options; only pytest knows which tests a ``-k`` would leave out. Places have
the numbers of torchrun's node ranks, as in a run that the launcher starts. Hostnames come from the nodes that came, else from
``--hosts``.
"""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.commands.packaged.names_of_tests import nodeid_in_suite
from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.config.settings import OPTIONS, reaches, settings_from, unrecognized
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.plan import places_of, rule_against
from pytest_gpucluster.judging.verdict import MISSING, SKIPPED, Record, Verdict
from pytest_gpucluster.protocol.rank import ranges
from pytest_gpucluster.reporting.files import ResultsDirectory
from pytest_gpucluster.reporting.journal import Journal, record_facts
from pytest_gpucluster.reporting.rebuild import rebuild
from pytest_gpucluster.reporting.recorder import planned_facts
from pytest_gpucluster.reporting.results import place_facts
from pytest_gpucluster.run_setup import prepare
from pytest_gpucluster.session import Session

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.config.settings import Settings
    from pytest_gpucluster.config.torchrun import Launch
    from pytest_gpucluster.places import Place


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
        return self.hostnames.get(node_rank) or (self.hosts[node_rank] if self.hosts else None)

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
    hosts = dict(enumerate(map(absence.hostname, range(absence.num_nodes))))
    return [replace(place, hostname=hosts.get(place.node)) for place in session.setup.inventory.everything]


def _outcome(row: Record, session: Session, absence: Absence, *, node: int | None) -> Record:
    """Skipped where a rule says so, else missing; ``node`` None: the whole cluster."""
    rule = rule_against(session.setup.criteria[row.criterion], session.setup.inventory)
    if rule is not None:
        return replace(row, outcome=SKIPPED, reason=rule.text, cause=rule.cause)
    if node is None or node not in absence.absent:
        return replace(row, outcome=MISSING, reason=absence.reason_elsewhere)
    reason = absence.reason(node)
    return replace(row, outcome=MISSING, reason=reason, culprits=(f"node{node}",), blames="node", cause=reason)
