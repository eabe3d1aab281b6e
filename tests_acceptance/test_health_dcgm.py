"""NVIDIA's own diagnostic, where it is installed: ``dcgmi diag``, one test for each GPU and each kind of its tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.health.dcgm import judge_diag
from pytest_gpucluster.inventory.dcgm import SOFTWARE
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.measurements.dcgm import dcgm_diag, dcgm_program
from pytest_gpucluster.plugin.activation import run_of
from pytest_gpucluster.plugin.stash_keys import PAIR, RULE

if TYPE_CHECKING:
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.places import Place

pytestmark = pytest.mark.health


def pytest_generate_tests(metafunc):
    """One test for each entry ``dcgm_diag[...]`` of the limits."""
    if "diagnostic" in metafunc.fixturenames:
        metafunc.parametrize("diagnostic", kinds_in(metafunc.config))


def kinds_in(config):
    """What stands in the brackets of the entries, in their order; never empty, so that a file without one is told so."""
    try:
        criteria = run_of(config).session.setup.criteria
    except (pytest.UsageError, pytest.exit.Exception):  # kept by the plugin, which raises it later
        criteria = {}
    kinds = [key.removeprefix("dcgm_diag[").removesuffix("]") for key in criteria if key.startswith("dcgm_diag[")]
    return kinds or [SOFTWARE]


@pytest.fixture(scope="session")
def dcgm_programs(cluster):
    """Whether each host has the program."""
    return cluster.run(dcgm_program, per="host", places=cluster.places, deadline_s=60)


@pytest.fixture(scope="session")
def diagnosed(request, cluster, recipe):
    """One diagnostic on each host, at the highest level that a selected test wants, for GPUs that nobody else uses."""
    items = [item for item in request.session.items if "dcgm_programs" in item.fixturenames and RULE not in item.stash]
    asked = [recipe(item.stash[PAIR].criterion) for item in items]
    uuids = [cluster.at_start[place].uuid for place in cluster.places if place not in cluster.at_start.errors]
    longest = max(asked, key=lambda one: one["run"])
    return cluster.run(dcgm_diag, per="host", places=cluster.places, uuids=uuids, **longest)


@dataclass(frozen=True)
class Host:
    """The node of a GPU: whether it has the program, which other nodes have it, and who was on each GPU before the run."""

    node: Place
    has_program: bool
    others: tuple[str, ...]
    at_start: Results


@pytest.fixture
def host(place, cluster, dcgm_programs):
    """The node of this GPU."""
    paths = {node: dcgm_programs[node].path for node in dcgm_programs if node not in dcgm_programs.errors}
    node = next(node for node in cluster.nodes if node.node == place.node)
    others = tuple(other.label for other, path in paths.items() if path)
    return Host(node, dcgm_programs[node].path is not None, others, cluster.at_start)


def test_dcgm_diag(diagnostic, host, place, request, criterion):
    """Every test of this kind passed on the GPU, and said nothing of an error."""
    if not host.has_program and not host.others:
        criterion.does_not_apply("on any host")
    if not host.has_program:
        cause = "dcgmi is not installed here, and is on other hosts"
        text = f"{host.node.label}: {cause}: {', '.join(host.others)}"
        raise MeasurementError(text, culprits=(host.node,), blame=Blame(part="host", cause=cause))
    uuid = host.at_start[place].uuid
    diag = request.getfixturevalue("diagnosed")[host.node]
    found = judge_diag(diag, uuid, diagnostic, kinds=kinds_in(request.config))
    if found.bad or not found.unknown:
        parts = Parts(kind=found.blames, advice=found.advice)
        criterion.require(len(found.bad), evidence={"found": found.bad, **found.evidence}, parts=parts)
    if found.unknown:
        text = f"{place.label}, DCGM {diag.version or '(version not told)'}: {'; '.join(found.unknown)}"
        raise MeasurementError(text, culprits=(place,), blame=Blame(cause=found.unknown[0]))
