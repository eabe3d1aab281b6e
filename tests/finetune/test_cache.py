"""Rows made once for each node: equal to those without a scratch folder, made by one process, made again if damaged."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from finetune_smoke.__main__ import main
from finetune_smoke.data import batches, cache, calls, hub
from finetune_smoke.settings.config import Config, InputError, preset
from finetune_smoke.training.loop import finetune
from tests.support import REPOSITORY
from tests.support.finetune.runs import CHEAP, options, result

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS = options(CHEAP)
CODEC = batches.own_codec(calls.Tokenizer())


def texts(folder: Path, count: int = 40) -> Path:
    """A data set of ``count`` texts of different lengths."""
    folder.mkdir(exist_ok=True)
    rows = [{"text": f"text {number} " + "abc " * (number % 7)} for number in range(count)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def config_of(tmp_path: Path, **settings: Any) -> Config:
    """Settings for the texts, with a scratch folder; the tokenizer is the one in code."""
    given = {"model": "m", "dataset": str(texts(tmp_path / "data")), "scratch": str(tmp_path / "scratch"), **settings}
    return preset("model", **given)


def source(config: Config, heard: list[str] | None = None) -> batches.Source:
    """The rows of ``config`` for steps of 4 rows."""
    return cache.source(config, CODEC, step_rows=4, say=(heard if heard is not None else []).append)


def made(config: Config) -> cache.Cache:
    """The folder of ``config``."""
    return cache.open_rows(config, CODEC, step_rows=4)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_texts_are_those_made_in_memory(tmp_path: Path, packed: bool) -> None:  # noqa: FBT001 -- parametrised
    """Training rows over and over, held-out rows, and which tokens are predicted."""
    config = config_of(tmp_path, packed=packed, row_tokens=48)
    kept, fresh = source(config), source(dataclasses.replace(config, scratch=None))
    assert [kept.row(index) for index in range(90)] == [fresh.row(index) for index in range(90)]
    assert kept.heldout == fresh.heldout
    assert (kept.pad_id, kept.answers) == (fresh.pad_id, fresh.answers)


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_calls_are_those_made_in_memory(tmp_path: Path, packed: bool) -> None:  # noqa: FBT001 -- parametrised
    """The rows are equal also beyond those that the run reads: checks read them."""
    settings: dict[str, Any] = {"packed": packed, "row_tokens": 128, "steps": 3, "heldout_rows": 8}
    kept = source(preset("tiny", **settings, scratch=str(tmp_path)))
    fresh = source(preset("tiny", **settings))
    for index in (*range(20), 77_777):
        assert kept.row(index) == fresh.row(index)
    assert dataclasses.replace(kept, row=fresh.row) == fresh


def test_packed_texts_are_whole_and_full() -> None:
    """In order, no text cut, every row of one length."""
    rows = [batches.Row([number] * length, list(range(1, length))) for number, length in enumerate((3, 4, 2, 5, 1), start=1)]
    packed = list(batches.pack(rows, 8, pad_id=0))
    assert [row.ids for row in packed] == [[1, 1, 1, 2, 2, 2, 2, 0], [3, 3, 4, 4, 4, 4, 4, 5]]
    assert [row.predicted for row in packed] == [[1, 2, 4, 5, 6], [1, 3, 4, 5, 6]]


def test_second_reader_finds_what_the_first_made(tmp_path: Path) -> None:
    """The second call finds the rows, and its remark says so."""
    config, heard = config_of(tmp_path), []
    source(config, heard)
    source(config, heard)
    assert "rows of" in heard[0]
    assert "(new)" in heard[0]
    assert "found in" in heard[1]


@pytest.mark.parametrize("change", ["row_tokens", "packed", "heldout_rows", "text", "tokenizer"])
def test_other_rows_are_another_folder(tmp_path: Path, change: str) -> None:
    """A change in anything that the rows depend on gives another folder."""
    config, codec = config_of(tmp_path, row_tokens=48), CODEC
    first = cache.open_rows(config, codec, step_rows=4)
    if change == "text":
        texts(tmp_path / "data", 41)
    elif change == "tokenizer":
        codec = dataclasses.replace(codec, digest=1)
    else:
        config = dataclasses.replace(config, **{change: {"row_tokens": 24, "packed": True, "heldout_rows": 2}[change]})
    second = cache.open_rows(config, codec, step_rows=4)
    assert second.made
    assert second.folder != first.folder
    assert not cache.open_rows(config, codec, step_rows=4).made


def test_what_rows_do_not_depend_on_changes_nothing(tmp_path: Path) -> None:
    """A learning rate or the seed of the base does not change the folder."""
    config = config_of(tmp_path)
    first = made(config)
    assert made(dataclasses.replace(config, learning_rate=1.0, seed=7, steps=3)).folder == first.folder


@pytest.mark.parametrize(
    ("name", "spoil", "remark"),
    [
        ("ids.npy", "flip", "ids.npy was damaged"),
        ("ends.npy", "cut", "ends.npy was damaged"),
        ("predicted.npy", "remove", "predicted.npy was damaged"),
        ("index.json", "cut", "index.json was damaged"),
        ("index.json", "remove", "index.json was damaged"),
    ],
)
def test_damaged_rows_are_made_again(tmp_path: Path, name: str, spoil: str, remark: str) -> None:
    """The digest finds the damage, and the remark says so."""
    config = config_of(tmp_path)
    first = made(config)
    path = first.folder / name
    content = path.read_bytes()
    middle = len(content) // 2
    if spoil == "remove":
        path.unlink()
    else:
        path.write_bytes(content[:middle] if spoil == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    again = made(config)
    assert again.made
    assert remark in again.remark
    assert path.read_bytes() == content
    assert not made(config).made


def test_remains_of_a_killed_maker_are_replaced(tmp_path: Path) -> None:
    """A draft never has the folder's name."""
    config = config_of(tmp_path)
    folder = made(config).folder
    folder.rename(folder.with_suffix(".tmp"))
    (folder.with_suffix(".tmp") / "rubbish").write_text("x")
    assert made(config).made
    assert not (folder / "rubbish").exists()


