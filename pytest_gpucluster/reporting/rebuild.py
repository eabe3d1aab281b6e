"""Reports from a journal: if the controller died before it wrote them, or to write them again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from pytest_gpucluster.config.run_files import JOURNAL, JUNIT, RESULTS
from pytest_gpucluster.config.settings import JUNIT_FORMS, MOST_EXPECTED
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging import waivers
from pytest_gpucluster.judging.plan import Key
from pytest_gpucluster.judging.verdict import MISSING, OUTCOMES, PENDING, REJECTED, VERDICTS, Record, Terms, Verdict, decide
from pytest_gpucluster.places import Device, Inventory, Place
from pytest_gpucluster.records.reading import bytes_of, run_facts, with_types, zoned
from pytest_gpucluster.reporting.files import ResultsDirectory, require_no_links, write_atomically
from pytest_gpucluster.reporting.journal import FOUND_AT_END, RESUMED, record_from_facts, soak_remark, texts_of, write_reports
from pytest_gpucluster.reporting.results import JunitForm, Part, ReportedTest, RunParts, RunReport, last_known, parts_remarks
from pytest_gpucluster.text import counted

CUT_SHORT = "not run: the run was cut short, its controller died"
NO_VERDICT = "the run ended before its verdict"
NOT_AN_EVENT = (ArithmeticError, AttributeError, ConfigurationError, LookupError, RecursionError, TypeError, ValueError)
"""What a line raises that is no event of a journal, wherever that comes to light."""
TRIED = ("started", "resumed", "planned", "bound", "selftest", "soak_resumed", "verdict")


class History(NamedTuple):
    """How a run came to where it is.

    ``started`` is its first event, ``files`` are the digests of its test files by name.
    """

    started: Mapping[str, Any] = {}
    parts: RunParts = RunParts()
    files: Mapping[str, str] = {}


@dataclass(slots=True, kw_only=True)
class JournalState:
    """What the events of a journal say about a run.

    ``verdict_word`` is the verdict of the run itself, ``unread`` the numbers of the lines that could not be read.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    terms: Terms = field(default_factory=lambda: Terms(rehearsal=True, level_reached=False))
    places: dict[str, Place] = field(default_factory=dict)
    records: dict[tuple[str, str | None], Record] = field(default_factory=dict)
    nodeids: dict[tuple[str, str | None], str] = field(default_factory=dict)
    began_s: float = 0.0
    ended_s: float = 0.0
    finished: bool = False
    verdict_word: str | None = None
    selftest: dict[str, Any] | None = None
    unread: list[int] = field(default_factory=list)
    history: History = field(default_factory=History)

    @property
    def versions(self) -> dict[str, str]:
        """Of the run's software."""
        found: dict[str, str] = self.history.started.get("versions", {})
        return found

    @property
    def junit(self) -> JunitForm:
        """What the run was asked of its JUnit file; a journal of an older version does not say it."""
        settings = self.history.started.get("settings", {})
        form = settings.get("junit")
        return JunitForm(form=form if form in JUNIT_FORMS else None, is_strict=settings.get("junit_strict") == "True")

    def take(self, event: dict[str, Any]) -> None:
        """Add one event. An unknown event belongs to a newer version and is ignored."""
        self.began_s = self.began_s or float(event["at_s"])
        self.ended_s = float(event["at_s"])
        reader = getattr(self, "_on_" + event["event"], None)
        if reader is not None:
            reader(event)

    def _on_started(self, event: dict[str, Any]) -> None:
        run = {"id": event.get("run"), "started": zoned(float(event["at_s"])), **event["facts"].get("run", {})}
        self.facts = {**event["facts"], "run": run}
        started, parts = {**event, "versions": dict(event["versions"])}, self.history.parts._replace(began_s=self.ended_s)
        self.history = self.history._replace(started=started, parts=parts)
        self.terms = replace(self.terms, simulated=bool(self.facts.get("simulated")))

    def _on_resumed(self, event: dict[str, Any]) -> None:
        """The run goes on: what ended it, and its verdict, are past."""
        earlier = tuple(Part(**part) for part in event["parts"])
        self.history = self.history._replace(parts=self.history.parts._replace(earlier=earlier, began_s=self.ended_s))
        self.finished, self.verdict_word = False, None
        self.facts = {name: value for name, value in self.facts.items() if name != "timings"}
        self.terms = replace(self.terms, objections=())

    def _on_test_files(self, event: dict[str, Any]) -> None:
        files = {str(name): str(digest) for name, digest in event["files"].items()}
        self.history = self.history._replace(files={**self.history.files, **files})

    def _on_planned(self, event: dict[str, Any]) -> None:
        simulated = self.terms.simulated or bool(event["terms"].get("simulated"))  # either line may be damaged
        read = ((name, tuple(one) if isinstance(one, list) else one) for name, one in event["terms"].items())
        said: dict[str, Any] = dict(read)
        self.terms = Terms(**{**said, "objections": tuple(said["objections"]), "simulated": simulated})
        for row in event["expected"]:
            record = record_from_facts(row)
            if not isinstance(row["nodeid"], str):
                raise TypeError("not a node id")
            key = (record.criterion, record.place)
            self.records[key], self.nodeids[key] = record, row["nodeid"]

    def _on_bound(self, event: dict[str, Any]) -> None:
        bound = [Place(**place) for place in (*event["places"], *event.get("nodes", ()))]
        self.places = {place.id: last_known(self.places.get(place.id), place) for place in bound}
        shape = str(event.get("shape", self.terms.shape))
        self.terms = replace(self.terms, remarks=tuple(event.get("remarks", ())), shape=shape)
        self.facts = {**self.facts, "environment": event.get("environment", {})}
        if "changed_terms" in event:  # what other nodes said
            self.terms = replace(self.terms, changed_terms=tuple(event["changed_terms"]))
            self.facts = {**self.facts, "changed_terms": event["changed_terms"]}

    def _on_selftest(self, event: dict[str, Any]) -> None:
        """Add the objections of the self-test: they forbid an acceptance also if the run ended before its verdict."""
        self.selftest = event["selftest"]
        self.terms = replace(self.terms, objections=(*self.terms.objections, *event["selftest"]["objections"]))

    def _on_soak_resumed(self, event: dict[str, Any]) -> None:
        resumed = {name: event[name] for name in RESUMED}
        self.terms = replace(self.terms, remarks=(*self.terms.remarks, soak_remark(resumed)))
        self.facts = {**self.facts, "soak_resumed": resumed}

    def _on_outcome(self, event: dict[str, Any]) -> None:
        record: Record = event["record"]
        self.records[record.criterion, record.place] = record
        self.history = self.history._replace(parts=self.history.parts._replace(outcome_s=self.ended_s))

    def _on_verdict(self, event: dict[str, Any]) -> None:
        self.finished, self.verdict_word = True, event.get("verdict")
        self.ended_s = float(event.get("ended_s") or self.ended_s)
        if self.verdict_word not in (None, *VERDICTS):
            raise ValueError(self.verdict_word)
        self.terms = replace(self.terms, objections=tuple(event["objections"]))
        self.facts = {**self.facts, **{name: event[name] for name in FOUND_AT_END if name in event}}

    def close(self) -> Verdict:
        """Give what never got an outcome the outcome ``missing``, and decide."""
        for key, record in self.records.items():
            if record.outcome == PENDING:
                self.records[key] = replace(record, outcome=MISSING, reason=CUT_SHORT)
        if not self.records:
            self.terms = replace(self.terms, objections=("the run ended before anything was planned",))
        elif not self.finished:  # an objection that was found after the plan is written only with the verdict
            self.terms = replace(self.terms, objections=(*self.terms.objections, NO_VERDICT))
        if self.unread:
            lines = counted(len(self.unread), "line was", "lines were")
            damage = f"the journal is damaged at line {self.unread[0]}; {lines} not read"
            self.terms = replace(self.terms, objections=(*self.terms.objections, damage))
        self.terms = replace(self.terms, remarks=(*self.terms.remarks, *parts_remarks(self._parts_facts)))
        verdict = decide(self.records.values(), self.terms)
        if (verdict.is_good or self.verdict_word == REJECTED) and self.verdict_word not in (None, verdict.word):
            self.terms = replace(self.terms, objections=(*self.terms.objections, f"the run itself said {self.verdict_word}"))
            return decide(self.records.values(), self.terms)
        return verdict

    @property
    def _parts_facts(self) -> list[dict[str, Any]]:
        return self.history.parts.facts(self.records.values())

    @property
    def _found(self) -> dict[str, Any]:
        """Environment and times as the run itself reported them. What it did not live to report is worked out, and said."""
        environment = {**self.facts.get("environment", {}), "versions": self.versions}
        if self.finished and not self.unread and "timings" in self.facts:
            return {"environment": environment, "timings": self.facts["timings"]}
        total_s = max(0.0, round(self.ended_s - (self.history.parts.began_s or self.began_s), 3))
        return {"environment": {**environment, "rebuilt_from_journal": True}, "timings": {"total_s": total_s}}

    def report(self, verdict: Verdict) -> RunReport:
        """What the reports say after :meth:`close`."""
        places = self.places or unbound_places(self)
        facts = {
            **self.facts,
            "run": run_facts(self.facts.get("run", {}), places.values(), last_s=self.ended_s, has_ended=self.finished),
            "waivers": waivers.states_from(self.facts.get("waivers", []), self.records.values()),
            **self._found,
            **({"parts": self._parts_facts} if self.history.parts.earlier else {}),
            **({"selftest": self.selftest} if self.selftest is not None else {}),
        }
        cases = (ReportedTest(nodeid=self.nodeids.get(key, key[0]), record=record) for key, record in self.records.items())
        return RunReport(
            cases=tuple(cases),
            verdict=verdict,
            places=places,
            facts=facts,
            is_rehearsal=self.terms.rehearsal or self.terms.simulated,
            is_rebuilt=True,
            junit=self.junit,
        )


