"""A checkpoint is resumed by any number of ranks under any strategy, and a signal to any rank stops all of them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.finetune.runs import CHEAP, failed, forked

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

SAVED = {**CHEAP, "rows": 12, "heldout_rows": 4, "checkpoint_every": 3}
WORLDS = {"one": (1, "auto"), "ddp2": (2, "ddp"), "fsdp2": (2, "fsdp"), "ddp3": (3, "ddp")}
"""Name -> ranks and strategy."""

OWN = {
    "two-one": ("ddp2", "one", {"rows": 6, "rows_shared": False}),
    "one-two": ("one", "ddp2", {"rows": 12, "rows_shared": False}),
    "two-three": ("ddp2", "ddp3", {"rows": 6, "rows_shared": False}),
    "two-three-passes": ("ddp2", "ddp3", {"rows": 1, "rows_shared": False, "accumulation": 6}),
    "passes": ("one", "one", {"rows": 5, "accumulation": 2}),
}
"""Changes after which the settings alone would make another batch: from, to, settings."""

WHOLE = ("one", "ddp2", "fsdp2")
CHANGES = [
    ("one", "ddp2"), ("ddp2", "one"), ("ddp2", "ddp3"), ("ddp2", "fsdp2"),
    ("fsdp2", "ddp2"), ("fsdp2", "one"), ("one", "fsdp2"),
]  # fmt: skip


def world(name: str, kind: str, folder: Path, *, of: str = "", **settings: Any) -> dict[str, Any]:
    """A run with checkpoints in a directory of its own; ``of``: it goes on from step 3 of that run."""
    size, strategy = WORLDS[kind]
    own = {"checkpoint_dir": str(folder / name), "strategy": strategy, **({"resume": "auto"} if of else {})}
    copy = [(str(folder / of / "step-3"), str(folder / name / "step-3"))] if of else []
    return {"name": name, "world_size": size, "settings": {**SAVED, **own, **settings}, "copy": copy}


def rows_of(folder: Path, name: str, ranks: int) -> dict[int, list[int]]:
    """The rows that all ranks of a run trained on, by step, sorted."""
    by_rank = [json.loads((folder / f"{name}.{rank}.json").read_text())["rows"] for rank in range(ranks)]
    return {int(step): sorted(number for rows in by_rank for number in rows[step]) for step in by_rank[0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all checkpoints."""
    return tmp_path_factory.mktemp("worlds")


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, dict[str, Any]]:
    """Whole runs, and each change from step 3 of one of them."""
    worlds = [world(name, name, folder) for name in WHOLE]
    worlds += [world(f"{before}-{after}", after, folder, of=before) for before, after in CHANGES]
    worlds += [world(name, after, folder, of=before, **settings) for name, (before, after, settings) in OWN.items()]
    worlds.append(world("odd", "one", folder, rows=9, steps=3))
    worlds.append(world("unshared", "ddp2", folder, of="odd", rows=1, rows_shared=False, steps=3))
    apart = {"fault": "post-bitflip-once:1", "steps": 15, "digest_every": 0, "keep_checkpoints": 2}
    worlds.append(world("apart", "ddp2", folder, **apart))
    slow = world("slow", "ddp2", folder, steps=3)
    worlds.append({**slow, "settings": {**slow["settings"], "fault": "straggler:1", "spread_limit": 1.75}})
    worlds.append({**slow, "name": "slow-again", "settings": {**slow["settings"], "resume": "auto"}})
    changed = world("changed", "fsdp2", folder, steps=3)
    worlds.append({**changed, "settings": {**changed["settings"], "fault": "base-late:1"}})
    worlds.append({**changed, "name": "changed-again", "settings": {**changed["settings"], "resume": "auto"}})
    worlds.append({**world("full", "ddp2", folder), "full_disk": True})
    stopped = world("stopped", "ddp2", folder, steps=9, checkpoint_every=0, window_steps=3)
    worlds.append({**stopped, "signal": {"rank": 1, "step": 3}})
    worlds.append({**stopped, "name": "went-on", "settings": {**stopped["settings"], "resume": "auto"}})
    worlds.append(world("not-stopped", "ddp2", folder, steps=9))
    return forked(folder, worlds)


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_losses_go_on_in_another_world(outcomes: dict[str, dict[str, Any]], before: str, after: str) -> None:
    """Steps 3 to 5 as the run that saved would have had them, to 1e-5 in float32; what was before is kept to the bit."""
    changed, whole = outcomes[f"{before}-{after}"], outcomes[before]
    assert (changed["resumed_at"], changed["world_size"]) == (3, WORLDS[after][0])
    assert changed["losses"][:3] == whole["losses"][:3]
    assert changed["losses"][3:] == pytest.approx(whole["losses"][3:], rel=1e-5)
    assert failed(changed) == set()


