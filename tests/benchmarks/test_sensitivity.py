"""The study of how slow a GPU has to be: its analysis, what it writes, what it refuses. The GPUs' side runs on GPUs only."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree as ET

import pytest

from pytest_gpucluster.judging.siblings import Shortfall
from tests.support.scripts import BENCHMARKS, benchmark_module
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SCRIPT = BENCHMARKS / "sensitivity.py"
HEALTHY = {
    "bf16_tflops": [790.0, 792.0, 784.0, 788.0],
    "fp32_tflops": [51.0, 51.1, 51.1, 51.0],
    "hbm_bandwidth": [4.373, 4.374, 4.373, 4.372],
    "bf16_sustained": [664.0, 662.0, 665.0, 660.0],
    "bf16_at_clock": [0.915, 0.912, 0.911, 0.916],
    "bf16_per_cycle": [0.84, 0.841, 0.839, 0.84],
}
SLOWDOWNS = (5.0, 10.0)
REPEATS = 8


@pytest.fixture(scope="module")
def modules() -> Iterator[SimpleNamespace]:
    """The script and its two halves, as modules."""
    names = ("sensitivity", "sensitivity_analysis", "sensitivity_gpus")
    with contextlib.ExitStack() as stack:
        yield SimpleNamespace(**{name.rpartition("_")[2]: stack.enter_context(benchmark_module(name)) for name in names})


@pytest.fixture(scope="module")
def criteria() -> Any:
    """The limits that judge."""
    file = packaged()
    return file.criteria(file.profiles["h200-sxm"])


def made(modules: SimpleNamespace, *, changed: dict[str, dict[int, float]] | None = None) -> list[Any]:
    """Rounds in which the victim's HBM alone is slowed; ``changed``: shares by quantity and GPU that apply in every round."""
    rounds = []
    for victim, slowdown in modules.sensitivity.plan(REPEATS, SLOWDOWNS, 4):
        rates = {name: list(values) for name, values in HEALTHY.items()}
        for name, shares in (changed or {}).items():
            for gpu, share in shares.items():
                rates[name][gpu] *= share
        if victim is not None:
            rates["hbm_bandwidth"][victim] *= 1 - slowdown / 100
        rounds.append(
            modules.analysis.Round(
                victim=victim, slowdown_percent=slowdown, rates=rates, taken_ratio={"hbm": slowdown / 99} if slowdown else {}
            )
        )
    return rounds


def row_of(content: dict[str, Any], criterion: str) -> dict[str, Any]:
    """What is concluded about one criterion."""
    return next(dict(row) for row in content["detection"] if row["criterion"] == criterion)


def found(row: dict[str, Any], slowdown: str) -> tuple[int, int, int]:
    """Rounds, rounds in which the victim was called, and it alone."""
    at = row["by_slowdown_percent"][slowdown]
    return at["rounds"], at["found"], at["alone"]


def test_rounds_take_turns(modules: SimpleNamespace) -> None:
    """As many clean ones as of each slowdown, spread over the whole time, every GPU a victim as often."""
    rounds = list(modules.sensitivity.plan(8, (3, 5, 10, 30), 4))
    assert [slowdown for _, slowdown in rounds] == [0, 3, 5, 10, 30] * 8
    for slowdown in (3, 5, 10, 30):
        assert sorted(victim for victim, one in rounds if one == slowdown) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {victim for victim, slowdown in rounds if not slowdown} == {None}


def test_the_victim_is_found_by_the_comparison_and_not_by_the_floor(modules: SimpleNamespace, criteria: Any) -> None:
    """5 % of HBM bandwidth: above the floor of 4.1 TB/s at every GPU, and below its siblings in every round, alone."""
    content = modules.analysis.analyse(made(modules), criteria)
    assert found(row_of(content, "straggler[hbm_bandwidth]"), "5") == (REPEATS, REPEATS, REPEATS)
    assert found(row_of(content, "hbm_bandwidth"), "5") == (REPEATS, 0, 0)
    assert found(row_of(content, "hbm_bandwidth"), "10") == (REPEATS, REPEATS, REPEATS)
    assert found(row_of(content, "straggler[bf16_tflops]"), "10") == (REPEATS, 0, 0)
    assert found(row_of(content, "any criterion"), "5") == (REPEATS, REPEATS, REPEATS)
    assert [aim["reached"] for aim in content["aims"]] == [True, True]


