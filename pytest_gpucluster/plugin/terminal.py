"""Prints the end of a run: a table, what is to blame, and the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.judging import causes, failure_text
from pytest_gpucluster.judging.culprits import find_culprits
from pytest_gpucluster.judging.verdict import FAILED, REJECTED, SHOWN_LIMITS, Record, Verdict, counted_as
from pytest_gpucluster.plugin.live import Live
from pytest_gpucluster.plugin.screen import Screen
from pytest_gpucluster.reporting.table import Layout, criteria_table
from pytest_gpucluster.text import hung, one_line
from pytest_gpucluster.thresholds.file import REMOVED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

    from pytest_gpucluster.session import Session


class Terminal:
    """Prints what stands at the end of a run; ``live`` shows what goes on until then."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        """Nothing is shown yet."""
        self._config = config
        self._screen = Screen(config)
        self._subjects: Mapping[str, str] = {}
        self.live = Live(self._screen, session)
        self._remarks: list[str] = []

    def group_by(self, subjects: Mapping[str, str]) -> None:
        """Take the subject of each criterion, by which the table is grouped."""
        self._subjects = subjects

    def remark(self, text: str) -> None:
        """Keep a line for the end: an advisory limit was missed, which is no failure."""
        self._remarks.append(text)

    def summary(
        self, reporter: pytest.TerminalReporter, session: Session, verdict: Verdict, *, disk_errors: Sequence[str]
    ) -> None:
        """Print the table, failures over all places, remarks and the verdict."""
        records = list(session.plan)
        reporter.section("gpucluster")
        for line in session.setup.waivers.lines:
            reporter.write_line(one_line(line), bold=True)
        reporter.write(criteria_table(records, session.places(), subjects=self._subjects, layout=self._layout(session)))
        for criterion in dict.fromkeys(row.criterion for row in records if counted_as(row) == FAILED and row.limit):
            rows = [record for record in records if record.criterion == criterion]
            threshold, device = session.setup.criteria.get(criterion), session.setup.inventory.device
            for line in failure_text.describe_together(rows, session.places(), device=device, threshold=threshold):
                reporter.write_line(one_line(line))
        self._write_causes(reporter, session, records)
        for remark in self._remarks:
            reporter.write_line(hung(f"advisory: {remark}"))
        for line in causes.describe_remarks(records):
            reporter.write_line(one_line(line))
        changed = session.setup.changed_entries
        if changed:
            shown = [f"{key} ({', '.join(words)})" for key, words in changed.items() if words != [REMOVED]]
            removed = [key for key, words in changed.items() if words == [REMOVED]]
            more = f" and {len(removed) - SHOWN_LIMITS} more" if len(removed) > SHOWN_LIMITS else ""
            shown += [f"removed: {', '.join(removed[:SHOWN_LIMITS])}{more}"] if removed else []
            reporter.write_line(one_line(f"limits changed from the packaged ones: {'; '.join(shown)}"))
        if disk_errors:
            reporter.write_line(one_line(f"results are incomplete on disk: {'; '.join(disk_errors)}"), red=True)
        timings = session.timings()
        reporter.write_line(
            f"{timings['total_s']:.1f} s: {timings['startup_s']:.1f} start-up, {timings['measuring_s']:.1f} measuring, "
            f"{timings['other_s']:.1f} other; results in {one_line(str(session.setup.settings.results_dir))}"
        )
        reporter.write_line(f"verdict {verdict.line}", bold=True, green=verdict.is_acceptance, red=verdict.word == REJECTED)

    def _layout(self, session: Session) -> Layout:
        screen = self._screen
        return Layout(
            width=screen.width,
            color=screen.has_color,
            is_rehearsal=session.setup.rehearsal,
            is_whole=screen.verbosity > 0,
        )

    def _write_causes(self, reporter: pytest.TerminalReporter, session: Session, records: Sequence[Record]) -> None:
        """Print what is to blame, each cause once. With ``-v`` pytest's own sections have the whole texts."""
        places = session.places()
        whole = self._config.get_verbosity() <= 0 and self._config.option.tbstyle != "no"
        lines = causes.describe_causes(find_culprits(records, places), records, places, whole=whole)
        if lines:
            reporter.write_line("culprits and causes:", bold=True)
        for line in lines:
            reporter.write_line(line)
