"""The command below a bad part selects the tests that it failed."""

from __future__ import annotations

import shlex
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.judging.culprits import find_culprits
from pytest_gpucluster.reporting.next_steps import again
from tests.support.fleet_records import failed, fleet
from tests.support.runs import PYTEST, environment

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

EXPECT = "--gpucluster-expect=nodes=2,gpus_per_node=4"
FAILED = {
    "test_bf16_tflops[node1-cpu3]": ("bf16_tflops", "node1-cpu3"),
    "test_straggler[node1-cpu3-hbm_bandwidth]": ("straggler[hbm_bandwidth]", "node1-cpu3"),
    "test_busbw[node1-all_reduce]": ("busbw[all_reduce]", "node1"),
    "test_finetune_check[finite]": ("finetune_check[finite]", None),
}


@pytest.mark.parametrize(
    "names", [list(FAILED)[:1], list(FAILED)[1:2], list(FAILED)[2:3], list(FAILED)[:2], [*list(FAILED)[:2], *list(FAILED)[3:]]]
)
def test_the_command_selects_what_failed(tmp_path: Path, names: list[str]) -> None:
    """As a shell reads it, broken over several lines; of other places nothing is selected but cluster-wide tests."""
    places = fleet(2, 4, device="cpu")
    where = FAILED[names[0]][1]
    bad = [failed(*FAILED[name], 1.0, culprits=(where,), blames="gpu") for name in names]
    (culprit,) = find_culprits(bad, places)
    command = again(culprit.selection, ("pytest", "--pyargs", "tests_acceptance", EXPECT), width=60, indent="      ")
    words = shlex.split("\n".join(command).replace("\\\n", ""))
    run: Any = subprocess.run(
        [sys.executable, *PYTEST[1:], *words[1:], "--collect-only", "-q"],
        cwd=tmp_path,
        env=environment(measured=False),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    selected = {line.rpartition("::")[2] for line in run.stdout.splitlines() if "::" in line}
    assert set(names) <= selected, run.stdout
    assert [name for name in selected if f"{where}" not in name and "finetune_check" not in name] == []
