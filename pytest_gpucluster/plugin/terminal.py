"""Prints the end of a run: a table, the bad parts, and the verdict; pytest's own sections show none of that again."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.run_files import REPORT, RESULTS
from pytest_gpucluster.judging.selection import ONLY, Selector
from pytest_gpucluster.judging.verdict import FAILED, SHOWN_LIMITS, Verdict
from pytest_gpucluster.page.outputs import Said
from pytest_gpucluster.plugin import header
from pytest_gpucluster.plugin.header import Screen
from pytest_gpucluster.plugin.live import Live
from pytest_gpucluster.plugin.stash_keys import COMMAND
from pytest_gpucluster.plugin.verdict_item import NODEID
from pytest_gpucluster.reporting.bad_parts import Shown, advisory_lines, describe_bad_parts, remark_lines
from pytest_gpucluster.reporting.lines import printed
from pytest_gpucluster.reporting.table import Ending, Layout, criteria_table, verdict_block
from pytest_gpucluster.text import shortlist
from pytest_gpucluster.thresholds.file import REMOVED

if TYPE_CHECKING:
    import pytest
    from rich.text import Text

    from pytest_gpucluster.places import Place
    from pytest_gpucluster.session import Session

FROM_EARLIER_RUNS = ("-x", "--exitfirst", "--lf", "--last-failed", "--ff", "--failed-first", "--sw", "--stepwise")
"""Options that choose tests, or end a run, by what failed."""
SELECTING = ("-k", ONLY)
SECTIONS = ("error", "failed")
PLAIN_SUMMARY = "fE"
"""pytest's own choice of what its short summary names."""


class Terminal:
    """Prints what stands at the end of a run; ``live`` shows what goes on until then."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        """``config`` has what the user asks of pytest's screen."""
        self._config = config
        self._session = session
        self.screen = Screen(config)
        self.hidden = HiddenReports(config, session)
        self.subjects: Mapping[str, str] = {}
        """The subject of each criterion, by which the table is grouped."""
        self.live = Live(self.screen, session.state)
        self.said = Said()

    def summary(self, *, disk_errors: Sequence[str]) -> None:
        """Print the table, the bad parts, and remarks."""
        session, screen = self._session, self.screen
        records = list(session.plan)
        layout = Layout(
            width=screen.width,
            color=screen.has_color,
            is_rehearsal=session.setup.rehearsal,
            is_whole=screen.verbosity > 0,
            noise={key: entry.noise for key, entry in session.setup.criteria.items() if entry.noise is not None},
        )
        screen.reporter.section("gpucluster")
        for line in session.setup.waivers.lines:
            screen.write(line, bold=True)
        places = session.state.places()
        screen.print(criteria_table(records, places, subjects=self.subjects, layout=layout))
        screen.print(self._printed(describe_bad_parts(records, self._shown(places))))
        screen.print(advisory_lines(records, places, width=screen.width))
        screen.print(remark_lines(records, width=screen.width, is_whole=screen.verbosity > 0))
        changed = session.setup.changed_entries
        if changed:
            shown = [f"{key} ({', '.join(words)})" for key, words in changed.items() if words != [REMOVED]]
            removed = [key for key, words in changed.items() if words == [REMOVED]]
            shown += [f"removed: {shortlist(removed, most=SHOWN_LIMITS)}"] if removed else []
            screen.write(f"limits changed from the packaged ones: {'; '.join(shown)}")
        for problem in self.said.problems:
            screen.write(problem, red=True)
        screen.print(self.said.annotations)
        if disk_errors:
            screen.write(f"results are incomplete on disk: {'; '.join(disk_errors)}", red=True)

    def conclude(self, verdict: Verdict, *, is_whole: bool) -> None:
        """Print the verdict, after every other section. Reports that the disk refused are not named: ``is_whole`` is false."""
        setup = self._session.setup
        folder = setup.settings.results_dir
        files = [name for name in (REPORT, RESULTS) if (folder / name).is_file()]
        junit = getattr(self._config.option, "xmlpath", None)
        ending = Ending(
            mode=header.mode(setup) if setup.rehearsal and setup.simulation is None else None,
            timings=self._session.state.timings(),
            folder=str(folder),
            files=[*files, *([str(junit)] if junit else [])] if is_whole else ["incomplete, see above"],
        )
        quiet = self._config.get_verbosity() < 0
        self.screen.print(self._printed(verdict_block(verdict, ending, width=self.screen.width, quiet=quiet)))

    def _shown(self, places: Mapping[str, Place]) -> Shown:
        """What the lines about bad parts depend on. Where a user asks pytest for whole texts, they stand there."""
        setup, config = self._session.setup, self._config
        given = config.stash.get(COMMAND, None) or ("pytest", *map(str, config.invocation_params.args))
        is_real = not header.accepts_nothing(setup) and setup.inventory.device == "cuda"
        return Shown(
            places=places,
            tests=Selector(self._session.plan.nodeids()),
            device=setup.inventory.device,
            width=self.screen.width,
            whole=shows_own(config),
            is_whole=self.screen.verbosity > 0,
            command=tuple(without_selection(given)) if setup.launch is None else (),
            report=str(setup.settings.results_dir / RESULTS),
            drain_reason=f"gpucluster-{time.strftime('%Y%m%d')}" if is_real else None,
        )

    def _printed(self, texts: Iterable[Text]) -> list[str]:
        return printed(texts, width=self.screen.width, color=self.screen.has_color)


