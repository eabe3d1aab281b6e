"""GPU memory."""

import pytest

from pytest_gpucluster.measurements.hbm_pattern import hbm_pattern
from tests_acceptance.conftest import measured

pytestmark = pytest.mark.memory

KINDS = ("copy", "triad", "read", "write")


def test_hbm_bandwidth(hbm, place, criterion):
    """Copy or triad, read plus written bytes, whichever is better."""
    moved = hbm[place]
    rates = {f"{kind} TB/s": getattr(moved, f"{kind}_tb_s") for kind in KINDS}
    criterion.require(hbm.repeated(place, "tb_s", "repeats_tb_s"), evidence={**rates, **moved.evidence})


pattern = measured(hbm_pattern, "hbm_pattern")
"""Patterns written over the free memory of every GPU at once, and read back."""


def test_hbm_pattern(pattern, place, criterion):
    """Not one word differs from what was written."""
    found = pattern[place]
    first = [error.text for error in found.first_errors[:1]]
    tested = {"first": first, "GB tested": found.tested_bytes / 1e9}
    criterion.require(found.errors, evidence={**found.errors_by_kind, **tested, **found.evidence})


def test_hbm_pattern_coverage(pattern, place, criterion):
    """Nearly all of the GPU's memory was tested."""
    found = pattern[place]
    criterion.require(found.share_of_total, evidence={"share of what was free": found.share_of_free})
