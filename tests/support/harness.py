"""Launches a run the way a person does and collects what is left of it: exit code, terminal, JUnit, results, journal."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import jsonschema  # type: ignore[import-untyped]  # its stubs would be one more thing to install
import psutil

from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ACCEPTANCE = str(REPOSITORY / "tests_acceptance")
PLANTS = REPOSITORY / "tests" / "e2e" / "plants"
FOLDERS = REPOSITORY / "tests" / "e2e" / "folders"
SCHEMA: dict[str, Any] = json.loads(
    (REPOSITORY / "pytest_gpucluster" / "reporting" / "results.schema.json").read_text(encoding="utf-8")
)
VARIABLE = "GPUCLUSTER_E2E"
"""Marks every process of a launch, so that none is overlooked when it is over."""

FOREIGN = ("PYTEST_", "TORCHELASTIC_", "GPUCLUSTER_", "NCCL_")
FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """Start through torchrun: ``ranks`` on each node, one torchrun for each of ``nodes``, which hold its own variables."""

    ranks: int
    nodes: tuple[Mapping[str, str], ...] = ({},)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A testcase of the JUnit file; ``kind`` is passed, failure, error or skipped."""

    name: str
    kind: str
    message: str
    body: str
    properties: Mapping[str, str]

    @property
    def text(self) -> str:
        """The message, and below it the body."""
        return f"{self.message}\n{self.body}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a launch left behind. ``stdout`` holds stderr too; ``junit`` is the one ``testsuite``, None without a file."""

    returncode: int
    returncodes: tuple[int, ...]
    stdout: str
    junit: ET.Element | None
    results: dict[str, Any]
    journal: list[dict[str, Any]] = field(default_factory=list)
    wall_s: float

    @property
    def cases(self) -> list[Case]:
        """The testcases, in the file's order."""
        assert self.junit is not None, self.stdout
        return [_case(element) for element in self.junit.iter("testcase")]

    def case(self, name: str) -> Case:
        """The one testcase of this name."""
        found = [case for case in self.cases if case.name == name]
        assert len(found) == 1, f"{len(found)} testcases {name}"
        return found[0]

    @property
    def verdict_line(self) -> str:
        """The terminal's line with the verdict."""
        return next(line for line in self.stdout.splitlines() if line.startswith("verdict "))

    def row(self, criterion: str, place: str | None = None) -> dict[str, Any]:
        """The one row of results.json for a criterion at a place (None: cluster-wide)."""
        found = [
            row
            for row in self.results["criteria"]
            if row["criterion"] == criterion and (row["place"] or {"id": None})["id"] == place
        ]
        assert len(found) == 1, f"{len(found)} rows for {criterion} at {place}"
        return dict(found[0])

    def outcomes(self, criterion: str) -> dict[str | None, str]:
        """Outcome by place id."""
        rows = [row for row in self.results["criteria"] if row["criterion"] == criterion]
        return {(row["place"] or {"id": None})["id"]: row["outcome"] for row in rows}

    def culprit(self, place: str) -> dict[str, Any]:
        """The one culprit at this place."""
        found = [culprit for culprit in self.results["culprits"] if culprit["place"]["id"] == place]
        assert len(found) == 1, f"{len(found)} culprits at {place}: {self.results['culprits']}"
        return dict(found[0])

    def settled_s(self, criterion: str, place: str | None = None) -> float:
        """When the journal says that an outcome was known (the last one told), in seconds since 1970."""
        records = [(event["record"], event["at_s"]) for event in self.journal if event["event"] == "outcome"]
        return float([at_s for record, at_s in records if (record["criterion"], record["place"]) == (criterion, place)][-1])


def launch(
    folder: Path,
    *arguments: str,
    torchrun: Torchrun | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 600,
) -> Ran:
    """Run pytest with ``arguments`` in ``folder``; fails when it takes longer or leaves a process behind.

    The package is used as installed; where it is not, from this checkout.
    """
    token = uuid.uuid4().hex
    base = {**_environment(), **(environment or {}), VARIABLE: token}
    started_s = time.monotonic()
    launched: list[subprocess.Popen[bytes]] = []
    nodes = torchrun.nodes if torchrun is not None else ({},)
    for number, (command, variables) in enumerate(zip(_commands(torchrun, arguments), nodes, strict=True)):
        with (folder / f"terminal{number}.log").open("wb") as log:
            launched.append(
                subprocess.Popen(
                    command, cwd=folder, env={**base, **variables}, stdin=subprocess.DEVNULL, stdout=log, stderr=log
                )
            )
    late, left = False, []
    try:
        for process in launched:
            process.wait(max(0.1, started_s + timeout_s - time.monotonic()))
        wall_s = time.monotonic() - started_s
        left = _left(token, within_s=3.0)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        _kill(token, launched)
    logs = [folder / f"terminal{number}.log" for number in range(len(nodes))]
    terminal = "".join(log.read_text(encoding="utf-8", errors="replace") for log in logs)
    assert not late, f"the run took longer than {timeout_s:g} s\n{terminal}"
    assert not left, f"the run left processes behind: {left}\n{terminal}"
    return _collect(folder, tuple(process.returncode for process in launched), terminal, wall_s)


