"""A criterion on the command line: shown, measured by its recipe, and what would run; nothing is measured here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
import yaml

from pytest_gpucluster.commands import criteria, main
from pytest_gpucluster.thresholds.lint import load
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Sequence


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a command prints that ends well, in one line."""
    assert main.main([*words]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_criterion_is_shown_as_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    """Limit, why, source, recipe, how long, where it is written, and the limit of each profile."""
    text = shown(capsys, "show", "bf16_tflops")
    for words in (
        "limit > 700 TFLOPS",
        "about 5 s",
        "sizes [4096, 8192, 16384]",
        "why The handover's limit",
        "thresholds.yaml:",
    ):
        assert words in text
    assert "source handover (H100)" in text
    assert "a100-sxm > 230 TFLOPS" in text
    assert "gpucluster run bf16_tflops" in text
    assert "measured, not judged" in shown(capsys, "show", "host_memory")


def test_a_family_is_shown_member_by_member(capsys: pytest.CaptureFixture[str]) -> None:
    """``busbw`` is each ``busbw[...]``, and no criterion that begins alike."""
    text = shown(capsys, "show", "busbw")
    assert "busbw[all_reduce]: " in text
    assert "busbw[all_gather]: " in text
    assert "busbw_scaling: " not in text
    assert "8: 400 GB/s, by number of GPUs" in " ".join(text.split())


def test_limits_of_a_site_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Those of the named file."""
    own = tmp_path / "own.yaml"
    own.write_text("extends: packaged\ncriteria:\n  bf16_tflops: {above: 741, source: contract 7}\n", encoding="utf-8")
    text = shown(capsys, "show", "bf16_tflops", "--limits", str(own))
    assert "> 741 TFLOPS" in text
    assert "contract 7" in text


def test_a_name_that_is_none_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    """It says what is meant; a beginning names all that begin so. No word at all is no command."""
    assert main.main(["show", "bf16_tflop"]) == 4
    assert "Did you mean 'bf16_tflops'?" in capsys.readouterr().err
    assert main.main(["show", "bf16"]) == 4
    assert "Did you mean 'bf16_tflops' or 'bf16_" in capsys.readouterr().err
    for command, code in (("show", 4), ("run", 2)):
        assert main.main([command, "zzz"]) == code
        assert capsys.readouterr().err.endswith(" 'gpucluster plan --fleet 2x8' lists criteria.\n")
    with pytest.raises(SystemExit, match="2"):
        main.main([])
    assert capsys.readouterr().err.endswith("error: say a command; 'gpucluster --help' lists all\n")
    with pytest.raises(SystemExit, match="2"):
        main.main(["info", "--josn"])
    assert capsys.readouterr().err.endswith("info: error: unrecognized arguments: --josn. Did you mean '--json'?\n")
    with pytest.raises(SystemExit, match="2"):
        main.main(["demo", "--gpucluster-level", "quick"])
    assert capsys.readouterr().err.endswith(" --gpucluster-level quick. Arguments of pytest stand after --.\n")


def test_results_in_a_folder_that_is_called_as_a_criterion(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are what is meant; an empty folder of that name hides no criterion."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bf16_tflops").mkdir()
    assert "limit > 700" in shown(capsys, "show", "bf16_tflops")
    (tmp_path / "bf16_tflops" / "results.json").write_text("{}", encoding="utf-8")
    assert main.main(["show", "bf16_tflops"]) == 4
    assert "results.json" in capsys.readouterr().err


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """The commands that would have run, in a folder of their own; a file of limits is kept as ``kept.yaml``."""
    found: list[list[str]] = []

    def call(words: Sequence[str], **_: Any) -> int:
        found.append([*words])
        for word in words:
            if word.startswith("--gpucluster-thresholds="):
                Path("kept.yaml").write_text(Path(word.partition("=")[2]).read_text(encoding="utf-8"), encoding="utf-8")
        return 0

    def become(_file: str, words: Sequence[str]) -> NoReturn:
        found.append([*words])
        raise SystemExit

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "call", call)
    monkeypatch.setattr(os, "execv", become)
    return found


@pytest.mark.parametrize(
    ("words", "expression"),
    [
        (["bf16_tflops"], "test_bf16_tflops"),
        (["busbw[all_reduce]"], "test_busbw and not test_busbw_soak and not test_busbw_scaling and all_reduce]"),
        (["finetune_throughput"], "test_finetune_throughput and not test_finetune_throughput_healthy"),
        (["bf16_tflops", "--place", "node0-gpu3"], "test_bf16_tflops and (node0-gpu3)"),
    ],
)
def test_a_criterion_is_run_by_its_tests(called: list[list[str]], words: list[str], expression: str) -> None:
    """And by no others; its results lie beside those of whole runs."""
    assert main.main(["run", *words]) == 0
    (command,) = called
    assert command[:3] == [sys.executable, "-m", "pytest"]
    assert command[command.index("-k") + 1] == expression
    assert "--gpucluster-results=gpucluster-run" in command
    assert not any(word.startswith("--gpucluster-thresholds") for word in command)


def test_a_recipe_is_changed_for_one_run(called: list[list[str]]) -> None:
    """In a file that overlays the packaged one, and is gone afterwards."""
    assert main.main(["run", "bf16_tflops", "iterations=5", "--device", "cpu", "--expect", "gpus_per_node=3"]) == 0
    (command,) = called
    kept = yaml.safe_load(Path("kept.yaml").read_text(encoding="utf-8"))
    for profile in packaged().profiles:
        assert kept["criteria"]["bf16_tflops"]["profiles"][profile] == {"recipe": {"iterations": 5}}
    file = load(Path("kept.yaml"))
    assert {file.criteria(one)["bf16_tflops"].recipe["iterations"] for one in file.profiles.values()} == {5}
    (limits,) = (word.partition("=")[2] for word in command if word.startswith("--gpucluster-thresholds="))
    assert not Path(limits).exists()
    assert {"--gpucluster-profile=rehearsal", "--gpucluster-expect=gpus_per_node=3"} <= {*command}


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["bf16_tflops", "iteration=5"], "the recipe of bf16_tflops has no iteration; it has sizes"),
        (["bf16_tflops", "iterations=abc"], "iterations=abc: the recipe of bf16_tflops has a number there, not a word"),
        (["bf16_tflops", "sizes=7"], "sizes=7: the recipe of bf16_tflops has a list there, not a number"),
        (["busbw", "iterations=true"], "has a number there, not yes or no"),
        (["bf16_tflops", "--per", "node"], "--per and --deadline-s are for a function"),
        (["bf16_tflop"], "names no function"),
    ],
)
def test_wrong_usage_runs_nothing(
    called: list[list[str]], capsys: pytest.CaptureFixture[str], words: list[str], why: str
) -> None:
    """It says what the recipe has, or what to say instead."""
    assert main.main(["run", *words]) == 2
    assert why in capsys.readouterr().err
    assert called == []


def test_values_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """By place; of a family by criterion first."""
    row = {"criterion": "a[x]", "place": {"id": "node0-gpu1"}, "value": 7.5, "unit": "GB/s", "outcome": "passed"}
    criteria.print_values([row, {**row, "place": None}], is_family=False)
    one = {"value": 7.5, "unit": "GB/s", "outcome": "passed"}
    assert json.loads(capsys.readouterr().out) == {"node0-gpu1": one, "cluster": one}
    criteria.print_values([row], is_family=True)
    assert json.loads(capsys.readouterr().out) == {"a[x]": {"node0-gpu1": one}}


def test_a_plan_is_a_collection(called: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    """Of what is here, or of a fleet of that shape; a shape or a profile that is none is refused first."""
    with pytest.raises(SystemExit):
        main.main(["plan", "--fleet", "2x8", "--", "-m", "compute"])
    (command,) = called
    assert {"--collect-only", "--fleet=2x8", "--gpucluster-profile=h200-sxm"} <= {*command}
    assert command[-2:] == ["-m", "compute"]
    for wrong in (["--fleet", "2x"], ["--fleet", "2x8", "--profile", "h200"]):
        assert main.main(["plan", *wrong]) == 2
    assert len(called) == 1
    assert capsys.readouterr().err.count("gpucluster plan: ") == 2


def test_an_audit_is_a_run_that_reads(called: list[list[str]]) -> None:
    """In a folder of its own, so that the results of whole runs stay; what follows ``--`` is pytest's."""
    with pytest.raises(SystemExit):
        main.main(["audit", "--fleet", "2x8", "--", "--gpucluster-gate"])
    (command,) = called
    assert {"--gpucluster-audit", "--fleet=2x8", "--gpucluster-results=gpucluster-audit"} <= {*command}
    assert command[-1] == "--gpucluster-gate"
    assert main.main(["audit", "--fleet", "2x"]) == 2


@pytest.mark.long
def test_a_plan_names_criteria_limits_and_seconds(tmp_path: Path) -> None:
    """Without a GPU, a file or a process that stays; what does not apply is counted by its cause."""
    words = ["plan", "--fleet", "2x8", "--", "-m", "compute or fabric or links"]
    command = [sys.executable, "-m", "pytest_gpucluster.cli", *words]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    lines = [line.split() for line in ran.stdout.splitlines()]
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ["bf16_tflops", "16", ">", "700", "TFLOPS", "5"] in lines
    assert ["inter_node_busbw[all_reduce]", "1", ">", "350", "GB/s", "6"] in lines
    assert "profile h200-sxm" in ran.stdout
    assert "nothing was measured" in ran.stdout
    assert not any("hbm_bandwidth" in line for line in ran.stdout.splitlines())
    assert [*tmp_path.iterdir()] == []
    headings = [line for line in ran.stdout.splitlines() if line in ("compute", "fabric", "links")]
    assert len(headings) == len(set(headings)), "a subject has one group"
