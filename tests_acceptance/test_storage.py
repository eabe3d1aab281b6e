"""The file systems that all nodes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.health.shared_paths import Amiss, Asked, PathLooks, judge_path
from pytest_gpucluster.measurements.file_rates import file_rates
from pytest_gpucluster.measurements.shared_paths import small_files
from tests_acceptance.shared_paths import Hosts, look

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.platform


@dataclass(frozen=True)
class Looked:
    """One shared path: what the hosts saw, the errors of those that did not answer, and what is amiss, by node id."""

    looks: PathLooks
    errors: Mapping[str, MeasurementError]
    amiss: Mapping[str, Amiss]


@pytest.fixture(scope="session")
def shared(cluster, recipe):
    """Every shared path, one after the other."""
    arguments = recipe("shared_paths")
    room = {name: arguments[name] for name in ("least_free_gib", "least_free_inodes")}
    asked, found = Asked(**room, locks=arguments["lock_s"] > 0), {}
    for path in cluster.promised.shared_paths:
        hosts = Hosts(cluster, path, arguments["deadline_s"])
        looks = look(hosts, within_s=arguments["within_s"], lock_s=arguments["lock_s"])
        amiss = judge_path(path, looks, asked, hosts=[node.id for node in cluster.nodes])
        found[path] = Looked(looks=looks, errors=hosts.errors, amiss=amiss)
    return found


def test_shared_paths(shared, node, criterion):
    """The node sees what each other node writes, locks hold, and there is room."""
    amiss = [one.amiss[node.id] for one in shared.values()]
    wrong, unknown = ([text for one in amiss for text in getattr(one, name)] for name in ("wrong", "unknown"))
    errors = [one.errors[node.id] for one in shared.values() if node.id in one.errors]
    if wrong or not (unknown or errors):
        evidence = {name: fact for path, one in shared.items() for name, fact in evidence_of(path, one.looks, node).items()}
        criterion.require(len(wrong), evidence={"found": wrong, **evidence})
    for error in errors:
        raise error
    if unknown:
        raise MeasurementError(f"{node.label}: {'; '.join(unknown)}", blame=Blame(part="host"))


def evidence_of(path, looks, node):
    """The file system below a path as the node has it, free room, and how long the slowest file took to show."""
    mark, turns = looks.marks.get(node.id), (looks.seen.get(node.id), looks.seen_again.get(node.id))
    slowest = [turn.slowest_s for turn in turns if turn is not None and turn.slowest_s is not None]
    if mark is None:
        return {}
    found: dict[str, object] = {path: str(mark.mount)}
    if mark.problem is None:
        found |= {f"{path} free GiB": mark.free_gib, f"{path} free inodes": mark.free_inodes}
    if slowest:
        found[f"{path} s until seen"] = max(slowest)
    if mark.leftovers:
        found[f"{path} leftovers removed"] = len(mark.leftovers)
    return found


@pytest.fixture(scope="session")
def shared_small(cluster, recipe):
    """Many small files below each shared path, by all hosts at once."""
    paths, arguments = cluster.promised.shared_paths, recipe("shared_small_files")
    return {path: cluster.run(small_files, per="host", places=cluster.places, path=path, **arguments) for path in paths}


def test_shared_small_files(shared_small, node, criterion):
    """The slowest of the shared paths."""
    by_path = {path: results[node] for path, results in shared_small.items()}
    worst = min(by_path.values(), key=lambda found: found.files_s)
    criterion.require(worst.files_s, evidence={path: f"{one.files} in {one.seconds:.2f} s" for path, one in by_path.items()})


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


@pytest.fixture(scope="session")
def shared_together(cluster, recipe):
    """Large files below each shared path, by all hosts at once."""
    paths, arguments = cluster.promised.shared_paths, recipe("shared_write_all")
    return {path: cluster.run(file_rates, per="host", places=cluster.places, path=path, **arguments) for path in paths}


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
