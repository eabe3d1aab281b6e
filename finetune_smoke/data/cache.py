"""Rows made once for each node: tokenised, packed if wanted, and kept in a scratch folder (``--scratch DIR``).

``DIR/rows-KEY`` holds NumPy files that the node's ranks map into memory, and ``index.json``: what they were made of, with a
digest of each file. KEY stands for data set, tokenizer and settings. One process makes the folder under a lock, which the
system releases however its holder ends, while the others wait; the folder gets its name when it is complete. A folder whose
files differ from its index is made again. Without a scratch folder the same rows are made in memory, as needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import numpy as np

from finetune_smoke import digests
from finetune_smoke.data import batches, hub
from finetune_smoke.settings.config import Config, InputError, as_input_error

FORMAT = 1
INDEX = "index.json"
DEADLINE_S = 570.0
"""How long to wait for the process that makes the rows. It is less than the 600 s after which the ranks of other nodes
stop waiting in their process group (ranks.py), so that the run ends with a message that says why."""
SPEAK_AFTER_S = 3.0
"""A process that waits longer says so."""
ARRAYS = {"ids.npy": np.int32, "predicted.npy": np.bool_, "ends.npy": np.int64}
"""The tokens of all rows one after another, which of them are predicted, and where each row ends."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Rows in a folder: first ``train`` rows, then ``heldout``. ``remark`` says whether they were found or made, and why."""

    folder: Path
    train: int
    heldout: int
    tokens: int
    made: bool
    remark: str
    digest: int
    arrays: dict[str, Any]

    def row(self, number: int) -> batches.Row:
        """Row ``number``, counted over training and held-out rows."""
        ends = self.arrays["ends.npy"]
        first, last = int(ends[number - 1]) if number else 0, int(ends[number])
        predicted = np.flatnonzero(self.arrays["predicted.npy"][first:last])
        return batches.Row(self.arrays["ids.npy"][first:last].tolist(), predicted.tolist())


def source(config: Config, codec: batches.Codec, *, step_rows: int, say: Callable[[str], None]) -> batches.Source:
    """The source of the rows of ``config``; ``step_rows`` is the number of rows of all ranks in a pass. Raises InputError."""
    if config.scratch is None:
        return _in_memory(config, codec, step_rows).shuffled(config.seed)
    made = open_rows(config, codec, step_rows=step_rows, say=say)
    say(made.remark)
    if config.dataset is None:
        fresh = batches.synthetic(config, codec)
        # Checks read rows beyond those of the last step: these are made in memory.
        return dataclasses.replace(fresh, row=lambda index: (made if index < made.train else fresh).row(index))
    heldout = tuple(made.row(made.train + number) for number in range(made.heldout))
    kept = batches.Source(row=made.row, size=made.train, heldout=heldout, pad_id=codec.pad_id, digest=made.digest)
    return kept.shuffled(config.seed)


def _in_memory(config: Config, codec: batches.Codec, step_rows: int) -> batches.Source:
    """Calls, or texts in the order of their files."""
    if config.dataset is None:
        return batches.synthetic(config, codec)
    return batches.text_rows(config, codec, hub.load_texts(config.dataset), step_rows=step_rows)


def open_rows(
    config: Config, codec: batches.Codec, *, step_rows: int, say: Callable[[str], None] = lambda _text: None
) -> Cache:
    """Open the rows of ``config`` in its scratch folder; make them if they are missing or damaged. Raises InputError."""
    about = _about(config, codec, step_rows)
    key = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    scratch = Path(config.scratch or "")
    folder = scratch / f"rows-{key}"
    with _locked(scratch, key, say):
        flaw = _flaw(folder, about)
        begin = time.monotonic()
        if flaw is not None:
            _make(config, codec, folder, about, step_rows)
        how = f"found in {folder}" if flaw is None else f"made in {folder} in {time.monotonic() - begin:.1f} s ({flaw})"
        index = json.loads((folder / INDEX).read_text())
        arrays = {name: np.load(folder / name, mmap_mode="r") for name in ARRAYS}
    tokens = len(arrays["ids.npy"])
    found = Cache(
        folder=folder,
        train=index["train"],
        heldout=index["heldout"],
        tokens=tokens,
        made=flaw is not None,
        remark=f"{index['train'] + index['heldout']} rows of {tokens} tokens {how}",
        digest=digests.digest_bytes(json.dumps(index["files"], sort_keys=True).encode()),
        arrays=arrays,
    )
    batches.require_a_step(
        config, found.train, step_rows, f"{found.train} training rows of up to {config.row_tokens} tokens are"
    )
    return found