def read_journal(path: Path) -> JournalState:
    """The state after the last event of ``journal.jsonl``; lines that cannot be read are left out and counted.

    Raises:
        ConfigurationError: there is no journal.
    """
    return state_of(bytes_of(path))


class _Outcome(msgspec.Struct, tag_field="event", tag="outcome"):
    """The event of an outcome."""

    at_s: float
    record: Record


_OUTCOME = msgspec.json.Decoder(_Outcome)


def event_of(line: bytes) -> dict[str, Any]:
    """The event of one line; the ``record`` of an outcome is one already.

    Raises:
        LookupError, TypeError, ValueError, RecursionError: it is no event.
    """
    text = line.decode("utf-8")
    try:
        outcome = _OUTCOME.decode(text)
        if outcome.record.outcome in OUTCOMES:
            return {"at_s": outcome.at_s, "event": "outcome", "record": outcome.record}
    except msgspec.DecodeError:  # another event, or one that json alone can read, such as NaN
        pass
    event: dict[str, Any] = json.loads(text)
    return {**event, "record": record_from_facts(event["record"])} if event["event"] == "outcome" else event


def state_of(content: bytes) -> JournalState:
    """The state after the last event of a journal's text."""
    state = JournalState()
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n") if content else (), start=1):
        try:
            state = state_after(state, event_of(line))
        except NOT_AN_EVENT:
            state.unread.append(number)
    return state


