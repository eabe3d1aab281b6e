"""Function calls that are really generated: prompts with their only right answer, greedy decoding, shares of right answers."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING, Any

import torch

from finetune_smoke.data import calls, hub
from finetune_smoke.settings.config import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune_smoke.data.batches import Codec
    from finetune_smoke.ranks import Ranks
    from finetune_smoke.settings.config import Config

ROWS = 64
"""Prompts in one batch of the decoding."""

CALL = "<functioncall>"
"""The text before a call in glaive-function-calling-v2."""

QUOTED = re.compile(r"""\{"name":\s*("[^"]*"),\s*"arguments":\s*'(.*)'\}""", re.DOTALL)
"""A call as that data set writes it: JSON except for the single quotes around the arguments."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A prompt as tokens, the text of the call that answers it, and how many tokens that is."""

    ids: list[int]
    answer: str
    answer_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares (0 to 1) of ``prompts`` answers: calls in JSON, right name, right arguments, and both right (``exact``)."""

    prompts: int
    json_valid: float
    name: float
    arguments: float
    exact: float


def questions(config: Config, codec: Codec) -> list[Question]:
    """The held-out calls: synthetic ones, or those in the held-out rows of the data set; raises InputError for none."""
    if config.dataset is None:
        examples = [calls.example(config.seed, "heldout", index) for index in range(config.heldout_rows)]
        pairs = [(example.prompt, example.response) for example in examples]
    else:
        texts = hub.load_texts(config.dataset)
        pairs = [pair for text in texts[-min(config.heldout_rows, max(1, len(texts) // 10)) :] for pair in _calls_in(text)]
    found = [Question(codec.encode(prompt), answer, len(codec.encode(answer)) + 1) for prompt, answer in pairs]
    fitting = [one for one in found if len(one.ids) + one.answer_tokens <= config.row_tokens]
    if not fitting:
        raise InputError(
            f"data set {config.dataset}: none of its held-out rows has a {CALL} with a call in JSON within "
            f"row_tokens = {config.row_tokens}"
        )
    return fitting


def _calls_in(text: str) -> list[tuple[str, str]]:
    """(text before the call, the call) for each readable call in ``text``."""
    pairs = []
    for mark in re.finditer(re.escape(CALL), text):
        answer = written(text[mark.end() :])
        if call_of(answer) is not None:
            pairs.append((text[: mark.end()], answer))
    return pairs


def written(text: str) -> str:
    """The call at the beginning of ``text``, up to the end of its line or of the turn."""
    return re.split(r"<\|endoftext\|>|\n", text.strip(), maxsplit=1)[0].strip()


def call_of(text: str) -> tuple[str, dict[str, Any]] | None:
    """(name, arguments) if ``text`` is exactly one call in JSON, otherwise None."""
    quoted = QUOTED.fullmatch(text)
    try:
        call = {"name": json.loads(quoted[1]), "arguments": json.loads(quoted[2])} if quoted else json.loads(text)
    except ValueError:
        return None
    if isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict):
        return call["name"], call["arguments"]
    return None


def judge(answer: str, given: str) -> tuple[bool, bool, bool, bool]:
    """Whether ``given`` is a call in JSON, has the name of ``answer``, its arguments, and both."""
    right, call = call_of(answer), call_of(given)
    if right is None or call is None:
        return False, False, False, False
    name, arguments = call[0] == right[0], call[1] == right[1]
    return True, name, arguments, name and arguments


def shares(ranks: Ranks, asked: Sequence[Question], given: Sequence[str]) -> Shares:
    """The shares of right answers over all ranks; ``given`` are this rank's answers to ``asked``. A collective."""
    judged = [judge(one.answer, written(text)) for one, text in zip(asked, given, strict=True)]
    mine = [len(judged), *(sum(right[part] for right in judged) for part in range(4))]
    total, *counts = (sum(column) for column in zip(*ranks.gather(mine), strict=True))
    valid, name, arguments, exact = (count / total for count in counts)
    return Shares(prompts=total, json_valid=valid, name=name, arguments=arguments, exact=exact)


@torch.no_grad()
def answers(model: Any, asked: Sequence[Question], codec: Codec, device: torch.device) -> list[str]:
    """The text that ``model`` generates after each prompt, without the end token."""
    given: list[str] = []
    for first in range(0, len(asked), ROWS):
        some = asked[first : first + ROWS]
        # A little longer than the answer: an answer that does not end in time is wrong and is cut off.
        limit = max(one.answer_tokens for one in some) + 8
        prompts = [one.ids for one in some]
        tokens = generate(model, prompts, limit=limit, end_id=codec.end_id, pad_id=codec.pad_id, device=device)
        given += [codec.decode(row[:-1] if row[-1:] == [codec.end_id] else row) for row in tokens]
    return given


def generate(  # noqa: PLR0913 -- the arguments of transformers' generate
    model: Any, prompts: Sequence[list[int]], *, limit: int, end_id: int, pad_id: int, device: torch.device
) -> list[list[int]]:
    """The tokens after each prompt, up to and including the end token. Prompts are padded at the left."""
    width = max(map(len, prompts))
    filled = [[pad_id] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    output = model.generate(
        input_ids=torch.tensor(filled, device=device),
        attention_mask=torch.tensor(mask, device=device),
        do_sample=False,
        use_cache=True,
        max_new_tokens=limit,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )
    return [_until(end_id, tokens) for tokens in output[:, width:].tolist()]


def _until(end_id: int, tokens: list[int]) -> list[int]:
    """``tokens`` up to and including the first ``end_id``."""
    return tokens[: tokens.index(end_id) + 1] if end_id in tokens else tokens
