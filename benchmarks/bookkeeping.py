"""Cost of the bookkeeping: the whole suite on simulated fleets of growing size, beside as many plain tests.

    python benchmarks/bookkeeping.py [--fleet 2x8 16x8 128x8] [--repeats 10] [--bad PART:FAULT ...] [--out DIR]
                                     [--checkout DIR] [--before results.json]

A simulated fleet answers in place of GPUs, so nearly all of a run's time is pytest's and the plugin's own. As many plain
tests, which only read a fixture, are run by pytest without the plugin; the difference is the plugin's cost. CPU time is that
of pytest's process alone and of all processes of a run, the simulated agents included; memory is that of the largest one.

On a busy machine the clock says little: CPU seconds are what compares two commits. ``--checkout`` measures another checkout,
``--before`` draws what was measured there beside it. Since waited_s is stated, so are the seconds in which all ranks waited.

``further`` is what a test costs beyond a plain one where a fleet has more of them than the one before: without start and end.

Prints commit, cores, repeats and a table; with ``--out`` also writes results.json and plot.svg there.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
SHAPES = ("2x8", "16x8", "64x8", "128x8", "512x8")
PLAIN = """
import pytest

@pytest.fixture
def place(request):
    return request.param

@pytest.mark.parametrize("place", range({number}), indirect=True)
def test_plain(place):
    assert place >= 0
"""
AIM_S, AIM_MIB = 90.0, 1229.0
"""Of the whole suite at 128 x 8, on 2 cores."""


CLOCK = """
import pathlib
import time

def pytest_unconfigure():
    pathlib.Path("own_cpu_s.txt").write_text(repr(time.process_time()), encoding="ascii")
"""
"""A pytest plugin that writes the CPU seconds of pytest's own process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of pytest: seconds by the clock, CPU seconds of pytest's process and of all, MiB of the largest one."""

    wall_s: float
    own_cpu_s: float
    cpu_s: float
    peak_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The runs of one fleet, and of as many plain tests without the plugin."""

    fleet: str
    places: int
    testcases: int
    runs: tuple[Run, ...]
    plain: tuple[Run, ...]
    waited_s: tuple[float, ...]
    """Of each run: for how long all ranks waited for the controller; none where the checkout does not say it."""

    @property
    def ms_a_test(self) -> float:
        """The median CPU time of a test in pytest's process beyond that of a plain test, in milliseconds."""
        ours_s, plain_s = self.own_s
        return 1000 * (ours_s - plain_s) / self.testcases

    @property
    def own_s(self) -> tuple[float, float]:
        """The median CPU seconds of pytest's process, with the plugin and of as many plain tests."""
        ours_s, plain_s = (statistics.median(run.own_cpu_s for run in runs) for runs in (self.runs, self.plain))
        return ours_s, plain_s

    def further(self, smaller: Cost) -> float:
        """What each further test of this fleet costs beyond a plain one, as a multiple of that: without what any run costs."""
        ours_s, plain_s = (mine - its for mine, its in zip(self.own_s, smaller.own_s, strict=True))
        return (ours_s - plain_s) / plain_s


def pytest_run(folder: Path, words: Sequence[str], checkout: Path) -> Run:
    """Run pytest in ``folder``, in a process of its own, with the plugin of this checkout.

    Raises:
        RuntimeError: it came to no end of its own: neither all passed nor some failed.
    """
    environment = {**os.environ, "PYTHONPATH": f"{checkout}{os.pathsep}{folder}"}
    (folder / "own_clock.py").write_text(CLOCK, encoding="utf-8")
    with (folder / "output.txt").open("wb") as output:
        began_s = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "own_clock", f"--rootdir={folder}", *words]
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=environment)  # noqa: S603 -- ours
        _, status, used = os.wait4(process.pid, 0)
        wall_s = time.monotonic() - began_s
    code = process.returncode = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        raise RuntimeError(f"pytest ended with {code}:\n{(folder / 'output.txt').read_text(errors='replace')[-2000:]}")
    own_cpu_s = float((folder / "own_cpu_s.txt").read_text(encoding="ascii"))
    return Run(wall_s=wall_s, own_cpu_s=own_cpu_s, cpu_s=used.ru_utime + used.ru_stime, peak_mib=used.ru_maxrss / 1024)


