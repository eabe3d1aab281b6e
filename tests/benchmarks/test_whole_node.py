"""The script for a whole node: what each part has to show, parts that hang, and a rehearsal of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.thresholds.lint import load
from tests.support.scripts import BENCHMARKS, benchmark_module

if TYPE_CHECKING:
    from collections.abc import Iterator

SCRIPT = BENCHMARKS / "whole_node.py"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The script as a module."""
    with benchmark_module("whole_node") as module:
        yield module


def junit(folder: Path, **outcomes: str) -> Path:
    """A JUnit file with these testcases, and a verdict that fails as that of any part of a suite does."""
    cases = {**outcomes, "gpucluster.verdict": "error"}
    lines = [f'<testcase name="{name}">{"" if end == "passed" else f"<{end}/>"}</testcase>' for name, end in cases.items()]
    (folder / "junit.xml").write_text(f"<testsuites><testsuite>{''.join(lines)}</testsuite></testsuites>", encoding="utf-8")
    return folder


def test_nothing_may_fail_and_something_has_to_pass(script: Any, tmp_path: Path) -> None:
    """Of the criteria between two halves."""
    assert script.nothing_failed(junit(tmp_path, one="passed", two="skipped"), [1]) == ""
    assert script.nothing_failed(junit(tmp_path, one="passed", two="failure"), [0]) == "not passed: two"
    assert script.nothing_failed(junit(tmp_path, one="passed", two="error"), [0]) == "not passed: two"
    assert script.nothing_failed(junit(tmp_path, one="skipped"), [0]) == "nothing passed"


def test_each_fault_is_an_error_and_its_twin_passes(script: Any, tmp_path: Path) -> None:
    """Of the suite with planted faults."""
    ended = {"test_before": "passed", "test_hung": "error", "test_after_hung": "passed"}
    assert script.each_fault_and_its_twin(junit(tmp_path, **ended), [1]) == ""
    bad = {**ended, "test_after_hung": "error"}
    assert script.each_fault_and_its_twin(junit(tmp_path, **bad), [1]) == "not as planted: test_after_hung error"
    bad = {**ended, "test_hung": "passed"}
    assert script.each_fault_and_its_twin(junit(tmp_path, **bad), [1]) == "not as planted: test_hung passed"
    assert script.each_fault_and_its_twin(junit(tmp_path), [0]) == "nothing was planted"


@pytest.mark.parametrize(
    ("places", "wrong"),
    [
        (["node0-gpu7"], ""),
        (["node0-gpu7", "node0-gpu7"], ""),
        (["node0-gpu6"], "named node0-gpu6, not node0-gpu7 alone"),
        (["node0-gpu7", "node0-gpu0"], "named node0-gpu7, node0-gpu0, not node0-gpu7 alone"),
        ([None], "named nobody, not node0-gpu7 alone"),
        ([], "named nobody, not node0-gpu7 alone"),
    ],
)
def test_the_shared_gpu_and_no_other_one(script: Any, tmp_path: Path, places: list[str | None], wrong: str) -> None:
    """As results.json names them."""
    (tmp_path / "gpucluster-results").mkdir()
    culprits = [{"place": place and {"id": place}} for place in places]
    (tmp_path / "gpucluster-results" / "results.json").write_text(json.dumps({"culprits": culprits}), encoding="utf-8")
    assert script.shared_gpu(8).expects(tmp_path, [1]) == wrong


def part(script: Any, *commands: str, **changes: Any) -> Any:
    """Python programs that have to end with 0."""
    processes = tuple((sys.executable, "-c", command) for command in commands)
    made = script.Part(name="made", processes=processes, variables=({},) * len(commands), within_s=60, expects=script.zero)
    return replace(made, **changes)


