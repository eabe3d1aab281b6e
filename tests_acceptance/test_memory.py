"""GPU memory."""

from __future__ import annotations

import pytest

from pytest_gpucluster.measurements.hbm import hbm_bandwidth

pytestmark = pytest.mark.memory


@pytest.fixture(scope="session")
def hbm(cluster, recipe):
    """Copy and triad on every GPU at once."""
    return cluster.run(hbm_bandwidth, per="gpu", **recipe("hbm_bandwidth"))


def test_hbm_bandwidth(hbm, place, criterion):
    """Copy or triad, read plus written bytes, whichever is better."""
    moved = hbm[place]
    repeats = hbm.repeated(place, "tb_s", "repeats_tb_s")
    criterion.require(repeats, evidence={"copy TB/s": moved.copy_tb_s, "triad TB/s": moved.triad_tb_s})