def measure(fleet: str, bad: Sequence[str], repeats: int, checkout: Path = ROOT) -> Cost:
    """The whole suite on one fleet, and plain tests, in turns."""
    nodes, _, each = fleet.partition("x")
    runs, plain, waited_s, testcases = [], [], [], 0
    for number in range(repeats):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            planted = [f"--fleet-bad={fault}" for fault in bad]
            ours = ["-p", "pytest_gpucluster.plugin.fleet", f"--fleet={fleet}", f"--fleet-seed={number}", *planted]
            suite = ["--gpucluster-profile=h200-sxm", "--gpucluster-results=res", "--pyargs", "tests_acceptance"]
            runs.append(pytest_run(folder, [*ours, *suite, "--junitxml=junit.xml"], checkout))
            results = json.loads((folder / "res" / "results.json").read_text(encoding="utf-8"))
            waited_s += [results["timings"]["waited_s"]] if "waited_s" in results["timings"] else []
            left_out = results.get("criteria_omitted", {})
            rows = [row for row in results["criteria"] if row["outcome"] != "not_selected"]
            testcases = len(rows) + sum(number for outcome, number in left_out.items() if outcome != "not_selected")
            (folder / "test_plain.py").write_text(PLAIN.format(number=testcases), encoding="utf-8")
            plain.append(pytest_run(folder, ["-p", "no:gpucluster", "test_plain.py", "-q", "--junitxml=plain.xml"], checkout))
    places = int(nodes) * int(each)
    of_runs = {"runs": tuple(runs), "plain": tuple(plain), "waited_s": tuple(waited_s)}
    return Cost(fleet=fleet, places=places, testcases=testcases, **of_runs)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def commit_of(checkout: Path) -> str | None:
    """The commit that lies there; None where it is no checkout of git."""
    command = ["git", "rev-parse", "HEAD"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False).stdout.strip() or None  # noqa: S603


def document(costs: Sequence[Cost], loads: Sequence[Sequence[float]], checkout: Path) -> dict[str, Any]:
    """The results as plain data."""
    return {
        "commit": commit_of(checkout),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "load_average_before": loads[0],
        "load_average_after": loads[1],
        "fleets": [
            {
                **asdict(cost),
                "ms_a_test": cost.ms_a_test,
                "further": cost.further(before) if before is not None else None,
                "wall_s": spread([run.wall_s for run in cost.runs]),
                "own_cpu_s": spread([run.own_cpu_s for run in cost.runs]),
                "cpu_s": spread([run.cpu_s for run in cost.runs]),
                "peak_mib": spread([run.peak_mib for run in cost.runs]),
            }
            for before, cost in zip((None, *costs), costs, strict=False)
        ],
    }


# The plot: an SVG of 720 x 330 with two panels, both axes logarithmic; a panel is 260 x 240, its origin at (left, 290).


def draw(costs: Sequence[Cost], before: Mapping[str, Any] | None = None) -> str:
    """CPU seconds of pytest's process and MiB by expected places: the median with its number, and a bar from lowest to highest.

    ``before``: the results of another commit, in grey.
    """
    earlier = (before or {}).get("fleets", [])
    panels = tuple(
        Panel(
            title=title,
            ends=ends,
            aim=aim,
            samples={cost.places: [getattr(run, what) for run in cost.runs] for cost in costs},
            before={fleet["places"]: fleet[what]["median"] for fleet in earlier},
        )
        for title, what, ends, aim in (
            ("CPU seconds of pytest's process", "own_cpu_s", (5.0, 1000.0), AIM_S),
            ("MiB of the largest process", "peak_mib", (100.0, 10_000.0), AIM_MIB),
        )
    )
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 330" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="720" height="330" fill="white"/>')
    for left, one in zip((60, 420), panels, strict=True):
        parts += drawn(one, left)
    return "\n".join([*parts, "</svg>"]) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """What one panel shows. ``ends``: of its y-axis. ``samples``: the values of all runs, ``before`` medians, by places."""

    title: str
    ends: tuple[float, float]
    aim: float
    samples: Mapping[int, Sequence[float]]
    before: Mapping[int, float]


