"""A pytest plugin that is never loaded by itself: it prints what would run here, with limits and seconds, and runs nothing.

``gpucluster plan`` loads it, with ``--collect-only``. It reads no hardware but the names of the GPUs, and writes no file.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pytest_gpucluster.inventory.identity import version_of
from pytest_gpucluster.judging.forecast import Forecast, clock
from pytest_gpucluster.plugin import header
from pytest_gpucluster.plugin.activation import RUN
from pytest_gpucluster.plugin.header import PLAIN_WIDTH
from pytest_gpucluster.plugin.stash_keys import CRITERION, NO_LIMIT, PAIR, RULE
from pytest_gpucluster.reporting.lines import printed, whole, width_of
from pytest_gpucluster.text import counted, one_line, with_commas

COLUMNS = ("criterion", "checks", "limit", "seconds")
UNKNOWN = "?"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Leave out pytest's list of tests."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter._printcollecteditems = lambda _items: None  # noqa: SLF001 -- there is no public hook


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Print what was selected: what the run is, each criterion with its limit here and its seconds, and what does not apply."""
    items = session.items
    run = session.config.stash.get(RUN, None)
    if run is None:
        return
    setup = run.session.setup
    width = shutil.get_terminal_size((PLAIN_WIDTH, 24)).columns
    planned = run.collection.forecast()
    first = header.run_lines(setup, version=version_of("pytest-gpucluster"), width=width)
    above = [*(Text(line, style="bold") for line in first), *map(Text, header.plan_lines(planned, width=width)), Text()]
    table = whole(_table(planned, _limits_of(items)), width=width)
    below = [*_left_out(items, width=width), f"about {clock(planned.total_s)}; nothing was measured"]
    console = Console()
    for line in printed([*above, table, *map(Text, below)], width=width_of(table), color=console.is_terminal):
        console.file.write(f"{line}\n")


def _table(planned: Forecast, limits: Mapping[str, str]) -> Table:
    subject = None
    order = {name: number for number, name in enumerate(dict.fromkeys(step.subject for step in planned.steps))}
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in COLUMNS:
        made.add_column(name, no_wrap=True, justify="right" if name in ("checks", "seconds") else "left")
    for step in sorted(planned.steps, key=lambda step: order[step.subject]):
        if step.subject != subject:
            subject = step.subject
            made.add_row(Text(subject, style="bold"))
        lasts_s = planned.lasts_s(step)
        seconds = UNKNOWN if lasts_s is None else f"{lasts_s:.3g}"
        made.add_row(Text(f"  {step.criterion}"), str(step.tests), Text(limits.get(step.criterion, "")), seconds)
    return made


def _limits_of(items: Sequence[pytest.Item]) -> dict[str, str]:
    """The limit of each criterion, as it applies here; why there is none."""
    found: dict[str, str] = {}
    for item in items:
        pair = item.stash.get(PAIR, None)
        if pair is None or pair.criterion in found:
            continue
        if (known := item.stash.get(CRITERION, None)) is not None:
            text = one_line(known.limit.text.removesuffix(" count"))
            found[pair.criterion] = "measured, not judged" if known.limit.is_none else text
        elif (why := item.stash.get(NO_LIMIT, None)) is not None:
            found[pair.criterion] = one_line(why)
    return found


def _left_out(items: Sequence[pytest.Item], *, width: int) -> list[str]:
    """What does not apply here, by rule."""
    rules: dict[str, set[str]] = {}
    for item in items:
        if (rule := item.stash.get(RULE, None)) is not None:
            rules.setdefault(one_line(rule.cause), set()).add(item.stash[PAIR].criterion)
    number = len({name for names in rules.values() for name in names})
    causes = [f"{cause} ({len(names)})" for cause, names in rules.items()]
    if not causes:
        return []
    head = f"not applicable: {counted(number, 'criterion', 'criteria')}:"
    return header.wrap([head, *with_commas(causes)], width=width)
