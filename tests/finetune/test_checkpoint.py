"""Checkpoints: whole or not there, resumable at any world size, refused where they do not fit."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
from finetune_runs import QUICK

from finetune_smoke.config import InputError, preset
from finetune_smoke.train import Outcome, finetune

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CHEAP = {**QUICK, "audit_every": 0, "greedy_rows": 0, "restore_check": False}


def run(folder: Path, **settings: Any) -> Outcome:
    """A quick run alone, with checkpoints in ``folder``."""
    return finetune(preset("tiny", **{**CHEAP, "checkpoint_dir": str(folder), **settings}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run of six steps with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, checkpoint_every=2)


@pytest.fixture
def copied(whole: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """Its checkpoints 2 and 4, to be spoilt."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "step-6")
    return folder


def test_checkpoint_is_marked_and_complete(whole: tuple[Path, Outcome]) -> None:
    """No draft is left, and the marker says what is inside."""
    folder, outcome = whole
    assert sorted(path.name for path in folder.iterdir()) == ["step-2", "step-4", "step-6"]
    marker = json.loads((folder / "step-6" / "_SUCCESS").read_text())
    assert (marker["step"], marker["world_size"]) == (6, 1)
    assert f"{int(marker['digest'], 16) % 2**64:016x}" == outcome.adapter_digest
    assert set(marker["files"]) == {path.name for path in (folder / "step-6").iterdir()} - {"_SUCCESS"}


def test_resume_takes_the_newest_and_ends_the_same(copied: Path, whole: tuple[Path, Outcome]) -> None:
    """From step 4 the curve and the adapter are those of the run that was not interrupted."""
    heard: list[str] = []
    settings = {**CHEAP, "checkpoint_dir": str(copied), "resume": "auto"}
    resumed = finetune(preset("tiny", **settings), progress=lambda step, _: heard.append(step))
    assert "resumed at step 4" in heard
    assert resumed.losses == whole[1].losses
    assert resumed.adapter_digest == whole[1].adapter_digest


def test_resume_at_the_end_evaluates_only(whole: tuple[Path, Outcome]) -> None:
    """Nothing is left to train, so there is no rate to tell."""
    resumed = run(whole[0], resume="auto")
    assert resumed.losses == whole[1].losses
    assert (resumed.tokens_per_s_per_gpu, resumed.step_ms) == (None, None)
    assert resumed.heldout_loss == whole[1].heldout_loss


def test_resume_with_nothing_there_starts_at_0(tmp_path: Path, whole: tuple[Path, Outcome]) -> None:
    """As a first run does."""
    assert run(tmp_path / "new", resume="auto", steps=2).losses == pytest.approx(whole[1].losses[:2], rel=1e-4)


def test_fresh_start_beside_checkpoints_is_refused(whole: tuple[Path, Outcome]) -> None:
    """A later resume could not tell the two runs apart."""
    with pytest.raises(InputError, match="holds a checkpoint of step 6: --resume auto goes on from it"):
        run(whole[0])


@pytest.mark.parametrize("spoil", ["no marker", "half a marker", "short file", "file gone"])
def test_incomplete_checkpoint_is_passed_over(copied: Path, spoil: str, whole: tuple[Path, Outcome]) -> None:
    """The next older one is taken."""
    newest = copied / "step-4"
    data = next(newest.glob("*.distcp"))
    spoilt: dict[str, Callable[[], object]] = {
        "no marker": (newest / "_SUCCESS").unlink,
        "half a marker": lambda: (newest / "_SUCCESS").write_text('{"step": 4'),
        "short file": lambda: data.write_bytes(data.read_bytes()[:-1]),
        "file gone": data.unlink,
    }
    spoilt[spoil]()
    heard: list[str] = []
    settings = {**CHEAP, "checkpoint_dir": str(copied), "resume": "auto"}
    resumed = finetune(preset("tiny", **settings), progress=lambda step, _: heard.append(step))
    assert "resumed at step 2" in heard
    assert resumed.losses == whole[1].losses


def test_remains_of_a_killed_save_are_replaced(copied: Path) -> None:
    """A draft and a checkpoint without its marker, of the step that is saved again."""
    (copied / "step-6.tmp").mkdir()
    (copied / "step-6.tmp" / "rubbish").write_text("x")
    (copied / "step-6").mkdir()
    run(copied, resume="auto")
    assert (copied / "step-6" / "_SUCCESS").exists()
    assert not (copied / "step-6.tmp").exists()
    assert not (copied / "step-6" / "rubbish").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 4}, "does not fit this run: lora_rank 8 there, 4 here"),
        ({"lora_alpha": 16}, "lora_alpha 128 there, 16 here"),
        ({"hidden_size": 32}, "does not fit this run: base"),
        ({"seed": 5}, "does not fit this run: base"),
    ],
)
def test_checkpoint_of_another_run_is_refused(copied: Path, settings: dict[str, Any], message: str) -> None:
    """Another base, or other adapters."""
    with pytest.raises(InputError, match=message):
        run(copied, resume="auto", **settings)


def test_damaged_checkpoint_is_refused(copied: Path) -> None:
    """Complete by its sizes, but not what was saved."""
    marker = copied / "step-4" / "_SUCCESS"
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps({**content, "digest": "1234"}))
    with pytest.raises(InputError, match=r"step-4 is damaged: adapters have digest .*, 1234 was saved"):
        run(copied, resume="auto")


def test_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """Before anything is trained."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="checkpoint directory cannot be written"):
        run(tmp_path / "file")


def test_saved_by_two_ranks_resumed_by_one(outcomes: dict[str, list[dict[str, Any]]], two_rank_checkpoints: Path) -> None:
    """Elastic: losses go on as they would have, to 1e-5 in float32."""
    outcome = finetune(preset("tiny", **{**QUICK, "checkpoint_dir": str(two_rank_checkpoints), "resume": "auto"}))
    assert outcome.world_size == 1
    assert outcome.losses == pytest.approx(outcomes["checkpointed"][0]["losses"], rel=1e-5)
