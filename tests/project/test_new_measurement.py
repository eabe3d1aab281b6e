"""What CONTRIBUTING.md says of a new measurement, followed: one module, one entry, one test, and the rest is derived."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

import pytest_gpucluster.measurements
from pytest_gpucluster.cli import main as cli
from pytest_gpucluster.fleet import model
from pytest_gpucluster.fleet.simulated_call import SimulatedGroup
from pytest_gpucluster.fleet.simulation import parse_simulation
from pytest_gpucluster.protocol.messages import Failure, FunctionName, Success, read_reply
from tests.project import test_readings
from tests.project.test_docs import script

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "pytest_gpucluster.measurements.copy_latency"
MODULE = '''"""The time of a small copy inside a GPU."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from pytest_gpucluster.inventory.reading import EVIDENCE, judged
from pytest_gpucluster.measurements import timing
from pytest_gpucluster.protocol.functions import simulated_by

if TYPE_CHECKING:
    from pytest_gpucluster.fleet.simulated_call import SimulatedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyLatency:
    """Microseconds of one copy; ``copy_us`` is the median."""

    copy_us: float = judged("launch_latency")
    repeats_us: list[float] = judged("launch_latency")
    size_bytes: int = judged(EVIDENCE, "of the same")


def _simulated(call: SimulatedCall) -> CopyLatency:
    copy_us, asked = call.near(12.0, "copy", chip=0.01), call.kwargs
    return CopyLatency(copy_us=copy_us, repeats_us=call.repeats(copy_us, asked["repeats"]), size_bytes=asked["size_bytes"])


@simulated_by(_simulated)
def copy_latency(*, size_bytes: int, repeats: int) -> CopyLatency:
    """Copy ``size_bytes`` inside the current device, ``repeats`` times."""
    source = torch.ones(size_bytes, dtype=torch.uint8, device=timing.current_device())
    times_us = [_copy_us(source) for _ in range(repeats)]
    return CopyLatency(copy_us=statistics.median(times_us), repeats_us=times_us, size_bytes=size_bytes)


def _copy_us(source: torch.Tensor) -> float:
    start_s = time.perf_counter()
    source.clone()
    timing.synchronize()
    return 1e6 * (time.perf_counter() - start_s)
'''
ENTRY = """schema: 1
extends: packaged
criteria:
  copy_latency:
    criterion: Every GPU copies a few bytes inside its memory without delay.
    per: gpu
    below: 100
    unit: us
    level: standard
    severity: advisory
    recipe: {size_bytes: 4096, repeats: 100, at_once: 1}
    why: A host that is held back is slower, and every small operation with it.
    source: a guess, so the limit is advisory
"""
TEST = '''"""Copies."""

from pytest_gpucluster.measurements.copy_latency import copy_latency
from tests_acceptance.conftest import measured

copies = measured(copy_latency, "copy_latency")
"""A few bytes copied inside every GPU, one GPU of a node at a time."""


def test_copy_latency(copies, place, criterion):
    """The median of the copies, each waited for."""
    criterion.require(copies.repeated(place, "copy_us", "repeats_us"))
'''


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose module belongs to the measurements, as if it lay there."""
    (tmp_path / "copy_latency.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setattr(pytest_gpucluster.measurements, "__path__", [*pytest_gpucluster.measurements.__path__, str(tmp_path)])
    yield tmp_path
    if sys.modules.pop(NAME, None) is not None:
        del pytest_gpucluster.measurements.copy_latency


def answered(**kwargs: int) -> Success | Failure:
    """What a rank of a simulated fleet answers."""
    name = FunctionName(module=NAME, qualname="copy_latency", file="", relative="", digest="")
    group = SimulatedGroup(simulation=parse_simulation("1x8", faults=[]), ranks=(3,))
    reply = model.answer(group, name, rank=3, kwargs=kwargs)
    read = read_reply(reply.to_json())
    assert isinstance(read, (Success, Failure))
    return read


def test_a_simulated_fleet_has_its_value(added: Path) -> None:
    """From the module alone."""
    assert added
    reply = answered(size_bytes=4096, repeats=5)
    assert isinstance(reply, Success)
    assert len(reply.value.repeats_us) == 5
    assert abs(reply.value.copy_us / 12 - 1) <= 0.02


def test_without_the_mark_a_simulated_fleet_says_so(added: Path) -> None:
    """No value is made up."""
    (added / "copy_latency.py").write_text(MODULE.replace("@simulated_by(_simulated)\n", ""), encoding="utf-8")
    assert isinstance(answered(size_bytes=4096, repeats=5), Failure)


def test_its_fields_have_their_judges(added: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The check of the readings sees the rows beside the fields, and the printed table has them."""
    assert added
    test_readings.test_every_field_has_its_row()
    assert {row.fields for row in test_readings.rows() if row.kind == "CopyLatency"} == {
        ("copy_us",),
        ("repeats_us",),
        ("size_bytes",),
    }
    script("generate_readings.py").main()
    assert re.search(r"\| `copy_us` \|.*`launch_latency`", capsys.readouterr().out)


def test_a_field_without_a_row_is_seen(added: Path) -> None:
    """A field that nobody judges, in silence."""
    (added / "copy_latency.py").write_text(MODULE.replace(': int = judged(EVIDENCE, "of the same")', ": int"), encoding="utf-8")
    with pytest.raises(AssertionError):
        test_readings.test_every_field_has_its_row()


@pytest.mark.parametrize(("test", "code"), [(TEST, 0), (TEST.replace("test_copy_latency", "test_copies"), 1)])
def test_the_entry_and_its_test_are_a_pair(tmp_path: Path, capsys: pytest.CaptureFixture[str], test: str, code: int) -> None:
    """By their name; an entry whose test is missing is named."""
    (tmp_path / "site.yaml").write_text(ENTRY, encoding="utf-8")
    (tmp_path / "test_copies.py").write_text(test, encoding="utf-8")
    assert cli(["lint", str(tmp_path / "site.yaml")]) == code
    assert ("no problems" in capsys.readouterr().out) is (code == 0)
