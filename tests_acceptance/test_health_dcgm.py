"""NVIDIA's own diagnostic, where it is installed: ``dcgmi diag``, one test for each GPU and each kind of its tests."""

import pytest

from pytest_gpucluster import Blame, MeasurementError, health
from pytest_gpucluster.measurements.dcgm import dcgm_diag, dcgm_program
from tests_acceptance.conftest import measured

pytestmark = pytest.mark.health


dcgm_programs = measured(dcgm_program, per="host", at="all", deadline_s=60)
"""Whether each host has the program."""


@pytest.fixture(scope="session")
def diagnosed(entries, cluster, recipe):
    """One diagnostic on each host, at the highest level that a selected test wants, for GPUs that nobody else uses."""
    uuids = [cluster.at_start[place].uuid for place in cluster.places if place not in cluster.at_start.errors]
    longest = max(map(recipe, entries.selected("dcgm_diag")), key=lambda one: one["run"])
    return cluster.run(dcgm_diag, per="host", places=cluster.places, uuids=uuids, **longest)


@pytest.fixture
def host(place, cluster, dcgm_programs):
    """The node of this GPU, whether it has the program, the other nodes that have it, and the GPU's UUID."""
    node = next(node for node in cluster.nodes if node.node == place.node)
    known = {one: dcgm_programs[one].path for one in cluster.nodes if one not in dcgm_programs.errors}
    others = [other.label for other, path in known.items() if path is not None]
    return node, dcgm_programs[node].path is not None, others, cluster.at_start[place].uuid


@pytest.mark.each_entry("diagnostic")
def test_dcgm_diag(diagnostic, host, entries, request, criterion):
    """Every test of this kind passed on the GPU, and said nothing of an error."""
    node, has_program, others, uuid = host
    if not has_program and not others:
        criterion.does_not_apply("on any host")
    if not has_program:
        cause = "dcgmi is not installed here, and is on other hosts"
        text = f"{node.label}: {cause}: {', '.join(others)}"
        raise MeasurementError(text, culprits=(node,), blame=Blame(part="host", cause=cause))
    diag = request.getfixturevalue("diagnosed")[node]
    criterion.judge(health.judge_diag(diag, uuid, diagnostic, kinds=entries.brackets("dcgm_diag")))
