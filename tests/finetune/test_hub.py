"""A real model and data set: from directories, and by id from the hub's cache."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from finetune_smoke.__main__ import main
from finetune_smoke.data import hub
from finetune_smoke.model import build
from finetune_smoke.settings.config import InputError
from tests.support import REPOSITORY
from tests.support.finetune.runs import result

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UNPADDED = "has no pad token that the model knows: rows are filled with its end token"
SETTINGS = ["--steps=6", "--lora-rank=4", "--row-tokens=64", "--heldout-rows=4", "--loss-limit=none"]


def test_real_model_trains_on_a_data_set(real_model: Path, real_dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model trains in the same loop, on all tokens, which the summary says; there are no calls to generate."""
    assert main(["--model", str(real_model), "--dataset", str(real_dataset), *SETTINGS, "--learning-rate=0.01"]) == 0
    out = capsys.readouterr().out
    found = result(out)
    assert "all tokens" in out
    assert found["losses"][5] < found["losses"][0]
    assert (found["exact_match"], found["greedy_exact_match"], found["blind_floor_nats"]) == (None, None, None)
    assert found["checks"]["restore"]["passed"]


def cached(root: Path, kind: str, content: Path) -> None:
    """``content`` as the hub's cache keeps ``test/tiny``."""
    repository = root / f"{kind}s--test--tiny"
    shutil.copytree(content, repository / "snapshots" / "0123456789abcdef")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123456789abcdef")


