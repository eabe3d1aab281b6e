"""Rows as a function of the step, batches, and the blind floor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from finetune_smoke.data import batches
from finetune_smoke.data.calls import Tokenizer
from finetune_smoke.settings.config import InputError, preset

TOKENIZER = Tokenizer()
CODEC = batches.own_codec(TOKENIZER)


def synthetic(**settings: Any) -> batches.Source:
    """The source of preset tiny with ``settings``."""
    return batches.synthetic(preset("tiny", **settings), CODEC)


def test_ranks_share_the_rows_of_a_step_whatever_their_number() -> None:
    """32 rows a step: all of them once, in the same order, read by 1, 2 or 4 ranks."""
    for world_size in (1, 2, 4):
        rows = 32 // world_size
        slices = [batches.indices(5, rank=rank, world_size=world_size, rows=rows) for rank in range(world_size)]
        assert [index for each in slices for index in each] == list(range(160, 192))


def test_rows_that_ranks_cannot_share_are_refused() -> None:
    """33 rows and two ranks; with rows of its own each rank takes them all."""
    with pytest.raises(InputError, match="33 rows a step cannot be shared by 2 ranks"):
        batches.local_rows(preset("tiny", rows=33), 2)
    assert batches.local_rows(preset("tiny", rows=33, rows_shared=False), 2) == 33


def test_batch_predicts_the_answer_from_the_token_before() -> None:
    """Positions point at the token before each target, padding is never predicted, owners are the rows."""
    rows = [batches.Row([5, 6, 7, 8], [2, 3]), batches.Row([9, 10], [1])]
    batch = batches.batch(rows, pad_id=0)
    assert batch.ids.tolist() == [[5, 6, 7, 8], [9, 10, 0, 0]]
    assert batch.positions.tolist() == [1, 2, 4]
    assert batch.ids.flatten()[batch.positions].tolist() == [6, 7, 9]
    assert batch.targets.tolist() == [7, 8, 10]
    assert batch.owners.tolist() == [0, 0, 1]
    assert batch.to(torch.device("cpu")).targets.tolist() == [7, 8, 10]


@pytest.mark.parametrize(("longest", "most", "width"), [(1, 2048, 64), (64, 2048, 64), (65, 2048, 128), (50, 56, 56)])
def test_batches_have_few_widths(longest: int, most: int, width: int) -> None:
    """Multiples of 64: a GPU plans its attention anew for each width. Never more than a row may have."""
    rows = [batches.Row([1] * length, [0]) for length in (longest, 1)]
    assert batches.common_width(rows, most=most) == width


def test_synthetic_row_predicts_the_answer_and_the_end_only() -> None:
    """Loss counts on the answer only: the prompt is given."""
    row = synthetic().row(3)
    answer = TOKENIZER.decode([row.ids[at] for at in row.predicted])
    assert answer.startswith('{"name": "')
    assert answer.endswith('"}}<|end|>')
    assert TOKENIZER.decode(row.ids[: row.predicted[0]]).endswith("<|asst|>")


def test_blind_floor_is_the_entropy_per_answer_token() -> None:
    """About 21 nats in 14.5 tokens; far above half the limit and far below a uniform guess."""
    floor = synthetic().blind_floor_nats
    assert floor is not None
    assert 1.2 < floor < 1.5 < math.log(len(TOKENIZER))


def test_example_longer_than_a_row_is_refused() -> None:
    """An example longer than a row is refused: a cut would lose the answer."""
    with pytest.raises(InputError, match="more than row_tokens = 20"):
        synthetic(row_tokens=20)


def test_packed_rows_are_full_and_share_no_example() -> None:
    """Whole examples to exactly the row's length, with padding only where the next one does not fit."""
    source = synthetic(packed=True, row_tokens=256)
    first, second = source.row(0), source.row(1)
    assert len(first.ids) == len(second.ids) == 256
    assert first.ids.count(CODEC.end_id) >= 256 // 40
    assert first.ids != second.ids
    assert all(first.ids[at] != CODEC.pad_id for at in first.predicted)


def test_digest_of_rows_sees_another_answer() -> None:
    """The digest changes with one token or one predicted position."""
    row = batches.Row([1, 2, 3], [2])
    digests = {batches.digest_rows([other]) for other in (row, batches.Row([1, 2, 4], [2]), batches.Row([1, 2, 3], [1, 2]))}
    assert len(digests) == 3


def texts(count: int, **settings: Any) -> batches.Source:
    """A source of ``count`` short texts for steps of 4 rows."""
    config = preset("model", model="m", dataset="d", **settings)
    return batches.text_rows(config, CODEC, [f"text {number}" for number in range(count)], step_rows=4)


def test_texts_have_one_row_each() -> None:
    """Every token but the first is predicted; the last tenth is held out."""
    source = texts(20)
    assert len(source.heldout) == 2
    row = source.row(3)
    assert TOKENIZER.decode(row.ids) == "text 3<|end|>"
    assert row.predicted == list(range(1, len(row.ids)))
    assert not source.answers
    assert source.blind_floor_nats is None


def test_long_text_is_cut() -> None:
    """A text is cut at row_tokens."""
    assert len(texts(20, row_tokens=4).row(0).ids) == 4


def test_data_set_smaller_than_a_step_is_refused() -> None:
    """Otherwise ranks would read the same row in one step, which looks like a fault. The message has all numbers."""
    with pytest.raises(InputError, match="4 rows, 1 of them held out, leave fewer than one step of 4 rows"):
        texts(4)
    assert len(texts(9, accumulation=2).heldout) == 1
    with pytest.raises(InputError, match=r"8 rows, 1 of them .* fewer than one step of 8 rows: .* less --accumulation"):
        texts(8, accumulation=2)
