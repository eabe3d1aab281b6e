"""What several criteria are judged from is measured once, here."""

from __future__ import annotations

import pytest

from pytest_gpucluster.measurements.health import gpu_state
from pytest_gpucluster.measurements.training import finetune


@pytest.fixture(scope="session")
def gpu_states(cluster):
    """NVML's and torch's view of every GPU."""
    return cluster.run(gpu_state, per="gpu", deadline_s=60)


@pytest.fixture(scope="session")
def finetuned(cluster, recipe):
    """One LoRA fine-tune over the whole cluster."""
    return cluster.run(finetune, per="cluster", **recipe("finetune_loss"))
