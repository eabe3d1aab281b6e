"""The adapter in peft's layout: loaded back as a user would, and never written over anything else."""

from __future__ import annotations

import contextlib
import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PeftModel

from finetune_smoke.__main__ import main
from finetune_smoke.checkpoints import export
from finetune_smoke.model import build
from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training.loop import finetune
from tests.support.finetune.runs import CHEAP, options, result

if TYPE_CHECKING:
    from pathlib import Path

RESTORED = {**CHEAP, "restore_check": True}
OPTIONS = options(RESTORED)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's adapter, by --output."""
    folder = tmp_path_factory.mktemp("exported") / "adapter"
    (folder.parent / "adapter.tmp").mkdir()
    (folder.parent / "adapter.tmp" / "thesis.txt").write_text("x")
    assert main([*OPTIONS, f"--output={folder}"]) == 0
    return folder


def test_layout_is_pefts(exported: Path) -> None:
    """Its two files, and ours beside them. A folder NAME.tmp beside --output is somebody else's."""
    assert (exported.parent / "adapter.tmp" / "thesis.txt").exists()
    assert sorted(path.name for path in exported.iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "config.yaml", "finetune_smoke.json", "summary.txt",
    ]  # fmt: skip
    assert json.loads((exported / "adapter_config.json").read_text())["r"] == 8
    summary = (exported / "summary.txt").read_text()
    assert "ok   export" in summary
    assert "in 6 steps" in summary


def test_peft_loads_it_and_it_changes_the_model(exported: Path) -> None:
    """As in peft's own documentation."""
    device = torch.device("cpu")
    config = preset("tiny", **CHEAP)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        bare = build.base_of(config, device)(input_ids=ids).logits
        adapted = PeftModel.from_pretrained(build.base_of(config, device), str(exported))(input_ids=ids).logits
    assert not torch.allclose(bare, adapted)


def test_adapter_that_is_not_whole_fails_the_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tensor is missing from the file: peft only warns. A failed check is enough: there is no limit on the loss."""
    assert main([*OPTIONS, f"--output={tmp_path / 'adapter'}", "--fault=truncate-ckpt"]) == 1
    out = capsys.readouterr().out
    assert "FAIL export: the adapter in" in out
    assert result(out)["checks"]["restore"]["ranks"] == [0]
    assert "FAIL export" in (tmp_path / "adapter" / "summary.txt").read_text()


def test_adapter_of_another_scale_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every bit of the tensors is right, but what peft makes of them is another model."""
    load = export.load

    def weaker(base: Any, folder: Path) -> Any:
        model = load(base, folder)
        for module in model.modules():
            if isinstance(getattr(module, "scaling", None), dict):
                module.scaling["default"] *= 0.1
        return model

    monkeypatch.setattr(export, "load", weaker)
    assert main([*OPTIONS, f"--output={tmp_path / 'adapter'}"]) == 1
    assert "FAIL export" in capsys.readouterr().out


def test_other_content_is_not_overwritten(tmp_path: Path) -> None:
    """A directory with other files is refused before anything is trained."""
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="is not empty: name another, or move it away"):
        finetune(preset("tiny", **CHEAP, output=str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    """A file is refused as the directory; as its parent, by test_cli.py."""
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file: the adapter needs a directory"):
        finetune(preset("tiny", **CHEAP, output=str(tmp_path / "file")))


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint directory with final/, and the settings that made it."""
    folder = tmp_path_factory.mktemp("ended")
    settings = {**CHEAP, "steps": 2, "heldout_rows": 4}
    finetune(preset("tiny", **settings, checkpoint_dir=str(folder)))
    return folder, settings


def test_own_adapter_is_replaced_on_resume_only(ended: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The end of a run that was resumed at its end writes it again; another run's is left alone."""
    shutil.copytree(ended[0], tmp_path / "checkpoints")
    weights = tmp_path / "checkpoints" / "final" / "adapter_model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(b"")
    finetune(preset("tiny", **ended[1], checkpoint_dir=str(tmp_path / "checkpoints"), resume="auto"))
    assert weights.read_bytes() == content
    other = {**CHEAP, "checkpoint_dir": str(tmp_path / "other"), "output": str(weights.parent), "resume": "auto"}
    with pytest.raises(InputError, match="holds the adapter of another run"):
        finetune(preset("tiny", **{**other, "lora_rank": 4}))
    assert weights.read_bytes() == content


NEW, OLD = ".final.finetune_smoke-new", ".final.finetune_smoke-old"


@pytest.mark.parametrize("state", ["being written", "moved aside", "old one being removed"])
def test_run_killed_while_it_replaced_its_adapter_is_resumed(
    state: str, ended: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Each state that a kill leaves."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(ended[0], folder)
    final = folder / "final"
    whole = (final / "adapter_model.safetensors").read_bytes()
    names = sorted(path.name for path in final.iterdir())
    if state == "being written":
        (folder / NEW).mkdir()
        (folder / NEW / "adapter_model.safetensors").write_bytes(b"half")
    elif state == "moved aside":
        shutil.copytree(final, folder / NEW)
        final.rename(folder / OLD)
    else:
        (folder / OLD).mkdir()
        (folder / OLD / "adapter_config.json").write_text("{}")
    outcome = finetune(preset("tiny", **ended[1], checkpoint_dir=str(folder), resume="auto"))
    assert outcome.resumed_at == 2
    assert (final / "adapter_model.safetensors").read_bytes() == whole
    assert sorted(path.name for path in final.iterdir()) == names
    assert sorted(path.name for path in folder.iterdir()) == ["final", "step-2"]


def test_older_adapter_that_was_moved_aside_comes_back(ended: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """The old adapter comes back also for a run that may not replace it and is refused."""
    shutil.copytree(ended[0] / "final", tmp_path / ".adapter.finetune_smoke-old")
    with pytest.raises(InputError, match="adapter is not empty: name another"):
        finetune(preset("tiny", **ended[1], output=str(tmp_path / "adapter")))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_each_moment_of_a_replacement_can_be_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before its first, second, ... change of the disk: afterwards the old or the new adapter is there, whole."""

    class Killed(BaseException):
        """Stop here: nothing after this call runs."""

    def make(folder: Path, text: str) -> None:
        folder.mkdir()
        for name in ("finetune_smoke.json", "adapter_model.safetensors"):
            (folder / name).write_text(json.dumps(text))

    rename, rmtree = type(tmp_path).rename, shutil.rmtree
    seen = []
    for moment in range(8):
        folder = tmp_path / str(moment) / "final"
        folder.parent.mkdir()
        draft, old = export._draft_and_old(folder)
        make(folder, "old")
        make(draft, "new")
        left = iter([None] * moment)

        def counted(work: Any, left: Any = left) -> Any:
            def instead(*arguments: Any, **settings: Any) -> Any:
                if next(left, "none") == "none":
                    raise Killed
                return work(*arguments, **settings)

            return instead

        with monkeypatch.context() as patch:
            patch.setattr(type(tmp_path), "rename", counted(rename))
            patch.setattr(export.shutil, "rmtree", counted(rmtree))
            with contextlib.suppress(Killed):
                export._replace(folder, draft, old)
        export._repair(folder)
        assert [path.name for path in folder.parent.iterdir()] == ["final"]
        assert (folder / "finetune_smoke.json").read_text() == (folder / "adapter_model.safetensors").read_text()
        seen.append(json.loads((folder / "finetune_smoke.json").read_text()))
    assert seen == ["old", "old", "old", "new", "new", "new", "new", "new"]
