"""The recorder of a run: writes each outcome into the journal at once, and the reports while the ranks work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.run_files import JOURNAL, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.plan import Plan
from pytest_gpucluster.judging.verdict import NOT_SELECTED, PENDING, Record, Terms, Verdict, decide
from pytest_gpucluster.places import Place
from pytest_gpucluster.records.reading import run_facts
from pytest_gpucluster.reporting import journal
from pytest_gpucluster.reporting.files import ResultsDirectory, is_replaceable, require_writable
from pytest_gpucluster.reporting.results import BY_NUMBER, JunitForm, ReportedTest, RunParts, RunReport, parts_remarks
from pytest_gpucluster.reporting.unfinished_run import InterruptedSoak, UnfinishedRun, find_interrupted_soak, require_unchanged

PLANNED = ("criterion", "place", "outcome", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """What the reports say about a run besides its records, at one moment.

    ``places`` are the expected GPUs and nodes by id. ``facts`` are those of results.json, with ``environment`` and ``timings``.
    ``junit`` is what was asked of the JUnit file.
    """

    terms: Terms
    places: Mapping[str, Place]
    facts: Mapping[str, Any]
    junit: JunitForm = BY_NUMBER


class Recorder:
    """Writes the journal, results.json and the JUnit file of one run. Before :meth:`open` it only fills the plan."""

    def __init__(self, plan: Plan, *, status: Callable[[], RunStatus]) -> None:
        """``plan`` receives the outcomes; ``status`` is called before each report is written."""
        self._plan = plan
        self._status = status
        self._directory: ResultsDirectory | None = None
        self._journal: journal.Journal | None = None
        self._junit: Path | None = None
        self._ended_s: float | None = None
        self._ahead_s = time.time() - time.monotonic()  # a clock that is set meanwhile makes no run longer
        self._writer = journal.ReportWriter(self._write_unfinished)
        self.calls_are_elsewhere = False
        """Whether other threads make the calls, so that the reports are written as outcomes come in."""
        self.cut_soak: InterruptedSoak | None = None
        self.resumed: Mapping[str, Any] | None = None
        self.parts = RunParts()

    @property
    def is_open(self) -> bool:
        """Whether the run has a results directory, so that it measures."""
        return self._directory is not None

    def open(
        self,
        folder: Path,
        *,
        junit: Path | None,
        replicate: Callable[[str], None] = lambda _line: None,
        unfinished: UnfinishedRun | None = None,
    ) -> tuple[str, ...]:
        """Take the results directory ``folder`` and begin the journal.

        Args:
            folder: made if it does not exist; an older run's files move into ``previous/``.
            junit: the JUnit file; pytest writes the final one. It is rewritten while the run goes on, unless it is a link, a
                device or a pipe.
            replicate: gets every line of the journal.
            unfinished: the run in that directory that goes on; its journal is continued.

        Returns:
            The folders of the oldest runs, which were removed from ``previous/``.

        Raises:
            ConfigurationError: one of the two cannot be written, or another run holds the directory.
        """
        if junit is not None:
            require_writable(junit)
        self._directory = ResultsDirectory(folder, goes_on=unfinished is not None)
        self._junit = junit if junit is not None and is_replaceable(junit) else None
        if unfinished is not None:
            self.parts = RunParts(earlier=unfinished.state.history.parts.all)
        try:
            keep = None if unfinished is None else require_unchanged(unfinished)
            self._journal = journal.Journal(folder / JOURNAL, copy=replicate, keep=keep)
        except OSError as error:
            raise ConfigurationError(f"the journal in {folder} cannot be written: {error.strerror}") from None
        return self._directory.removed

    def look_for_cut_soak(self, facts: Mapping[str, Any], versions: Mapping[str, str]) -> None:
        """Find the soak that the older run in this results directory left unfinished, for ``cut_soak``.

        Args:
            facts: of this run, as results.json has them.
            versions: of this run's software.
        """
        assert self._directory is not None
        older = self._directory.path if self.parts.earlier else self._directory.older_run  # a run that goes on has its journal
        if older is not None:
            self.cut_soak = find_interrupted_soak(older, facts=facts, versions=versions, now_s=time.time())

    def write(self, event: str, **facts: Any) -> None:
        """Append one event to the journal, if there is one."""
        if self._journal is not None:
            self._journal.write(event, **facts)

    def record_plan(self) -> None:
        """Write the expected set and the terms of the verdict."""
        if self.is_open:
            if self.parts.earlier:
                self.parts = self.parts._replace(began_s=round(time.time(), 3))
                self.write("resumed", at_s=self.parts.began_s, parts=[asdict(part) for part in self.parts.earlier])
            self.write("planned", **planned_facts(self._plan, self._status().terms))
            self._writer.note()

    def record_outcome(self, record: Record) -> Record:
        """Take one outcome and write it at once; the outcome as it is kept, with its part of the run."""
        if record.part != self.parts.number:
            record = replace(record, part=self.parts.number)
        self._plan.set_outcome(record)
        if self.is_open:
            self.parts = self.parts._replace(outcome_s=round(time.time(), 3))
            self.write("outcome", at_s=self.parts.outcome_s, record=journal.record_facts(record))
            self._writer.note()
            if self.calls_are_elsewhere:
                self._writer.catch_up()
        return record

    def close_pending(self, *, outcome: str, why: str) -> list[Record]:
        """Give this outcome to every record that has none, write them, and return them."""
        return [self.record_outcome(record) for record in self._plan.close(outcome=outcome, why=why)]

    def record_soak_resumed(self, cut: InterruptedSoak, *, away_s: float) -> None:
        """Write that the soak goes on with what an earlier run had measured, ``away_s`` seconds after it was cut short."""
        folder = "" if self.parts.earlier else cut.folder.name  # of a run that goes on, the soak is in its own journal
        facts = {"run": cut.run, "folder": folder, "rounds": cut.num_whole_rounds, "elapsed_s": cut.elapsed_s}
        self.resumed = {**facts, "away_s": round(away_s, 3)}
        self.write("soak_resumed", **self.resumed)

    @property
    def soak_remarks(self) -> tuple[str, ...]:
        """What a reader of the verdict must know of the soak, and of the parts of the run."""
        soak = () if self.resumed is None else (journal.soak_remark(self.resumed),)
        return (*soak, *parts_remarks(self.parts.facts(self._plan)))

    def record_soak_round(self, **facts: Any) -> None:
        """Write that a round of a soak has ended; the reports follow in the next call."""
        self.write("soak_round", **facts)
        self._writer.note(is_due=True)

    def record_selftest(self, facts: Mapping[str, Any]) -> None:
        """Write what the self-test found."""
        self.write("selftest", selftest=facts)
        self._writer.note()

    def catch_up(self, worked_s: float = math.inf) -> None:
        """Write the reports if a record changed and it is time. Called while ranks work, for so many seconds."""
        self._writer.catch_up(worked_s)

    def report(self, verdict: Verdict) -> RunReport:
        """What the reports of the ended run say. Its end is the first time that this is asked."""
        self._ended_s = self._ended_s or round(self._now_s, 3)
        return self._report(self._plan, verdict, self._status())

    def finish(self, verdict: Verdict) -> str | None:
        """Write the verdict and results.json; returns what the disk refused, None if it took everything.

        pytest writes the final JUnit file itself.
        """
        if self._journal is None:
            return None
        report = self.report(verdict)
        facts = {"line": verdict.line, "objections": self._status().terms.objections, "ended_s": self._ended_s}
        shown = {name: report.facts[name] for name in journal.FOUND_AT_END if name in report.facts}
        self.write("verdict", verdict=verdict.word, **facts, **shown)
        try:
            journal.write_reports(report, self._results, None)
        except OSError as error:
            return f"results.json could not be written: {error.strerror}"
        lost = None if self._journal.is_at(self._results.with_name(JOURNAL)) else f"{JOURNAL} was removed or replaced meanwhile"
        return self._journal.failed or lost

    def close(self) -> None:
        """Close the journal and free the results directory."""
        if self._journal is not None:
            self._journal.close()
        if self._directory is not None:
            self._directory.close()

    def _write_unfinished(self) -> None:
        """Write the reports as they would stand if the run ended now. Called by the report writer."""
        if self._ended_s is not None:  # a hook measures after the verdict
            return
        status, records = self._status(), journal.with_pending_as_missing(self._plan)
        facts = {**status.facts, "environment": {**status.facts["environment"], "unfinished": True}}
        verdict = decide(records, journal.not_ended(status.terms))
        journal.write_reports(self._report(records, verdict, replace(status, facts=facts)), self._results, self._junit)

    def _report(self, records: Iterable[Record], verdict: Verdict, status: RunStatus) -> RunReport:
        cases = tuple(ReportedTest(nodeid=self._plan.nodeid(record), record=record) for record in records)
        rehearsal = status.terms.rehearsal or status.terms.simulated
        last_s, run = self._ended_s or self._now_s, status.facts.get("run", {})
        run = run_facts(run, status.places.values(), last_s=last_s, has_ended=self._ended_s is not None)
        return RunReport(
            cases=cases,
            verdict=verdict,
            places=status.places,
            facts={**status.facts, "run": run},
            is_rehearsal=rehearsal,
            junit=status.junit,
        )

    @property
    def _now_s(self) -> float:
        return self._ahead_s + time.monotonic()

    @property
    def _results(self) -> Path:
        assert self._directory is not None
        return self._directory.path / RESULTS


def planned_facts(plan: Plan, terms: Terms) -> dict[str, Any]:
    """The expected set and the terms of the verdict, for the journal; without what an earlier part of the run has measured."""
    due = [row for row in plan if row.outcome in (PENDING, NOT_SELECTED)]
    rows = [{"nodeid": plan.nodeid(row), **{name: getattr(row, name) for name in PLANNED}} for row in due]
    return {"expected": rows, "terms": asdict(terms)}
