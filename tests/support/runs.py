"""Runs pytest with the plugin to its end and collects what is left: exit code, terminal, JUnit, results, journal."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema  # type: ignore[import-untyped]  # its stubs would be one more thing to install

from tests.support import REPOSITORY, reports
from tests.support.launching import PYTEST, Launch, environment, python_path, under_torchrun

if TYPE_CHECKING:
    from collections.abc import Mapping
    from xml.etree import ElementTree as ET

PLANTS = REPOSITORY / "tests" / "e2e" / "plants"
FOLDERS = REPOSITORY / "tests" / "e2e" / "folders"
RUN_S = 400.0
"""For a whole run. Below the ``faulthandler_timeout`` of noxfile.py: a run that hangs then shows what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """Start through torchrun: ``ranks`` on each node, one torchrun for each of ``nodes``, which hold its own variables."""

    ranks: int
    nodes: tuple[Mapping[str, str], ...] = ({},)


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """What a run left behind. ``stdout`` holds stderr too; ``junit`` is the one ``testsuite``, None without a file."""

    returncodes: tuple[int, ...]
    stdout: str
    junit: ET.Element | None
    results: dict[str, Any]
    journal: list[dict[str, Any]]

    @property
    def returncode(self) -> int:
        """The exit code of the only node, or of the first."""
        return self.returncodes[0]

    @property
    def cases(self) -> list[reports.Case]:
        """The testcases, in the file's order."""
        assert self.junit is not None, self.stdout
        return reports.cases_of(self.junit)

    def case(self, name: str) -> reports.Case:
        """The one testcase of this name."""
        found = [case for case in self.cases if case.name == name]
        assert len(found) == 1, f"{len(found)} testcases {name}"
        return found[0]

    @property
    def verdict_line(self) -> str:
        """The terminal's line with the verdict."""
        return next(line for line in self.stdout.splitlines() if line.startswith("verdict "))

    def _rows(self, criterion: str) -> dict[str | None, dict[str, Any]]:
        rows = [row for row in self.results["criteria"] if row["criterion"] == criterion]
        found = {row["place"] and row["place"]["id"]: row for row in rows}
        assert len(found) == len(rows), f"a place is there twice: {rows}"
        return found

    def row(self, criterion: str, place: str | None = None) -> dict[str, Any]:
        """The one row of results.json for a criterion at a place (None: cluster-wide)."""
        return self._rows(criterion)[place]

    def outcomes(self, criterion: str) -> dict[str | None, str]:
        """Outcome by place id."""
        return {place: row["outcome"] for place, row in self._rows(criterion).items()}

    def culprit(self, place: str) -> dict[str, Any]:
        """The one culprit at this place."""
        found = [culprit for culprit in self.results["culprits"] if culprit["place"] and culprit["place"]["id"] == place]
        assert len(found) == 1, f"{len(found)} culprits at {place}: {self.results['culprits']}"
        return dict(found[0])

    def settled_s(self, criterion: str, place: str | None = None) -> float:
        """When the journal has the last outcome, in seconds since 1970."""
        records = [(event["record"], event["at_s"]) for event in self.journal if event["event"] == "outcome"]
        return float([at_s for record, at_s in records if (record["criterion"], record["place"]) == (criterion, place)][-1])


def run_pytest(
    folder: Path,
    *arguments: str,
    torchrun: Torchrun | None = None,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = RUN_S,
) -> FinishedRun:
    """Run pytest with ``arguments`` in ``folder``; fails when it takes longer or leaves a process behind."""
    launches = start_pytest(folder, *arguments, torchrun=torchrun, variables=variables)
    deadline_s = time.monotonic() + timeout_s
    try:
        for launch in launches:
            launch.end(within_s=max(0.1, deadline_s - time.monotonic()))
            launch.gone()
    finally:
        for launch in launches:
            launch.kill_all()
    return collect(launches)


def start_pytest(
    folder: Path, *arguments: str, torchrun: Torchrun | None = None, variables: Mapping[str, str] | None = None
) -> list[Launch]:
    """Start pytest, or one torchrun for each node, and return at once. ``variables`` are added to the environment."""
    ours = {**environment(measured=True), **(variables or {})}
    chosen = ("--junitxml=junit.xml", *arguments)
    nodes = torchrun.nodes if torchrun is not None else ({},)
    commands = under_torchrun(*chosen, ranks=torchrun.ranks, nodes=len(nodes)) if torchrun is not None else [[*PYTEST, *chosen]]
    return [
        Launch(
            command=command, cwd=folder, environment={**ours, **its, "PYTHONPATH": python_path(PLANTS)}, name=f"node{number}"
        ).start()
        for number, (command, its) in enumerate(zip(commands, nodes, strict=True))
    ]


def collect(launches: list[Launch]) -> FinishedRun:
    """What the launches of one run left in their folder; results.json has the published schema."""
    folder = launches[0].cwd
    results: dict[str, Any] = {}
    if (folder / reports.RESULTS / "results.json").exists():
        results = launches[0].results()
        jsonschema.validate(results, reports.SCHEMA)
    junit = folder / "junit.xml"
    return FinishedRun(
        returncodes=tuple(launch.end() for launch in launches),
        stdout="".join(launch.output for launch in launches),
        junit=reports.read_suite(junit) if junit.exists() else None,
        results=results,
        journal=launches[0].journal(),
    )


def user_folder(name: str, target: Path) -> Path:
    """A copy of one of ``folders``: what a user's own folder holds."""
    return Path(shutil.copytree(FOLDERS / name, target))
