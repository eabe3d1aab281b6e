"""A tokenizer and a data set, the real ones from a directory or from the hub's cache."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from finetune_smoke.data import calls
from finetune_smoke.data.batches import Codec, own_codec
from finetune_smoke.digests import digest_bytes
from finetune_smoke.settings.config import Config, InputError, as_input_error


def codec_of(config: Config) -> Codec:
    """The tokenizer of the base; raises InputError."""
    return own_codec(calls.Tokenizer()) if config.model is None else load_codec(config.model)


def load_codec(name: str) -> Codec:
    """The tokenizer of model ``name``; raises InputError if it cannot be loaded or has no end token.

    Encoding raises InputError for a token that the model has no embedding for.
    """
    check_place("model", name)
    from transformers import AutoConfig, AutoTokenizer  # noqa: PLC0415 -- seconds; only where a model is loaded

    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        config = AutoConfig.from_pretrained(name).get_text_config()
    except (OSError, ValueError) as error:
        raise InputError(reason("tokenizer of model", name, error)) from error
    if tokenizer.eos_token_id is None:
        raise InputError(f"tokenizer of {name} has no end token: set eos_token in its tokenizer_config.json")
    known = getattr(config, "vocab_size", None) or len(tokenizer)

    def checked(ids: list[int]) -> list[int]:
        foreign = next((number for number in ids if number >= known), None)
        if foreign is not None:
            token = tokenizer.convert_ids_to_tokens(foreign)
            raise InputError(f"tokenizer of {name} has token {foreign}, {token!r}, and the model's tokens end at {known - 1}")
        return ids

    def encode(text: str) -> list[int]:
        return checked(tokenizer(text, add_special_tokens=False)["input_ids"])

    backend = getattr(tokenizer, "backend_tokenizer", None)  # of a fast tokenizer
    rules = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    # Padding follows all tokens that are read and predicted in a row, or is masked, so any token would do.
    # A class of transformers may add its own pad token to a vocabulary without one, behind the model's last token.
    unpadded = tokenizer.pad_token_id is None or tokenizer.pad_token_id >= known
    return Codec(
        encode=encode,
        decode=functools.partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False),
        end_id=checked([tokenizer.eos_token_id])[0],
        pad_id=tokenizer.eos_token_id if unpadded else tokenizer.pad_token_id,
        digest=digest_bytes(rules.encode()),
        remark=f"tokenizer of {name} has no pad token that the model knows: rows are filled with its end token"
        if unpadded
        else None,
    )


def load_texts(name: str) -> list[str]:
    """The texts of the JSON and JSONL files of a data set, in the files' natural order; raises InputError.

    A row holds ``text``, or ``system`` and ``chat`` as glaive-function-calling-v2 does, or ``instruction``, ``input`` and
    ``output``; all of it is one text.
    """
    return [prompt + rest for prompt, rest in load_parts(name)]


def load_parts(name: str) -> list[tuple[str, str]]:
    """The same texts, each as (what comes before ``output``, the rest); the first is empty in the other layouts."""
    return [_parts(row, where) for path in _files(name) for where, row in _rows(path)]


def dataset_digest(name: str) -> str:
    """SHA-256, as hex, of the names and contents of the files that ``load_texts`` reads; raises InputError."""
    found = hashlib.sha256()
    for path in _files(name):
        with as_input_error(f"{path}: cannot be read"):
            content = path.read_bytes()
        found.update(f"{path.name}\0{len(content)}\0".encode())
        found.update(content)
    return found.hexdigest()


def _files(name: str) -> list[Path]:
    check_place("data set", name)
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download  # noqa: PLC0415 -- slow import, only for a hub repository

        try:
            folder = Path(snapshot_download(name, repo_type="dataset", allow_patterns=["*.json", "*.jsonl"]))
        except (OSError, ValueError) as error:
            raise InputError(reason("data set", name, error)) from error
    files = sorted(path for path in folder.rglob("*") if path.suffix in {".json", ".jsonl"} and path.is_file())
    files = [path for path in files if path.name not in {"dataset_infos.json", "dataset_info.json", "state.json"}]
    if not files:
        raise InputError(f"data set {name}: no .jsonl and no .json file in {folder}")
    return files


def check_place(kind: str, name: str) -> None:
    """Raise InputError for a file or a path that does not exist; a directory switches access to the hub off."""
    if Path(name).is_file():
        raise InputError(f"{kind} {name}: a file, and a directory is needed")
    if kind == "model" and Path(name).is_dir() and not (Path(name) / "config.json").is_file():
        raise InputError(f"model {name}: cannot be loaded: there is no config.json in that directory")
    if Path(name).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    elif name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise InputError(f"no such {kind} directory: {name}")


def reason(kind: str, name: str, error: Exception) -> str:
    """A one-line message for one of the hub's long errors."""
    first = str(error).strip().partition("\n")[0]
    where = "cannot be loaded" if Path(name).is_dir() else "not a directory here, and not to be had from the hub or its cache"
    return f"{kind} {name}: {where}: {first}"


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(where, row) of each row: a JSON array, or one JSON object a line."""
    with as_input_error(f"{path}: cannot be read as UTF-8 text", (OSError, UnicodeDecodeError)):
        content = path.read_text(encoding="utf-8-sig")
    if content.lstrip().startswith("["):
        for number, row in enumerate(_parsed(content, str(path))):
            yield f"{path}, row {number}", row
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _parsed(line, f"{path}:{number}")


def _parsed(content: str, where: str) -> Any:
    with as_input_error(f"{where}: not JSON", (ValueError, RecursionError)):
        return json.loads(content)


def _parts(row: Any, where: str) -> tuple[str, str]:
    """(what comes before ``output``, the rest) of a row; raises InputError if there is no text to train on."""
    found = row if isinstance(row, dict) else {}
    if "text" in found:
        before, parts = [], [found["text"]]
    elif "output" in found:
        before, parts = [found.get("instruction") or "", found.get("input") or ""], [found["output"]]
    else:
        before, parts = [], [found.get("system") or "", found.get("chat")]
    if not all(isinstance(part, str) for part in (*before, *parts)):
        raise InputError(
            f"{where}: a row needs 'text', or 'chat' with or without 'system', or 'output' with or without 'instruction' and "
            "'input'"
        )
    prompt = "".join(f"{part}\n" for part in before if part)
    rest = "\n".join(part for part in parts if part)
    if not (prompt + rest).strip():
        raise InputError(f"{where}: the row has no text")
    try:
        (prompt + rest).encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{where}: half of a UTF-16 pair stands alone: {error.object[error.start]!a}") from error
    return prompt, rest
