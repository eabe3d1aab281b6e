"""Synthetic function calls and their tokenizer."""

from __future__ import annotations

import json
import math

import pytest

from finetune_smoke.data.calls import FUNCTIONS, VALUES, Tokenizer, entropy_nats, example

TOKENIZER = Tokenizer()


def test_examples_are_a_function_of_seed_split_and_index() -> None:
    """The same arguments give the same example, and every argument matters."""
    assert example(1, "train", 7) == example(1, "train", 7)
    assert len({example(*key) for key in [(1, "train", 7), (2, "train", 7), (1, "heldout", 7), (1, "train", 8)]}) == 4


def test_first_example_is_pinned() -> None:
    """Another Python must make the same rows: ranks of one run may not differ."""
    first = example(1234, "train", 0)
    assert first.prompt.startswith("<|sys|>")
    assert (first.prompt, first.response) == (PINNED_PROMPT, PINNED_RESPONSE)


def test_no_heldout_call_occurs_in_training() -> None:
    """A hash of the call decides the split."""
    train = {example(1, "train", index).response for index in range(2000)}
    assert train.isdisjoint(example(1, "heldout", index).response for index in range(2000))


def test_response_is_a_call_that_the_prompt_asks_for() -> None:
    """Valid JSON of an offered function, and every value stands in the prompt."""
    for index in range(300):
        made = example(3, "train", index)
        call = json.loads(made.response)
        assert call["name"] in made.prompt.split("<|usr|>")[0]
        assert list(call["arguments"]) == list(FUNCTIONS[call["name"]].arguments)
        assert all(value in made.prompt for value in call["arguments"].values())


def test_tokenizer_is_lossless() -> None:
    """Everything that is ever encoded comes back, and so does any printable text."""
    for index in range(300):
        made = example(4, "train", index)
        for text in (made.prompt, made.response):
            assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    printable = "".join(map(chr, range(32, 127)))
    assert TOKENIZER.decode(TOKENIZER.encode(printable)) == printable


def test_part_of_a_value_is_one_token() -> None:
    """Copying a value needs attention, not spelling; and no part is part of two classes."""
    parts = [text for kind in VALUES.values() for part in kind for text in part]
    assert all(len(TOKENIZER.encode(text)) == 1 for text in parts)
    assert len(set(parts)) == len(parts)


def test_character_without_a_token_is_refused() -> None:
    """A character without a token is refused and not dropped."""
    with pytest.raises(KeyError, match="no token"):
        TOKENIZER.encode("Zürich")


def test_entropy_of_a_value_is_that_of_its_uniform_parts() -> None:
    """48 x 48 x 48 identifiers, 12 months times 28 days."""
    assert entropy_nats("id") == pytest.approx(3 * math.log(48))
    assert entropy_nats("date") == pytest.approx(math.log(12 * 28))


def test_entropy_of_an_example_counts_the_choice_of_the_function() -> None:
    """About 21 nats a call, of which ln 8 for the function."""
    made = example(1, "train", 0)
    kinds = FUNCTIONS[json.loads(made.response)["name"]].arguments.values()
    assert made.entropy_nats == pytest.approx(math.log(8) + sum(map(entropy_nats, kinds)))


PINNED_PROMPT = "<|sys|>track_order; get_stock_price; create_event<|usr|>where is order FI-55-dax sent with EGq/ar<|asst|>"
PINNED_RESPONSE = '{"name": "track_order", "arguments": {"order_id": "FI-55-dax", "carrier": "EGq/ar"}}'