def test_clean_verdicts_are_counted_by_criterion_and_gpu(modules: SimpleNamespace, criteria: Any) -> None:
    """4 GPUs in every clean round, 3 beside a victim; all criteria together give ten verdicts on each."""
    content = modules.analysis.analyse(made(modules), criteria)
    one, together = row_of(content, "straggler[bf16_tflops]"), row_of(content, "any criterion")
    assert (one["clean_verdicts"], one["verdicts_beside_a_slow_one"]) == (4 * REPEATS, 3 * 2 * REPEATS)
    assert (together["clean_verdicts"], together["verdicts_beside_a_slow_one"]) == (10 * 4 * REPEATS, 10 * 3 * 2 * REPEATS)
    assert together["false_alarms"] == together["false_alarms_beside"] == 0


def test_false_alarms_are_counted(modules: SimpleNamespace, criteria: Any) -> None:
    """GPU 3 lies 9 % below its siblings in a burst, in every round: an alarm each but as the victim; the aim is missed."""
    rounds = made(modules, changed={"bf16_tflops": {3: 0.91}})
    row = row_of(modules.analysis.analyse(rounds, criteria), "straggler[bf16_tflops]")
    as_victim = sum(one.victim == 3 for one in rounds)
    assert row["false_alarms"] == REPEATS
    assert row["false_alarms_beside"] == 2 * REPEATS - as_victim
    content = modules.analysis.analyse(rounds, criteria)
    assert [aim["reached"] for aim in content["aims"]] == [True, False]
    named = found(row_of(content, "any criterion"), "5")
    assert named == (REPEATS, REPEATS, sum(one.victim == 3 for one in rounds if one.slowdown_percent == 5))


