"""Reports from a journal: if the controller died before it wrote them, or to write them again."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging import waivers
from pytest_gpucluster.judging.verdict import MISSING, PENDING, Record, Terms, Verdict, decide
from pytest_gpucluster.places import Device, Inventory, Place
from pytest_gpucluster.reporting.files import ResultsDirectory, require_no_links, write_atomically
from pytest_gpucluster.reporting.journal import record_from_facts
from pytest_gpucluster.reporting.report import Case, Report
from pytest_gpucluster.reporting.writer import ReportFiles

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

CUT_SHORT = "not run: the run was cut short, its controller died"
NO_VERDICT = "the run ended before its verdict"


@dataclass(slots=True, kw_only=True)
class JournalState:
    """What the events of a journal say about a run; ``verdict_word`` is the verdict of the run itself."""

    facts: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    terms: Terms = field(default_factory=lambda: Terms(rehearsal=True, level_reached=False))
    places: dict[str, Place] = field(default_factory=dict)
    records: dict[tuple[str, str | None], Record] = field(default_factory=dict)
    nodeids: dict[tuple[str, str | None], str] = field(default_factory=dict)
    began_s: float = 0.0
    ended_s: float = 0.0
    finished: bool = False
    verdict_word: str | None = None
    selftest: dict[str, Any] | None = None

    def take(self, event: dict[str, Any]) -> None:
        """Add one event. An unknown event belongs to a newer version and is ignored."""
        self.began_s = self.began_s or event["at_s"]
        self.ended_s = event["at_s"]
        reader = getattr(self, f"_on_{event['event']}", None)
        if reader is not None:
            reader(event)

    def _on_started(self, event: dict[str, Any]) -> None:
        self.facts, self.versions = event["facts"], event["versions"]

    def _on_planned(self, event: dict[str, Any]) -> None:
        self.terms = Terms(**{**event["terms"], "objections": tuple(event["terms"]["objections"])})
        for row in event["expected"]:
            key = (row["criterion"], row["place"])
            self.records[key] = Record(criterion=key[0], place=key[1], outcome=row["outcome"], reason=row["reason"])
            self.nodeids[key] = row["nodeid"]

    def _on_bound(self, event: dict[str, Any]) -> None:
        self.places = {place["id"]: Place(**place) for place in (*event["places"], *event.get("nodes", ()))}
        if "changed_terms" in event:  # what other nodes said
            self.terms = replace(self.terms, changed_terms=tuple(event["changed_terms"]))
            self.facts = {**self.facts, "changed_terms": event["changed_terms"]}

    def _on_selftest(self, event: dict[str, Any]) -> None:
        """Add the objections of the self-test: they forbid an acceptance also if the run ended before its verdict."""
        self.selftest = event["selftest"]
        self.terms = replace(self.terms, objections=(*self.terms.objections, *event["selftest"]["objections"]))

    def _on_outcome(self, event: dict[str, Any]) -> None:
        record = record_from_facts(event["record"])
        self.records[record.criterion, record.place] = record

    def _on_verdict(self, event: dict[str, Any]) -> None:
        self.finished, self.verdict_word = True, event.get("verdict")
        self.terms = replace(self.terms, objections=tuple(event["objections"]))

    def close(self) -> Verdict:
        """Give what never got an outcome the outcome ``missing``, and decide."""
        for key, record in self.records.items():
            if record.outcome == PENDING:
                self.records[key] = replace(record, outcome=MISSING, reason=CUT_SHORT)
        if not self.records:
            self.terms = replace(self.terms, objections=("the run ended before anything was planned",))
        elif not self.finished:  # an objection that was found after the plan is written only with the verdict
            self.terms = replace(self.terms, objections=(*self.terms.objections, NO_VERDICT))
        verdict = decide(self.records.values(), self.terms)
        if verdict.is_good and self.verdict_word not in (None, verdict.word):
            self.terms = replace(self.terms, objections=(*self.terms.objections, f"the run itself said {self.verdict_word}"))
            return decide(self.records.values(), self.terms)
        return verdict


def read_journal(path: Path) -> JournalState:
    """The state after the last event of ``journal.jsonl``; a last line that was cut off is left out.

    Raises:
        ConfigurationError: there is no journal, or a line inside it is broken.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    state = JournalState()
    for number, event in _events(lines, path):
        try:
            state.take(event)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigurationError(f"{path}:{number}: not an event of a journal: {error!r}") from None
    return state


def _events(lines: list[str], path: Path) -> Iterable[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        try:
            yield number, json.loads(line)
        except ValueError:
            if number < len(lines):
                raise ConfigurationError(f"{path}:{number}: not JSON: the journal is damaged") from None


def rebuild(folder: Path, *, junit: Path | None = None) -> Verdict:
    """Write ``results.json`` and a JUnit file from the journal in ``folder``.

    Args:
        folder: the results directory of the run.
        junit: the JUnit file; None: ``junit.xml`` in ``folder``.

    Raises:
        ConfigurationError: there is no journal, it is damaged, or a link lies where a report belongs.
        OSError: the files cannot be written.
    """
    require_no_links(folder)
    state = read_journal(folder / "journal.jsonl")
    verdict = state.close()
    facts = {
        **state.facts,
        "waivers": waivers.states_from(state.facts.get("waivers", []), state.records.values()),
        "environment": {"versions": state.versions, "rebuilt_from_journal": True},
        "timings": {"total_s": round(state.ended_s - state.began_s, 3)},
        **({"selftest": state.selftest} if state.selftest is not None else {}),
    }
    report = Report(
        cases=tuple(Case(nodeid=state.nodeids.get(key, key[0]), record=record) for key, record in state.records.items()),
        verdict=verdict,
        places=state.places or _unbound(state),
        facts=facts,
        is_rehearsal=state.terms.rehearsal,
        is_rebuilt=True,
    )
    ReportFiles(results=folder / "results.json", junit=junit if junit is not None else folder / "junit.xml").write(report)
    return verdict


def require_journal_of(run: str, folder: Path) -> None:
    """Check that the journal is the one of ``run``: another run may have moved its files away meanwhile.

    Raises:
        ConfigurationError: the journal in ``folder`` is another run's.
    """
    with (folder / "journal.jsonl").open(encoding="utf-8") as journal:
        if json.loads(journal.readline() or "{}").get("run") != run:
            raise ConfigurationError(f"{folder} belongs to another run now")


def take_over(folder: Path, copy: Path) -> None:
    """Put the copy of a lost run's journal into its folder, unless the journal there is as long as the copy.

    Files of another run in that folder move into ``previous/``.

    Raises:
        ConfigurationError: the folder cannot be written, or another run holds it.
        OSError: the copy cannot be read.
    """
    text = copy.read_text(encoding="utf-8")
    journal = folder / "journal.jsonl"
    there = journal.read_text(encoding="utf-8") if journal.exists() else ""
    if there.splitlines()[:1] != text.splitlines()[:1]:
        ResultsDirectory(folder).close()
    elif len(there) >= len(text):
        return
    write_atomically(journal, text)


def _unbound(state: JournalState) -> dict[str, Place]:
    """The expected places of a run that ended before any rank said hello."""
    expected = state.facts.get("expected")
    if expected is None:
        return {}
    device: Device = "cpu" if state.terms.rehearsal else "cuda"
    inventory = Inventory(num_nodes=expected["nodes"], gpus_per_node=expected["gpus_per_node"], device=device)
    return {place.id: place for place in (*inventory.places, *inventory.nodes)}