def _about(config: Config, codec: batches.Codec, step_rows: int) -> dict[str, object]:
    """Everything that the rows depend on."""
    synthetic = {"seed": config.seed, "rows": _rows_read(config, step_rows)}
    return {
        "format": FORMAT,
        "data": synthetic if config.dataset is None else hub.dataset_digest(config.dataset),
        "tokenizer": [codec.digest, codec.end_id, codec.pad_id],
        "row_tokens": config.row_tokens,
        "packed": config.packed,
        "heldout_rows": config.heldout_rows,
    }


def data_digest(config: Config, codec: batches.Codec) -> int:
    """A 64-bit digest of data set (or seed) and tokenizer, whatever the settings and the number of ranks; raises InputError."""
    content = config.seed if config.dataset is None else hub.dataset_digest(config.dataset)
    return digests.digest_bytes(repr([content, codec.digest, codec.end_id, codec.pad_id]).encode())


def _rows_read(config: Config, step_rows: int) -> int:
    return config.steps * config.accumulation * step_rows


def _locked(scratch: Path, key: str, say: Callable[[str], None]) -> filelock.AcquireReturnProxy[Any]:
    """Take the lock of ``key``; raises InputError if the folder cannot be written, or another process holds it too long."""
    lock = filelock.FileLock(scratch / f"rows-{key}.lock")
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        try:
            return lock.acquire(timeout=min(SPEAK_AFTER_S, DEADLINE_S))
        except filelock.Timeout:
            say(f"waiting for another process, which is making the rows and holds {lock.lock_file}; at most {DEADLINE_S:.0f} s")
            return lock.acquire(timeout=max(0.0, DEADLINE_S - SPEAK_AFTER_S))
    except filelock.Timeout as error:
        raise InputError(
            f"another process is making the rows and has held {lock.lock_file} for more than {DEADLINE_S:.0f} s: wait until it "
            "is done and start again, end it if it hangs (its lock goes with it), or name another folder"
        ) from error
    except OSError as error:
        raise InputError(f"scratch folder cannot be written or locked: {error}") from error


def _flaw(folder: Path, about: dict[str, object]) -> str | None:
    """Why the rows in ``folder`` are unusable, None if they are usable."""
    if not folder.exists():
        return "new"
    try:
        index = json.loads((folder / INDEX).read_text())
        changed = [name for name in ARRAYS if index["files"][name]["digest"] != _digest(folder / name)]
        same = index["about"] == json.loads(json.dumps(about))
    except (OSError, ValueError, KeyError, TypeError):
        return f"{INDEX} was damaged"
    return None if same and not changed else f"{' and '.join(changed) or INDEX} was damaged"


def _digest(path: Path) -> str | None:
    """The digest of a file; None if it cannot be read."""
    try:
        with path.open("rb") as file:
            return digests.file_digest(file, path.stat().st_size)
    except OSError:
        return None


def _make(config: Config, codec: batches.Codec, folder: Path, about: dict[str, object], step_rows: int) -> None:
    """Make all rows, write them to a draft and rename it to ``folder``; raises InputError."""
    fresh = _in_memory(config, codec, step_rows)
    size = _rows_read(config, step_rows) if fresh.size is None else fresh.size
    rows = [*map(fresh.row, range(size)), *fresh.heldout]
    ends = np.cumsum([len(row.ids) for row in rows])
    predicted = np.zeros(int(ends[-1]), dtype=np.bool_)
    for row, end in zip(rows, ends.tolist(), strict=True):
        predicted[[end - len(row.ids) + at for at in row.predicted]] = True
    ids = np.fromiter((token for row in rows for token in row.ids), dtype=np.int64, count=int(ends[-1]))
    draft = folder.with_suffix(".tmp")
    with as_input_error("scratch folder cannot be written"):
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        for name, array in {"ids.npy": ids, "predicted.npy": predicted, "ends.npy": ends}.items():
            np.save(draft / name, array.astype(ARRAYS[name]))
        made = {name: {"digest": _digest(draft / name)} for name in ARRAYS}
        index = {"about": about, "train": size, "heldout": len(fresh.heldout), "files": made}
        (draft / INDEX).write_text(json.dumps(index, indent=1) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
