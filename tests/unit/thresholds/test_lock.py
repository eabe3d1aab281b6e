"""The packaged limits by content: whoever edits the packaged file itself, or a GPU's figures, is named."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pytest_gpucluster import run_setup
from pytest_gpucluster.config.settings import Expect, Settings
from pytest_gpucluster.config.yaml_lines import read
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.detect import Detected
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.session import Session
from pytest_gpucluster.thresholds import layers, lock, resolve, specs
from pytest_gpucluster.thresholds.load import load

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Edit = Callable[[dict[Any, Any]], None]

H200 = "NVIDIA H200"
PACKAGED = layers.packaged_path()


def edited(folder: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit) -> Path:
    """Edit the packaged file in place: a copy takes its path."""
    document: dict[Any, Any] = copy.deepcopy(read(PACKAGED, file="x").data)
    edit(document)
    path = folder / "thresholds.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    monkeypatch.setattr(layers, "packaged_path", lambda: path)
    return path


def of_run(folder: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Path | None = None) -> Session:
    """A run on a node of eight H200, which starts nothing."""
    monkeypatch.setattr(run_setup, "detect_gpus", lambda: Detected(names=(H200,) * 8))
    settings = Settings(
        thresholds=thresholds,
        profile=None,
        expect=Expect(nodes=None, gpus_per_node=None),
        level="standard",
        soak_s=None,
        results_dir=folder / "results",
        gate=False,
        inline=False,
    )
    return Session(run_setup.prepare(settings, None, start=folder), rootdir=folder)


def setting(key: str, **values: Any) -> Edit:
    """An edit of one entry; None removes a key."""

    def edit(document: dict[Any, Any]) -> None:
        entry = document["criteria"][key]
        for name, value in values.items():
            if value is None:
                entry.pop(name)
            elif isinstance(value, dict) and isinstance(entry.get(name), dict):
                entry[name].update(value)
            else:
                entry[name] = value

    return edit


def removing(document: dict[Any, Any]) -> None:
    """Remove an entry."""
    del document["criteria"]["gpu_memory"]


EDITS = {
    "a lower limit": (setting("bf16_tflops", above=400), ["above 400 instead of above 700"]),
    "a removed criterion": (removing, ["removed"]),
    "a smaller recipe": (setting("bf16_tflops", recipe={"iterations": 1}), ["recipe iterations"]),
    "an advisory limit": (setting("bf16_tflops", severity="advisory"), ["severity"]),
    "only at soak": (setting("bf16_tflops", level="soak"), ["level"]),
    "more noise": (setting("bf16_tflops", noise=0.5), ["noise"]),
    "on many GPUs only": (setting("bf16_tflops", needs=4), ["needs"]),
    "on many nodes only": (setting("bf16_tflops", needs_nodes=3), ["needs_nodes"]),
    "skipped": (setting("bf16_tflops", profiles={"h200-sxm": {"skip": "too slow"}}), ["skip"]),
    "another kind of limit": (setting("bf16_tflops", above=None, min=700), ["min 700 instead of above 700"]),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_packaged_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """By what it says, wherever it lies; also below a site's overlay. In the verdict line, and in words in results.json."""
    edit, words = EDITS[name]
    edited(tmp_path, monkeypatch, edit)
    site = tmp_path / "site.yaml"
    site.write_text("schema: 1\nextends: packaged\n", encoding="utf-8")
    for thresholds in (None, site):
        run = of_run(tmp_path, monkeypatch, thresholds)
        run.plan.set_outcome(Record(criterion="hbm_bandwidth", place="node0-gpu0", outcome="passed"))
        key = "gpu_memory" if edit is removing else "bf16_tflops"
        assert run.state.facts()["changed_limits"] == [key]
        assert run.state.facts()["changed_entries"] == {key: words}
        assert f"limits changed: {key}" in run.decide().line


def test_edited_terms_of_the_packaged_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level, a fabric or a shape that the packaged profile no longer asks for."""

    def edit(document: dict[Any, Any]) -> None:
        document["profiles"]["h100-sxm"] |= {"accept_at": "quick", "fabric": "sockets"}

    edited(tmp_path, monkeypatch, edit)
    assert of_run(tmp_path, monkeypatch).state.facts()["changed_terms"] == [
        "accept_at quick instead of standard",
        "fabric sockets instead of infiniband",
    ]


def test_a_comment_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that change no outcome are not named."""
    edited(tmp_path, monkeypatch, setting("bf16_tflops", why="Another reason.", source="none", takes_s=3))
    facts = of_run(tmp_path, monkeypatch).state.facts()
    assert (facts["changed_limits"], facts["changed_entries"], facts["changed_terms"]) == ([], {}, [])


@pytest.mark.parametrize(
    ("changes", "others"),
    [({"memory_gib": 70.0}, {}), ({"names": ("another",)}, {"b200-sxm": {"names": (H200,)}})],
)
def test_edited_figures_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], others: dict[str, dict[str, Any]]
) -> None:
    """A limit that is a part of a figure follows the figure, and a GPU may be taken for another one: both are named."""
    found = {**specs.load_specs()}
    for name, update in {"h200-sxm": changes, **others}.items():
        found[name] = found[name].model_copy(update=update)
    assert lock.changed_figures([H200, "a GPU of tomorrow"], specs.load_specs()) == []
    assert lock.changed_figures([H200], found) == [f"figures of {H200}"]
    monkeypatch.setattr(resolve, "load_specs", lambda: found)
    if "memory_gib" in changes:
        file = load(None)
        assert file.changed_limits(file.profiles["h200-sxm"]) == ["gpu_memory"]


def test_the_lock_is_fresh() -> None:
    """Otherwise run ``python docs/generate_criteria.py``."""
    assert lock.PATH.read_text(encoding="utf-8") == lock.locked_text(PACKAGED)
    file = load(None)
    for name in ("h100-sxm", "h200-sxm", "rehearsal"):
        assert file.changed_entries(file.profiles[name]) == {}


def test_a_missing_lock_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nothing could be compared: the installation is damaged."""
    torn = tmp_path / "torn.json"
    torn.write_text(lock.PATH.read_text(encoding="utf-8")[:-99], encoding="utf-8")
    for damaged in (tmp_path / "none.json", torn):
        monkeypatch.setattr(lock, "PATH", damaged)
        file = load(None)
        with pytest.raises(ConfigurationError, match=f"{damaged.name}.*install the package again"):
            file.changed_limits(file.profiles["h200-sxm"])
