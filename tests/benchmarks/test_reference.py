"""The side-by-side benchmark: a rehearsal of all of it, what it counts, and that a disagreement does not go unseen."""

from __future__ import annotations

import ast
import json
import math
import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.scripts import BENCHMARKS, benchmark_module

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SCRIPT = BENCHMARKS / "reference.py"
WITHOUT_PYTEST = """
import runpy, sys
for name in ("pytest", "_pytest", "pydantic"):
    sys.modules[name] = None
sys.argv = [{script!r}, *{arguments!r}]
runpy.run_path({script!r}, run_name="__main__")
"""
FP8 = torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm", "CPU")
MAMF = ("mamf-finder mean", "mamf-finder median", "mamf-finder max")
METHODS = {
    **{f"bf16_{order}": ("loop", *MAMF) for order in (4096, 8192, 16384)},
    **dict.fromkeys(("bf16_sustained", "fp16_8192", "tf32_8192", "int8_8192", "fp32_8192", "fp64_8192"), ("loop",)),
    **({"fp8_8192": ("loop",), "fp8_16384": ("loop",)} if FP8 else {}),
    "copy": ("loop", "BabelStream", "nvbandwidth x 2"),
    **dict.fromkeys(("triad", "read", "write"), ("loop", "BabelStream")),
    "h2d": ("nvbandwidth",),
    "d2h": ("nvbandwidth",),
}


@pytest.fixture(scope="module")
def reference() -> Iterator[Any]:
    """The script as a module; ``reference.loops`` is the reference itself."""
    with benchmark_module("reference") as module:
        yield module


