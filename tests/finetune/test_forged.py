"""Forged checkpoints: nothing in them runs, nothing huge is allocated; both readers say so in one line."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import struct
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from finetune_smoke.__main__ import main
from finetune_smoke.checkpoints import files
from finetune_smoke.evaluation import score_adapter
from finetune_smoke.settings.config import InputError, preset
from finetune_smoke.training.loop import Outcome, finetune
from tests.support.finetune.runs import CHEAP

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from finetune_smoke.checkpoints.files import Marker

pytestmark = pytest.mark.long

SHORT = {**CHEAP, "steps": 2, "window_steps": 2, "heldout_rows": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A quick run's checkpoint of step 2, and its outcome."""
    folder = tmp_path_factory.mktemp("trained")
    return folder, finetune(preset("tiny", **SHORT, checkpoint_dir=str(folder)))


@pytest.fixture
def forged(trained: tuple[Path, Outcome], tmp_path: Path) -> Path:
    """A copy of that checkpoint, to be forged: the folder of its step."""
    shutil.copytree(trained[0] / "step-2", tmp_path / "run" / "step-2")
    return tmp_path / "run" / "step-2"


class WritesAFile:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        """What pickle calls to make it again."""
        return os.system, (f"touch {self.path}",)


def refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line with which ``evaluate`` refuses ``folder``."""
    capsys.readouterr()
    code = main(["evaluate", f"--checkpoint-dir={folder}"])
    lines = capsys.readouterr().err.splitlines()
    assert code == 2, lines
    assert len(lines) == 1, lines
    return lines[0]


def resumed(folder: Path) -> Outcome:
    """The outcome of a run that resumes from ``folder``."""
    return finetune(preset("tiny", **SHORT, checkpoint_dir=str(folder), resume="auto"))


def sha(content: bytes) -> str:
    """The digest that a marker has of a file with this content."""
    return hashlib.sha256(content).hexdigest()[:16]


def edit(step: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the marker, and let it agree with the file beside it if that is a file."""
    path = step / "_SUCCESS"
    marker = json.loads(path.read_text())
    for name, entry in marker["files"].items():
        file = step / name
        if file.is_file() and file.stat().st_size < 2**30:
            entry.update(bytes=file.stat().st_size, digest=sha(file.read_bytes()))
    change(marker)
    path.write_text(json.dumps(marker))


