"""Checkpoints: whole or absent, resumable at any world size, refused where they do not fit."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from finetune_smoke.checkpoints import writing
from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training.loop import Outcome, finetune
from tests.support.finetune.runs import CHEAP, QUICK, flip_a_bit

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.long


def run(folder: Path, *, heard: list[str] | None = None, **settings: Any) -> Outcome:
    """A quick run of a single rank, with checkpoints in ``folder``; ``heard`` gets what it tells."""
    told = [] if heard is None else heard
    config = preset("tiny", **{**CHEAP, "checkpoint_dir": str(folder), **settings})
    return finetune(config, progress=lambda step, _: told.append(step))


def content_of(folder: Path) -> dict[str, bytes]:
    """Every file under ``folder``, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run of six steps with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder, checkpoint_every=2)


@pytest.fixture
def copied(whole: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A copy of its checkpoints 2 and 4, to be damaged."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "step-6")
    return folder


def test_checkpoint_is_marked_and_complete(whole: tuple[Path, Outcome]) -> None:
    """No draft is left, and the marker says what is inside: the place in the data, and no failure."""
    folder, outcome = whole
    assert sorted(path.name for path in folder.iterdir()) == ["final", "step-2", "step-4", "step-6"]
    marker = json.loads((folder / "step-6" / "_SUCCESS").read_text())
    assert (marker["step"], marker["world_size"]) == (6, 1)
    assert marker["digest"] == outcome.adapter_digest
    assert (marker["failures"], marker["next_row"], marker["step_rows"]) == ({}, 48, 8)
    assert (outcome.saved_step, outcome.notes) == (6, [])
    assert set(marker["files"]) == {path.name for path in (folder / "step-6").iterdir()} - {"_SUCCESS"}


def test_resume_takes_the_newest_and_ends_the_same(copied: Path, whole: tuple[Path, Outcome]) -> None:
    """From step 4 the curve and the adapter are those of the run that was not interrupted."""
    heard: list[str] = []
    resumed = run(copied, heard=heard, resume="auto")
    assert "resumed at step 4" in heard
    assert resumed.losses == whole[1].losses
    assert resumed.adapter_digest == whole[1].adapter_digest


def test_resume_at_the_end_evaluates_only(whole: tuple[Path, Outcome]) -> None:
    """Nothing is left to train, so there is no rate."""
    resumed = run(whole[0], resume="auto")
    assert resumed.losses == whole[1].losses
    assert (resumed.tokens_per_s_per_gpu, resumed.step_ms) == (None, None)
    assert resumed.heldout_loss == whole[1].heldout_loss


def test_resume_with_nothing_there_starts_at_0(tmp_path: Path, whole: tuple[Path, Outcome]) -> None:
    """The run starts at step 0."""
    assert run(tmp_path / "new", resume="auto", steps=2).losses == pytest.approx(whole[1].losses[:2], rel=1e-4)


def test_fresh_start_beside_checkpoints_is_refused(whole: tuple[Path, Outcome]) -> None:
    """A later resume could not tell the two runs apart."""
    with pytest.raises(InputError, match="holds a checkpoint of step 6: --resume auto goes on from it"):
        run(whole[0])


def edit_marker(checkpoint: Path, **fields: Any) -> None:
    """Change the marker."""
    marker = checkpoint / "_SUCCESS"
    marker.write_text(json.dumps({**json.loads(marker.read_text()), **fields}))


CUT = "its saving was cut short"
SPOILT: dict[str, tuple[str, Callable[[Path, Path], object]]] = {
    "no marker": (CUT, lambda step, _: (step / "_SUCCESS").unlink()),
    "half a marker": (CUT, lambda step, _: (step / "_SUCCESS").write_text('{"step": 4')),
    "foreign marker": (CUT, lambda step, _: (step / "_SUCCESS").write_text("[]")),
    "other row": (CUT, lambda step, _: edit_marker(step, next_row=31)),
    "short file": ("files are missing or have another size", lambda _, data: data.write_bytes(data.read_bytes()[:-1])),
    "file gone": ("files are missing or have another size", lambda _, data: data.unlink()),
    "flipped bit": ("damaged: files cannot be read or have another content", lambda _, data: flip_a_bit(data)),
    "other state": (
        "damaged: adapters or optimiser have another digest", lambda step, _: edit_marker(step, state_digest="1234"),
    ),
    "draft": (CUT, lambda step, _: step.rename(step.with_suffix(".tmp"))),
}  # fmt: skip
"""What is done to a checkpoint and the file in it, and what is said of it."""


@pytest.mark.parametrize("spoil", SPOILT)
def test_incomplete_or_damaged_checkpoint_is_passed_over(copied: Path, spoil: str, whole: tuple[Path, Outcome]) -> None:
    """The next older one is resumed, which a note says; the run ends with the same bits."""
    said, work = SPOILT[spoil]
    work(copied / "step-4", next((copied / "step-4").glob("*.safetensors")))
    heard: list[str] = []
    resumed = run(copied, heard=heard, resume="auto")
    (note,) = resumed.notes
    assert f"is passed over: {said}" in note.replace("it has no _SUCCESS or a damaged one: ", "")
    assert note in heard
    assert "resumed at step 2" in heard
    assert resumed.resumed_at == 2
    assert resumed.losses == whole[1].losses
    assert resumed.adapter_digest == whole[1].adapter_digest


def test_no_checkpoint_that_is_whole_starts_at_0(copied: Path, whole: tuple[Path, Outcome]) -> None:
    """With the adapters of a fresh start: nothing of a damaged checkpoint got into them."""
    for step in (2, 4):
        edit_marker(copied / f"step-{step}", state_digest="1234")
    resumed = run(copied, resume="auto")
    assert len(resumed.notes) == 2
    assert resumed.resumed_at is None
    assert resumed.adapter_digest == whole[1].adapter_digest


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
        ({"seed": 5}, "seed 1234 there, 5 here"),
        ({"row_tokens": 64}, "does not fit this run: row_tokens 56 there, 64 here"),
        ({"packed": True}, "does not fit this run: packed False there, True here"),
        ({"learning_rate": 1e-3, "steps": 7}, "steps 6 there, 7 here; learning_rate 0.004 there, 0.001 here"),
    ],
)
def test_checkpoint_of_another_run_is_refused(copied: Path, settings: dict[str, Any], message: str) -> None:
    """Another base, or other adapters; nothing there is touched."""
    before = content_of(copied)
    with pytest.raises(InputError, match=message):
        run(copied, resume="auto", **settings)
    assert content_of(copied) == before


