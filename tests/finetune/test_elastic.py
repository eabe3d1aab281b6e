"""A checkpoint is resumed by any number of ranks under any strategy, and a signal to any rank stops all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from finetune_runs import QUICK, REPOSITORY

CHEAP = {
    **QUICK,
    "rows": 12,
    "audit_every": 0,
    "greedy_rows": 0,
    "restore_check": False,
    "heldout_rows": 4,
    "checkpoint_every": 3,
}
WORLDS = {"one": (1, "auto"), "ddp2": (2, "ddp"), "fsdp2": (2, "fsdp"), "ddp3": (3, "ddp")}
"""Name -> ranks and strategy."""

WHOLE = ("one", "ddp2", "fsdp2")
CHANGES = [
    ("one", "ddp2"), ("ddp2", "one"), ("ddp2", "ddp3"), ("ddp2", "fsdp2"),
    ("fsdp2", "ddp2"), ("fsdp2", "one"), ("one", "fsdp2"),
]  # fmt: skip


def world(name: str, kind: str, folder: Path, **settings: Any) -> dict[str, Any]:
    """A run with checkpoints in a directory of its own."""
    size, strategy = WORLDS[kind]
    own = {"checkpoint_dir": str(folder / name), "strategy": strategy}
    return {"name": name, "world_size": size, "settings": {**CHEAP, **own, **settings}}


def run_worlds(folder: Path, worlds: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Their outcomes by name."""
    (folder / "worlds.json").write_text(json.dumps(worlds))
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "forked_worlds.py", folder],
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {each["name"]: json.loads((folder / f"{each['name']}.json").read_text()) for each in worlds}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Whole runs, and each change from step 3 of one of them."""
    folder = tmp_path_factory.mktemp("worlds")
    worlds = [world(name, name, folder, checkpoint_async=name == "ddp2") for name in WHOLE]
    for before, after in CHANGES:
        name = f"{before}-{after}"
        changed = world(name, after, folder, resume="auto")
        worlds.append({**changed, "copy": [(str(folder / before / "step-3"), str(folder / name / "step-3"))]})
    stopped = world("stopped", "ddp2", folder, steps=9, checkpoint_every=0, window_steps=3)
    worlds.append({**stopped, "signal": {"rank": 1, "step": 3}})
    worlds.append({**stopped, "name": "went-on", "settings": {**stopped["settings"], "resume": "auto"}})
    worlds.append(world("not-stopped", "ddp2", folder, steps=9))
    return run_worlds(folder, worlds)


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_losses_go_on_in_another_world(outcomes: dict[str, dict[str, Any]], before: str, after: str) -> None:
    """Steps 3 to 5 as the run that saved would have had them, to 1e-5 in float32; what was before is kept to the bit."""
    changed, whole = outcomes[f"{before}-{after}"], outcomes[before]
    assert (changed["resumed_at"], changed["world_size"]) == (3, WORLDS[after][0])
    assert changed["losses"][:3] == whole["losses"][:3]
    assert changed["losses"][3:] == pytest.approx(whole["losses"][3:], rel=1e-5)
    assert [name for name, check in changed["checks"].items() if not check["passed"]] == []


def test_worlds_agree_at_all(outcomes: dict[str, dict[str, Any]]) -> None:
    """The whole runs have one curve; a resumed one that did not load the optimiser would leave it."""
    assert outcomes["ddp2"]["losses"] == pytest.approx(outcomes["one"]["losses"], rel=1e-5)
    assert outcomes["fsdp2"]["losses"] == pytest.approx(outcomes["one"]["losses"], rel=1e-5)
    assert outcomes["one"]["losses"][3:] != pytest.approx(outcomes["one"]["losses"][:3], rel=1e-2)


def test_signal_to_one_rank_stops_all_with_a_checkpoint(outcomes: dict[str, dict[str, Any]]) -> None:
    """Heard by rank 1 after step 3, agreed on after the next window, saved at its end."""
    stopped = outcomes["stopped"]
    assert stopped["stopped"]
    assert stopped["steps"] == 6
    assert stopped["exact_match"] is None


def test_stopped_run_goes_on_to_the_same_end(outcomes: dict[str, dict[str, Any]]) -> None:
    """To the bit, at the same world size."""
    went_on, whole = outcomes["went-on"], outcomes["not-stopped"]
    assert went_on["resumed_at"] == 6
    assert not went_on["stopped"]
    assert went_on["losses"] == whole["losses"]
    assert went_on["adapter_digest"] == whole["adapter_digest"]
