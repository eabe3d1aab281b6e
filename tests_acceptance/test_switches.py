"""NVSwitches, by what their driver writes into the kernel log of each host."""

from __future__ import annotations

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.health.driver_errors import judge_sxids
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.measurements.driver_errors import node_sxids
from tests_acceptance.conftest import snapshot, watched_s

pytestmark = pytest.mark.health


@pytest.fixture(scope="session")
def sxids_at_end(cluster):
    """The same, after everything else."""
    return snapshot(cluster, node_sxids, per="host", deadline_s=60)


@pytest.mark.at_end
def test_sxid_during_run(sxids_at_start, sxids_at_end, node, criterion):
    """The driver reported no error of an NVSwitch that the guide does not call harmless."""
    seconds = watched_s(sxids_at_start, sxids_at_end)
    heard = sxids_at_end.results[node]
    found = judge_sxids(heard)
    if found.over or heard.kernel_log_why is None:
        evidence = {"found": found.facts, "harmless": found.harmless, "before the run": found.before}
        shown = {name: texts for name, texts in evidence.items() if texts}
        parts = Parts(kind="switch", names=found.switches, advice=found.advice)
        criterion.require(found.over, evidence={**shown, "seconds watched": seconds}, parts=parts)
    if heard.kernel_log_why is not None:
        why = f"SXids could not be read: {heard.kernel_log_why}"
        raise MeasurementError(f"{node.label}: {why}", culprits=(node,), blame=Blame(part="settings", cause=why))
