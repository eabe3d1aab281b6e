"""Three ranks, the fault on the last: its check finds it and names that rank, and finds nothing where nothing is wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.finetune.runs import ONE_RANK, QUICK, failed, forked

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

pytestmark = pytest.mark.long

GUILTY = 2
CAUGHT = {**ONE_RANK, "graph-bitflip": "graph_lock_step"}
BY_DAY = ("base", "bitflip", "graph-bitflip", "post-bitflip-once", "wrongdata", "straggler", "truncate-ckpt")
"""One fault for each check. The others go the same road, and two ranks have them by day (test_ranks.py)."""
AT_NIGHT = [pytest.param(name, check, marks=pytest.mark.slow) for name, check in CAUGHT.items() if name not in BY_DAY]

CHEAP = {**QUICK, "rows": 6, "heldout_rows": 3, "greedy_rows": 0, "restore_check": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "post-bitflip-once": {"steps": 12, "window_steps": 12},
    "straggler": {"spread_limit": 1.75},
    "graph-bitflip": {"cuda_graph": True},
    "truncate-ckpt": {"restore_check": True},
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> dict[str, dict[str, Any]]:
    """The faults by day, and runs without one: as it is, with replayed steps, and on equal texts."""
    folder = tmp_path_factory.mktemp("three")
    texts = folder / "texts"
    texts.mkdir()
    (texts / "same.jsonl").write_text((json.dumps({"text": "USER: what is the weather in Oslo"}) + "\n") * 40)
    runs = fault_settings(BY_DAY)
    runs |= {"clean": {"restore_check": True}, "replayed": {"cuda_graph": True}, "noallreduce": {"fault": "noallreduce"}}
    runs["equal-texts"] = {"model": str(real_model), "dataset": str(texts)}
    return three_ranks(folder, runs)


@pytest.fixture(scope="module")
def siblings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The faults at night."""
    return three_ranks(tmp_path_factory.mktemp("siblings"), fault_settings(name for name in CAUGHT if name not in BY_DAY))


def fault_settings(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The settings of runs with these faults."""
    return {name: {"fault": f"{name}:{GUILTY}", **SETTINGS.get(name, {})} for name in names}


def three_ranks(folder: Path, runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The outcome of each of these runs."""
    worlds = [
        {"name": name, "world_size": 3, "settings": {**CHEAP, **settings}, "graphs": "cuda_graph" in settings}
        for name, settings in runs.items()
    ]
    return forked(folder, worlds)


@pytest.mark.parametrize(("fault", "check"), [*((name, CAUGHT[name]) for name in BY_DAY), *AT_NIGHT])
def test_fault_is_caught_and_its_rank_is_named(request: pytest.FixtureRequest, fault: str, check: str) -> None:
    """By the check of the table; weights that drifted apart fail the audit of a later step too."""
    outcome = request.getfixturevalue("outcomes" if fault in BY_DAY else "siblings")[fault]
    assert {check} <= failed(outcome) <= {check, "lock_step"}
    assert outcome["checks"][check]["ranks"] == [GUILTY]


@pytest.mark.parametrize("name", ["clean", "replayed", "equal-texts"])
def test_nothing_is_found_where_nothing_is_wrong(outcomes: dict[str, dict[str, Any]], name: str) -> None:
    """Every check looked; how far apart the forwards were on this machine is not judged."""
    outcome = outcomes[name]
    assert failed(outcome) == set()
    looked = {"adapter_digest", "adapters_moved", "all_reduce", "base_digest", "data_digest", "finite", "lock_step"}
    assert looked <= set(outcome["checks"])
    assert ("graph_lock_step" in outcome["checks"]) == (name == "replayed")
    assert ("restore" in outcome["checks"]) == (name == "clean")


def test_replayed_steps_learn_what_eager_ones_do(outcomes: dict[str, dict[str, Any]]) -> None:
    """The replayed steps are those of this run."""
    assert outcomes["replayed"]["losses"] == pytest.approx(outcomes["clean"]["losses"], rel=1e-5)


def test_ranks_that_never_exchange_gradients_blame_nobody(outcomes: dict[str, dict[str, Any]]) -> None:
    """All three hold other adapters: none is in the majority."""
    found = outcomes["noallreduce"]["checks"]["adapter_digest"]
    assert not found["passed"]
    assert found["ranks"] == []