def state_after(state: JournalState, event: dict[str, Any]) -> JournalState:
    """The state after an event. Events other than outcomes are few: each is tried to its end, the reports of a sample."""
    if event["event"] not in TRIED:
        state.take(event)
        return state
    taken = _copy(state)
    taken.take(event)
    tried = replace(_copy(taken), records=_sample(taken.records, is_by_place=event["event"] != "verdict"))
    with_types(json.loads(texts_of(tried.report(tried.close()))[0]), RESULTS)
    return taken


def _sample(records: Mapping[Key, Record], *, is_by_place: bool) -> dict[Key, Record]:
    """The last record of each place, or of all where no place is new, and every waived one.

    The records themselves were checked: one is as good as another.
    """
    last = {record.place if is_by_place else None: key for key, record in records.items()}
    waived = (key for key, record in records.items() if record.waiver is not None)
    return {key: records[key] for key in (*last.values(), *waived)}


def _copy(state: JournalState) -> JournalState:
    """A state of its own. What its tables hold is never changed."""
    changing = ("facts", "places", "records", "nodeids", "unread")
    return replace(state, **{name: copy(getattr(state, name)) for name in changing})


def rebuild(folder: Path, *, junit: Path | None = None, replaces_ended: bool = True) -> Verdict:
    """Write ``results.json`` and a JUnit file from the journal in ``folder``.

    Args:
        folder: the results directory of the run.
        junit: the JUnit file; None: ``junit.xml`` in ``folder``.
        replaces_ended: whether a journal that is not whole may replace the results of a run that ended.

    Raises:
        ConfigurationError: there is no journal, a link lies where a report belongs, or results would be lost.
        OSError: the files cannot be written.
    """
    require_no_links(folder)
    state = read_journal(folder / JOURNAL)
    results = folder / RESULTS
    if not replaces_ended and (not state.finished or state.unread) and _is_of_ended_run(results):
        advice = f"'gpucluster report {results}' makes its page"
        raise ConfigurationError(
            f"{results} is of a run that ended, and its journal is not whole: nothing was written; {advice}"
        )
    verdict = state.close()
    write_reports(state.report(verdict), results, junit if junit is not None else folder / JUNIT)
    return verdict