class HiddenReports:
    """pytest's reports of what the block of bad parts shows: hidden while pytest prints its sections, so that each stands once.

    With ``-v`` or ``--tb`` pytest's sections stay as they are.
    """

    def __init__(self, config: pytest.Config, session: Session) -> None:
        """``config`` says whether pytest shows all; ``session`` has what the block shows."""
        self._config = config
        self._session = session
        self._hidden: dict[str, list[Any]] = {}

    def hide(self, reporter: Any) -> None:
        """Leave out the reports whose text is ours and that captured no output."""
        if not shows_own(self._config):
            return
        records = self._session.plan  # what a plain test says stays pytest's to show
        ours = {records.nodeid(one) for one in records if not (one.outcome == FAILED and one.limit is None)}
        self._hidden = {section: reporter.stats[section] for section in SECTIONS if section in reporter.stats}
        for section, reports in self._hidden.items():
            reporter.stats[section] = [one for one in reports if not _is_shown(one, ours)]

    def restore_for_short_summary(self, reporter: Any) -> None:
        """Put them back where ``-r`` asks pytest's short summary to name every test."""
        if self._config.option.reportchars != PLAIN_SUMMARY:
            self.restore(reporter)

    def restore(self, reporter: Any) -> None:
        """Put them back: pytest counts them in its last line."""
        reporter.stats.update(self._hidden)
        self._hidden = {}


def _is_shown(report: Any, ours: set[str]) -> bool:
    """Whether another section has the text of a report: the verdict, or a failure in the block of bad parts."""
    is_judged = report.nodeid in ours and not report.sections and isinstance(report.longrepr, str)
    return is_judged or report.nodeid == NODEID


def shows_own(config: pytest.Config) -> bool:
    """Whether our block has the whole texts: neither ``-v`` nor a ``--tb`` asks pytest for them."""
    return bool(config.get_verbosity() <= 0 and config.option.tbstyle == "auto")


def without_selection(args: Iterable[str]) -> list[str]:
    """The arguments of a command without ``-k``, named parts, and what chooses tests by what happened before."""
    kept: list[str] = []
    words = iter(args)
    for word in words:
        if word in SELECTING:
            next(words, None)
        elif not (word.startswith(("-k", f"{ONLY}=")) or word in FROM_EARLIER_RUNS):
            kept.append(word)
    return kept
