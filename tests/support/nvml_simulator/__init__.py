"""A simulated NVML under the real Python binding: builds ``nvml.c`` and makes environments that load it.

The binding loads ``libnvidia-ml.so.1`` by name, so only a process *started* with the environment sees the simulated
GPUs; the test's own process never does. The keys of a scenario stand in ``nvml.c``. Which fields
it gives and which it refuses is compared with real GPUs (tests/project/test_raw_reads.py), NVLinks apart; its values are not.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.inventory.nvlinks import LinkCounters, NvLink
from pytest_gpucluster.inventory.nvml import GpuCounters, GpuRepair, GpuState
from pytest_gpucluster.inventory.nvml_calls import Nvml, NvmlField
from pytest_gpucluster.inventory.reading import rows
from tests.support import REPOSITORY
from tests.support.programs import why_not_working

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SOURCE = Path(__file__).with_name("nvml.c")
LIBRARY = "libnvidia-ml.so.1"
ANSWERING = """
import json, os, sys, traceback
first = dict(os.environ)
for line in sys.stdin:
    code, variables = json.loads(line)
    os.environ.clear()
    os.environ.update({**first, **variables})
    names = {}
    try:
        exec(code, names)
        printed = [names["answer"], None]
    except Exception:
        printed = [None, traceback.format_exc()]
    print(json.dumps(printed), flush=True)
"""


def build(folder: Path) -> Path:
    """Put the simulator into ``folder`` and return that; skips the test where there is no C compiler."""
    shutil.copy(_compiled(), folder / LIBRARY)
    return folder


@functools.cache
def _compiled() -> str:
    """The library, compiled once a process."""
    compiler = next((name for name in ("gcc", "cc") if why_not_working(name, "--version") is None), None)
    if compiler is None:
        pytest.skip("no C compiler that works (gcc or cc): the NVML simulator cannot be built")
    folder = Path(_folder_of_this_process().name)
    answers = healthy_answers()
    healthy = "".join(f'{{"{name}", "{answer}"}},\n' for name, answer in answers.items())
    (folder / "healthy.h").write_text(healthy, encoding="utf-8")
    (folder / "getters.h").write_text(getters(answers, SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", f"-I{folder}"]
    subprocess.run([compiler, *flags, "-o", str(folder / LIBRARY), str(SOURCE)], check=True, timeout=60)
    return str(folder / LIBRARY)


def healthy_answers() -> dict[str, int | str]:
    """What the table of readings says of a healthy GPU, where that is one number or text, by NVML's call or numbered field."""
    found: dict[str, int | str] = {}
    for kind in (GpuState, GpuRepair, NvLink, GpuCounters, LinkCounters):
        for row in rows(kind).values():
            answer = row.healthy[0] if isinstance(row.healthy, tuple) else row.healthy
            if isinstance(answer, (int, str)) and isinstance(row.source, (Nvml, NvmlField)):
                name = f"field.{row.source.number}" if isinstance(row.source, NvmlField) else row.source.name
                found[name] = answer
    return found


def getters(answers: Mapping[str, int | str], source: str) -> str:
    """A function in C for each call that gives one number and that the source does not have."""
    missing = [
        name for name, answer in answers.items() if name.startswith("nvml") and isinstance(answer, int) and name not in source
    ]
    return "".join(f'GETTER({name}, unsigned, "{name}")\n' for name in missing)


@functools.cache
def _folder_of_this_process() -> tempfile.TemporaryDirectory[str]:
    """Removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="gpucluster-nvml-")


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
    fresh.write_text(scenario, encoding="utf-8", errors="surrogateescape")
    fresh.replace(target)


class Readers:
    """A process under the simulator that reads one scenario after the other."""

    def __init__(self, process: subprocess.Popen[str], variables: dict[str, str]) -> None:
        self._process = process
        self._variables = variables

    def answer(self, code: str, scenario: str = "", **variables: str) -> Any:
        """What ``code`` leaves in ``answer`` over the GPUs of ``scenario``, with these variables of the environment."""
        plant(self._variables, scenario)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([code, variables]), file=self._process.stdin, flush=True)
        answer, raised = json.loads(self._process.stdout.readline())
        assert raised is None, raised
        return answer

    def survey(self, scenario: str = "", **variables: str) -> dict[str, Any]:
        """The inventory's view of the GPUs of ``scenario``."""
        found = self.answer("from pytest_gpucluster.inventory.detect import survey; answer = survey()", scenario, **variables)
        assert isinstance(found, dict)
        return found


@contextlib.contextmanager
def readers(folder: Path) -> Iterator[Readers]:
    """Start the process; it ends with the block."""
    variables = environment(folder)
    command = [sys.executable, "-c", ANSWERING]
    with subprocess.Popen(
        command, env=variables, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Readers(process, variables)
        assert process.stdin is not None
        process.stdin.close()