@pytest.mark.long
def test_one_process_makes_and_the_others_wait(tmp_path: Path) -> None:
    """Four processes start at once, as the ranks of a node do."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "finetune_smoke", "preprocess", f"--scratch={tmp_path}", "--steps=300"]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    results = [result(output) for output in outputs]
    assert [process.returncode for process in processes] == [0] * 4
    assert sorted(each["made"] for each in results) == [False, False, False, True]
    assert len({each["folder"] for each in results}) == 1
    assert sorted(path.suffix for path in tmp_path.iterdir()) == ["", ".lock"]


def test_rows_that_another_process_makes_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line says that it waits, then one line, and exits with code 2. A holder that was killed holds nothing."""
    assert main(["preprocess", *OPTIONS, f"--scratch={tmp_path}"]) == 0
    (lock,) = tmp_path.glob("*.lock")
    program = (
        "import filelock, sys, time\nlock = filelock.FileLock(sys.argv[1])\nlock.acquire()\nprint('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(cache, "DEADLINE_S", 1.0)
    monkeypatch.setattr(cache, "SPEAK_AFTER_S", 0.2)
    with subprocess.Popen([sys.executable, "-c", program, str(lock)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        capsys.readouterr()
        code = main(["preprocess", *OPTIONS, f"--scratch={tmp_path}"])
        holder.kill()
    assert code == 2
    captured = capsys.readouterr()
    assert f"waiting for another process, which is making the rows and holds {lock}" in captured.out
    assert f"another process is making the rows and has held {lock} for more than 1 s: wait" in captured.err
    assert len(captured.err.splitlines()) == 1
    assert main(["preprocess", *OPTIONS, f"--scratch={tmp_path}"]) == 0


def test_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some network file systems are mounted without locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(InputError, match=r"scratch folder cannot be written or locked: .*No locks available"):
        made(config_of(tmp_path))


@pytest.mark.parametrize("passes", [1, 2])
def test_training_uses_what_preprocess_made(passes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The losses are those without preprocess, and the folder is found."""
    assert main(["preprocess", *OPTIONS, f"--accumulation={passes}", f"--scratch={tmp_path}"]) == 0
    found = result(capsys.readouterr().out)
    assert (found["command"], found["train"], found["heldout"], found["made"]) == ("preprocess", 48 * passes, 16, True)
    heard: list[str] = []
    settings = {**CHEAP, "accumulation": passes}
    kept = finetune(preset("tiny", **settings, scratch=str(tmp_path)), progress=lambda step, _part: heard.append(step))
    assert any(f"{48 * passes + 16} rows of" in step and "found in" in step for step in heard)
    assert kept.losses == finetune(preset("tiny", **settings)).losses


def test_tokenizer_of_a_model_has_a_digest_of_its_rules(real_model: Path, tmp_path: Path) -> None:
    """One more rule changes the digest; loading the tokenizer twice does not."""
    codec = hub.load_codec(str(real_model))
    assert codec.digest == hub.load_codec(str(real_model)).digest
    for path in real_model.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert hub.load_codec(str(tmp_path)).digest != codec.digest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "preprocess needs --scratch DIR"),
        (["--scratch={tmp}/file"], "scratch folder cannot be written"),
        (["--scratch={tmp}/s", "--world-size=x"], "world size 'x': a number of ranks is needed"),
        (["--scratch={tmp}/s", "--world-size=3"], "32 rows a step cannot be shared by 3 ranks"),
        (["--scratch={tmp}/s", "--model={tmp}/none"], "no such model directory"),
    ],
)
def test_bad_input_leaves_2_with_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input makes no folder."""
    (tmp_path / "file").write_text("")
    assert main(["preprocess", *(text.format(tmp=tmp_path) for text in arguments)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert not (tmp_path / "s").exists()


def test_rows_made_for_a_smaller_batch_may_be_too_few(tmp_path: Path) -> None:
    """Too few rows are found, counted and refused."""
    config = config_of(tmp_path)
    made(config)
    with pytest.raises(InputError, match="36 training rows of up to 1024 tokens are fewer than one step of 37 rows"):
        cache.open_rows(config, CODEC, step_rows=37)
    assert cache.open_rows(config, CODEC, step_rows=36).train == 36


def test_too_few_packed_rows_are_refused(tmp_path: Path) -> None:
    """The message says how many rows there are, and no folder stays."""
    with pytest.raises(InputError, match=r"40 rows make \d packed ones of 1024 tokens, fewer than one step of 4 rows"):
        made(config_of(tmp_path, packed=True, row_tokens=1024))
    assert [path.suffix for path in (tmp_path / "scratch").iterdir()] == [".lock"]