def test_pickle_is_not_read(forged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever name it has, with a marker that vouches for it; for both readers."""
    ran = tmp_path / "it-ran"
    payload = pickle.dumps(WritesAFile(ran))
    for path in forged.iterdir():
        if path.name != "_SUCCESS":
            path.write_bytes(payload)
    for name in (".metadata", "__0_0.distcp", "rank-0.bin", "adapter_model.bin"):
        (forged / name).write_bytes(payload)

    def vouch(marker: dict[str, Any]) -> None:
        present = [path.name for path in forged.iterdir() if path.name != "_SUCCESS"]
        marker["files"] = {name: {"bytes": len(payload), "digest": sha(payload)} for name in present}

    edit(forged, vouch)
    assert "no complete checkpoint in" in refused(forged.parent, capsys)
    outcome = resumed(forged.parent)
    assert not ran.exists()
    assert outcome.resumed_at is None
    assert "checkpoint step-2 is passed over" in outcome.notes[0]


def test_pickle_in_the_place_of_the_tensors_is_not_read(
    forged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pickle fills the file to the size that its tensors need, so that only its content is wrong."""
    ran = tmp_path / "it-ran"
    file = forged / "rank-0.safetensors"
    file.write_bytes(pickle.dumps(WritesAFile(ran)).ljust(file.stat().st_size, b"\0"))
    edit(forged, lambda _marker: None)
    assert "is damaged" in refused(forged.parent, capsys)
    assert "damaged: files cannot be read" in resumed(forged.parent).notes[0]
    assert not ran.exists()


def test_adapter_of_another_kind_is_refused(trained: tuple[Path, Outcome], tmp_path: Path) -> None:
    """Other kinds than LoRA load further files; the settings of Megatron name a module to import."""
    for number, change in enumerate([{"peft_type": "XLORA"}, {"megatron_config": {}, "megatron_core": "antigravity"}]):
        folder = tmp_path / str(number)
        shutil.copytree(trained[0] / "final", folder)
        settings = folder / "adapter_config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), **change}))
        assert main(["evaluate", f"--adapter={folder}"]) == 2


def replace(path: Path, make: Callable[[Path], object]) -> None:
    """Put another thing in the place of ``path``."""
    if path.is_dir():
        path.rename(path.with_name("moved"))
    else:
        path.rename(path.parent.parent / path.name)
    make(path)


LINKS: dict[str, Callable[[Path], object]] = {
    "marker is a link": lambda step: replace(step / "_SUCCESS", lambda path: path.symlink_to(path.parent.parent / path.name)),
    "marker is a pipe": lambda step: replace(step / "_SUCCESS", os.mkfifo),
    "marker is a device": lambda step: replace(step / "_SUCCESS", lambda path: path.symlink_to("/dev/zero")),
    "file is a link": lambda step: replace(
        step / "rank-0.safetensors", lambda path: path.symlink_to(path.parent.parent / path.name)
    ),
    "file is a pipe": lambda step: replace(step / "rank-0.safetensors", os.mkfifo),
    "file is a device": lambda step: replace(step / "rank-0.safetensors", lambda path: path.symlink_to("/dev/zero")),
    "file is a folder": lambda step: replace(step / "rank-0.safetensors", lambda path: path.mkdir()),
    "folder is a link": lambda step: replace(step, lambda path: path.symlink_to(path.with_name("moved"))),
    "folder is a pipe": lambda step: replace(step, os.mkfifo),
}


@pytest.mark.parametrize("how", LINKS)
def test_links_pipes_and_devices_are_not_followed(forged: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A link out of the folder, though it leads to the right content; and what would never end."""
    LINKS[how](forged)
    line = refused(forged.parent, capsys)
    assert "checkpoint step-2 is passed over: it is or holds a link, a device or a pipe" in line
    outcome = resumed(forged.parent)
    assert outcome.resumed_at is None
    assert "it is or holds a link" in outcome.notes[0]


TERA = 2**40


def sparse(step: Path, size_bytes: int) -> None:
    """Let the file of tensors look as large as ``size_bytes``."""
    os.truncate(step / "rank-0.safetensors", size_bytes)


def huge_header(step: Path) -> None:
    """A header that claims to be a terabyte long."""
    file = step / "rank-0.safetensors"
    file.write_bytes(struct.pack("<Q", TERA) + file.read_bytes()[8:])
    edit(step, lambda _marker: None)


def huge_tensor_in_header(step: Path) -> None:
    """A header whose first tensor claims a terabyte."""
    file = step / "rank-0.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    first = next(iter(header))
    header[first].update(shape=[TERA // 4], data_offsets=[0, TERA])
    text = json.dumps(header, separators=(",", ":")).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])
    edit(step, lambda _marker: None)


def huge_file_in_marker(step: Path) -> None:
    """A marker, and a file that seems as large, of petabytes."""
    sparse(step, 2**43)
    edit(step, lambda marker: marker["files"]["rank-0.safetensors"].update(bytes=2**50))


def large_file(step: Path) -> None:
    """A sparse file within the limit of all checkpoints, larger than this run's state; its digest is right."""
    sparse(step, 2**26)
    edit(step, lambda _marker: None)


def large_tensors(step: Path) -> None:
    """Adapters of other, larger shapes: file and marker agree."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 -- slow import

    file = step / "rank-0.safetensors"
    state = load_file(file)
    save_file({name: torch.cat([each, each]) if each.ndim else each for name, each in state.items()}, file)
    edit(step, lambda _marker: None)


HUGE = {
    "header": huge_header,
    "tensor in the header": huge_tensor_in_header,
    "file in the marker": huge_file_in_marker,
    "file": lambda step: sparse(step, TERA),
    "marker": lambda step: os.truncate(step / "_SUCCESS", TERA),
    "file of the right digest": large_file,
    "adapters": large_tensors,
    "layers": lambda step: edit(step, lambda marker: marker["config"].update(layers=2**40)),
    "hidden size": lambda step: edit(
        step, lambda marker: marker["config"].update(hidden_size=2**40, heads=2**20, kv_heads=2**20)
    ),
    "deep": lambda step: (step / "_SUCCESS").write_text("[" * 10**6),
    "number": lambda step: edit(step, lambda marker: marker.update(step=10**300)),
}


@pytest.mark.parametrize("how", HUGE)
def test_huge_claims_allocate_nothing(forged: Path, how: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Both readers come back at once."""
    HUGE[how](forged)
    assert refused(forged.parent, capsys)
    outcome = resumed(forged.parent)
    if how in {"layers", "hidden size"}:  # a resume takes its settings from the command line
        assert outcome.resumed_at == 2
    else:
        assert "checkpoint step-2 is passed over" in outcome.notes[0]


@pytest.mark.parametrize(
    "name", ["step-60", "step-99999999999999999999", "step-002", "step-\u0662", "step-0", "step--2", "step-2x"]
)
def test_folder_of_another_name_is_no_checkpoint_of_that_step(
    forged: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name and the marker have to agree; a number that no machine holds breaks nothing."""
    forged.rename(forged.parent / name)
    assert "no complete checkpoint in" in refused(forged.parent, capsys)
    assert resumed(forged.parent).resumed_at is None


WRONG = [None, True, -1, 0.5, 10**30, "x", [], {}, [[]], {"a": 1}]


def test_other_types_in_the_marker_are_refused(forged: Path) -> None:
    """Each field, and each setting, with values of other types: refused in one line, never by another exception."""
    good = json.loads((forged / "_SUCCESS").read_text())
    changed = [{**good, name: value} for name in good for value in WRONG]
    for name, was in good["config"].items():
        others = [value for value in WRONG if type(value) is not type(was)]
        changed += [{**good, "config": {**good["config"], name: value}} for value in others]
    for marker in changed:
        (forged / "_SUCCESS").write_text(json.dumps(marker))
        assert len(settings_refused(forged.parent).splitlines()) <= 1


def settings_refused(folder: Path) -> str:
    """Why ``evaluate`` finds no usable settings in ``folder``; empty if it finds some."""
    try:
        score_adapter.config_of(score_adapter.find_adapter({"checkpoint_dir": str(folder)}), {})
    except InputError as error:
        return str(error)
    return ""


def refusal(folder: Path, adapters: dict[str, torch.Tensor]) -> str:
    """Why ``evaluate`` cannot find or read the newest checkpoint in ``folder``; empty if it can. Needs no model."""
    try:
        source = score_adapter.find_adapter({"checkpoint_dir": str(folder)})
        files.read_state(source.path, cast("Marker", source.marker), adapters, torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return ""


def adapters_in(step: Path) -> dict[str, torch.Tensor]:
    """The adapters of a checkpoint, by their names in the model."""
    from safetensors.torch import load_file  # noqa: PLC0415 -- slow import

    state = load_file(step / "rank-0.safetensors")
    return {name.removeprefix("adapters/"): each for name, each in state.items() if name.startswith("adapters/")}


def test_marker_is_refused_wherever_it_is_cut_or_changed(forged: Path) -> None:
    """Each truncation is a damaged marker. Each flipped byte is refused, or leaves a marker with other harmless values."""
    content, ours = (forged / "_SUCCESS").read_bytes(), adapters_in(forged)
    assert not refusal(forged.parent, ours)
    for length in [*range(0, len(content), 31), len(content) - 1]:
        (forged / "_SUCCESS").write_bytes(content[:length])
        assert "passed over: it has no _SUCCESS or a damaged one" in refusal(forged.parent, ours)
    for at in range(0, len(content), 7):
        (forged / "_SUCCESS").write_bytes(content[:at] + bytes([content[at] ^ 0x83]) + content[at + 1 :])
        assert refusal(forged.parent, ours), at  # the byte is no ASCII any more


def test_file_of_tensors_is_refused_wherever_its_header_changed(forged: Path) -> None:
    """Bytes and lengths of the header, with a marker that vouches for what is there."""
    file = forged / "rank-0.safetensors"
    content, ours = file.read_bytes(), adapters_in(forged)
    (length,) = struct.unpack("<Q", content[:8])
    begin = len(content[: 8 + length].rstrip())  # the header ends with blanks, which may be anything that JSON skips
    for at in range(begin):
        if at < 8 or at % 17 == 0:
            file.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
            edit(forged, lambda _marker: None)
            assert refusal(forged.parent, ours), at
    for cut in range(0, 8 + length, 401):
        file.write_bytes(content[:cut])
        edit(forged, lambda _marker: None)
        assert refusal(forged.parent, ours), cut