def drawn(panel: Panel, left: float) -> list[str]:
    """The elements of one panel."""
    aim, samples = panel.aim, panel.samples

    def x(places: int) -> float:
        return left + 15 + 230 * math.log(places / 16) / math.log(4096 / 16)

    def y(value: float) -> float:
        return 290 - 240 * math.log(value / panel.ends[0]) / math.log(panel.ends[1] / panel.ends[0])

    parts = [f'<text x="{left}" y="30">{panel.title}</text>']
    if panel.before:
        points = " ".join(f"{x(places):.1f},{y(value):.1f}" for places, value in panel.before.items())
        parts.append(f'<polyline points="{points}" fill="none" stroke="#999" stroke-width="2"/>')
        places, value = max(panel.before.items())
        parts.append(f'<text x="{x(places) + 5:.1f}" y="{y(value) - 5:.1f}" fill="#666">before {value:.4g}</text>')
    parts.append(f'<path d="M{left} 50V290H{left + 260}" fill="none" stroke="black"/>')
    parts.append(f'<path d="M{left} {y(aim):.1f}H{left + 260}" stroke="#d62728" stroke-dasharray="4 3"/>')
    parts.append(f'<text x="{left + 6}" y="{y(aim) - 5:.1f}" fill="#d62728">aim {aim:g} at 1024</text>')
    middles = {places: statistics.median(values) for places, values in samples.items()}
    points = " ".join(f"{x(places):.1f},{y(value):.1f}" for places, value in middles.items())
    parts.append(f'<polyline points="{points}" fill="none" stroke="#1f77b4" stroke-width="2"/>')
    for places, values in samples.items():
        at, top, bottom = x(places), y(max(values)), y(min(values))
        parts.append(f'<path d="M{at:.1f} {top:.1f}V{bottom:.1f}" stroke="#1f77b4" stroke-width="6" opacity="0.4"/>')
        parts.append(f'<text x="{at + 5:.1f}" y="{y(middles[places]) + 16:.1f}">{middles[places]:.4g}</text>')
        parts.append(f'<text x="{at:.1f}" y="306" text-anchor="middle">{places}</text>')
    return [*parts, f'<text x="{left + 130}" y="324" text-anchor="middle">expected places</text>']


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", nargs="+", default=list(SHAPES), metavar="NODESxGPUS")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--bad", action="append", default=[], metavar="PART:FAULT", help="a planted fault, on every fleet")
    parser.add_argument("--out", type=Path, help="folder for results.json and plot.svg")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="the checkout that is measured; this one by default")
    parser.add_argument("--before", type=Path, help="results.json of another commit, drawn in grey")
    chosen = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before, costs = os.getloadavg(), []
    cores = len(os.sched_getaffinity(0))
    print(f"commit {commit_of(chosen.checkout)}, {cores} cores, load {before[0]:.1f}, {chosen.repeats} repeats; medians")
    print("places  testcases  wall, s  own CPU, s  CPU, s  plain CPU, s  ms a test  further  peak, MiB  waited, s")
    for fleet in chosen.fleet:
        costs.append(cost := measure(fleet, chosen.bad, chosen.repeats, chosen.checkout))
        medians = {what: statistics.median(getattr(run, what) for run in cost.runs) for what in asdict(cost.runs[0])}
        wall_s, own_s, cpu_s, peak = medians.values()
        plain_s = cost.own_s[1]
        further = f"{cost.further(costs[-2]):7.2f}" if costs[1:] else f"{'-':>7}"
        measured = f"{wall_s:7.1f}  {own_s:10.1f}  {cpu_s:6.1f}  {plain_s:12.1f}  {cost.ms_a_test:9.2f}  {further}  {peak:9.0f}"
        waited = f"{statistics.median(cost.waited_s):9.1f}" if cost.waited_s else f"{'-':>9}"
        print(f"{cost.places:6}  {cost.testcases:9}  {measured}  {waited}", flush=True)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        content = json.dumps(document(costs, (before, os.getloadavg()), chosen.checkout), indent=1) + "\n"
        (chosen.out / "results.json").write_text(content, encoding="utf-8")
        earlier = json.loads(chosen.before.read_text(encoding="utf-8")) if chosen.before is not None else None
        (chosen.out / "plot.svg").write_text(draw(costs, earlier), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
