"""Finding the GPUs of this machine."""

from __future__ import annotations

import subprocess

import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory import detect


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML that never answers is a broken machine, reported within the deadline, even if its process cannot be ended."""
    asleep = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    monkeypatch.setattr(detect, "DEADLINE_S", 0.2)
    monkeypatch.setattr(detect.subprocess, "Popen", lambda *_args, **_options: asleep)
    monkeypatch.setattr(asleep, "kill", lambda: None)  # as in state D
    with pytest.raises(ConfigurationError, match="the driver hangs"):
        detect.detect_gpus()
    assert asleep.poll() is None
    asleep.terminate()
    asleep.communicate(timeout=10)
