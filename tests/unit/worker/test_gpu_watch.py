"""The watch of a worker's GPU over the simulated NVML, in processes of their own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import REPOSITORY
from tests.support.nvml_simulator import build, environment

if TYPE_CHECKING:
    from pathlib import Path

WATCHING = """
import json, os, sys, time
from pathlib import Path
from pytest_gpucluster.worker import gpu_watch
from tests.support.nvml_simulator import plant

folder = Path(sys.argv[1])
STRANGER = 4_194_999
seen = []

def wait_for(condition):
    deadline_s = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)

def come(pid=STRANGER):
    (folder / f"3.{pid}").touch()

def leave(pid=STRANGER):
    (folder / f"3.{pid}").unlink()

def take(watch):
    with watch.creating_context("GPU-00000003-0000-0000-0000-000000000003"):
        come(os.getpid())

watch = gpu_watch.GpuWatch(lambda process: seen.append([process.pid, process.name, process.memory_gib, process.when]))
started_s = time.monotonic()
exec(sys.argv[2])
answer = json.dumps({"seen": seen, "took_s": time.monotonic() - started_s})
Path(sys.argv[3]).write_text(answer)  # not printed: the watch prints from a thread of its own
sys.stdout.flush()
os._exit(0)
"""
STRANGER = [4_194_999, "python3", 612 / 1024]


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the simulated library."""
    return build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def watched(simulator: Path, tmp_path: Path) -> Any:
    """Runs code with a watch; returns what was reported, how long it took, and what was printed before."""

    def run(code: str, scenario: str = "") -> tuple[list[Any], float, list[str]]:
        scenario = f"processes {tmp_path}\nprogram.4194999 /usr/bin/python3\n{scenario}"
        written = tmp_path.with_suffix(".answer")
        command = [sys.executable, "-c", WATCHING, str(tmp_path), code, str(written)]
        variables = environment(simulator, scenario)
        done = subprocess.run(
            command, env=variables, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=120, check=True
        )
        answer = json.loads(written.read_text(encoding="utf-8"))
        return answer["seen"], answer["took_s"], done.stdout.splitlines()

    return run


MEASURE = "take(watch)\nwith watch.measuring('7'):\n    {inside}\n"


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        (MEASURE.format(inside="time.sleep(1.2)"), []),
        (MEASURE.format(inside="come()"), [[*STRANGER, "after"]]),
        (MEASURE.format(inside="come(); wait_for(lambda: seen); leave()"), [[*STRANGER, "during"]]),
        ("take(watch)\ncome()\nwith watch.measuring('7'):\n    time.sleep(1.2)", [[*STRANGER, "before"]]),
        ("take(watch)\ncome()\nwith watch.measuring('7'):\n    leave()", [[*STRANGER, "before"]]),
        ("come()\ntake(watch)\nleave()\nwith watch.measuring('7'):\n    pass", []),
        (MEASURE.format(inside="pass") + "come()\ntime.sleep(1.2)\nleave()\nwith watch.measuring('7'):\n    pass", []),
        (
            MEASURE.format(inside="come()") + "with watch.measuring('7'):\n    pass",
            [[*STRANGER, "after"], [*STRANGER, "before"]],
        ),
    ],
    ids=["idle", "comes", "comes-and-goes", "there-before", "leaves-meanwhile", "left-before", "between-two", "stays-for-two"],
)
def test_reports_of_a_measurement(watched: Any, code: str, seen: list[Any]) -> None:
    """Each foreign process once in each measurement, with the moment; none that was there between two measurements only."""
    assert watched(code)[0] == seen


def test_process_that_is_just_ending_is_waited_for(watched: Any) -> None:
    """The worker before this one, for example."""
    code = """
take(watch)
come()
really_pause = time.sleep
def pause(seconds):
    really_pause(seconds)
    (folder / f"3.{STRANGER}").unlink(missing_ok=True)
time.sleep = pause
with watch.measuring('7'):
    pass
"""
    assert watched(code)[0] == []


def test_measurement_that_raises_is_reported_on(watched: Any) -> None:
    """What it raised is raised."""
    code = MEASURE.format(inside="come(); raise ArithmeticError")
    code = f"try:\n    {code.strip().replace(chr(10), chr(10) + '    ')}\nexcept ArithmeticError:\n    pass"
    assert watched(code)[0] == [[*STRANGER, "after"]]


REFUSED = "err.nvmlDeviceGetComputeRunningProcesses"


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        (f"{REFUSED} 3", "NVML does not give the processes on it"),
        (f"{REFUSED} 4", "NVML does not give the processes on it"),
        (f"{REFUSED} 15", "GPU is lost"),
        ("init 9", "Driver Not Loaded"),
        ("count 2", "NVML shows no GPU GPU-00000003"),
    ],
    ids=["not-supported", "no-permission", "lost", "no-driver", "no-such-gpu"],
)
def test_nvml_that_refuses_is_said_once(watched: Any, scenario: str, why: str) -> None:
    """The measurements go on without it, and do not wait for it."""
    code = MEASURE.format(inside="come()") + "with watch.measuring('7'):\n    pass"
    seen, took_s, printed = watched(code, scenario)
    assert seen == []
    (line,) = printed
    assert line.startswith("gpucluster: who comes to this GPU is not known: ")
    assert why in line
    assert took_s < 60


def test_nvml_that_hangs_does_not_hang_the_measurement(watched: Any) -> None:
    """It is waited for once."""
    hung = "delay_ms.nvmlDeviceGetComputeRunningProcesses 600000"
    code = "gpu_watch.ANSWER_S = 0.5\n" + MEASURE.format(inside="come()") + "with watch.measuring('7'):\n    pass"
    seen, took_s, printed = watched(code, hung)
    assert (seen, len(printed)) == ([], 1)
    assert "NVML has not answered for 0.5 s" in printed[0]
    assert took_s < 60
