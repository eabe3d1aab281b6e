"""``--gpucluster-selftest`` in a run: before the first test, on the terminal, in the reports. Glue only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.plugin.pairing import Pair
from pytest_gpucluster.reporting.results import selftest_lines
from pytest_gpucluster.selftest import running

if TYPE_CHECKING:
    from pytest_gpucluster.plugin.terminal import Terminal
    from pytest_gpucluster.session import Session

NAME = "self-test"
BEGINS = f"gpucluster: {NAME}: planting a slow, a wrong, a dead and a hung rank in software"


def run_selftest(session: Session, terminal: Terminal) -> None:
    """Run the self-test once, show it and record it."""
    terminal.live.begin(Pair(criterion=NAME, place=None, judges=False))
    terminal.live.say(BEGINS)
    facts = running.run_selftest(session, lambda step, fraction: terminal.live.progress(0, step, fraction)).facts
    terminal.live.say(f"gpucluster: {NAME}: {facts['places']} places, {facts['seconds']:.1f} s")
    for line in selftest_lines(facts):
        terminal.live.say(f"gpucluster: {NAME}: {line}", red=line in facts["objections"])
    session.take_selftest(facts)