def environment(**changes: str) -> dict[str, str]:
    """As a user has it: nothing of torchrun's, no GPU, one thread."""
    own = {name: value for name, value in os.environ.items() if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    return {**own, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **changes}


@pytest.mark.long
def test_rehearsal_of_all(tmp_path: Path) -> None:
    """From another folder, not installed, without pytest: every quantity beside every method, strict JSON, exit 0."""
    names = [name for name in METHODS if name not in {"copy", "triad", "read", "write", "h2d", "d2h"}]
    arguments = ["--json", str(tmp_path / "out.json"), "--only", *names, "hbm", "host"]
    command = [sys.executable, "-c", WITHOUT_PYTEST.format(script=str(SCRIPT), arguments=arguments)]
    done = subprocess.run(command, cwd="/", env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert (content["judged"], content["world_size"], content["torch"]) == (False, 1, torch.__version__)
    rows = [row for part in content["benchmarks"] for row in part["rows"]]
    found = {quantity: tuple(row["method"] for row in rows if row["quantity"] == quantity) for quantity in METHODS}
    assert found == METHODS
    for row in rows:
        values = [row[name] for name in ("ours_before", "reference", "ours_after", "ratio", "drift")]
        assert all(math.isfinite(value) and value > 0 for value in values), row
        assert f"{row['quantity']}  " in done.stdout
    for part in content["benchmarks"]:
        assert [seen["what"] for seen in part["passes"]] == ["ours before", "reference", "ours after"]
        assert min(seen["seconds"] for seen in part["passes"]) > 0
    assert {figure["source"] for figure in content["tools"]} == {"2026-11-20-h200x1-peers"}


@pytest.mark.long
def test_two_ranks_add_the_all_reduce(tmp_path: Path) -> None:
    """Both ranks' rows, written and printed by rank 0 alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    arguments = [sys.executable, str(SCRIPT), "--only", "all_reduce", "--json", str(tmp_path / "out.json")]
    ranks = [
        subprocess.Popen(
            arguments,
            env=environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                GLOO_SOCKET_IFNAME="lo", GPUCLUSTER_NODE="0",
            ),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=90)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told[1] == ""
    assert "all_reduce rank 1  loop" in told[0]
    content = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [part["rank"] for part in content["benchmarks"]] == [0, 1]
    first, second = (part["rows"][0]["reference"] for part in content["benchmarks"])
    assert first == second > 0  # the slowest rank's time is everybody's


def test_the_reference_has_nothing_of_ours() -> None:
    """What is compared shares no code: no import of the package."""
    tree = ast.parse((BENCHMARKS / "reference_loops.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in imported if "gpucluster" in name or name.startswith("reference")]


# --- A disagreement ---


def planted(reference: Any, name: str, *, quantity: str, method: str, ratio: float) -> Any:
    """A benchmark of which ours is ``ratio`` times the reference's 4.0."""
    real = reference.BENCHMARKS[name]
    return reference.Benchmark(
        ours=lambda _sizes: {quantity: 4.0 * ratio},
        reference=lambda _sizes: {quantity: {method: 4.0}},
        kind=real.kind,
        unit=real.unit,
    )


@pytest.mark.parametrize(
    ("what", "ratio", "verdict"),
    [
        (("bf16_8192", "bf16_8192", "loop"), 1.029, "inside"),
        (("bf16_8192", "bf16_8192", "loop"), 1.031, "OUTSIDE"),
        (("bf16_8192", "bf16_8192", "loop"), 0.969, "OUTSIDE"),
        (("bf16_8192", "bf16_8192", "mamf-finder median"), 0.969, "OUTSIDE"),
        (("bf16_8192", "bf16_8192", "mamf-finder max"), 0.5, "shown"),
        (("bf16_sustained", "bf16_sustained", "loop"), 1.031, "OUTSIDE"),
        (("hbm", "copy", "loop"), 1.014, "inside"),
        (("hbm", "copy", "nvbandwidth x 2"), 2.0, "OUTSIDE"),
        (("hbm", "triad", "BabelStream"), 0.984, "OUTSIDE"),
        (("host", "h2d", "nvbandwidth"), 1.019, "inside"),
        (("host", "d2h", "nvbandwidth"), 0.979, "OUTSIDE"),
    ],
)
def test_a_planted_disagreement_is_marked(
    reference: Any, monkeypatch: pytest.MonkeyPatch, what: tuple[str, str, str], ratio: float, verdict: str
) -> None:
    """By the band of its kind, in the text, in the Markdown and by the exit code on a GPU; in a rehearsal in the tables."""
    name, quantity, method = what
    monkeypatch.setitem(reference.BENCHMARKS, name, planted(reference, name, quantity=quantity, method=method, ratio=ratio))
    ran = reference.compare(name, reference.REHEARSAL, 0)
    assert (ran.error, [reference.verdict_of(row) for row in ran.rows]) == (None, [verdict])
    assert ran.rows[0].ratio == pytest.approx(ratio)
    content = reference.content_of([ran], 1.0)
    for markdown in (False, True):
        told = reference.tables(content, markdown=markdown)
        line = next(line for line in told.splitlines() if method in line)
        assert verdict in line
        assert ("OUTSIDE" in told) == (verdict == "OUTSIDE")
    assert reference.exit_code({**content, "judged": True}) == (verdict == "OUTSIDE")
    assert reference.exit_code(content) == 0


def test_ours_is_the_mean_of_both_passes(reference: Any) -> None:
    """Drift between them is told apart from a disagreement."""
    one = reference.row("bf16_8192", "bf16_8192", "loop", (790.0, 780.0, 770.0))
    assert (one.ratio, one.within) == (1.0, True)
    assert one.drift == pytest.approx(770 / 790)


def test_a_failed_benchmark_is_told_and_the_next_one_runs(
    reference: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its error and the pass it came in stand in table and file, and the exit code is 1 even in a rehearsal."""

    def broken(_sizes: Any) -> None:
        raise RuntimeError("no FP8 here")

    bad = reference.Benchmark(ours=lambda _sizes: {"fp8_8192": 1.0}, reference=broken, kind="products", unit="TFLOPS")
    monkeypatch.setitem(reference.BENCHMARKS, "fp8_8192", bad)
    good = planted(reference, "hbm", quantity="copy", method="loop", ratio=1.0)
    monkeypatch.setitem(reference.BENCHMARKS, "hbm", good)
    assert reference.main(["--only", "fp8_8192", "hbm", "--json", str(tmp_path / "out.json")]) == 1
    told = capsys.readouterr().out
    assert "FAILED fp8_8192: RuntimeError in reference: no FP8 here" in told
    assert "\ncopy" in told
    parts = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["benchmarks"]
    assert [(part["benchmark"], bool(part["error"]), len(part["rows"])) for part in parts] == [
        ("fp8_8192", True, 0),
        ("hbm", False, 1),
    ]


def test_an_earlier_run_is_rendered_and_judged_again(
    reference: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``--from`` measures nothing, and the tools' own figures stand below with the record they are from."""
    monkeypatch.setattr(reference, "measure", lambda _names: pytest.fail("measured"))
    clock = {"sm_clock_mhz": 1755.4, "power_w": 690.6, "power_max_w": 700.0, "temperature_c": 60.0}
    seen = reference.Seen(what="reference", seconds=1.0, event_reasons=[], **clock)
    row = reference.row("hbm", "copy", "loop", (4.28, 4.1, 4.28))
    ran = reference.Ran(benchmark="hbm", rank=0, rows=[row], passes=[seen] * 3, error=None)
    content = {**reference.content_of([ran], 1.0), "device": "NVIDIA H200", "judged": True}
    (tmp_path / "in.json").write_text(json.dumps(content), encoding="utf-8")
    assert reference.main(["--from", str(tmp_path / "in.json"), "--markdown"]) == 1
    told = capsys.readouterr().out
    assert "| copy | loop | 4.28 | 4.1 | 4.28 | TB/s | 1.0439 | 1.5 % | OUTSIDE | " in told
    assert " | 1755 / 1755 / 1755 | 691 / 691 / 691 |" in told
    assert "| copy | BabelStream Copy 2^28 | 3.99304 | 2026-11-20-h200x1-peers |" in told


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["--only", "bf16"], "choose from"), (["--only", "all_reduce"], "all_reduce needs several ranks")],
)
def test_what_cannot_be_measured_is_refused(
    reference: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    """An unknown name and a collective of one are wrong usage, not an empty table."""
    with pytest.raises(SystemExit) as caught:
        reference.main(arguments)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


# --- What the reference counts ---


@pytest.fixture
def fixed_spans(reference: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every span runs its operation once and is said to last 1 ms an operation; the counts that were asked for."""
    counts: list[int] = []

    def span_s(operation: Callable[[], object], count: int) -> float:
        operation()
        counts.append(count)
        return 0.001

    monkeypatch.setattr(reference.loops, "span_s", span_s)
    return counts


def test_bytes_are_counted_as_the_tools_do(reference: Any, fixed_spans: list[int]) -> None:
    """Copy two arrays, triad three, read and write one; nvbandwidth's once, doubled; BabelStream in 100 rounds."""
    found = reference.loops.memory(80_000, 20)
    assert found["copy"] == pytest.approx(dict.fromkeys(METHODS["copy"], 0.00016))
    assert found["triad"] == pytest.approx(dict.fromkeys(METHODS["triad"], 0.00024))
    assert found["read"] == found["write"] == pytest.approx(dict.fromkeys(METHODS["read"], 0.00008))
    assert fixed_spans == [*([5] + [20] * 3 + [1] * 100) * 4, 4, 16, 16, 16]
    assert reference.loops.host_link(80_000) == {"h2d": {"nvbandwidth": 0.08}, "d2h": {"nvbandwidth": 0.08}}


def test_babelstream_drops_its_first_round_and_takes_the_best(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the first round counted, it would be the best here."""
    times_s = iter([9.0, 1.0, 1.0, 1.0, 0.001, *[0.5] * 98, 0.25])
    monkeypatch.setattr(reference.loops, "span_s", lambda _operation, _count: next(times_s))
    assert reference.loops._moved(lambda: None, 10**12, 20) == {"loop": 1.0, "BabelStream": 4.0}


def test_products_are_counted_by_two_n_cubed(reference: Any, fixed_spans: list[int]) -> None:
    """Over the median span; a span of short products is made long enough for the host's clock."""
    window = reference.loops.Window(products=6, bursts=2, rest_s=0.0, warmup_s=0.0)
    assert reference.loops.products_in_loop("bf16", 64, window)["loop"] == pytest.approx(2 * 64**3 / 0.001 / 1e12)
    assert fixed_spans == [1, 9, 10, 9, 10]


def test_mamf_finder_flushes_before_each_product_and_not_in_its_time(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many flushes as products, none of them timed; mean, median and max of the rates."""
    before: list[Any] = []
    assert reference.loops._alone_s(lambda: None, lambda: time.sleep(2.0)) < 2.0
    times_s = iter([0.1, 0.2, 0.4])
    monkeypatch.setattr(reference.loops, "_alone_s", lambda _multiply, first: (before.append(first()), next(times_s))[1])
    window = reference.loops.Window(products=3, bursts=1, rest_s=0.0, warmup_s=0.0, flush_bytes=16)
    found = reference.loops.products_by_mamf_finder("bf16", 64, window)
    flop = 2 * 64**3 / 1e12
    expected = {"mamf-finder mean": (10 + 5 + 2.5) / 3 * flop, "mamf-finder median": 5 * flop, "mamf-finder max": 10 * flop}
    assert found == pytest.approx(expected)
    assert [tuple(len(tensor) for tensor in queued) for queued in before] == [(16, 64)] * 3


def test_a_span_holds_launch_and_wait(reference: Any) -> None:
    """Per operation, by the host's clock."""
    assert 0.01 <= reference.loops.span_s(lambda: time.sleep(0.01), 30) < 0.2  # 0.3 undivided


def test_a_copy_that_does_not_arrive_is_an_error(reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference's own figure has to be of work that was done."""
    monkeypatch.setattr(reference.loops, "nvbandwidth_gb_s", lambda _copy, _bytes: 55.0)
    with pytest.raises(ArithmeticError, match="not what was sent"):
        reference.loops.host_link(4096)


def test_every_figure_of_a_tool_has_its_quantity(reference: Any) -> None:
    """None would be left out of the table for a misspelt name."""
    known = {*METHODS, "fp8_8192", "fp8_16384", "all_reduce"}
    figures = sys.modules["reference_tools"].FIGURES
    assert {figure.quantity for figure in figures} == known
    assert min(figure.value for figure in figures) > 0
