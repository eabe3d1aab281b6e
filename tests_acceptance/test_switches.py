"""NVSwitches, by what their driver writes into the kernel log of each host."""

import pytest

from pytest_gpucluster import health
from pytest_gpucluster.measurements.health import node_sxids

pytestmark = [pytest.mark.health, pytest.mark.reads]


@pytest.mark.over_run(node_sxids, per="host", between=health.judge_sxids_between)
def test_sxid_during_run(over_run, node, criterion):
    """The driver reported no error of an NVSwitch that the guide does not call harmless."""
    _, last = over_run[node]
    criterion.judge(health.judge_sxids(last).with_evidence(**{"seconds watched": over_run.seconds}))