@pytest.mark.long
def test_ids_are_found_in_the_hub_cache_offline(real_model: Path, real_dataset: Path, tmp_path: Path) -> None:
    """The node has no network, and a filled cache."""
    cached(tmp_path, "model", real_model)
    cached(tmp_path, "dataset", real_dataset)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "finetune_smoke", "--model=test/tiny", "--dataset=test/tiny", *SETTINGS],
        env={**environment, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines()[-1].startswith("RESULT ")


def without(model: Path, folder: Path, *tokens: str) -> Path:
    """A copy of ``model`` whose tokenizer does not know these."""
    shutil.copytree(model, folder)
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        path = folder / name
        if path.exists():
            content = json.loads(path.read_text())
            path.write_text(json.dumps({key: value for key, value in content.items() if key not in tokens}))
    return folder


def test_tokenizer_without_a_pad_token_fills_with_its_end_token(
    real_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so, and the losses are those of the tokenizer that has one: what fills a row is never read.

    Without --dataset a model trains on synthetic calls, through its own tokenizer, on the answers only.
    """
    unpadded = without(real_model, tmp_path / "model", "pad_token")
    losses = []
    for model in (real_model, unpadded):
        assert main(["--model", str(model), *SETTINGS, "--row-tokens=256", "--rows=2", "--greedy-rows=2", "--steps=2"]) == 0
        out = capsys.readouterr().out
        assert (f"tokenizer of {model} {UNPADDED}" in out) == (model == unpadded)
        found = result(out)
        assert found["exact_match"] == 0
        assert found["blind_floor_nats"] > 0
        losses.append(found["losses"])
    assert losses[0] == losses[1]
    codec = hub.load_codec(str(unpadded))
    assert codec.pad_id == codec.end_id == hub.load_codec(str(real_model)).end_id


def extended(model: Path, folder: Path, add: Callable[[Any], object]) -> Path:
    """A copy of ``model`` whose tokenizer was added to, behind the model's last embedding."""
    from transformers import AutoTokenizer  # noqa: PLC0415 -- slow import

    shutil.copytree(model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    add(tokenizer)
    tokenizer.save_pretrained(folder)
    return folder


def test_pad_token_behind_the_embedding_is_not_used(
    real_model: Path, real_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As transformers' class for Qwen2 adds one to a vocabulary of one's own."""
    model = extended(real_model, tmp_path / "model", lambda tokenizer: tokenizer.add_special_tokens({"pad_token": "<late>"}))
    assert main(["--model", str(model), "--dataset", str(real_dataset), *SETTINGS, "--steps=1"]) == 0
    assert f"tokenizer of {model} {UNPADDED}" in capsys.readouterr().out
    codec = hub.load_codec(str(model))
    assert codec.pad_id == codec.end_id


def test_token_without_an_embedding_is_refused(
    real_model: Path, real_dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text that has it, and an end token that is one; by name, and not in the midst of a forward."""
    model = extended(real_model, tmp_path / "model", lambda tokenizer: tokenizer.add_tokens(["weather"]))
    last = json.loads((model / "config.json").read_text())["vocab_size"] - 1
    assert main(["--model", str(model), "--dataset", str(real_dataset), *SETTINGS]) == 2
    said = f"tokenizer of {model} has token {last + 1}, 'weather', and the model's tokens end at {last}"
    assert said in capsys.readouterr().err
    ends = extended(real_model, tmp_path / "ends", lambda tokenizer: tokenizer.add_special_tokens({"eos_token": "<last>"}))
    with pytest.raises(InputError, match=f"has token {last + 1}, '<last>', and the model's tokens end at {last}"):
        hub.load_codec(str(ends))


def test_tokenizer_without_an_end_token_is_refused(real_model: Path, tmp_path: Path) -> None:
    """The message says what to set and where."""
    with pytest.raises(InputError, match="has no end token: set eos_token in its tokenizer_config"):
        hub.load_codec(str(without(real_model, tmp_path / "model", "pad_token", "eos_token")))


def test_directory_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message is one line."""
    assert main(["--model", str(tmp_path)]) == 2
    assert f"model {tmp_path}: cannot be loaded: there is no config.json in that directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no .jsonl and no .json file"),
        ('{"text": "\udcff"}', r"rows.jsonl: cannot be read as UTF-8 text: 'utf-8' codec can't decode byte 0xff"),
        ("[" * 200_000, r"rows.jsonl: not JSON"),
        ('{"text": "a"}\nnonsense\n', r"rows.jsonl:2: not JSON"),
        ('{"question": "a"}\n', r"rows.jsonl:1: a row needs 'text', or 'chat'"),
        ('{"instruction": "a", "input": "b", "output": null}', r"rows.jsonl:1: a row needs 'text', or 'chat'"),
        ('{"instruction": 1, "output": "b"}', r"rows.jsonl:1: a row needs 'text', or 'chat'"),
        ('{"text": "a"}\n{"text": " "}\n', r"rows.jsonl:2: the row has no text"),
        ('{"text": "a\\ud800"}\n', r"rows.jsonl:1: half of a UTF-16 pair stands alone: '\\ud800'|a"),
        ('["a"]', r"rows.jsonl, row 0: a row needs 'text', or 'chat'"),
        ('{"text": "a"}\n', "1 rows, 1 of them held out, leave fewer than one step of 4 rows"),
    ],
)
def test_unusable_data_set_is_refused(
    real_model: Path, tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message has file and line."""
    if content is not None:
        (tmp_path / "rows.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    assert main(["--model", str(real_model), "--dataset", str(tmp_path)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_missing_data_set_is_refused(real_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path is no hub id, and an id that is nowhere is said to be."""
    assert main(["--model", str(real_model), "--dataset", "./none/such"]) == 2
    assert "no such data set directory: ./none/such" in capsys.readouterr().err
    assert main(["--model", str(real_model), "--dataset", "nobody/nothing"]) == 2
    assert "data set nobody/nothing: not a directory here" in capsys.readouterr().err
    assert main(["--model", str(real_model), "--dataset", str(real_model / "config.json")]) == 2
    assert f"data set {real_model}/config.json: a file, and a directory is needed" in capsys.readouterr().err


def test_rows_of_both_layouts(tmp_path: Path) -> None:
    """A JSON array and JSON lines; system and chat become one text, a line separator in a text is no new line."""
    (tmp_path / "a.json").write_text(json.dumps([{"system": "S", "chat": "C"}, {"chat": "only"}]))
    (tmp_path / "b.jsonl").write_text('{"text": "x\u2028y"}\n\n')
    assert hub.load_texts(str(tmp_path)) == ["S\nC", "only", "x\u2028y"]


def spoiled(model: Path, copy: Path, change: Any) -> Path:
    """A copy of ``model`` whose weights ``change`` has had in hand."""
    from safetensors.torch import load_file, save_file  # noqa: PLC0415 -- slow import

    shutil.copytree(model, copy)
    weights = load_file(copy / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def test_model_with_missing_weights_is_refused(real_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The fine-tune would train on random numbers that transformers fills in."""

    def forget(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if "self_attn" in name]:
            del weights[name]

    model = spoiled(real_model, tmp_path / "model", forget)
    assert main(["--model", str(model), *SETTINGS, "--row-tokens=256"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert "4 weights are missing from its files: model.layers.0.self_attn.k_proj.weight, " in message
    assert message.endswith("...; fetch it again")


def test_weights_that_were_cut_short_are_refused(real_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An interrupted download."""
    shutil.copytree(real_model, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert main(["--model", str(tmp_path / "model"), *SETTINGS, "--row-tokens=256"]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"model {tmp_path / 'model'}: a file of weights cannot be read: " in message
    assert message.endswith("; fetch it again")


def test_model_with_weights_of_another_shape_is_refused(real_model: Path, tmp_path: Path) -> None:
    """The message has both shapes."""

    def shrink(weights: dict[str, torch.Tensor]) -> None:
        weights["model.norm.weight"] = torch.ones(7)

    model = spoiled(real_model, tmp_path / "model", shrink)
    with pytest.raises(InputError, match=r"1 weights have other shapes than .*: model.norm.weight \[7\] in place of \[32\]"):
        build.load_model(str(model), torch.device("cpu"))


def test_model_whose_head_is_its_embedding_misses_nothing(tmp_path: Path) -> None:
    """A tied head is in no file; and what a file has beyond the model does no harm."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415 -- slow import

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=True, **sizes)).save_pretrained(tmp_path / "tied")
    model = spoiled(tmp_path / "tied", tmp_path / "more", lambda weights: weights.update(extra=torch.ones(3)))
    loaded = build.load_model(str(model), torch.device("cpu"))
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight


def test_dropout_of_the_base_is_off_and_said(real_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dropout would look like a GPU that does not repeat itself."""
    shutil.copytree(real_model, tmp_path / "model")
    settings = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**settings, "attention_dropout": 0.1}))
    assert main(["--model", str(tmp_path / "model"), *SETTINGS, "--row-tokens=256", "--rows=2", "--audit-every=3"]) == 0
    found = result(capsys.readouterr().out)
    assert found["notes"][0] == "dropout of the base (attention_dropout 0.1) is off: ranks are compared to the bit"
    assert found["checks"]["lock_step"]["passed"]
    assert found["checks"]["restore"]["passed"]


def test_every_kind_of_dropout_is_off() -> None:
    """As modules (GPT-2) and as numbers; a model without any is left alone."""
    from transformers import GPT2Config, GPT2LMHeadModel  # noqa: PLC0415 -- slow import

    sizes = {"vocab_size": 50, "n_positions": 16, "n_embd": 32, "n_layer": 1, "n_head": 2}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes)).train()
    message = build.without_dropout(gpt2)
    assert message is not None
    assert "attn_pdrop 0.1" in message
    ids = torch.arange(12)[None]
    assert torch.equal(gpt2(ids).logits, gpt2(ids).logits)
    assert build.without_dropout(gpt2) is None
