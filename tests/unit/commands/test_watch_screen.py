"""The screen of ``gpucluster watch``: kept as it was looked at, at 80 and 200 columns."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from pytest_gpucluster.commands.watch import plain_text, screen_lines
from pytest_gpucluster.commands.watch_screen import progress_line
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.reporting.watched_run import RunPicture
from tests.support import REPOSITORY
from tests.support.screens import kept_screen
from tests.support.watched import gpu, port, reading, settled, view, write_run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pytest_gpucluster.commands.watch_screen import View

SCREENS = Path(__file__).with_name("screens")
NO_LIBRARY = NotAvailable("there is no NVIDIA driver library (libnvidia-ml.so.1) here")
NO_PORTS = NotAvailable("No such file or directory (/sys/class/infiniband)")
RUNS: dict[str, Any] = {
    "watch-node": None,
    "watch-run-2x8-goes-on": {"nodes": 2, "done": 0.6},
    "watch-run-64x8-ended": {
        "nodes": 64,
        "absent": [17],
        "verdict": "REJECTED: 2 failed, 24 missing on 64 nodes x 8 NVIDIA H200",
    },
}


def lines_of(shown: View, *, width: int) -> list[str]:
    """The lines of a log."""
    return plain_text(screen_lines(shown, width=width)).splitlines()


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", RUNS)
def test_screen(name: str, width: int, tmp_path: Path) -> None:
    """Eight GPUs stand in eight lines, none is wider than the screen, and no character acts on it."""
    known = RUNS[name]
    running = {"holder": 4711} if name.endswith("goes-on") else {}
    shown = view() if known is None else settled(write_run(tmp_path / "run", **known), **running)
    lines = lines_of(shown, width=width)
    assert lines == kept_screen(SCREENS / f"{name}-{width}.txt", lines)
    assert max(map(cell_len, lines)) <= width
    assert [line[4] for line in lines if re.match(r"    \d ", line)] == list("01234567")
    assert "\x1b" not in "".join(lines)


@pytest.mark.parametrize("width", [60, 80])
def test_no_line_but_of_a_log_is_cut(width: int, tmp_path: Path) -> None:
    """Each word of the wide screen stands in the narrow one."""
    shown = settled(write_run(tmp_path / "run", **RUNS["watch-run-2x8-goes-on"]), holder=4711)
    wide, narrow = (" ".join(line for line in lines_of(shown, width=one) if " | " not in line) for one in (400, width))
    assert "\N{HORIZONTAL ELLIPSIS}" not in narrow
    assert max(map(cell_len, lines_of(shown, width=width))) <= width
    numbers = [set(re.findall(r"[\d.]*\d(?: [A-Z]+)?", " ".join(text.split()))) for text in (wide, narrow)]
    assert numbers[0] - numbers[1] == set()


def test_colours_are_the_terminal_s_alone() -> None:
    """A fault is red on a terminal; a log has the same words."""
    (hot,) = (line for line in screen_lines(view(), width=200) if "hw_thermal_slowdown" in line.plain)
    style = hot.get_style_at_offset(Console(), hot.plain.index("hw_"))
    assert (style.bold, style.color is not None and style.color.number) == (True, 1)
    assert "\x1b" not in plain_text([hot])


@pytest.mark.parametrize("width", [80, 200])
def test_faults_stand_before_what_is_normal(width: int) -> None:
    """What is cut off is never the fault."""
    capped = gpu(0, seconds=102, event_reasons=["sw_power_cap", "applications_clocks_setting", "hw_thermal_slowdown"])
    (line,) = (one for one in lines_of(view(now=reading(seconds=102, gpus=[capped])), width=width) if one.startswith("    0 "))
    assert ("HW heat" if width == 80 else "hw_thermal_slowdown") in line


def rates_of(before: dict[str, int], now: dict[str, int]) -> Sequence[str]:
    """The two link columns of one GPU at two readings that are two seconds apart."""
    first, second = (
        reading(seconds=at, gpus=[gpu(0, seconds=at, counted_bytes=bytes_)]) for at, bytes_ in ((100, before), (102, now))
    )
    (line,) = (one for one in lines_of(view(before=first, now=second), width=80) if one.startswith("    0 "))
    return line.split()[7:9]


def test_rates_are_differences_over_the_time_between() -> None:
    """900 GB in two seconds are 450 GB/s."""
    zero = dict.fromkeys(("nvlink_tx", "nvlink_rx", "pcie_tx", "pcie_rx"), 0)
    now = {"nvlink_tx": 900 * 10**9, "nvlink_rx": 10**9, "pcie_tx": 0, "pcie_rx": 126 * 10**9}
    assert rates_of(zero, now) == ["450/0.5", "0.0/63"]


def test_a_counter_that_shrinks_was_reset() -> None:
    """No rate is said: neither a negative one nor that of the time since the reset."""
    before = dict.fromkeys(("nvlink_tx", "nvlink_rx", "pcie_tx", "pcie_rx"), 10**12)
    assert rates_of(before, {**before, "nvlink_tx": 10**9}) == ["-/0.0", "0.0/0.0"]


def test_the_first_reading_has_no_rates() -> None:
    """One reading of a counter is no rate."""
    lines = lines_of(view(before=None), width=80)
    assert [line.split()[7:9] for line in lines if line.startswith("    0 ")] == [["-/-", "-/-"]]
    (ports,) = (line for line in lines if line.startswith("  mlx5_0/1"))
    assert ports.split()[:5] == ["mlx5_0/1", "ACTIVE", "400", "-", "-"]


def test_a_gpu_that_says_nothing_has_no_zeros() -> None:
    """What is not available is a dash."""
    refused = NotAvailable("Not Supported")
    names = (
        "busy_percent",
        "memory_used_gib",
        "memory_gib",
        "temperature_c",
        "memory_temperature_c",
        "power_w",
        "power_limit_w",
    )
    silent = gpu(0, seconds=102, **dict.fromkeys((*names, "sm_clock_mhz", "memory_clock_mhz", "event_reasons"), refused))
    silent = replace(silent, counted_bytes=dict.fromkeys(silent.counted_bytes, refused))
    (line,) = (one for one in lines_of(view(now=reading(seconds=102, gpus=[silent])), width=80) if one.startswith("    0 "))
    assert line.split() == ["0", "-", "-/-", "-/-", "-/-", "-", "-", "-/-", "-/-", "-"]


def test_without_a_gpu_the_run_is_still_seen(tmp_path: Path) -> None:
    """It says why, and goes on with what it can see."""
    bare = reading(seconds=102, gpus=NO_LIBRARY, ports=NO_PORTS)
    shown = lines_of(replace(settled(write_run(tmp_path / "run", nodes=2)), now=bare, before=None), width=80)
    assert "  GPUs: there is no NVIDIA driver library (libnvidia-ml.so.1) here" in shown
    assert "  no InfiniBand, RoCE or EFA adapter is to be seen" in shown
    assert any("50 of 50 checks" in line for line in shown)


def test_a_driver_that_hangs_is_said() -> None:
    """Old values are not shown as new ones."""
    assert any("the driver has not answered for 61 s" in line for line in lines_of(view(silent_s=61.0), width=80))
    assert not any("has not answered" in line for line in lines_of(view(), width=80))
    assert any(
        "waiting for the first reading, for 61 s now" in line for line in lines_of(view(now=None, silent_s=61.0), width=80)
    )


def test_foreign_text_cannot_act_on_the_screen(tmp_path: Path) -> None:
    """Names of GPUs, ports and hosts, log lines and variables: escaped, in one line, within the screen."""
    evil = "\x1b[2J\r\n\t\u202e" + "verdict ACCEPTED" + "\N{FULLWIDTH LATIN CAPITAL LETTER A}" * 100
    run = write_run(tmp_path / "run", nodes=2)
    odd = reading(
        seconds=102,
        gpus=[gpu(0, seconds=102, name=evil, event_reasons=[evil]), NotAvailable(evil)],
        ports=[replace(port(0, seconds=102), name=evil, state=evil)],
    )
    changes = {"logs": ((evil, evil),), "variables": {f"NCCL_X={evil}": ("node0",)}, "facts": {"level": evil}, "shape": evil}
    node = replace(settled(run).run.nodes[0], hostname=evil, reasons=(evil,))  # type: ignore[union-attr]
    bad = replace(settled(run, **changes, nodes=(node,), verdict_line=evil, source=evil), now=odd, hostname=evil)
    for width in (40, 80, 200):
        text = plain_text(screen_lines(bad, width=width))
        assert max(map(cell_len, text.splitlines())) <= width
        assert text.replace("\n", "").isprintable()
        assert not any(line.startswith("verdict") for line in text.splitlines())


def test_the_picture_of_the_docs_shows_what_is_shown_today() -> None:
    """``python docs/images/draw.py watch`` draws it anew."""
    spec = importlib.util.spec_from_file_location("draw", REPOSITORY / "docs" / "images" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    kept = (draw.IMAGES / "watch.svg").read_text(encoding="utf-8")
    assert draw.watch_picture() == kept
    assert "url(http" not in kept


def test_the_share_of_a_run_is_a_whole_percent() -> None:
    """29 of 100 were 28 % on the plain screen."""
    run = RunPicture(source="", facts={}, counts={"passed": 29}, expected=100, places={})
    assert progress_line(run).plain == "[####------------] 29 %, 29 of 100 checks after 0:00"
