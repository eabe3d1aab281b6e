"""An error on one rank ends all ranks with its message: no rank waits in a collective."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.finetune.runs import CHEAP, forked

pytestmark = pytest.mark.slow

ELSEWHERE = "rank 1 cannot go on; its message says why"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By run: the report of each of the two ranks."""
    folder = tmp_path_factory.mktemp("together")
    adapters = [f"--adapter={folder / name / 'final'}" for name in ("long", "other")]
    copy = [(str(folder / "long" / "final"), str(folder / "twin"))]
    worlds = [
        {"name": "long", "world_size": 1, "settings": {**CHEAP, "output": str(folder / "long" / "final")}},
        {"name": "other", "world_size": 1, "settings": {**CHEAP, "fault": "lr0", "output": str(folder / "other" / "final")}},
        {"name": "row", "world_size": 2, "settings": CHEAP, "bad_row": 1},
        {"name": "room", "world_size": 2, "settings": {**CHEAP, "restore_check": True}, "no_room": 1},
        {"name": "stale", "world_size": 2, "evaluate": [[adapters[0]], [adapters[1]]]},
        {"name": "absent", "world_size": 2, "evaluate": [[adapters[0]], [f"--checkpoint-dir={folder}"]]},
        {"name": "twins", "world_size": 2, "evaluate": [[adapters[0]], [f"--adapter={folder / 'twin'}"]], "copy": copy},
        {"name": "prompts", "world_size": 2, "evaluate": [[adapters[0]], [adapters[0], "--heldout-rows=18"]]},
    ]
    forked(folder, worlds)
    pairs = [world["name"] for world in worlds if world["world_size"] == 2]
    return {name: [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in (0, 1)] for name in pairs}


CASES = {
    "a row that is no good, in the middle": ("row", None, [ELSEWHERE, "an example has 99 tokens: more than row_tokens = 64"]),
    "a full temporary folder": ("room", None, [ELSEWHERE, "no room for a temporary folder"]),
    "shares over two adapters would describe neither": ("stale", 2, ["rank 1 has another adapter, or other prompts,", ""]),
    "each node may have its own copy": ("twins", 0, ["", ""]),
    "other settings, so other prompts": ("prompts", 2, ["rank 1 was given another heldout_rows than rank 0", ""]),
    "a node without the checkpoints": ("absent", 2, [ELSEWHERE, "no complete checkpoint in"]),
}
"""What differs on rank 1 -> the run, the exit code of ``evaluate``, and what each rank says."""


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_end_with_their_message(reports: dict[str, list[dict[str, Any]]], case: str) -> None:
    """The rank concerned has the reason, the other one names that rank."""
    name, code, errors = CASES[case]
    for report, said in zip(reports[name], errors, strict=True):
        assert report.get("code") == code
        assert said in report["error"]
