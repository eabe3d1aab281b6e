"""``gpucluster watch`` as a command: simulated GPUs, none at all, a terminal, a log, and a demo that is killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import sys
import termios
import time
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.reporting.watched_run import WatchedRun
from tests.support import nvml_simulator
from tests.support.launching import DEADLINE_S, environment, hear_interrupts
from tests.support.processes import MARK, kill_marked
from tests.support.terminal import at_terminal
from tests.support.watched import write_run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

CLI = [sys.executable, "-m", "pytest_gpucluster.cli"]
WATCH = [*CLI, "watch"]
MOST_LINES = 5000
HOT = "2.throttle 64\n2.temp 91\nutil 97\nmem.used 64424509440\n"


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The simulated library."""
    return nvml_simulator.build(tmp_path_factory.mktemp("nvml"))


def gpus(simulator: Path, scenario: str = "") -> dict[str, str]:
    """Variables of a command that sees the GPUs of the scenario."""
    found = nvml_simulator.environment(simulator, scenario)
    return {**environment(measured=True), "COLUMNS": "80", **{name: found[name] for name in ("LD_LIBRARY_PATH", "FAKE_NVML")}}


def once(folder: Path, variables: dict[str, str], *words: str) -> Any:
    """One picture."""
    command = [*WATCH, "--once", "--interval-s", "0.2", *words]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


@contextlib.contextmanager
def log_of(folder: Path, variables: dict[str, str], *words: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """A watch that writes into a pipe, and what it writes."""
    command = [*WATCH, "--interval-s", "0.2", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=folder, env=variables, preexec_fn=hear_interrupts, **pipes) as process:  # noqa: PLW1509
        try:
            yield process, process.stdout
        finally:
            process.kill()


def wait_until(found: Callable[[], Any], what: str) -> Any:
    """What ``found`` returns first that is true."""
    until_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < until_s:
        if seen := found():
            return seen
        time.sleep(0.05)
    raise AssertionError(what)


def test_eight_gpus_of_a_simulated_driver(simulator: Path, tmp_path: Path) -> None:
    """One line each, the hot one with its reason; a lost one keeps its place."""
    ran = once(tmp_path, gpus(simulator, f"{HOT}5.err 15\n"))
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = ran.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if re.match(r"    \d ", line)]
    assert [row[4] for row in rows] == list("01234567")
    assert rows[2].split() == ["2", "97%", "115/700", "60.6/140", "91/42", "1980", "3201", "0.0/0.0", "0.0/0.0", "HW", "heat"]
    assert "GPU is lost" in rows[5]


def test_rates_and_a_reset_in_a_log(simulator: Path, tmp_path: Path) -> None:
    """Counters that grow are rates. One that shrinks is none. Ctrl-C ends with 0, and no control character was written."""
    variables = gpus(simulator, "nvlink.tx 1000000\n")
    with log_of(tmp_path, variables) as (process, shown):
        text = "".join(_until(shown, r"  0 .* 0\.0/0\.0"))
        text += "".join(_until(_counting(shown, variables, 90_000_000_000), r"  0 .* \d{3,}/0\.0"))
        text += "".join(_until(_counting(shown, variables, -1_000_000), r"  0 .* -/0\.0"))
        process.send_signal(signal.SIGINT)
        text += shown.read()
        assert process.wait(DEADLINE_S) == 0
    assert text.replace("\n", "").isprintable()


def _counting(shown: Iterable[str], variables: dict[str, str], step: int) -> Iterator[str]:
    """The lines; the counter goes on by ``step`` with each block, as one may show no reading of its own."""
    count = 10**13
    for line in shown:
        if line.startswith("    0 "):
            count += step
            nvml_simulator.plant(variables, f"nvlink.tx {count}\n")
        yield line


def _until(shown: Iterable[str], pattern: str) -> Iterator[str]:
    """The lines to the first one that fits."""
    for line in itertools.islice(shown, MOST_LINES):
        yield line
        if re.search(pattern, line):
            return
    raise AssertionError(f"no {pattern}")