def user_folder(name: str, target: Path) -> Path:
    """A copy of one of ``folders``: what a user's own folder holds."""
    return Path(shutil.copytree(FOLDERS / name, target))


def in_rehearsal(**keys: Any) -> dict[str, Any]:
    """What an overlay writes to change an entry for rehearsals."""
    waived = {"bound_waived": "a CPU, and a limit between a good and a planted value"} if "above" in keys else {}
    return {"profiles": {"rehearsal": {**keys, **waived}}}


def write_limits(path: Path, criteria: Mapping[str, Any], *, extends: bool = True) -> str:
    """A thresholds file as ``--gpucluster-thresholds`` wants it: over the packaged one, or alone for a rehearsal."""
    alone = {"cluster": {}, "profiles": {"rehearsal": {"gpu": None, "rehearsal": True, "accept_at": "quick", "fabric": "none"}}}
    document = {"schema": 1, **({"extends": "packaged"} if extends else alone), "criteria": criteria}
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")  # JSON is YAML
    return f"--gpucluster-thresholds={path}"


def entry(**keys: Any) -> dict[str, Any]:
    """A complete entry of a thresholds file, cluster-wide and at least 1, unless ``keys`` say otherwise."""
    limit = {} if {"above", "below", "max"} & set(keys) else {"min": 1}
    about = {
        "criterion": "It is judged.",
        "per": "cluster",
        "unit": "count",
        "level": "quick",
        "why": "A test.",
        "source": "none",
    }
    return {**about, **limit, **keys}


def _environment() -> dict[str, str]:
    """Ours without what belongs to the pytest (or torchrun) that runs these tests."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN_NAMES and not name.startswith(FOREIGN)}
    paths = [str(PLANTS), *([] if _is_installed() else [str(REPOSITORY)]), *filter(None, [kept.get("PYTHONPATH")])]
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def _is_installed() -> bool:
    return any(point.value == "pytest_gpucluster.plugin" for point in importlib.metadata.entry_points(group="pytest11"))


def _commands(torchrun: Torchrun | None, arguments: tuple[str, ...]) -> Iterator[list[str]]:
    plugin = [] if _is_installed() else ["-p", "pytest_gpucluster.plugin"]
    run = ["-m", "pytest", "-p", "no:cacheprovider", *plugin, "--junitxml=junit.xml", *arguments]
    if torchrun is None:
        yield [sys.executable, *run]
        return
    port = _free_port()
    for number in range(len(torchrun.nodes)):
        where = [f"--nnodes={len(torchrun.nodes)}", f"--node-rank={number}", "--master-addr=127.0.0.1", f"--master-port={port}"]
        yield [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={torchrun.ranks}", *run]


def _free_port() -> int:
    """One that nobody uses just now, below those that the kernel gives to outgoing connections."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise OSError("no free port")


def _with(token: str) -> list[psutil.Process]:
    """The live processes of a launch, by the variable that they inherited."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(VARIABLE) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _kill(token: str, launched: list[subprocess.Popen[bytes]]) -> None:
    """End whatever of a launch is still there."""
    for process in _with(token):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for one in launched:
        one.wait(10)


def _left(token: str, *, within_s: float) -> list[str]:
    """What has not ended within a moment after the command has."""
    deadline_s = time.monotonic() + within_s
    while (found := _with(token)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return [str(process) for process in found]


def _collect(folder: Path, codes: tuple[int, ...], terminal: str, wall_s: float) -> Ran:
    junit_file = folder / "junit.xml"
    written = folder / "gpucluster-results"
    results: dict[str, Any] = {}
    journal: list[dict[str, Any]] = []
    if (written / "results.json").exists():
        results = json.loads((written / "results.json").read_text(encoding="utf-8"), parse_constant=_refuse)
        jsonschema.validate(results, SCHEMA)
    if (written / "journal.jsonl").exists():
        journal = [json.loads(line) for line in (written / "journal.jsonl").read_text(encoding="utf-8").splitlines()]
    return Ran(
        returncode=codes[0],
        returncodes=codes,
        stdout=terminal,
        junit=ET.parse(junit_file).getroot()[0] if junit_file.exists() else None,  # noqa: S314 -- our own file
        results=results,
        journal=journal,
        wall_s=wall_s,
    )


def _refuse(constant: str) -> None:
    raise ValueError(f"results.json holds {constant}, which is not JSON")


def _case(element: ET.Element) -> Case:
    kind, message, body = "passed", "", ""
    for child in element:
        if child.tag in ("failure", "error", "skipped"):
            kind, message, body = child.tag, child.get("message", ""), child.text or ""
    properties = {one.attrib["name"]: one.attrib["value"] for one in element.iter("property")}
    return Case(name=element.attrib["name"], kind=kind, message=message, body=body, properties=properties)
