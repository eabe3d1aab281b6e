"""The live screen of ``gpucluster watch``: boxes at 80 and 200 columns, kept as they were looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from pytest_gpucluster.commands.watch import live_lines
from pytest_gpucluster.commands.watch_screen import sparkline
from pytest_gpucluster.inventory.reading import NotAvailable
from tests.support.screens import kept_screen
from tests.support.watched import gpu, reading, settled, view, write_run

if TYPE_CHECKING:
    from pytest_gpucluster.commands.watch_screen import View

SCREENS = Path(__file__).with_name("screens")


def seen(folder: Path, **changes: Any) -> View:
    """A node that was read twelve times, GPU 0 ever busier, and a run that goes on."""
    past = tuple(
        reading(seconds=100 + 2 * one, gpus=[gpu(0, seconds=100, busy_percent=9 * one, power_w=60.0 * one)])
        for one in range(11)
    )
    shown = settled(write_run(folder / "run", nodes=2, done=0.9), holder=4711)
    return replace(shown, **{"history": (*past, reading(seconds=122)), **changes})


@pytest.mark.parametrize("width", [80, 200])
def test_the_whole_screen(width: int, tmp_path: Path) -> None:
    """Run, GPUs with sparklines of use and power, bad parts, ports, log, and the keys; nothing is wider than the terminal."""
    lines = [line.plain for line in live_lines(seen(tmp_path), width=width, height=60)]
    assert lines == kept_screen(SCREENS / f"watch-live-{width}.txt", lines)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert all(words in text for words in ("▄", "90 %", "45 of 50 checks", "bad so far", "mlx5_0/1", "NCCL INFO", "q quit"))
    assert [line[4] for line in lines if line[1:4] == "   " and line[4:5].isdigit()] == list("01234567")


def test_80_columns_and_24_lines(tmp_path: Path) -> None:
    """Whole boxes, the most important first; the last line says what is left out, and nothing scrolls."""
    lines = [line.plain for line in live_lines(seen(tmp_path), width=80, height=24)]
    assert len(lines) <= 24
    assert "below: ports, log" in lines[-1]
    assert sum(line.startswith("╭") for line in lines) == sum(line.startswith("╰") for line in lines) == 3


@pytest.mark.parametrize(
    ("shows", "inside", "outside"),
    [
        ("node", ("mlx5_0/1", "NVLink"), ("NCCL INFO", "45 of 50", "NCCL variables")),
        ("log", ("NCCL INFO",), ("mlx5_0/1", "NVLink", "45 of 50")),
    ],
)
def test_keys_show_one_part(shows: Any, inside: tuple[str, ...], outside: tuple[str, ...], tmp_path: Path) -> None:
    """The node, or the log; the last line says which key shows all again."""
    text = "\n".join(line.plain for line in live_lines(seen(tmp_path), width=120, height=60, shows=shows))
    assert all(words in text for words in inside)
    assert not any(words in text for words in outside)
    assert f"{shows[0]} all" in text


@pytest.mark.parametrize(("width", "words"), [(60, ("HW slow",)), (80, ("HW slow, HW heat",)), (120, ("hw_thermal_slowdown",))])
def test_what_is_bad_is_not_cut(width: int, words: tuple[str, ...], tmp_path: Path) -> None:
    """Of a lost GPU the whole reason; on a narrow terminal there are faults in place of sparklines, and whole numbers."""
    text = "\n".join(line.plain for line in live_lines(seen(tmp_path), width=width, height=60, shows="node"))
    for said in (*words, "  6 cannot be read: GPU is lost (nvmlDeviceGetUUID)", "692/700"):
        assert said in text


def test_no_width_and_no_lost_gpu_ends_the_watch(tmp_path: Path) -> None:
    """A window that is drawn together, and a driver that has lost every GPU."""
    lost = replace(seen(tmp_path), now=reading(seconds=102, gpus=[NotAvailable("GPU is lost")] * 8))
    for width in range(1, 30):
        assert live_lines(lost, width=width, height=8)
        assert live_lines(view(), width=width, height=8)
    assert sum("cannot be read: GPU is lost" in line.plain for line in live_lines(lost, width=60, height=60)) == 8


@pytest.mark.parametrize("width", [80, 120])
def test_columns_stand_still(width: int, tmp_path: Path) -> None:
    """Sparklines grow in a column that is as wide as all of it."""
    shown = seen(tmp_path)
    assert shown.now is not None
    many = replace(shown, history=(shown.now,) * 30)
    heads = [live_lines(one, width=width, height=60, shows="node")[1] for one in (replace(shown, history=()), shown, many)]
    assert heads[0].plain == heads[1].plain == heads[2].plain


def test_titles_have_the_colour_of_the_terminal(tmp_path: Path) -> None:
    """Frames are blue or red; blue letters on black are hard to read."""
    for line in live_lines(seen(tmp_path), width=80, height=60):
        if line.plain.startswith("╭"):
            style = line.get_style_at_offset(Console(), 4)
            assert (style.bold, style.color is None or style.color.is_default) == (True, True), line.plain


@pytest.mark.parametrize(
    ("values", "most", "blocks"),
    [([0, 50, 100], 100, "▁▄▇"), ([None, 700.0], 700.0, "·▇"), ([], 100, ""), ([0.0], None, "▁"), ([900.0], 700.0, "▇")],
)
def test_sparkline(values: list[float | None], most: float | None, blocks: str) -> None:
    """From nothing to the most; what is not known is no zero, and what is beyond the most is full."""
    assert sparkline(values, most=most) == blocks


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Without a driver, with one that hangs, before the first reading, and without a run."""
    shown = seen(tmp_path)
    bare = replace(reading(seconds=102), gpus=NotAvailable("there is no NVIDIA driver library here"))
    for changed, words in (
        (replace(shown, now=bare), "GPUs: there is no NVIDIA driver library here"),
        (replace(shown, silent_s=61.0), "has not answered for 61 s"),
        (replace(shown, now=None, silent_s=61.0), "waiting for the first reading, for 61 s now"),
        (replace(shown, run=replace(shown.run, problem="no journal yet")), "no journal yet"),  # type: ignore[type-var]
        (view(), "8 x NVIDIA"),
    ):
        text = "\n".join(line.plain for line in live_lines(changed, width=80, height=60))
        assert words in text.replace("7 x", "8 x")


def test_foreign_text_cannot_act_on_the_screen(tmp_path: Path) -> None:
    """Names, reasons and log lines: escaped, in their box."""
    evil = "\x1b[2J\r\n\t\u202e" + "verdict ACCEPTED" + "\N{FULLWIDTH LATIN CAPITAL LETTER A}" * 100
    odd = reading(seconds=102, gpus=[gpu(0, seconds=102, name=evil, event_reasons=[evil]), NotAvailable(evil)])
    shown = seen(tmp_path)
    assert shown.run is not None
    run = replace(shown.run, logs=((evil, evil),), source=evil, shape=evil, facts={"level": evil})
    for width in (40, 80, 200):
        lines = [line.plain for line in live_lines(replace(shown, run=run, now=odd, hostname=evil), width=width, height=80)]
        assert max(map(cell_len, lines)) <= width
        assert "".join(lines).isprintable()
