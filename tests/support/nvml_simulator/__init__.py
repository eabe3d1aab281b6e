"""A simulated NVML under the real Python binding: builds ``nvml.c`` and makes environments that load it.

The binding loads ``libnvidia-ml.so.1`` by name, so only a process *started* with the environment sees the simulated
GPUs; the test's own process never does. The keys of a scenario stand in ``nvml.c``. Which fields
it gives and which it refuses is compared with real GPUs (tests/project/test_raw_reads.py), NVLinks apart; its values are not.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.support.programs import why_not_working

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"


def build(folder: Path) -> Path:
    """Compile the simulator into ``folder`` and return that; skips the test where there is no C compiler."""
    compiler = next((name for name in ("gcc", "cc") if why_not_working(name, "--version") is None), None)
    if compiler is None:
        pytest.skip("no C compiler that works (gcc or cc): the NVML simulator cannot be built")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}"]
    subprocess.run([compiler, *flags, "-o", str(folder / LIBRARY), str(SOURCE)], check=True, timeout=60)
    return folder


def environment(folder: Path, scenario: str = "") -> dict[str, str]:
    """This process's environment, changed so that a child sees the GPUs of ``scenario``; empty: eight healthy H200.

    Each call has a scenario file of its own, named by ``FAKE_NVML``.
    """
    handle, path = tempfile.mkstemp(dir=folder, suffix=".scenario")
    os.close(handle)
    libraries = [str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    made = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries), "FAKE_NVML": path}
    made.pop("CUDA_VISIBLE_DEVICES", None)
    plant(made, scenario)
    return made


def plant(environment: dict[str, str], scenario: str) -> None:
    """Replace the scenario under a process that runs with ``environment``: its next NVML call sees the new one."""
    target = Path(environment["FAKE_NVML"])
    fresh = target.with_suffix(".new")
    fresh.write_text(scenario, encoding="utf-8")
    fresh.replace(target)