def test_checkpoint_of_another_version_is_refused(copied: Path) -> None:
    """Its files may mean something else; it is not taken for a damaged one, which would be overwritten."""
    marker = json.loads((copied / "step-4" / "_SUCCESS").read_text())
    edit_marker(copied / "step-4", fits={**marker["fits"], "format": 2}, files={"a": 3})
    with pytest.raises(InputError, match=r"does not fit this run: format 2 there, 4 here$"):
        run(copied, resume="auto")


def test_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message is one line with the rank."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writing.files, "content", full)
    with pytest.raises(InputError, match=r"step-6.tmp cannot be written by rank 0: .*No space left on device"):
        run(tmp_path)
    assert not (tmp_path / "step-6").exists()


@pytest.mark.parametrize(("keep", "left"), [(1, ["step-6"]), (2, ["step-4", "step-6"]), (9, ["step-2", "step-4", "step-6"])])
def test_newest_checkpoints_are_kept(tmp_path: Path, keep: int, left: list[str]) -> None:
    """As many as --keep-checkpoints says."""
    run(tmp_path, checkpoint_every=2, keep_checkpoints=keep)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == left


def test_saved_by_two_ranks_resumed_by_one(
    outcomes: dict[str, list[dict[str, Any]]], shared_folder: Path, tmp_path: Path
) -> None:
    """From step 3 of 6; the losses continue as without the change of ranks, to 1e-5 in float32."""
    shutil.copytree(shared_folder / "checkpoints" / "step-3", tmp_path / "step-3")
    outcome = finetune(preset("tiny", **{**QUICK, "checkpoint_dir": str(tmp_path), "resume": "auto"}))
    assert outcome.world_size == 1
    assert outcome.losses == pytest.approx(outcomes["checkpointed"][0]["losses"], rel=1e-5)
