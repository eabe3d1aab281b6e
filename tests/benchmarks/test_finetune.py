"""The fine-tune's benchmark, rehearsed: rows, comparison, table, and that a failure or a kill leaves no row out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from finetune_smoke.settings.config import preset
from tests.support.scripts import BENCHMARKS, benchmark_module

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.long

SCRIPT = BENCHMARKS / "finetune.py"
TINY = "7b-peft-eager,7b-eager,7b-compiled"
RECIPES = (
    "recipe-reference", "recipe-no-checkpointing", "recipe-batch-4", "recipe-loaders-8", "recipe-prefetch-4",
    "recipe-throughput", "recipe-optimized", "recipe-optimized-eager", "recipe-optimized-no-checkpointing",
)  # fmt: skip
OPTIMIZED = ("rows", "loader_workers", "prefetch", "compile")
"""What the recipe's optimised variant sets otherwise."""


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    """The script as a module."""
    with benchmark_module("finetune") as module:
        yield module


def started(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, JSON lines and table of a rehearsal."""
    monkeypatch.setattr(sys, "argv", ["finetune.py", "--cpu", *options])
    code = benchmark.main()
    out = capsys.readouterr().out
    lines, _, table = out.partition("\n\n")
    return code, [json.loads(line) for line in lines.splitlines() if line.startswith("{")], table


def torchrun(*options: str) -> subprocess.CompletedProcess[str]:
    """Two gloo ranks of the script."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT), "--cpu"]
    return subprocess.run([*command, *options], env=surroundings, capture_output=True, text=True, timeout=300, check=False)


def test_rows_table_and_file_agree(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Three cases of few steps; each is beside the first of those it may be compared with that was run."""
    file = tmp_path / "rows.json"
    options = (f"--cases={TINY}", "--steps=4", "--learning-rate=0.002", f"--json={file}")
    code, rows, table = started(benchmark, monkeypatch, capsys, *options)
    assert code == 0
    assert [row["case"] for row in rows] == TINY.split(",")
    assert [row.get("beside") for row in rows] == [None, "7b-peft-eager", "7b-eager"]
    kept = json.loads(file.read_text())
    assert list(kept["cases"]) == TINY.split(",")
    assert kept["options"]["learning_rate"] == 0.002
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert {len(line) for line in cells} == {8}
    for row, line in zip(rows, cells[2:], strict=True):
        whole = kept["cases"][row["case"]]
        assert len(whole["losses"]) == 4
        assert row["first_losses"] == [round(loss, 4) for loss in whole["losses"]]
        assert line[:2] == [row["case"], f"{whole['tokens_per_s_per_gpu']:,.0f}"]
        if "beside" in row:
            other = kept["cases"][row["beside"]]
            apart = [abs(a - b) / b for a, b in zip(whole["losses"], other["losses"], strict=True)]
            assert whole["apart_max"] == pytest.approx(max(apart), abs=1e-12)
            assert whole["rate_ratio"] == pytest.approx(whole["tokens_per_s_per_gpu"] / other["tokens_per_s_per_gpu"])
            assert line[6] == f"{whole['rate_ratio']:.3f} of {row['beside']}"
            assert line[7] == f"{whole['apart_max']:.2%} at step {whole['apart_max_step']}"


def test_comparison_of_two_curves(benchmark: Any) -> None:
    """Relative to the other one, its step, means of ten; only the first 100 steps; no number where a loss is none."""
    other = [2.0] * 20
    mine = [2.0, 2.1, *[2.0] * 8, *[2.2] * 10]
    assert benchmark.compared(mine, other) == {
        "apart_max": pytest.approx(0.1), "apart_max_step": 10, "apart_means_of_10": [0.005, 0.1],
    }  # fmt: skip
    assert benchmark.compared([1.0] * 100 + [9.0], [1.0] * 101)["apart_max"] == 0
    assert benchmark.compared([float("nan"), 2.0], [2.0, 2.0])["apart_max"] is None


def test_recipe_cases_change_one_thing_each(benchmark: Any) -> None:
    """Beside the preset as it stands; together they are its optimised variant, and both can be had on several ranks."""
    config = {name: preset(case.preset, **case.settings) for name, case in benchmark.ALONE.items()}
    assert tuple(benchmark.named("recipe-*", benchmark.ALONE)) == RECIPES
    assert tuple(benchmark.named("recipe-*", benchmark.TOGETHER)) == RECIPES
    reference = config["recipe-reference"]
    changed = {
        name: {field: value for field in (*OPTIMIZED, "gradient_checkpointing")
               if (value := getattr(config[name], field)) != getattr(reference, field)}
        for name in RECIPES
    }  # fmt: skip
    assert changed["recipe-no-checkpointing"] == {"gradient_checkpointing": False}
    assert changed["recipe-batch-4"] == {"rows": 4}
    assert changed["recipe-loaders-8"] == {"loader_workers": 8}
    assert changed["recipe-prefetch-4"] == {"prefetch": 4}
    assert changed["recipe-optimized"] == {"rows": 4, "loader_workers": 8, "prefetch": 4, "compile": "layers"}
    assert changed["recipe-optimized-eager"] == {"rows": 4, "loader_workers": 8, "prefetch": 4}
    assert "gradient_checkpointing" in changed["recipe-optimized-no-checkpointing"]
    assert (config["recipe-throughput"].row_tokens, config["recipe-throughput"].rows) == (512, 8)
    assert not set(RECIPES) & set(benchmark.named(None, benchmark.ALONE))


def test_recipe_is_rehearsed_and_other_batches_have_no_common_curve(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rates are compared, losses only where the rows are the same."""
    names = "recipe-reference,recipe-no-checkpointing,recipe-throughput"
    code, (_, same, other), table = started(benchmark, monkeypatch, capsys, f"--cases={names}", "--steps=2")
    assert code == 0
    assert same["beside"] == other["beside"] == "recipe-reference"
    assert same["apart_max"] < 1e-3
    assert "apart_max" not in other
    assert "of recipe-reference" in table.splitlines()[-1]


def test_failing_case_is_an_error_line_and_the_others_go_on(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In the lines, the table and the file; exit code 1."""
    true = benchmark.finetune

    def failing(config: Any) -> Any:
        if config.own_lora and config.compile == "off" and config.rows == 2:
            failing.calls += 1
            if failing.calls == 1:
                raise RuntimeError("no kernel | image\nis available")
        return true(config)

    failing.calls = 0
    monkeypatch.setattr(benchmark, "finetune", failing)
    file = tmp_path / "rows.json"
    code, rows, table = started(benchmark, monkeypatch, capsys, f"--cases={TINY}", "--steps=4", f"--json={file}")
    assert code == 1
    assert rows[1] == {"case": "7b-eager", "error": "RuntimeError: no kernel | image"}
    assert rows[2]["beside"] == "7b-peft-eager"  # what failed is nothing to compare with
    assert "| 7b-eager | ERROR: RuntimeError: no kernel \\| image |" in table
    assert json.loads(file.read_text())["cases"]["7b-eager"]["error"] == "RuntimeError: no kernel | image"


def test_killed_run_keeps_what_was_done(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The file has the first case, and says of the others that they did not end, or did not begin."""
    true, seen = benchmark.finetune, []

    def interrupted(config: Any) -> Any:
        seen.append(config)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return true(config)

    monkeypatch.setattr(benchmark, "finetune", interrupted)
    file = tmp_path / "rows.json"
    with pytest.raises(KeyboardInterrupt):
        started(benchmark, monkeypatch, capsys, f"--cases={TINY}", "--steps=4", f"--json={file}")
    first, second, third = json.loads(file.read_text())["cases"].values()
    assert len(first["losses"]) == 4
    assert (second, third) == ({"error": "started, and did not end"}, {"error": "not run"})


def test_case_that_is_not_there_is_refused(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With those there are."""
    with pytest.raises(SystemExit) as left:
        started(benchmark, monkeypatch, capsys, "--cases=7b-eager,8b")
    assert left.value.code == 2
    assert "no case '8b' here: there are 7b-peft-eager, 7b-eager" in capsys.readouterr().err


@pytest.mark.e2e
@pytest.mark.slow
def test_two_ranks_side_by_side(tmp_path: Path) -> None:
    """Both strategies at 8 rows, and fsdp with its shards on the host: the same curve, told once."""
    file = tmp_path / "rows.json"
    done = torchrun("--cases=7b-*-8-rows,7b-fsdp,7b-fsdp-offload", "--steps=4", f"--json={file}")
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(file.read_text())["cases"]
    assert list(rows) == ["7b-ddp-8-rows", "7b-fsdp-8-rows", "7b-fsdp", "7b-fsdp-offload"]
    assert [row.get("beside") for row in rows.values()] == [None, "7b-ddp-8-rows", None, "7b-fsdp"]
    assert rows["7b-fsdp-8-rows"]["apart_max"] < 1e-3
    assert rows["7b-fsdp-offload"]["apart_max"] == 0
    assert len([line for line in done.stdout.splitlines() if line.startswith("{")]) == 4


@pytest.mark.e2e
def test_failing_case_of_two_ranks_ends_the_run(tmp_path: Path) -> None:
    """The others cannot be waited for: what was not run is a row too."""
    file = tmp_path / "rows.json"
    done = torchrun("--cases=7b-ddp,7b-fsdp", "--steps=0", f"--json={file}")
    assert done.returncode == 1
    first, second = json.loads(file.read_text())["cases"].values()
    assert first == {"error": "InputError: steps is 0: at least 1 is needed"}
    assert second == {"error": "not run: 7b-ddp failed before it"}
    assert "| 7b-fsdp | ERROR: not run: 7b-ddp failed before it |" in done.stdout


def test_ratios_are_against_the_best_trainer_by_row_length() -> None:
    """Ours is the mean of its runs; a variant that failed, and the curves of small, are no rates."""
    with benchmark_module("finetune_beside") as beside:
        rows = [
            {"variant": "ours", "row_tokens": 2048, "positions_per_s": 17_000.0},
            {"variant": "trainer", "row_tokens": 2048, "positions_per_s": 15_000.0},
            {"variant": "trainer-bf16", "row_tokens": 2048, "positions_per_s": 16_000.0},
            {"variant": "ours-peft", "row_tokens": 2048, "error": "out of memory"},
            {"variant": "ours", "row_tokens": 2048, "positions_per_s": 19_000.0},
            {"variant": "trainer", "row_tokens": 4096, "positions_per_s": 14_000.0},
            {"variant": "small", "rows": 64, "losses": [6.7]},
        ]
        found = beside.ratios(rows)
    assert found["2048"]["ours_over_best_trainer"] == 18_000 / 16_000
    assert found["2048"]["ours_over_ours_peft"] is None
    assert found["4096"]["ours_over_best_trainer"] is None


def test_outer_clock_begins_after_the_warm_up() -> None:
    """At the ends of windows alone; the rate is that of all timed steps."""
    with benchmark_module("finetune_beside") as beside:
        clock = beside.Clock()
        for step in (1, 2, 3, 4, 5, 6, 8):
            clock.note(step)
        assert [step for step, _ in clock.ends] == [4, 6, 8]
        clock.ends = [(4, 10.0), (6, 11.0), (8, 13.0)]
        found = clock.figures(100)
    assert (found["positions_per_s"], found["timed_steps"]) == (400 / 3, 4)
    assert found["window_rates"] == [200, 100]
