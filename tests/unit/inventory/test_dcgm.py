"""``dcgmi`` found, run under a deadline, and asked for its GPUs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory import dcgm
from pytest_gpucluster.inventory.dcgm import DcgmError, DcgmGpu
from tests.support.dcgm import NO_ENGINE, discovery, install

if TYPE_CHECKING:
    from pathlib import Path

UUIDS = {0: "GPU-934a71d6-e50c-86a3-f752-3743a8c1bbb2", 3: "GPU-34bf77d1-c686-6821-79a8-32d326c5039c"}
LONG_S = 60.0
CPUS = """1 CPU found.
+--------+----------------------------------------------------------------------+
| CPU ID | Device Information                                                   |
+--------+----------------------------------------------------------------------+
| 0      | Name: Grace                                                          |
+--------+----------------------------------------------------------------------+
"""


def program(folder: Path, text: str) -> str:
    """A script in place of ``dcgmi``."""
    path = folder / "dcgmi"
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


def test_numbers_and_uuids_of_the_table() -> None:
    """DCGM's numbers, which may have gaps; switches and CPUs are no GPUs."""
    found = dcgm.parse_discovery(discovery(UUIDS) + CPUS)
    assert found == [DcgmGpu(number=number, uuid=uuid) for number, uuid in UUIDS.items()]


def test_a_gpu_without_a_uuid_is_left_out() -> None:
    """As DCGM shows one that it cannot ask any more."""
    lost = discovery(UUIDS).replace("Device UUID: GPU-934a", "Return: GPU is lost  ")
    assert [gpu.number for gpu in dcgm.parse_discovery(lost)] == [3]


def test_one_uuid_twice_is_refused() -> None:
    """Nobody could tell which of them a result is about."""
    with pytest.raises(DcgmError, match="two GPUs one number"):
        dcgm.parse_discovery(discovery({0: UUIDS[0], 1: UUIDS[0]}))


def test_without_the_host_engine(tmp_path: Path) -> None:
    """What ``dcgmi`` said, and what to look for."""
    made = install(tmp_path / "bin", uuids=UUIDS, report="", before=NO_ENGINE) / "dcgmi"
    with pytest.raises(DcgmError, match=r"exit code 235: Error: unable to establish .* nv-hostengine"):
        dcgm.read_gpus(str(made), within_s=LONG_S)


def test_the_version(tmp_path: Path) -> None:
    """From the program; None where it says nothing that is one."""
    made = install(tmp_path / "bin", uuids=UUIDS, report="") / "dcgmi"
    assert dcgm.read_version(str(made), within_s=LONG_S) == "3.3.9"
    assert dcgm.read_version(program(tmp_path, "echo what?"), within_s=LONG_S) is None


def test_what_cannot_be_run_is_an_error_of_dcgm(tmp_path: Path) -> None:
    """With the same words."""
    with pytest.raises(DcgmError, match=r"^dcgmi diag: no answer within 1 s, so it was ended$"):
        dcgm.run(program(tmp_path, "sleep 1000"), ["diag"], within_s=1.0, grace_s=0.5)


def test_whether_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On PATH, and executable."""
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert dcgm.find_program() is None
    made = program(tmp_path, "exit 0")
    assert dcgm.find_program() == made
