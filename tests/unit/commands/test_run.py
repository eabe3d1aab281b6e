"""``gpucluster run``: what is typed, what is shown, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.commands import arguments, main, run
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.reading import as_plain
from tests.support import REPOSITORY
from tests.support.launching import Launch, Starter, finished, starter_in

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator

COMMAND = (sys.executable, "-m", "pytest_gpucluster.cli", "run")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
PROBES = """
import os
import time
from dataclasses import dataclass
from pathlib import Path

import neighbour

@dataclass(frozen=True)
class Found:
    rank: int
    noise: float

def look(*, fail: int = -1, sleep_s: float = 0.0, text: str = "hello"):
    rank = int(os.environ["RANK"])
    print(f"{text} from {rank}\\n--- not a heading")
    if rank == fail:
        raise RuntimeError("planted")
    if sleep_s:
        Path(f"sleeping{rank}").touch()
        time.sleep(sleep_s)
    return Found(rank=rank, noise=neighbour.NOISE)

def add():
    import torch
    import torch.distributed as dist
    x = torch.ones(1)
    dist.all_reduce(x)
    print("summed")
    return {"sum": float(x), "nan": float("nan")}

class Probe:
    def method(self):
        return 1

def _hidden():
    return 1

def takes(places, at_once):
    return 1
"""


@dataclass(frozen=True)
class Rate:
    """A value whose class is known here."""

    tflops: float
    by_size: dict[str, dict[str, float]]
    samples: list[float]


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with functions in it, and no variable or path of ours left behind."""
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    Path("probes.py").write_text(PROBES, encoding="utf-8")
    Path("neighbour.py").write_text("NOISE = 0.5\n", encoding="utf-8")


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[Starter]:
    """Starts commands in that folder; a process left behind fails the test, and so does a file."""
    with starter_in(tmp_path) as made:
        yield made
    assert list(made.temporary_files()) == []


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a wrong command says; on a machine with GPUs too, nothing is asked of them."""
    assert main.main(["run", *arguments, "--device", "cpu"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("gpucluster run: ")
    return captured.err


def measured(starter: Starter, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, on two ranks of the CPU."""
    return finished([*COMMAND, "--device", "cpu", *arguments], cwd=starter.folder, variables=starter.environment)


# What is typed.


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("x=5", 5),
        ("x=-0.5", -0.5),
        ("x=1e9", 1e9),
        ("x=bfloat16", "bfloat16"),
        ("x=[4096,8192]", [4096, 8192]),
        ("x={a: [1], b: {c: d}}", {"a": [1], "b": {"c": "d"}}),
        ("x=true", True),
        ("x=", None),
        ("x='5'", "5"),
        ("x=a=b", "a=b"),
        ("x=best size", "best size"),
    ],
)
def test_values(word: str, value: Any) -> None:
    """Plain YAML, read as thresholds.yaml is."""
    assert arguments.read_arguments([word]) == {"x": value}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["5"], "'5' is not an argument; say KEY=VALUE"),
        (["4x=5"], "not an argument"),
        (["x=1", "x=2"], "x is given twice"),
        (["x=[1"], r"x=\[1: not YAML"),
        (["x=a: b"], "x=a: b: not YAML"),
        (["x=1\ny: 2"], "more than one value"),
        (["x={1: a}"], "cannot be a key"),
        (["x=!!python/object:os.system {}"], "tag .* is not allowed"),
        (["x=&a [*a]"], "anchor .* is not allowed"),
        (["x=.nan"], "not a number that anything can be compared with"),
        (["x=\udcff"], "not UTF-8"),
    ],
)
def test_values_refused(typed: list[str], message: str) -> None:
    """Anything else is said with the word it stands in, and nothing is constructed."""
    with pytest.raises(ConfigurationError, match=message):
        arguments.read_arguments(typed)


def test_function_by_module_and_by_file() -> None:
    """Both lead to the same file; a file finds its neighbours, and takes no other module's name."""
    by_file = arguments.find_function("probes.py:look")
    assert by_file.__module__ == "gpucluster_run_probes"
    assert arguments.find_function("probes:look").__code__.co_filename == by_file.__code__.co_filename
    Path("json.py").write_text("def f():\n    return 1\n", encoding="utf-8")
    assert arguments.find_function("json.py:f")() == 1
    assert sys.modules["json"] is json


