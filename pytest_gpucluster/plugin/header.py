"""The first lines of a run: what is required, how long it takes, and what has joined. Pure: facts in, lines out.

The screen of a run: lines through pytest's terminal reporter, and one line at the end that is rewritten in place.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.verdict import SIMULATED
from pytest_gpucluster.reporting.lines import cut, folded, names_of_absent, pieces, tied, wrapped
from pytest_gpucluster.text import counted, one_line, with_commas

if TYPE_CHECKING:
    import pytest

    from pytest_gpucluster.cluster.binding import Binding
    from pytest_gpucluster.judging import forecast
    from pytest_gpucluster.judging.forecast import Forecast
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.run_setup import RunSetup


ACCEPTANCE, REHEARSAL = "ACCEPTANCE", "REHEARSAL on the CPU: accepts nothing"
SHOWN_GROUPS, SHOWN_ABSENT = 3, 6
INDENT = "      "


def accepts_nothing(setup: RunSetup) -> bool:
    """Whether no GPU is measured: a rehearsal, or a simulated fleet."""
    return setup.rehearsal or setup.simulation is not None


def mode(setup: RunSetup) -> str:
    """Whether this run can accept a cluster, and if not, why."""
    if setup.settings.audit:
        return f"{SIMULATED}: AUDIT: only reads" if setup.simulation is not None else "AUDIT: only reads, accepts nothing"
    if accepts_nothing(setup):
        return f"{SIMULATED}: accepts nothing" if setup.simulation is not None else REHEARSAL
    return ACCEPTANCE if setup.level_reached else f"{ACCEPTANCE} of nothing yet: the profile asks for {setup.profile.accept_at}"


def run_lines(setup: RunSetup, *, version: str, width: int) -> list[str]:
    """What the run is: version, kind, shape, level, profile, limits."""
    inventory = setup.inventory
    part = "rank" if inventory.device == "cpu" else "GPU"
    changed = f" ({len(setup.changed_entries)} changed)" if setup.changed_entries else ""
    limits = "packaged" if setup.settings.thresholds is None else setup.thresholds.path.name
    facts = [
        f"gpucluster {version}",
        mode(setup),
        f"{counted(inventory.num_nodes, 'node')} x {counted(inventory.gpus_per_node, part)}",
        f"level {setup.settings.level}",
        f"profile {setup.profile.name}",
        f"limits {limits}{changed}",
    ]
    return wrap(facts, width=width, separator="   ")


def plan_lines(plan: Forecast, *, width: int) -> list[str]:
    """What will run, and how long that takes."""
    return wrap(["plan:", *plan.plan], width=width)


def joined_lines(binding: Binding, *, width: int) -> list[str]:
    """What answers: the nodes folded by hardware and software, then how many of the expected ones joined, and which did not."""
    groups = groups_of(binding)
    lines: list[str] = []
    for what, hostnames in groups[:SHOWN_GROUPS]:
        *firsts, last = with_commas(pieces(hostnames))
        lines += wrap([*firsts, f"{last}:", *what], width=width)
    if len(groups) > SHOWN_GROUPS:
        lines.append(f"{INDENT}and {len(groups) - SHOWN_GROUPS} other kinds of node")
    return [*lines, *_count_lines(binding, width=width)]


def groups_of(binding: Binding) -> list[tuple[tuple[str, ...], list[str]]]:
    """The nodes that answer by what is in them, the most frequent kind first: its facts in words, and its hostnames."""
    gpus = _present(binding.places)
    answering = (node for node in binding.nodes if node.node in gpus)
    kinds = grouped((_facts_of(gpus[node.node], binding), node.hostname or node.id) for node in answering)
    found: list[tuple[tuple[str, ...], list[str]]] = []
    for (gpu_names, *versions), hostnames in sorted(kinds.items(), key=lambda kind: -len(kind[1])):
        count = f"{counted(len(hostnames), 'node')} x " if len(hostnames) > 1 else ""
        found.append(((f"{count}{gpu_names}", *versions), hostnames))
    return found


def _facts_of(gpus: Sequence[Place], binding: Binding) -> tuple[str, ...]:
    """What is on one node: GPUs by name, then versions."""
    identities = [binding.identities[place.id] for place in gpus if place.id in binding.identities]
    nameless = "ranks on the CPU" if binding.inventory.device == "cpu" else "GPUs without a name"
    names = Counter(one.gpu_name or nameless for one in identities)
    versions = {**identities[0].stack, "torch": identities[0].versions.get("torch", "of no known version")}
    gpu_names = " and ".join(f"{number} {name}" for name, number in names.items())
    return tuple(with_commas([gpu_names, *(f"{name} {version}" for name, version in versions.items())]))


def _count_lines(binding: Binding, *, width: int) -> list[str]:
    """How many nodes and GPUs joined; nothing where that is one node and all of it."""
    gpus, nodes = _present(binding.places), binding.nodes
    answering, expected = sum(map(len, gpus.values())), len(binding.places)
    if len(nodes) == 1 and answering == expected:
        return []
    parts = "ranks" if binding.inventory.device == "cpu" else "GPUs"
    counts = f"joined {len(gpus)} of {counted(len(nodes), 'node')}, {answering} of {expected} {parts}"
    if answering == expected:
        return [counts]
    lost = [node for node in nodes if node.node not in gpus]
    absent = [names_of_absent(lost)] if lost else []
    absent += [place.on_host for place in binding.places if place.rank is None and place.node in gpus]
    more = [f"and {len(absent) - SHOWN_ABSENT} more"] if len(absent) > SHOWN_ABSENT else []
    why = [f"({one_line(reason)})" for reason in list(binding.unidentified.values())[:1]]
    return wrap([f"{counts};", "absent:", *with_commas([*absent[:SHOWN_ABSENT], *more]), *why], width=width)


def _present(places: Iterable[Place]) -> Mapping[int, list[Place]]:
    """The GPUs at which a rank answers, by node."""
    return grouped((place.node, place) for place in places if place.rank is not None)


def wrap(pieces: Iterable[str], *, width: int, separator: str = " ") -> list[str]:
    """The pieces in lines of at most ``width`` columns, later lines set in. A piece is not broken; a longer one is cut."""
    text = separator.join(tied(one_line(piece)) for piece in pieces)
    return [cut(line, width) for line in wrapped(text, width=width, indent="", later=INDENT)]


PLAIN_WIDTH = 100
"""Columns of a log."""
BAR_WIDTH, NARROW_BAR_WIDTH, NARROW_WIDTH = 30, 10, 110


class Screen:
    """A pytest plugin that writes through pytest's own terminal reporter; silent where that is switched off."""

    def __init__(self, config: pytest.Config) -> None:
        """``config`` has the reporter, and what the user asks of it."""
        self._config = config
        self._transient = False
        self.is_on = False
        """Whether our lines stand in place of pytest's dots."""

    def take_over(self) -> None:
        """Up to normal verbosity our lines replace pytest's dots from here on."""
        reporter = self.reporter
        if reporter is not None and self.verbosity <= 0:
            self.is_on = True
            reporter.showfspath = False
            reporter._show_progress_info = False  # noqa: SLF001 -- there is no public switch at run time
            known = [reporter] if type(reporter).__module__ == "_pytest.terminal" else []  # another plugin's may do more
            self._log_elsewhere = self._config.pluginmanager.subset_hook_caller("pytest_runtest_logreport", known)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Give pytest no letter to show where the bar shows the progress."""
        if not self.is_on:
            return None
        if report.when in ("setup", "teardown") and report.outcome == "passed":
            return ("", "", "")
        if report.outcome == "failed" and report.when != "call":
            return ("error", "", "ERROR")
        return (report.outcome, "", report.outcome.upper())

    def log(self, item: pytest.Item, reports: Iterable[pytest.TestReport]) -> None:
        """Give reports to all who report; those of a set-up or teardown that passed not to the terminal, which keeps them."""
        hook = item.ihook
        is_brief = self.is_on and hook is self._config.hook and self._config.option.durations is None
        for report in reports:
            is_unseen = is_brief and report.when != "call" and report.outcome == "passed"
            (self._log_elsewhere if is_unseen else hook.pytest_runtest_logreport)(report=report)

    @property
    def reporter(self) -> Any:
        """Pytest's terminal reporter, None where it is switched off."""
        return self._config.pluginmanager.get_plugin("terminalreporter")

    @property
    def verbosity(self) -> int:
        """-1 with ``-q``, 1 with ``-v``."""
        return self._config.get_verbosity()

    @property
    def is_terminal(self) -> bool:
        """Whether a line can be rewritten in place."""
        return self.reporter is not None and bool(self.reporter.isatty)

    @property
    def has_bar(self) -> bool:
        """Whether a bar is shown: on a terminal, neither with ``-q`` nor with ``-v``."""
        return self.is_on and self.is_terminal and self.verbosity == 0

    @property
    def has_color(self) -> bool:
        """Whether pytest colours its lines."""
        return self.reporter is not None and bool(self.reporter.hasmarkup)

    @property
    def width(self) -> int:
        """Columns: of the terminal, as pytest counts them. Without a terminal ``COLUMNS``, or 100 where that is not set.

        While a test is captured, standard output is a file, which would be 80 columns wide.
        """
        if self.reporter is None or not (self.is_terminal or os.environ.get("COLUMNS")):
            return PLAIN_WIDTH
        with self._uncaptured():
            return int(self.reporter._tw.fullwidth)  # noqa: SLF001 -- pytest's own width

    def write(self, text: str, **markup: bool) -> None:
        """Write one line in place of a transient one, folded where it is too wide for the terminal.

        A log has it as one line: scripts and people search it.
        """
        reporter, whole = self.reporter, one_line(text)
        if reporter is None:
            return
        self.clear()
        with self._uncaptured():
            reporter.ensure_newline()
            for line in folded(whole, width=self.width) if self.is_terminal else [whole]:
                reporter.write_line(line, **markup)

    def print(self, lines: Iterable[str]) -> None:
        """Write whole lines as they are, at the end of the run."""
        self.reporter.ensure_newline()
        for line in lines:
            self.reporter.write_line(line)

    def rewrite(self, text: str) -> None:
        """Write a transient line, of the same width each time, in place of the one before. Only on a terminal."""
        with self._uncaptured():
            self.reporter.rewrite(text)
            self.reporter.flush()
            self._transient = True

    def clear(self) -> None:
        """Erase the transient line."""
        if self._transient:
            with self._uncaptured():
                self.reporter.rewrite("", erase=True)
                self.reporter.rewrite("")  # back to the first column
            self._transient = False

    def _uncaptured(self) -> Any:
        capture: Any = self._config.pluginmanager.get_plugin("capturemanager")
        return nullcontext() if capture is None else capture.global_and_fixture_disabled()


def bar_line(now: forecast.Progress, doing: str, *, bad: int, width: int, color: bool) -> str:
    """Bar, share, times, how many outcomes are bad, and what runs now; one column narrower than ``width``, filled with blanks.

    A longer line could not be rewritten.
    """
    columns = [
        BarColumn(NARROW_BAR_WIDTH if width < NARROW_WIDTH else BAR_WIDTH, complete_style="green", finished_style="green"),
        TextColumn(now.text, markup=False, table_column=Column(no_wrap=True)),
        *([TextColumn(f"{bad} bad", style="red", markup=False, table_column=Column(no_wrap=True))] if bad else []),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)),
    ]
    console = Console(width=width - 1, color_system="standard" if color else None, force_terminal=color, legacy_windows=False)
    line = Progress(*columns, console=console, expand=True)
    line.add_task(one_line(" ".join(doing.split())), completed=now.percent)
    with console.capture() as shown:
        console.print(line)
    return shown.get().rstrip("\n")