def test_broken_detection_is_seen(modules: SimpleNamespace, criteria: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study asks the package's own function: where that finds nothing, nothing is found, and the aim is missed."""
    quiet = Shortfall(percent=0.0, score=0.0, siblings=3, median=1.0, mad=0.0, explained_percent=1.0)
    monkeypatch.setattr(modules.analysis, "shortfalls", lambda values, **_: dict.fromkeys(values, quiet))
    content = modules.analysis.analyse(made(modules), criteria)
    assert found(row_of(content, "any criterion"), "5") == (REPEATS, 0, 0)
    assert not content["aims"][0]["reached"]


def test_what_was_really_lost_and_taken(modules: SimpleNamespace, criteria: Any) -> None:
    """Against the victim's own clean rounds, beside the share that was counted on the GPU."""
    content = modules.analysis.analyse(made(modules, changed={"hbm_bandwidth": {2: 0.98}}), criteria)
    lost = {row["quantity"]: row["lost_percent"] for row in content["losses"]}
    assert lost["hbm_bandwidth"] == pytest.approx({"5": 5, "10": 10})
    assert lost["bf16_tflops"] == pytest.approx({"5": 0, "10": 0})
    assert content["taken_percent"] == {key: {"hbm": pytest.approx(100 * float(key) / 99)} for key in ("5", "10")}


def test_a_gpu_without_a_clock_is_left_out(modules: SimpleNamespace, criteria: Any) -> None:
    """None is no rate: its siblings are compared all the same, and nothing that is written is NaN."""
    rounds = made(modules)
    for one in rounds:
        one.rates["bf16_at_clock"][:] = [None] * 4
        one.rates["bf16_sustained"][0] = None
    content = modules.analysis.analyse(rounds, criteria)
    assert json.dumps(content, allow_nan=False)
    assert "| `bf16_at_clock` | - | - |" in modules.analysis.markdown(content)


def test_the_thief_takes_its_share(modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread keeps pace with the clock, also when it wakes late: the counted share is the asked one."""
    counter = SimpleNamespace(ns=0)
    properties = SimpleNamespace(multi_processor_count=132, max_threads_per_multi_processor=2048)
    nothing = lambda *_: None  # noqa: E731 -- stands for several calls
    stream = SimpleNamespace(synchronize=nothing)
    cuda = SimpleNamespace(
        get_device_properties=lambda _: properties,
        current_device=lambda: 0,
        set_device=nothing,
        Stream=lambda *, priority: stream if priority < 0 else None,
    )
    zeros = lambda *_, **__: SimpleNamespace(item=lambda: counter.ns)  # noqa: E731
    monkeypatch.setattr(modules.gpus, "torch", SimpleNamespace(cuda=cuda, zeros=zeros, int64=None))

    def kernel(*, grid: tuple[int, int, int], block: tuple[int, int, int], args: list[Any], **how: Any) -> None:
        assert block[0] * grid[0] == 132 * 2048  # every thread slot
        assert 2 * how["shared_mem"] > 227 * 1024 - 4096  # and nearly all shared memory of an SM of Hopper
        counter.ns += grid[0] * args[0]

    with modules.gpus.Thief(0.1, kernel) as thief:
        _, share = thief.during(lambda: time.sleep(1.0))
    assert share == pytest.approx(0.1, abs=0.03)
    with modules.gpus.Thief(0.0, kernel) as honest:
        assert honest.during(lambda: time.sleep(0.01)) == (None, 0.0)


def test_a_thief_that_fails_is_no_clean_round(modules: SimpleNamespace) -> None:
    """A kernel that cannot be started ends the round with an error, never with an unslowed victim."""
    thief = object.__new__(modules.gpus.Thief)
    thief._share, thief._error = 0.0, ValueError("no context")
    thief._stop = SimpleNamespace(set=lambda: None)
    with pytest.raises(RuntimeError, match="could not be started"):
        thief.__exit__()


def test_refuses_a_torch_that_cannot_compile(
    modules: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No substitute is used in silence."""
    torch = importlib.import_module("torch")
    monkeypatch.delattr(torch.cuda, "_compile_kernel")
    with pytest.raises(SystemExit, match="2"):
        modules.sensitivity.gpus_or_exit()
    assert "no torch.cuda._compile_kernel" in capsys.readouterr().err


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The script as a user starts it, from another folder."""
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=120, check=False)


def test_dry_run(tmp_path: Path) -> None:
    """Writes the same three files as a real study, says that it was none, and gives the same twice."""
    done = run("--json", str(tmp_path / "a" / "dry.json"), "--dry-run", "--repeats", "3")
    assert done.returncode == 0, done.stderr
    content = json.loads((tmp_path / "a" / "dry.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert content["dry_run"] is True
    assert len(content["rounds"]) == content["rounds_wanted"] == 15
    table = (tmp_path / "a" / "dry.md").read_text(encoding="utf-8")
    assert table in done.stdout
    assert "| `straggler[hbm_bandwidth]` |" in table
    svg = ET.parse(tmp_path / "a" / "dry.svg").getroot()  # noqa: S314 -- our own file
    assert len(svg.findall("{http://www.w3.org/2000/svg}polyline")) == 7
    again = run("--json", str(tmp_path / "b.json"), "--dry-run", "--repeats", "3")
    assert again.stdout == done.stdout


@pytest.mark.long
def test_refuses_too_few_gpus(tmp_path: Path) -> None:
    """Here there is none: exit 2, a line that says so, and no file."""
    done = run("--json", str(tmp_path / "none.json"))
    assert done.returncode == 2
    assert "0 GPUs: it takes 3 to compare; see --dry-run" in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("wrong", [("--repeats", "0"), ("--slowdowns", "0"), ("--slowdowns", "100")])
def test_refuses_nonsense(tmp_path: Path, wrong: tuple[str, str]) -> None:
    """Exit 2 by the parser."""
    done = run("--json", str(tmp_path / "none.json"), "--dry-run", *wrong)
    assert (done.returncode, "between 0 and 100 per cent" in done.stderr) == (2, True)