@pytest.mark.parametrize(
    ("scenario", "said"),
    [("init 9\n", "Driver Not Loaded"), ("count 0\n", "NVML shows no GPU"), ("err.nvmlDeviceGetCount 999\n", "Unknown Error")],
)
def test_a_driver_without_gpus(simulator: Path, tmp_path: Path, scenario: str, said: str) -> None:
    """It says so, and shows the run."""
    write_run(tmp_path / "gpucluster-results", nodes=2)
    ran = once(tmp_path, gpus(simulator, scenario))
    assert ran.returncode == 0
    assert said in ran.stdout
    assert "50 of 50 checks" in ran.stdout


def test_a_driver_that_hangs_does_not_hang_the_picture(simulator: Path, tmp_path: Path) -> None:
    """A log goes on with what it can see, and ends at once."""
    write_run(tmp_path / "run", nodes=2)
    with log_of(tmp_path, gpus(simulator, "delay_ms.nvmlDeviceGetUtilizationRates 3600000\n"), "run") as (process, shown):
        assert "50 of 50 checks" in "".join(_until(shown, "waiting for the first reading"))
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM


def test_no_torch_is_loaded(tmp_path: Path) -> None:
    """And no pytest: the command shall cost a running acceptance nothing."""
    write_run(tmp_path / "run", nodes=1)
    code = (
        "import sys; from pytest_gpucluster.commands.main import main; "
        "code = main(['watch', '--once', '--interval-s', '0.1', 'run']); "
        "print(code, {'torch', 'pytest', 'transformers'} & {*sys.modules})"
    )
    variables = environment(measured=True)
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=variables, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "0 set()"


@pytest.mark.parametrize("how", ["q", "SIGINT", "SIGTERM"])
def test_the_terminal_is_as_it_was(simulator: Path, tmp_path: Path, how: str) -> None:
    """After a key and after signals: no alternate screen, the cursor shown, keys echoed again. F2 sends a Q, and is none."""
    variables = {**gpus(simulator, HOT), "LINES": "40", "TERM": "xterm-256color"}
    with at_terminal([*WATCH, "--interval-s", "0.2"], cwd=tmp_path, environment=variables) as terminal:
        before = termios.tcgetattr(terminal._own)
        terminal.wait_for("HW heat")
        if how == "q":
            os.write(terminal._own, b"\x1bOQ")
            terminal.wait_for("HW heat")
            terminal.wait_for("HW heat")
            os.write(terminal._own, b"q")
        else:
            terminal._process.send_signal(getattr(signal, how))
        assert terminal.end() == (128 + signal.SIGTERM if how == "SIGTERM" else 0)
        after = termios.tcgetattr(terminal._own)
    assert after == before
    assert "\x1b[?1049h" in terminal.seen
    assert terminal.seen.rindex("\x1b[?1049l") > terminal.seen.rindex("\x1b[?1049h")
    assert terminal.seen.rindex("\x1b[?25h") > terminal.seen.rindex("\x1b[?25l")


def test_the_reader_of_a_log_may_go_away(simulator: Path, tmp_path: Path) -> None:
    """``gpucluster watch | head``."""
    with log_of(tmp_path, gpus(simulator)) as (process, shown):
        shown.readline()
        shown.close()
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("words", [["--interval-s", "0"], ["--interval-s", "nan"]])
def test_an_interval_that_is_none(tmp_path: Path, words: list[str]) -> None:
    """Wrong usage."""
    ran = once(tmp_path, environment(measured=True), *words)
    assert ran.returncode == 2
    assert "is not a time" in ran.stderr


def test_a_demo_that_is_killed(tmp_path: Path) -> None:
    """Its journal is followed while it grows; killed, it has no verdict and nobody who runs it."""
    mark = "watch-demo-" + tmp_path.name
    command = [*CLI, "demo", "--fleet", "2x8", "--bad", "node1-gpu3:slow", "--", "-q"]
    variables = {**environment(measured=True), MARK: mark}
    process = subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = WatchedRun(tmp_path / "gpucluster-demo")
    try:
        early = wait_until(lambda: (seen := run.picture()).counts and seen, "no outcome")
        later = wait_until(
            lambda: sum((seen := run.picture()).counts.values()) > sum(early.counts.values()) and seen, "no second"
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        kill_marked(mark)
        process.kill()
        process.wait()
    ended = run.picture()
    assert 0 < sum(later.counts.values()) <= sum(ended.counts.values()) < ended.expected
    assert (ended.unread, ended.verdict_line, ended.holder, len(ended.nodes)) == (0, None, None, 2)
    assert ended.facts["simulated"]
