"""Exit codes, with the gate and without."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.launching import Starter

pytestmark = pytest.mark.e2e


def test_exit_codes_and_the_gate(starter: Starter) -> None:
    """0 for good measurements, with the gate only for ACCEPTED; a criterion that fails is 1 with and without it."""
    starter.write(test_plain="def test_plain(cluster):\n    assert cluster.world_size == 2\n")
    ungated = starter.pytest("--gpucluster", "--gpucluster-results", "a")
    assert ungated.end() == 0, ungated.output
    gated = starter.pytest("--gpucluster", "--gpucluster-gate", "--gpucluster-results", "b")
    assert gated.end() == 1, gated.output
    assert gated.results("b")["verdict"] == "INCOMPLETE"
    starter.write(test_plain="def test_plain(cluster):\n    assert cluster.world_size == 3\n")
    failed = starter.torchrun("--gpucluster", "--gpucluster-results", "c")
    assert failed.end() == 1, failed.output
    assert failed.results("c")["verdict"] == "REJECTED"
    assert "traceback : verdict REJECTED" in failed.output  # in torchrun's own banner
    failed.gone()