def test_function_of_a_package_by_file() -> None:
    """A file inside a package is imported as part of it, so that its relative imports work."""
    Path("deep/inner").mkdir(parents=True)
    for folder in ("deep", "deep/inner"):
        Path(folder, "__init__.py").touch()
    Path("deep/one.py").write_text("ONE = 1\n", encoding="utf-8")
    Path("deep/inner/two.py").write_text("from ..one import ONE\n\ndef f():\n    return ONE\n", encoding="utf-8")
    function = arguments.find_function("deep/inner/two.py:f")
    assert (function.__module__, function()) == ("deep.inner.two", 1)


def test_file_that_another_one_shadows() -> None:
    """What Python imports under that name is another file: said, not measured."""
    Path("pytest_gpucluster").mkdir()
    for name in ("__init__", "places"):
        Path("pytest_gpucluster", f"{name}.py").write_text("def f():\n    return 1\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"is not what Python imports as pytest_gpucluster\.places"):
        arguments.find_function("pytest_gpucluster/places.py:f")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("probes", "names no function; say MODULE:FUNCTION"),
        ("probes:", "names no function"),
        ("nowhere:look", "there is no module 'nowhere'"),
        ("probes.deep:look", "there is no module 'probes.deep'"),
        ("nowhere/probes.py:look", "there is no file nowhere/probes.py"),
        ("probes:loke", r"has no function 'loke'. Did you mean 'look'\?"),
        ("probes:zzz", "its functions: add, look, takes"),
        ("probes:Probe", "must be a function at module level"),
        ("os:getcwd", "must be a function at module level"),
        ("broken.py:f", r"broken.py cannot be imported: ZeroDivisionError: division by zero \(.*broken.py:2\)"),
        ("lacking:f", "lacking cannot be imported: ModuleNotFoundError: No module named 'nowhere_at_all'"),
    ],
)
def test_function_refused(typed: str, message: str) -> None:
    """No such module, file or function, or nothing that a worker could import."""
    Path("broken.py").write_text("\n1 / 0\n", encoding="utf-8")
    Path("lacking.py").write_text("import nowhere_at_all\n", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=message):
        arguments.find_function(typed)


def test_wrong_usage_is_said_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one line that says what is wrong and what is valid."""
    look = "probes.py:look"
    assert "unexpected keyword argument 'fial'; it takes (*, fail: int = -1" in refused(capsys, look, "fial=1")
    assert "unexpected keyword argument 'fial'" in refused(capsys, look, "fial=1", "text=x")
    assert "Did you mean 'fail'?" in refused(capsys, look, "fial=1")
    assert "one of that name" in refused(capsys, "probes.py:takes", "places=1", "at_once=1")
    assert "no place node0-gpu0; places: node0-cpu0, node0-cpu1, node0" in refused(capsys, look, "--place", "node0-gpu0")
    assert "--per rank is not one of gpu, host, node, domain, cluster, pair" in refused(capsys, look, "--per", "rank")
    assert "--deadline-s 0 is not a time" in refused(capsys, look, "--deadline-s", "0")
    assert "--expect nodes=2: this command is for one machine" in refused(capsys, look, "--expect", "nodes=2")
    assert "gpucluster run: --expect: 'gpus=2' is not understood" in refused(capsys, look, "--expect", "gpus=2")
    assert "no place node0-cpu1" in refused(capsys, look, "--inline", "--place", "node0-cpu1")


def test_arguments_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    """Also between and behind options; an unknown option stays an error of its own."""
    text = refused(capsys, "probes.py:look", "a=1", "--place", "node0-cpu0", "b=2", "--per", "gpu", "c=3", "a=4")
    assert "a is given twice" in text
    with pytest.raises(SystemExit) as left:
        main.main(["run", "probes.py:look", "--nowhere"])
    assert left.value.code == 2
    assert "gpucluster run: error: unrecognized arguments: --nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main.main(["run"])
    assert capsys.readouterr().err.endswith("are required: MODULE:FUNCTION|CRITERION\n")


def test_a_criterion_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is nearly right, one that is none, a soak's, and options of a function."""
    assert "is no criterion, and names no function" in refused(capsys, "bf16_tflop")
    assert "Did you mean 'bf16_tflops'?" in refused(capsys, "bf16_tflop")
    assert "say MODULE:FUNCTION or path/to/file.py:FUNCTION" in refused(capsys, "zzzzzzzz")
    assert "say pytest --pyargs tests_acceptance --gpucluster-level soak:10m -k bf16_soak" in refused(capsys, "bf16_soak")