@pytest.mark.parametrize(
    ("name", "ranks"), [*((f"{a}-{b}", WORLDS[b][0]) for a, b in CHANGES), *((n, WORLDS[OWN[n][1]][0]) for n in OWN)]
)
def test_each_row_is_read_as_often_as_without_a_change(
    outcomes: dict[str, dict[str, Any]], folder: Path, name: str, ranks: int
) -> None:
    """12 rows a step, one sequence: steps 3 to 5 read rows 36 to 71, once each, whoever reads them."""
    assert outcomes["one"]["step_rows"] == 12
    before = rows_of(folder, "one", 1)
    assert [number for step in range(6) for number in before[step]] == list(range(72))
    after = rows_of(folder, name, ranks)
    assert {step: after[step] for step in sorted(after)} == {step: before[step] for step in (3, 4, 5)}


@pytest.mark.parametrize("name", OWN)
def test_rows_of_a_step_are_kept(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """The losses are kept too, and a note says so."""
    changed, whole = outcomes[name], outcomes[OWN[name][0]]
    assert (changed["resumed_at"], changed["step_rows"]) == (3, 12)
    assert changed["losses"] == pytest.approx(whole["losses"], rel=1e-5)
    assert "checkpoint step-3 was trained on 12 rows a step, these settings make" in changed["notes"][0]


def test_ranks_that_cannot_share_the_rows_of_a_step_are_refused(outcomes: dict[str, dict[str, Any]], folder: Path) -> None:
    """9 rows and two ranks are refused on both, and the checkpoint stays."""
    assert outcomes["unshared"] == {}
    said, _ = (json.loads((folder / f"unshared.{rank}.json").read_text())["error"] for rank in (0, 1))
    assert "trained on 9 rows a step, which 2 ranks cannot share: resume it with a number of ranks that divides 9" in said
    assert [path.name for path in (folder / "unshared").iterdir()] == ["step-3"]


@pytest.mark.parametrize("name", ["changed", "changed-again"])
def test_base_that_changed_is_no_less_changed_for_a_restart(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """The restarted run loads a fresh base, which is healthy; the failure is carried all the same."""
    check = outcomes[name]["checks"]["base_digest"]
    assert (check["passed"], check["ranks"]) == (False, [1])
    assert check["detail"].startswith("frozen weights of rank 1 have other bits than before training")


def test_ranks_that_differ_are_not_saved(outcomes: dict[str, dict[str, Any]], folder: Path) -> None:
    """The ranks differ from step 10 on, before a digest is due: the last two good checkpoints stay."""
    assert sorted(path.name for path in (folder / "apart").glob("step-*")) == ["step-6", "step-9"]
    (note,) = outcomes["apart"]["notes"]
    assert "no checkpoint of steps 12, 15: adapter_digest: adapters and optimiser after step 12: ranks 0 and 1 differ" in note
    assert not outcomes["apart"]["checks"]["adapter_digest"]["passed"]


def test_failure_of_the_end_is_remembered_over_a_restart(outcomes: dict[str, dict[str, Any]]) -> None:
    """A slow rank is seen by its steps, and a run that is resumed at its end makes none."""
    for name in ("slow", "slow-again"):
        verdict = outcomes[name]["checks"]["step_time_spread"]
        assert not verdict["passed"]
        assert verdict["ranks"] == [1]
    assert outcomes["slow-again"]["resumed_at"] == 3
    assert "checkpoint step-3, of 2 ranks, carries a failure of step_time_spread" in outcomes["slow-again"]["notes"]


def test_disk_that_refuses_the_marker_ends_all_ranks(outcomes: dict[str, dict[str, Any]], folder: Path) -> None:
    """Only rank 0 writes the marker; the other rank must not wait for it."""
    assert outcomes["full"] == {}
    first, second = (json.loads((folder / f"full.{rank}.json").read_text())["error"] for rank in (0, 1))
    assert "step-3 cannot be written: no space left for _SUCCESS" in first
    assert second == "rank 0 cannot go on; its message says why"


def test_worlds_agree_at_all(outcomes: dict[str, dict[str, Any]]) -> None:
    """The whole runs have one curve; a resumed one that did not load the optimiser would leave it."""
    assert outcomes["ddp2"]["losses"] == pytest.approx(outcomes["one"]["losses"], rel=1e-5)
    assert outcomes["fsdp2"]["losses"] == pytest.approx(outcomes["one"]["losses"], rel=1e-5)
    assert outcomes["one"]["losses"][3:] != pytest.approx(outcomes["one"]["losses"][:3], rel=1e-2)


def test_signal_to_one_rank_stops_all_with_a_checkpoint(outcomes: dict[str, dict[str, Any]]) -> None:
    """Rank 1 receives the signal after step 3; all ranks save after the next window, and compare the base once more."""
    stopped = outcomes["stopped"]
    assert stopped["stopped"]
    assert stopped["steps"] == 6
    assert stopped["exact_match"] is None
    assert stopped["checks"]["base_digest"] == {"passed": True, "detail": "2 of 2 looks", "ranks": []}


def test_stopped_run_goes_on_to_the_same_end(outcomes: dict[str, dict[str, Any]]) -> None:
    """The end is the same to the bit, at the same world size."""
    went_on, whole = outcomes["went-on"], outcomes["not-stopped"]
    assert went_on["resumed_at"] == 6
    assert not went_on["stopped"]
    assert went_on["losses"] == whole["losses"]
    assert went_on["adapter_digest"] == whole["adapter_digest"]
