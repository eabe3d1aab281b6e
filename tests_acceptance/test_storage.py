"""The file systems that all nodes share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pytest_gpucluster import MeasurementError, Place, health
from pytest_gpucluster.measurements.file_rates import file_rates, file_requests
from pytest_gpucluster.measurements.shared_paths import (
    PathMark,
    clear_path,
    count_under_lock,
    leave_mark,
    read_marks,
    replace_file,
    small_files,
)
from tests_acceptance.conftest import values_of

pytestmark = pytest.mark.platform


@pytest.fixture(scope="session")
def shared(cluster, recipe):
    """What every shared path is at each node, by path and node id; the error of a node that did not answer in its place."""
    arguments = recipe("shared_paths")
    room = {name: arguments[name] for name in ("least_free_gib", "least_free_inodes")}
    required, found = health.PathRequirements(**room, locks=arguments["lock_s"] > 0), {}
    for path in cluster.promised.shared_paths:
        hosts = Hosts(cluster, path, arguments["deadline_s"])
        seen = observe(hosts, within_s=arguments["within_s"], lock_s=arguments["lock_s"])
        found[path] = (health.judge_path(path, seen, required, hosts=[node.id for node in cluster.nodes]), hosts.errors)
    return found


def test_shared_paths(shared, node, criterion):
    """The node sees what each other node writes, locks hold, and there is room."""
    errors = [errors[node.id] for _, errors in shared.values() if node.id in errors]
    found = health.merge(findings[node.id] for findings, _ in shared.values())
    if found.bad or not errors:
        criterion.judge(found)
    for error in errors:
        raise error


def on_each_path(function, key):
    """A fixture: what the function measures below each shared path, by path, on all hosts at once."""

    @pytest.fixture(scope="session")
    def results(cluster, recipe):  # noqa: ANN202 - a fixture, known by the name that it is given below
        paths, arguments = cluster.promised.shared_paths, recipe(key)
        return {path: cluster.run(function, per="host", places=cluster.places, path=path, **arguments) for path in paths}

    return results


shared_small = on_each_path(small_files, "shared_small_files")
"""Many small files below each shared path, by all hosts at once."""


def test_shared_small_files(shared_small, node, criterion):
    """The slowest of the shared paths."""
    by_path = {path: results[node] for path, results in shared_small.items()}
    worst = min(by_path.values(), key=lambda found: found.files_s)
    criterion.require(worst.files_s, evidence={path: f"{one.files} in {one.seconds:.2f} s" for path, one in by_path.items()})


shared_requests = on_each_path(file_requests, "shared_iops")
"""Small requests below each shared path, by all hosts at once."""


def test_shared_iops(shared_requests, node, criterion):
    """The slowest of the shared paths."""
    worst = min((results[node] for results in shared_requests.values()), key=lambda found: found.read.iops)
    criterion.require(worst.read.iops, evidence=worst.evidence)


@pytest.fixture(scope="session")
def alone():
    """The rates of each node alone: measured once for the criteria of writing and reading."""
    return {}


@pytest.fixture
def shared_alone(alone, node, cluster, recipe):
    """Large files below each shared path, by this node alone."""
    if node.id not in alone:
        alone[node.id] = {
            path: cluster.run(file_rates, per="host", places=[node], path=path, **recipe("shared_write"))
            for path in cluster.promised.shared_paths
        }
    return alone[node.id]


shared_together = on_each_path(file_rates, "shared_write_all")
"""Large files below each shared path, by all hosts at once."""


def judge(criterion, by_path, node, way):
    """Judge the slowest of the paths."""
    found = [results[node] for results in by_path.values()]
    worst = min(found, key=lambda one: getattr(one, way))
    criterion.require(getattr(worst, way), evidence=worst.evidence)


def test_shared_write(shared_alone, node, criterion):
    """One node at a time."""
    judge(criterion, shared_alone, node, "write_gb_s")


def test_shared_read(shared_alone, node, criterion):
    """The same files, read again."""
    judge(criterion, shared_alone, node, "read_gb_s")


def test_shared_write_all(shared_together, node, criterion):
    """All nodes at the same time."""
    judge(criterion, shared_together, node, "write_gb_s")


def test_shared_read_all(shared_together, node, criterion):
    """The same files, read again."""
    judge(criterion, shared_together, node, "read_gb_s")


class Hosts:
    """The hosts that still answer of one path. One that fails in a call is not called again: it would hang again."""

    def __init__(self, cluster: Any, path: str, deadline_s: float) -> None:
        """``deadline_s`` is that of each call."""
        self.path = path
        self.errors: dict[str, MeasurementError] = {}
        self._cluster = cluster
        self._deadline_s = deadline_s

    def ask(self, function: Callable[..., Any], **arguments: Any) -> dict[str, Any]:
        """What each host returned, by node id; None is left out."""
        nodes: list[Place] = [node for node in self._cluster.nodes if node.id not in self.errors]
        if not nodes:
            return {}
        results = self._cluster.run(
            function, per="host", places=nodes, deadline_s=self._deadline_s, path=self.path, **arguments
        )
        for node, error in results.errors.items():
            text = f"{self.path}: {error}"
            self.errors[node.id] = MeasurementError(text, culprits=error.culprits, kind=error.kind, blame=error.blame)
        return {node.id: found for node, found in values_of(results).items() if found is not None}


def observe(hosts: Hosts, *, within_s: float, lock_s: float) -> health.PathObservations:
    """Have every host write, read what all wrote, do both again, count under locks and replace a file; what was seen."""
    run = secrets.token_hex(8)
    try:
        marks = hosts.ask(leave_mark, run=run)
        seen = hosts.ask(read_marks, digests=_digests(marks), within_s=within_s)
        rewritten = hosts.ask(leave_mark, run=run)
        seen_again = hosts.ask(read_marks, digests=_digests(rewritten), within_s=within_s)
        parties = _parties(rewritten, seen, seen_again) if lock_s else []
        together = {"run": run, "parties": parties, "seconds": lock_s}
        counted = hosts.ask(count_under_lock, **together) if parties else {}
        flocked = hosts.ask(count_under_lock, **together, flock=True) if parties else {}
        replaced = hosts.ask(replace_file, **together) if parties else {}
    finally:
        left = hosts.ask(clear_path, run=run)
    turns = {"marks": marks, "seen": seen, "rewritten": rewritten, "seen_again": seen_again}
    return health.PathObservations(**turns, counted=counted, flocked=flocked, replaced=replaced, left=left)


def _digests(marks: Mapping[str, PathMark]) -> dict[str, str]:
    """The digest of the file in each host's folder."""
    return {mark.folder: mark.digest for mark in marks.values() if mark.problem is None}


def _parties(marks: Mapping[str, PathMark], *seen: Mapping[str, Any]) -> list[str]:
    """The folders of the hosts that saw every file in time, but for those of hosts that see no other's: these are apart."""
    folders = {node: mark.folder for node, mark in marks.items() if mark.problem is None}
    missed = {
        node: {one for turn in seen for one in (turn[node].missed if node in turn else folders.values())} for node in folders
    }
    apart = {folders[node] for node, ones in missed.items() if len(ones) >= len(folders) - 1 > 0}
    return [folder for node, folder in folders.items() if missed[node] <= apart - {folder}]
