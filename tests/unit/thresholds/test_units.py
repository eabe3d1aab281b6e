"""Units that the file does not take: the number in the unit that it does take."""

from __future__ import annotations

import pytest

from pytest_gpucluster.thresholds.schema import conversion


@pytest.mark.parametrize(
    ("unit", "number", "said"),
    [
        ("MB/s", 500, "say 0.5 GB/s"),
        ("MBps", 500, "say 0.5 GB/s"),
        ("MByte/sec", 500, "say 0.5 GB/s"),
        ("kB/s", 500_000, "say 0.5 GB/s"),
        ("KB/s", 500_000, "say 0.5 GB/s"),
        ("B/s", 5e8, "say 0.5 GB/s"),
        ("bytes/s", 5e8, "say 0.5 GB/s"),
        ("PB/s", 0.001, "say 1000 GB/s"),
        ("MiB/s", 1000, "say 1.048576 GB/s"),
        ("GiB/s", 1, "say 1.073741824 GB/s"),
        ("Gb/s", 4, "say 0.5 GB/s"),
        ("Gbps", 4, "say 0.5 GB/s"),
        ("gbps", 4, "say 0.5 GB/s"),
        ("Gbit/s", 400, "say 50 GB/s"),
        ("Tbit/s", 0.4, "say 50 GB/s"),
        ("Mb/s", 4000, "say 0.5 GB/s"),
        ("GB", 2**30 / 1e9, "say 1 GiB"),
        ("MB", 2**30 / 1e6, "say 1 GiB"),
        ("TB", 2**30 / 1e12, "say 1 GiB"),
        ("MiB", 512, "say 0.5 GiB"),
        ("TiB", 1, "say 1024 GiB"),
        ("GFLOPS", 500, "say 0.5 TFLOPS"),
        ("PFLOPS", 0.5, "say 500 TFLOPS"),
        ("GOPS", 500, "say 0.5 TOPS"),
        ("GHz", 1.5, "say 1500 MHz"),
        ("kW", 0.7, "say 700 W"),
        ("mW", 700_000, "say 700 W"),
        ("ns", 500, "say 0.5 us"),
        ("min", 2, "say 120 s"),
        ("minutes", 2, "say 120 s"),
        ("h", 2, "say 7200 s"),
        ("hours", 2, "say 7200 s"),
    ],
)
def test_the_number_is_converted(unit: str, number: float, said: str) -> None:
    """Prefixes of bytes, bits, rates, powers and times, however they are written."""
    assert conversion(unit, number) == f" For {number:.10g} {unit} {said}."


@pytest.mark.parametrize("unit", ["MB/s", "Gb/s", "GB", "Tbit/s", "KiB"])
def test_without_a_number_one_is_converted(unit: str) -> None:
    """A table of numbers, or none at all: what one of the unit is."""
    text = conversion(unit, None)
    assert text is not None
    assert text.startswith(f" 1 {unit} is ")


@pytest.mark.parametrize("unit", ["TFLOP", "parts", "", "mb/s", "percent", "Gx/s", "GB/s/GPU", "5"])
def test_what_is_no_other_unit(unit: str) -> None:
    """Nothing to convert: a misspelt one, a unit of something else, a prefix that could be two things."""
    assert conversion(unit, 5) is None
