"""GPUs of this machine by NVML, read in a child process: a driver that hangs must not hang the run.

``python -m pytest_gpucluster.inventory.detect`` is that child: it prints one JSON object and exits 0 whatever the state of
the GPUs is.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.pci_tree import read_nvidia_gpus
from pytest_gpucluster.inventory.program import ProgramError, run
from pytest_gpucluster.inventory.reading import NotAvailable, apply, or_none, split
from pytest_gpucluster.inventory.sysfs import PROC, SYS, list_names

DEADLINE_S = 20.0
DEV = Path("/dev")
NO_REHEARSAL = (
    "This is a broken GPU machine, not one without GPUs; "
    "to rehearse on the CPU all the same, say --gpucluster-profile rehearsal"
)
IN_A_CONTAINER = (
    "In a container, give it GPUs: docker run --gpus all, in a Pod a limit of nvidia.com/gpu; and NVIDIA_DRIVER_CAPABILITIES "
    "has to name utility. "
)
_NODE = re.compile(r"nvidia\d+")


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


def survey_gpus(within_s: float | None = None) -> dict[str, Any]:
    """What :func:`survey` finds, read in a child process under a deadline; :data:`DEADLINE_S` where none is given.

    Raises:
        ConfigurationError: NVML did not answer in time, or the child died.
    """
    deadline_s = DEADLINE_S if within_s is None else within_s
    try:
        ended = run(sys.executable, ["-m", "pytest_gpucluster.inventory.detect"], within_s=deadline_s)
    except ProgramError:
        raise ConfigurationError(
            f"NVML did not answer within {deadline_s:g} s: the driver hangs. Look at the kernel log (Xid), then reboot the node"
        ) from None
    try:
        return dict(json.loads(ended.printed if ended.exit_code == 0 else "", object_hook=as_written))
    except ValueError:
        tail = ended.complained.strip().splitlines()[-1:] or [f"exit code {ended.exit_code}"]
        raise ConfigurationError(f"NVML could not be read: {tail[0]}") from None


def as_written(read: dict[str, Any]) -> Any:
    """What the child process wrote as ``{"why": ...}`` was a reading that is not available."""
    return NotAvailable(**read) if read.keys() == {"why"} else read


def detect_gpus() -> Detected:
    """Read NVML. A library that fails, or is missing where the kernel shows GPUs, is a broken machine, not one without GPUs.

    Raises:
        ConfigurationError: NVML does not work beside GPUs, or did not answer in time.
    """
    found = survey_gpus()
    if found["status"] == "no_library":
        signs = signs_of_gpus()
        if signs is None:
            return Detected(names=())
        raise ConfigurationError(f"{signs}, and NVML is missing: {found['error']}. {IN_A_CONTAINER}{NO_REHEARSAL}")
    if found["status"] != "ok" and not found["gpus"]:
        raise ConfigurationError(f"NVML is installed but does not work: {found['error']}. {NO_REHEARSAL}")
    shown = [gpu["name"] for gpu in found["gpus"] if gpu["cuda_index"] is not None]
    hidden = len(found["gpus"]) - len(shown)
    return Detected(names=tuple(shown), num_lost=found["count"] - len(found["gpus"]), num_hidden=hidden)


def signs_of_gpus(*, sys: Path = SYS, proc: Path = PROC, dev: Path = DEV) -> str | None:
    """Where the kernel shows NVIDIA GPUs, in words; None where it shows none. In a container they may be the host's."""
    shown = {
        "on the PCI bus": or_none(read_nvidia_gpus(root=sys)),
        "in /proc/driver/nvidia": or_none(list_names(proc / "driver" / "nvidia" / "gpus")),
        "in /dev": [name for name in or_none(list_names(dev)) or () if _NODE.fullmatch(name)],
    }
    signs = [f"{len(gpus)} {where}" for where, gpus in shown.items() if gpus]
    return f"the kernel shows NVIDIA GPUs ({', '.join(signs)})" if signs else None


def survey() -> dict[str, Any]:
    """What :func:`main` prints.

    ``status`` is ``ok``, ``no_library`` (no driver here) or ``error``; ``error`` NVML's text, with every GPU it
    concerns, or None; ``gpus`` the readable GPUs; ``count`` how many NVML knows, unreadable ones included;
    ``driver_cuda`` the newest CUDA that the driver runs.
    """
    from pytest_gpucluster.inventory import gpu_index, nvml, nvml_calls  # noqa: PLC0415 -- load pynvml, for the child alone

    gpus: dict[int, nvml.GpuState] = {}
    errors: list[str] = []
    count = 0
    cuda: str | NotAvailable = NotAvailable("NVML did not start")
    status = "ok"
    try:
        with nvml_calls.session():
            cuda = apply(_cuda, nvml_calls.optional("nvmlSystemGetCudaDriverVersion_v2"))
            count = gpu_index.gpu_count()
            gpus, refused = split({index: nvml_calls.attempt(nvml.read_gpu, index) for index in range(count)})
            errors = [one.why for one in refused.values()]
    except nvml_calls.NvmlLibraryNotFoundError as error:
        status, errors = "no_library", [str(error)]
    except nvml_calls.NvmlError as error:
        gpus, errors = {}, [str(error)]
    return {
        "status": "error" if errors and status == "ok" else status,
        "error": "; ".join(errors) or None,
        "gpus": [dataclasses.asdict(gpu) for gpu in gpus.values()],
        "count": count,
        "driver_cuda": dataclasses.asdict(cuda) if isinstance(cuda, NotAvailable) else cuda,
    }


def _cuda(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def main() -> int:
    """Print :func:`survey` as one line of JSON; always 0, because a broken GPU is an answer."""
    sys.stdout.write(json.dumps(survey()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