def test_under_torchrun(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It starts its ranks by itself: in each rank of torchrun it would measure every GPU once more."""
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert "for one machine" in refused(capsys, "probes.py:look")
    monkeypatch.delenv("MASTER_PORT")
    assert "half of torchrun's environment" in refused(capsys, "probes.py:look")


def test_cuda_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No silent rehearsal for somebody who asked for GPUs."""
    monkeypatch.setattr(run, "detect_gpus", lambda: run.Detected(names=()))
    assert main.main(["run", "probes.py:look", "--device", "cuda"]) == 2
    assert "--device cuda: NVML shows no GPU here" in capsys.readouterr().err


def test_a_broken_driver_is_said_in_this_commands_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVML that fails is a broken machine; what to say instead is an option of this command."""

    def broken() -> None:
        raise ConfigurationError("NVML does not work; to rehearse all the same, say --gpucluster-profile rehearsal")

    monkeypatch.setattr(run, "detect_gpus", broken)
    assert main.main(["run", "probes.py:look"]) == 2
    assert "NVML does not work; to rehearse all the same, say --device cpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("expect", "inline", "found"),
    [(None, False, (4, 4)), ("gpus_per_node=8", False, (8, 4)), ("gpus_per_node=2", False, (2, 4)), (None, True, (1, 4))],
)
def test_places_of_a_gpu_machine(
    monkeypatch: pytest.MonkeyPatch,
    expect: str | None,
    inline: bool,  # noqa: FBT001 -- a column of the table above
    found: tuple[int, int],
) -> None:
    """One agent for each visible GPU (also for one that NVML has lost); as many places as were promised."""
    monkeypatch.setattr(run, "detect_gpus", lambda: run.Detected(names=("H",) * 3, num_lost=1))
    inventory, num_local = run._machine(SimpleNamespace(expect=expect, device="auto", inline=inline))  # type: ignore[arg-type]
    assert (inventory.gpus_per_node, num_local) == found
    assert inventory.device == "cuda"


# What is shown.


def test_lines_are_aligned_and_searchable() -> None:
    """Place, name and value; nested names joined by dots, a long list of numbers summarized."""
    rate = Rate(tflops=731.23456, by_size={"8192": {"best": 800.0}}, samples=[float(n) for n in range(50)])
    values = {"node0-gpu0": as_plain(rate), "node0-gpu10": as_plain(SimpleNamespace(note="a b", flag=None))}
    assert run.as_lines(values).splitlines() == [
        "node0-gpu0   tflops             731.235",
        "node0-gpu0   by_size.8192.best  800",
        "node0-gpu0   samples            50 values: min 0, median 24.5, max 49",
        "node0-gpu10  note               a b",
        "node0-gpu10  flag               null",
    ]
    assert run.as_lines({"node0": 3}) == "node0  value  3\n"
    assert run.as_lines({}) == ""


def test_progress(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line with place, step and share. Nothing of it on stdout."""
    monkeypatch.setattr(run, "LINE_INTERVAL_S", -1.0)
    show = run.progress_lines(lambda rank: f"node0-cpu{rank}")
    show(1, "copying", 0.25)
    show(0, "waiting", None)
    assert capfd.readouterr() == ("", "node0-cpu1: copying  25 %\nnode0-cpu0: waiting\n")


@pytest.mark.long
@pytest.mark.e2e
def test_one_place(starter: Starter) -> None:
    """The command of docs/commands.md, as it stands there: one place, all fields, exit code 0."""
    page = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("gpucluster run pytest_gpucluster.measurements"))
    done = finished([*COMMAND[:3], *line.split()[1:]], cwd=starter.folder, variables=starter.environment)
    assert done.returncode == 0, done.stderr
    shown = {fields[1]: fields[2:] for fields in (row.split() for row in done.stdout.splitlines())}
    assert {row.split()[0] for row in done.stdout.splitlines()} == {"node0-cpu0"}
    assert float(shown["tflops"][0]) > 0
    assert shown["best_size"] == ["256"]
    assert "here: 2 ranks on the CPU" in done.stderr