def test_an_exit_code_and_a_file_that_lacks(script: Any, tmp_path: Path) -> None:
    """Both are what is wrong with a part; a healthy one has nothing."""
    assert script.run(part(script, "print(1)"), tmp_path / "made", left_s=60).wrong == ""
    assert (tmp_path / "made" / "terminal.txt").read_text(encoding="utf-8") == "1\n"
    assert script.run(part(script, "raise SystemExit(3)"), tmp_path / "made", left_s=60).wrong == "exit codes 3"
    ended = script.run(part(script, "", expects=script.nothing_failed), tmp_path / "made", left_s=60)
    assert ended.wrong.startswith("FileNotFoundError")


def test_a_part_that_hangs_is_ended_with_all_that_it_started(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that ignores signals, and its companion."""
    monkeypatch.setattr(script, "GRACE_S", 0.5)
    monkeypatch.setattr(script, "LATER_S", 0.5)
    stubborn = (
        "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); open('pid{}', 'w').write(str(os.getpid()));"
    )
    hangs = part(script, *(f"{stubborn.format(index)} time.sleep(1000)" for index in (0, 1)), within_s=3)
    ended = script.run(hangs, tmp_path / "made", left_s=60)
    assert ended.wrong == "ended after 3 s"
    assert ended.exit_codes == [-9, -9]
    for index in (0, 1):
        pid = int((tmp_path / "made" / f"pid{index}").read_text(encoding="ascii"))
        assert not Path(f"/proc/{pid}").exists()


def test_no_part_is_begun_without_time(script: Any, tmp_path: Path) -> None:
    """It is said, and counts as wrong."""
    ended = script.run(part(script, "print(1)"), tmp_path / "made", left_s=5)
    assert ended.wrong == "not begun: the time was over"
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("gpus", [8, 4])
def test_limits_of_this_run_are_sound(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    """They load, and only where NVLink SHARP is forbidden does the acceptance of 8 GPUs use them."""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    (accept, *_) = script.parts_of("measure", gpus=gpus, out=tmp_path)
    loaded = load(tmp_path / "limits.yaml")
    assert {"nvls-off", "halves"} <= set(loaded.profiles)
    assert ("--gpucluster-profile=nvls-off" in accept.processes[0]) == (gpus == 8)
    monkeypatch.delenv("NCCL_NVLS_ENABLE")
    (accept, *_) = script.parts_of("measure", gpus=gpus, out=tmp_path)
    assert "--gpucluster-profile=nvls-off" not in accept.processes[0]


def test_which_parts_run_on_how_many_gpus(script: Any, tmp_path: Path) -> None:
    """Faults need four ranks; nobody competes for a GPU that is not there."""
    names = {gpus: [one.name for one in script.parts_of("faults", gpus=gpus, out=tmp_path)] for gpus in (0, 2, 4, 8)}
    assert names == {
        0: ["halves", "planted", "slowed"],
        2: [],
        4: ["halves", "shared-gpu", "planted", "slowed"],
        8: ["halves", "shared-gpu", "planted", "slowed"],
    }
    assert [one.name for one in script.parts_of("measure", gpus=1, out=tmp_path)] == ["acceptance"]


@pytest.mark.e2e
@pytest.mark.slow
def test_rehearsal_of_the_faults(tmp_path: Path) -> None:
    """Two torchruns, planted faults and the analysis of slowed GPUs, on the CPU; from another folder."""
    own = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "faults", "--out", str(tmp_path / "out"), "--gpus", "0"],
        cwd="/", env=own, capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads((tmp_path / "out" / "faults.json").read_text(encoding="utf-8"))
    assert [(one["part"], one["wrong"]) for one in said["parts"]] == [("halves", ""), ("planted", ""), ("slowed", "")]
    halves, planted, _ = said["parts"]
    assert "2 nodes x 2 ranks on the CPU" in halves["verdict_line"]
    assert "9 not measured" in planted["verdict_line"]
    assert set(halves["timings"]) == {"total_s", "startup_s", "measuring_s", "other_s", "waited_s"}
    assert not (tmp_path / "out" / "halves" / "gpucluster-results").exists()
