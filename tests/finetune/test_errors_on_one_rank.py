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


def test_row_that_is_no_good(reports: dict[str, list[dict[str, Any]]]) -> None:
    """One rank reads a bad row in the middle of the training."""
    assert [rank["error"] for rank in reports["row"]] == [ELSEWHERE, "an example has 99 tokens: more than row_tokens = 64"]


def test_restore_that_cannot_be_tried(reports: dict[str, list[dict[str, Any]]]) -> None:
    """One node's temporary folder is full."""
    assert [rank["error"] for rank in reports["room"]] == [ELSEWHERE, "no room for a temporary folder"]


def test_stale_adapter_on_a_node(reports: dict[str, list[dict[str, Any]]]) -> None:
    """Shares over two different adapters would describe neither."""
    assert [rank["code"] for rank in reports["stale"]] == [2, 2]
    assert "rank 1 has another adapter, or other prompts, than rank 0" in reports["stale"][0]["error"]


def test_the_same_adapter_elsewhere(reports: dict[str, list[dict[str, Any]]]) -> None:
    """Each node may have its own copy."""
    assert [rank["code"] for rank in reports["twins"]] == [0, 0]


def test_other_settings(reports: dict[str, list[dict[str, Any]]]) -> None:
    """Another seed would give other prompts."""
    assert [rank["code"] for rank in reports["prompts"]] == [2, 2]
    assert "rank 1 was given another heldout_rows than rank 0" in reports["prompts"][0]["error"]


def test_checkpoints_that_one_node_does_not_have(reports: dict[str, list[dict[str, Any]]]) -> None:
    """The rank that misses the file prints the message."""
    assert [rank["code"] for rank in reports["absent"]] == [2, 2]
    assert ELSEWHERE in reports["absent"][0]["error"]
    assert "no complete checkpoint in" in reports["absent"][1]["error"]
