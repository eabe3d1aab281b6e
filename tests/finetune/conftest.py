"""For the tests of finetune_smoke: small runs, a small real model, and one pair of ranks for all planted faults."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock

from tests.support.finetune.runs import QUICK, RUNS, SCRIPTS, torchrun

if TYPE_CHECKING:
    from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when huggingface_hub is imported: no test may need the network


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the pair of ranks reads its runs and leaves outcomes and checkpoints; all workers of pytest-xdist have one."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "ranks"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def outcomes(shared_folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Name of each of RUNS -> its outcome on rank 0 and on rank 1."""
    folder = shared_folder
    runs = {name: {**QUICK, **settings} for name, settings in RUNS.items()}
    for name in ("checkpointed", "resumed"):
        runs[name]["checkpoint_dir"] = str(folder / "checkpoints")
    files = [folder / f"rank{rank}.json" for rank in (0, 1)]
    with FileLock(folder / "lock"):  # a worker that comes later waits, and reads what the first one has run
        if not all(file.exists() for file in files):
            (folder / "runs.json").write_text(json.dumps(runs))
            done = torchrun(SCRIPTS / "two_ranks.py", folder)
            assert done.returncode == 0, done.stderr[-4000:]
    by_rank = [json.loads(file.read_text()) for file in files]
    return {name: [outcome[name] for outcome in by_rank] for name in runs}


@pytest.fixture(scope="session")
def real_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as a hub repository has it: a small Llama, its tokenizer and its generation settings."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers  # noqa: PLC0415 -- seconds; only who asks
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: PLC0415 -- as above

    folder = tmp_path_factory.mktemp("model")
    special = ["<unk>", "<pad>", "<s>", "</s>"]
    inner = Tokenizer(models.BPE(unk_token=special[0]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=special)
    inner.train_from_iterator(["SYSTEM: call a function. USER: what is the weather in Oslo"] * 3, trainer)
    names = dict(zip(("unk_token", "pad_token", "bos_token", "eos_token"), special, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.save_pretrained(folder)
    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def real_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as glaive-function-calling-v2 has it: JSON rows of ``system`` and ``chat``."""
    folder = tmp_path_factory.mktemp("dataset")
    rows = [{"system": "SYSTEM: call a function.", "chat": f"USER: what is the weather in city {i}"} for i in range(40)]
    (folder / "calls.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "README.md").write_text("synthetic\n")
    return folder
