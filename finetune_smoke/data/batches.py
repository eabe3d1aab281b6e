"""Rows as a function of the step: which rows a rank reads, as tokens, and batches of them.

Step ``s`` trains on the rows ``s * G`` to ``(s + 1) * G - 1`` of one endless sequence, with G rows for all ranks. Each rank
takes its slice. So the curve does not depend on the number of ranks if ``rows`` are shared. A resume needs only the number
of rows that were read (checkpoints/reading.py), and every rank can check what another one has read.

Threads make what the next steps need while the GPU works. They share the interpreter lock with the training thread, which
gives it away at every launch of a kernel, and would wait 5 ms each time to get it back; so the threads pass it on sooner.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from finetune_smoke.data import calls
from finetune_smoke.digests import digest_bytes
from finetune_smoke.settings.config import Config, InputError

WIDTHS = 64
"""Batches have multiples of so many tokens: cuDNN plans its attention for each new width, in about 0.2 s."""
PACKED_STRIDE = 4096
"""Examples reserved for one packed row: more than fit into it, so rows never share an example."""


@dataclass(frozen=True, slots=True)
class Codec:
    """A tokenizer as training uses it: text to tokens and back, the token that ends an answer, the token that pads a row.

    ``digest`` stands for its vocabulary and rules. ``remark`` names a token that had to be chosen, None otherwise.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    end_id: int
    pad_id: int
    digest: int
    remark: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of a row, and the positions (1 and up) of the tokens that the model has to predict, in order."""

    ids: list[int]
    predicted: list[int]

    @property
    def tokens(self) -> int:
        """The number of tokens without padding, which follows the last predicted one."""
        return self.predicted[-1] + 1 if self.predicted else len(self.ids)


class Batch(NamedTuple):
    """Rows as tensors: ``ids`` [rows, tokens], and one entry per predicted token in each of the others.

    ``positions`` is the index of the token before it in the flattened ``ids``, ``targets`` the token itself, ``owners`` the
    number of its row.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on ``device``."""
        return Batch(*(tensor.to(device, non_blocking=True) for tensor in self))

    def pinned(self) -> Batch:
        """The same batch in page-locked memory, from which a copy to a GPU runs beside other work."""
        return Batch(*(tensor.pin_memory() for tensor in self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A source of rows. ``row(index)`` returns a training row: one of ``size``, of endlessly many where that is None.

    ``answers``: each held-out row holds one function call. ``blind_floor_nats`` is the loss per predicted token of a model
    that has learnt the format and reads nothing of the prompt, None if it is unknown. ``digest`` stands for the content:
    equal on ranks that read the same data.
    """

    row: Callable[[int], Row]
    size: int | None = None
    heldout: tuple[Row, ...]
    pad_id: int
    answers: bool = False
    blind_floor_nats: float | None = None
    digest: int

    def shuffled(self, seed: int) -> Source:
        """The same rows as an endless sequence: all in an order drawn from ``seed``, then all in another."""
        size = self.size
        if size is None:
            return self

        @functools.lru_cache(maxsize=4)
        def order(epoch: int) -> list[int]:
            numbers = list(range(size))
            random.Random(f"{seed}/order/{epoch}").shuffle(numbers)
            return numbers

        return replace(self, row=lambda index: self.row(order(index // size)[index % size]), size=None)


def own_codec(tokenizer: calls.Tokenizer) -> Codec:
    """The tokenizer in code as a Codec."""
    return Codec(
        encode=tokenizer.encode,
        decode=tokenizer.decode,
        end_id=tokenizer.end_id,
        pad_id=tokenizer.pad_id,
        digest=digest_bytes("\0".join(tokenizer.fragments).encode()),
    )


def local_rows(config: Config, world_size: int) -> int:
    """Rows of a pass on each rank; raises InputError if the ranks cannot share the rows evenly."""
    if not config.rows_shared:
        return config.rows
    if config.rows % world_size:
        raise InputError(f"{config.rows} rows a step cannot be shared by {world_size} ranks: not divisible")
    return config.rows // world_size


def indices(step: int, *, rank: int, world_size: int, rows: int) -> range:
    """The rows that ``rank`` reads at ``step`` where each rank reads ``rows``."""
    first = (step * world_size + rank) * rows
    return range(first, first + rows)


def common_width(rows: Sequence[Row], *, most: int) -> int:
    """The tokens to which ``rows`` are filled: their longest up to a multiple of 64, at ``most`` those that a row may have.

    Rows of 60 to 1,000 tokens trained a third faster so on one H200 (docs/results/2026-11-29-h200x1-widths).
    """
    longest = max(len(row.ids) for row in rows)
    return min(most, -(-longest // WIDTHS) * WIDTHS)


def batch(rows: Sequence[Row], pad_id: int, width: int | None = None) -> Batch:
    """``rows`` as one batch, filled at the right to ``width`` tokens, which none exceeds, or to the longest."""
    width = width or max(len(row.ids) for row in rows)
    positions = [number * width + at - 1 for number, row in enumerate(rows) for at in row.predicted]
    targets = [row.ids[at] for row in rows for at in row.predicted]
    owners = [number for number, row in enumerate(rows) for _ in row.predicted]
    return Batch(
        ids=torch.tensor([row.ids + [pad_id] * (width - len(row.ids)) for row in rows]),
        positions=torch.tensor(positions, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        owners=torch.tensor(owners, dtype=torch.int64),
    )


def digest_rows(rows: Sequence[Row]) -> int:
    """A 64-bit digest of the tokens of ``rows`` and of which are predicted."""
    return digest_bytes(repr([(row.ids, row.predicted) for row in rows]).encode())


def synthetic(config: Config, codec: Codec) -> Source:
    """Function calls made from the seed, with the loss on the answers only; raises InputError if one is longer than a row."""
    examples = [calls.example(config.seed, "heldout", index) for index in range(config.heldout_rows)]
    heldout = tuple(_answer_row(example, codec) for example in examples)
    answer_tokens = sum(len(row.predicted) for row in heldout)

    def row(index: int) -> Row:
        if not config.packed:
            return _fitting(_answer_row(calls.example(config.seed, "train", index), codec), config)
        numbers = range(index * PACKED_STRIDE, (index + 1) * PACKED_STRIDE)
        examples = (_answer_row(calls.example(config.seed, "train", number), codec) for number in numbers)
        return next(pack(examples, config.row_tokens, codec.pad_id))

    return Source(
        row=row,
        heldout=tuple(_fitting(row, config) for row in heldout),
        pad_id=codec.pad_id,
        answers=True,
        blind_floor_nats=sum(example.entropy_nats for example in examples) / answer_tokens,
        digest=digest_rows(heldout),
    )


def text_rows(config: Config, codec: Codec, content: Sequence[str], *, step_rows: int) -> Source:
    """One text a row, cut at ``row_tokens``, or packed; every token predicted. The rows are in the order of the texts.

    Raises InputError if the training rows are fewer than those of one step: ``step_rows`` of all ranks in each pass.
    """
    train, held = split_texts(config, content)
    found = f"{len(content)} rows, {len(held)} of them held out, leave"

    def row(index: int) -> Row:
        return _text_row(train[index], codec, config.row_tokens)

    rows = Source(
        row=row,
        size=len(train),
        heldout=tuple(_text_row(text, codec, config.row_tokens) for text in held),
        pad_id=codec.pad_id,
        digest=digest_bytes("\0".join(content).encode()),
    )
    if config.packed:
        packed = list(pack(map(row, range(len(train))), config.row_tokens, codec.pad_id))
        rows = replace(rows, row=packed.__getitem__, size=len(packed))
        found = f"{len(content)} rows make {len(packed)} packed ones of {config.row_tokens} tokens,"
    require_a_step(config, rows.size or 0, step_rows, found)
    return rows


def split_texts(config: Config, content: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """(training texts, held-out ones): the last ``heldout_rows`` of all, at most a tenth, are held out."""
    held = min(config.heldout_rows, max(1, len(content) // 10))
    return content[: len(content) - held], content[len(content) - held :]


def require_a_step(config: Config, size: int, step_rows: int, found: str) -> None:
    """Raises InputError, which says what was ``found``, if ``size`` training rows are fewer than one step."""
    needed = step_rows * config.accumulation
    if size < needed:
        raise InputError(
            f"data set {config.dataset}: {found} fewer than one step of {needed} rows: it takes a larger data set, fewer "
            "--rows or less --accumulation"
        )


def _answer_row(example: calls.Example, codec: Codec) -> Row:
    """Prompt and answer as one row; the answer and the end are predicted."""
    prompt = codec.encode(example.prompt)
    ids = [*prompt, *codec.encode(example.response), codec.end_id]
    return Row(ids, list(range(len(prompt), len(ids))))


def _fitting(row: Row, config: Config) -> Row:
    if len(row.ids) > config.row_tokens:
        raise InputError(f"an example has {len(row.ids)} tokens: more than row_tokens = {config.row_tokens}")
    return row


def pack(rows: Iterable[Row], row_tokens: int, pad_id: int) -> Iterator[Row]:
    """Pack whole rows, in their order, into rows of exactly ``row_tokens`` tokens, padded at the end."""
    ids: list[int] = []
    predicted: list[int] = []
    for row in rows:
        if len(ids) + len(row.ids) > row_tokens:
            yield Row(ids + [pad_id] * (row_tokens - len(ids)), predicted)
            ids, predicted = [], []
        predicted = predicted + [len(ids) + at for at in row.predicted]
        ids = ids + row.ids
    if ids:
        yield Row(ids + [pad_id] * (row_tokens - len(ids)), predicted)


def _text_row(text: str, codec: Codec, row_tokens: int) -> Row:
    ids = [*codec.encode(text), codec.end_id][:row_tokens]
    return Row(ids, list(range(1, len(ids))))


SWITCH_S = 0.0002
"""How long a thread may keep the interpreter lock while another one wants it."""

Made = TypeVar("Made")
Value = TypeVar("Value")


@dataclass(slots=True)
class Loader(Generic[Made]):
    """``take(step)`` returns what ``make`` makes of a step, and has the next ``ahead`` steps made in the background."""

    make: Callable[[int], Made]
    pool: ThreadPoolExecutor | None
    ahead: int
    last: int
    side: ThreadPoolExecutor | None = None
    _coming: dict[int, Future[Made]] = field(default_factory=dict)

    def take(self, step: int) -> Made:
        """The result of ``make(step)``; raises its exceptions."""
        if self.pool is None:
            return self.make(step)
        for later in range(step, min(step + self.ahead + 1, self.last)):
            if later not in self._coming:
                self._coming[later] = self.pool.submit(self.make, later)
        return self._coming.pop(step).result()

    def beside(self, work: Callable[[], Value]) -> Callable[[], Value]:
        """A function that returns the result of ``work``, which runs in a thread meanwhile; without threads when asked."""
        return work if self.side is None else self.side.submit(work).result


@contextmanager
def loading(
    make: Callable[[int], Made], *, workers: int, ahead: int, last: int, begin: Callable[[], None] = lambda: None
) -> Iterator[Loader[Made]]:
    """A loader of the steps before ``last`` with ``workers`` threads, which end with the block; 0 makes steps on demand.

    ``begin`` is called once in each thread.
    """
    if workers == 0:
        yield Loader(make, None, 0, last)
        return
    before_s = sys.getswitchinterval()
    with (
        ThreadPoolExecutor(workers, thread_name_prefix="rows", initializer=begin) as pool,
        ThreadPoolExecutor(1, thread_name_prefix="checks", initializer=begin) as side,  # waits for no rows
    ):
        sys.setswitchinterval(SWITCH_S)
        try:
            yield Loader(make, pool, ahead, last, side)
        finally:
            sys.setswitchinterval(before_s)
            pool.shutdown(wait=False, cancel_futures=True)