def _is_of_ended_run(results: Path) -> bool:
    """Whether the run itself wrote this at its end."""
    try:
        document = json.loads(results.read_bytes())
        environment = document["environment"]
        return document["verdict"] in VERDICTS and not {"unfinished", "rebuilt_from_journal"} & environment.keys()
    except (OSError, *NOT_AN_EVENT):
        return False


def first_event(folder: Path) -> dict[str, Any]:
    """How the journal in a folder begins; empty for an empty one.

    Raises:
        OSError, LookupError, TypeError, ValueError: there is none, or it is damaged.
    """
    with (folder / JOURNAL).open("rb") as journal:
        event: dict[str, Any] = json.loads(journal.readline().decode("utf-8") or "{}")
    return event


def require_journal_of(run: str, folder: Path) -> None:
    """Check that the journal is the one of ``run``: another run may have moved its files away meanwhile.

    Raises:
        ConfigurationError: the journal in ``folder`` is another run's.
    """
    try:
        found = first_event(folder).get("run")
    except NOT_AN_EVENT:
        raise ConfigurationError(f"the first line of the journal in {folder} is damaged: it may be another run's") from None
    if found != run:
        raise ConfigurationError(f"{folder} belongs to another run now")


def take_over(folder: Path, replica: Path) -> None:
    """Put the copy of a lost run's journal into its folder, unless the journal there is as long as the copy.

    Files of another run in that folder move into ``previous/``.

    Raises:
        ConfigurationError: the copy cannot be read, the folder cannot be written, or another run holds it.
    """
    content = bytes_of(replica)
    journal = folder / JOURNAL
    there = bytes_of(journal) if journal.exists() else b""
    if there.partition(b"\n")[0] != content.partition(b"\n")[0]:
        ResultsDirectory(folder).close()
    elif len(there) >= len(content):
        return
    write_atomically(journal, content.decode("utf-8", "backslashreplace"))


def unbound_places(state: JournalState) -> dict[str, Place]:
    """The expected places of a run that ended before any rank said hello."""
    expected = state.facts.get("expected")
    if expected is None:
        return {}
    if any(expected[name] > most for name, most in MOST_EXPECTED.items()):
        raise ValueError(expected)
    device: Device = "cpu" if state.terms.rehearsal else "cuda"
    inventory = Inventory(num_nodes=expected["nodes"], gpus_per_node=expected["gpus_per_node"], device=device)
    return {**inventory.by_id}
