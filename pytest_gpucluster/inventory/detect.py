"""GPUs of this machine by NVML, read in a child process: a driver that hangs must not hang the run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import ConfigurationError

DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Detected:
    """NVML's names of the readable GPUs that a process started here may use, in PCI order.

    ``num_lost`` counts GPUs that NVML still lists and cannot read: they are places too, whose health is an error.
    ``num_hidden`` counts those that ``CUDA_VISIBLE_DEVICES`` hides from this run.
    """

    names: tuple[str, ...]
    num_lost: int = 0
    num_hidden: int = 0

    @property
    def num_gpus(self) -> int:
        """How many places this machine has."""
        return len(self.names) + self.num_lost


def survey_gpus() -> dict[str, Any]:
    """What ``pytest_gpucluster.inventory.nvml.survey`` finds, read in a child process under a deadline.

    Raises:
        ConfigurationError: NVML did not answer in time, or the child died.
    """
    command = [sys.executable, "-m", "pytest_gpucluster.inventory.nvml"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603 -- ourselves
    try:
        output, errors = child.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        child.kill()  # without a wait: SIGKILL may not end a process inside a driver that hangs
        raise ConfigurationError(
            f"NVML did not answer within {DEADLINE_S:g} s: the driver hangs. Look at the kernel log (Xid), then reboot the node"
        ) from None
    try:
        return dict(json.loads(output if child.returncode == 0 else ""))
    except ValueError:
        tail = errors.strip().splitlines()[-1:] or [f"exit code {child.returncode}"]
        raise ConfigurationError(f"NVML could not be read: {tail[0]}") from None


def detect_gpus() -> Detected:
    """Read NVML. Without its library there is no GPU. A library that fails is a broken machine, not one without GPUs.

    Raises:
        ConfigurationError: NVML is installed but does not work, or did not answer in time.
    """
    found = survey_gpus()
    if found["status"] == "no_library":
        return Detected(names=())
    if found["status"] != "ok" and not found["gpus"]:
        raise ConfigurationError(
            f"NVML is installed but does not work: {found['error']}. This is a broken GPU machine, not one without GPUs; "
            "to rehearse on the CPU all the same, say --gpucluster-profile rehearsal"
        )
    shown = [gpu["name"] for gpu in found["gpus"] if gpu["cuda_index"] is not None]
    hidden = len(found["gpus"]) - len(shown)
    return Detected(names=tuple(shown), num_lost=found["count"] - len(found["gpus"]), num_hidden=hidden)
