"""The command below a bad part selects the tests that it failed, and no others."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.judging.selection import Selector
from pytest_gpucluster.reporting.table import again
from tests.support.launching import PYTEST, environment, finished

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.long]

EXPECT = "--gpucluster-expect=nodes=2,gpus_per_node=4"
OWN = """
import pytest

IDS = ["a b", "$HOME", "`id`", "it's", 'say "x"', "a\\nb", "[x]", "[x]y", "x,y=1", "x::y", "UP", "up2"]

@pytest.mark.parametrize("value", IDS, ids=IDS)
def test_odd(value): pass

def test_plain(): pass
def test_plain_too(): pass
def test_own(): pass

class TestOne:
    def test_in_a_class(self): pass
class TestOneMore:
    def test_in_a_class_too(self): pass
"""


def collected(folder: Path, *words: str) -> list[str]:
    """The node ids that this command collects."""
    command = [*PYTEST, *words, "--collect-only", "-q"]
    run = finished(command, cwd=folder, variables=environment(measured=False))
    return [line for line in run.stdout.splitlines() if "::" in line]


def collected_by(folder: Path, selections: Iterable[str], *words: str) -> list[str]:
    """The node ids of all these commands, each as a shell reads its lines on a narrow screen."""
    found = []
    for selection in selections:
        lines = again(["-k", selection], ("pytest", *words), width=60, indent="      ")
        found += collected(folder, *shlex.split("\n".join(lines).replace("\\\n", ""))[1:])
    return found


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every test of the acceptance suite."""
    return collected(tmp_path_factory.mktemp("suite"), "--pyargs", "tests_acceptance", EXPECT)


@pytest.mark.parametrize(
    "words",
    [
        ["test_bf16_tflops[node1-cpu3]"],
        ["test_straggler[node1-cpu3-hbm_bandwidth]", "test_hbm_bandwidth[node1-cpu3]"],
        ["test_busbw[node1-all_reduce]", "test_finetune_check[finite]", "test_bf16_tflops[node1-cpu3]"],
        ["test_finetune_loss", "test_finetune_checks"],
        ["test_hbm_pattern[node0-cpu0]", "test_transport"],
    ],
)
def test_just_these_tests_of_the_suite(tmp_path: Path, suite: list[str], words: list[str]) -> None:
    """Others whose names begin alike, or that compare this criterion, are left out."""
    wanted = [nodeid for nodeid in suite if nodeid.rpartition("::")[2] in words]
    assert len(wanted) == len(words)
    selection = Selector({(nodeid, None): nodeid for nodeid in suite}).select((nodeid, None) for nodeid in wanted)
    assert collected_by(tmp_path, [selection], "--pyargs", "tests_acceptance", EXPECT) == wanted


def test_each_test_alone(tmp_path: Path) -> None:
    """Odd ids, names that are parts of others, and of a file: each selection finds its one test."""
    (tmp_path / "test_own.py").write_text(OWN, encoding="utf-8")
    (tmp_path / "test_other.py").write_text("def test_owner(): pass\ndef test_one(): pass\n", encoding="utf-8")
    every = collected(tmp_path, "-p", "no:gpucluster")
    tests = Selector({(nodeid, None): nodeid for nodeid in every})
    alone = {nodeid: collected_by(tmp_path, [tests.select([(nodeid, None)])], "-p", "no:gpucluster") for nodeid in every}
    assert {nodeid: found for nodeid, found in alone.items() if found != [nodeid]} == {}