@pytest.mark.long
@pytest.mark.e2e
def test_pairs_as_json(starter: Starter) -> None:
    """Strict JSON by ordered pair on stdout; what the function printed is beside it, with its place."""
    done = measured(starter, "probes.py:add", "--per", "pair", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert found == {f"node0-cpu{a},node0-cpu{b}": {"sum": 2.0, "nan": None} for a, b in ((0, 1), (1, 0))}
    assert "node0-cpu0 | summed\nnode0-cpu1 | summed\n" in done.stderr


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.fault
def test_one_place_fails(starter: Starter) -> None:
    """The others keep their values; the error names the rank; exit code 1."""
    done = measured(starter, "probes.py:look", "fail=1", "--expect", "gpus_per_node=3")
    assert done.returncode == 1
    assert done.stdout.splitlines()[:2] == ["node0-cpu0 | hello from 0", "node0-cpu0 | --- not a heading"]
    assert "--- look" not in done.stdout
    values = [line.split() for line in done.stdout.splitlines() if " | " not in line]
    assert values == [[place, *row] for place, rank in (("node0-cpu0", "0"), ("node0-cpu2", "2")) for row in FOUND[rank]]
    assert "look was not measured: rank 1 (node0-cpu1, " in done.stderr
    assert "RuntimeError: planted" in done.stderr


FOUND = {rank: [["rank", rank], ["noise", "0.5"]] for rank in ("0", "2")}


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.fault
def test_a_place_that_hangs_as_json(starter: Starter) -> None:
    """At its deadline it is named; in JSON it is null."""
    done = measured(starter, "probes.py:look", "sleep_s=300", "--deadline-s", "1", "--place", "node0-cpu1", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout) == {"node0-cpu1": None}
    assert "did not return within 1 s" in done.stderr


@pytest.mark.long
@pytest.mark.e2e
def test_inline(starter: Starter) -> None:
    """In this process, at one place; what it prints does not get into the JSON."""
    done = measured(starter, "probes.py:look", "--inline", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"node0-cpu0": {"rank": 0, "noise": 0.5}}
    assert "hello from 0" in done.stderr


@pytest.mark.long
@pytest.mark.e2e
def test_a_pair_needs_two(starter: Starter) -> None:
    """Nothing to measure is wrong usage, not an empty success."""
    done = measured(starter, "probes.py:add", "--per", "pair", "--place", "node0-cpu0")
    assert done.returncode == 2
    assert "--per pair: nothing to measure among 1 place" in done.stderr


def interrupted(starter: Starter, number: signal.Signals) -> Launch:
    """A run that got a signal while both ranks were busy, after its end."""
    launch = starter.start([*COMMAND, "--device", "cpu", "probes.py:look", "sleep_s=300"], name="run")
    launch.until(lambda: all((starter.folder / f"sleeping{rank}").exists() for rank in (0, 1)), what="call")
    os.kill(launch.pid, number)
    launch.end()
    launch.gone()
    return launch


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.fault
def test_sigterm_leaves_nothing(starter: Starter) -> None:
    """Said, exit code 1, and no agent or worker lives on."""
    launch = interrupted(starter, signal.SIGTERM)
    assert launch.end() == 1
    assert "not run: terminated by SIGTERM" in launch.output


@pytest.mark.long
@pytest.mark.e2e
@pytest.mark.fault
def test_ctrl_c_leaves_nothing(starter: Starter) -> None:
    """The same, with the exit code that shells know; no traceback."""
    launch = interrupted(starter, signal.SIGINT)
    assert launch.end() == 130
    assert "gpucluster run: interrupted" in launch.output
    assert "Traceback" not in launch.output
