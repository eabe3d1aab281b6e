"""Rows that never occurred in training: their loss, and function calls that are really generated for them.

The prompts have one right answer each. Decoding is greedy; told are the shares of right answers.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.attention import sdpa_kernel

from finetune_smoke.checks import exact
from finetune_smoke.data import batches, calls, hub
from finetune_smoke.data.batches import Codec
from finetune_smoke.ranks import Ranks
from finetune_smoke.run import TrainingRun
from finetune_smoke.settings.config import Config, InputError

ROWS = 64
"""Held-out calls in one forward, and prompts in one batch of the decoding. Running text takes as many as a training pass."""
EXACT = 0.9
"""The least share of exact generated calls; the base must stay below. Preset tiny reaches 1.0 at three seeds, its base 0."""

CALL = "<functioncall>"
"""The text before a call in glaive-function-calling-v2."""
SPEAKER, END = "ASSISTANT:", "<|endoftext|>"
"""The texts before an answer in that data set, and at the end of a turn."""
MARK, CLOSED = re.compile(r"<function_?call>"), re.compile(r"\s*</function_?call>")
"""Other data sets write an underscore, and a second mark after the call."""
QUOTED = re.compile(r"""\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*'\s*""")
"""The beginning of a call as that data set writes it: JSON except for the single quotes around the arguments."""
QUOTED_END = re.compile(r"'\s*\}")
ESCAPED = re.compile(r"\\([\\'])")
"""An escaped backslash, or a single quote that is escaped because it stands in single quotes."""
NO_CALL_TOKENS = 24
"""So many tokens are generated where no call is right: a call begins at once."""


@dataclasses.dataclass(frozen=True, slots=True)
class Question:
    """A prompt as tokens, the text of the call that answers it, empty where no call is right, and how many tokens that is."""

    ids: list[int]
    answer: str
    answer_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares (0 to 1) of ``prompts`` answers: calls in JSON, right name, right arguments, and both right (``exact``).

    ``no_call`` is the share of ``without_call`` further prompts, to which no call is right, that were answered without one;
    None if there are none.
    """

    prompts: int
    json_valid: float
    name: float
    arguments: float
    exact: float
    without_call: int = 0
    no_call: float | None = None


def held_out(config: Config, codec: Codec) -> tuple[list[Question], str | None]:
    """(the held-out calls, what was left out in a line); raises InputError for none.

    Calls are synthetic ones, or those in the held-out rows of the data set that can be read and are no longer than a row.
    """
    unreadable = 0
    if config.dataset is None:
        examples = [calls.example(config.seed, "heldout", index) for index in range(config.heldout_rows)]
        pairs = [(example.prompt, example.response) for example in examples]
    else:
        _, texts = batches.split_texts(config, hub.load_parts(config.dataset))
        rows = [_calls_in(*parts) for parts in texts]
        pairs = [pair for found, _ in rows for pair in found]
        unreadable = sum(bad for _, bad in rows)
    found = [
        Question(codec.encode(prompt), answer, len(codec.encode(answer)) + 1 if answer else NO_CALL_TOKENS)
        for prompt, answer in pairs
    ]
    fitting = [one for one in found if len(one.ids) + one.answer_tokens <= config.row_tokens]
    if not any(one.answer for one in fitting):
        raise InputError(
            f"data set {config.dataset}: none of its held-out rows has a {CALL} with a call in JSON within "
            f"row_tokens = {config.row_tokens}"
        )
    left = {"cannot be read": unreadable, "are longer than a row": len(found) - len(fitting)}
    parts = [f"{number} {why}" for why, number in left.items() if number]
    return fitting, f"left out of the held-out calls: {', '.join(parts)}" if parts else None


def _calls_in(prompt: str, text: str) -> tuple[list[tuple[str, str]], int]:
    """((what comes before the call, the call) for each readable call in ``text``, how many cannot be read).

    Of a row without a call, what comes before its first answer, and an empty call. ``prompt``, where a row has one apart,
    comes before the ``text`` and may show how calls are written.
    """
    pairs, bad = [], 0
    for mark in MARK.finditer(text):
        found = first_call(text[mark.end() :])
        if found is None:
            bad += 1
            continue
        _, length = found
        pairs.append((prompt + text[: mark.end()], text[mark.end() : mark.end() + length].strip()))
    if pairs or bad:
        return pairs, bad
    if not prompt:
        question, speaker, text = text.partition(SPEAKER)
        prompt = question + speaker
    return ([(prompt, "")], 0) if text.strip() else ([], 1)


def written(text: str) -> str:
    """What is written in ``text`` up to the end of the turn."""
    return text.partition(END)[0].strip()


Call = tuple[str, dict[str, Any]]


def first_call(text: str) -> tuple[Call, int] | None:
    """The call at the beginning of ``text`` as (name, arguments), and where it ends, its end mark included; None if none.

    A call is a JSON object with a name and arguments, also over several lines. Arguments are an object, or one as a string
    (as OpenAI writes them) or in single quotes (as glaive-function-calling-v2 does). A doubled key makes it unreadable.
    """
    begin = len(text) - len(text.lstrip())
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        name, arguments, end = _quoted_call(text, begin)
    else:
        name, arguments = (value.get("name"), value.get("arguments")) if isinstance(value, dict) else (None, None)
        arguments = _value(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    closed = CLOSED.match(text, end)
    return (name, arguments), closed.end() if closed else end


def _quoted_call(text: str, begin: int) -> tuple[Any, Any, int]:
    """(name, arguments, end) of a call whose arguments stand in single quotes, in which a single quote may be escaped."""
    head = QUOTED.match(text, begin)
    if head is None:
        return None, None, begin
    for tail in QUOTED_END.finditer(text, head.end()):
        inside = ESCAPED.sub(lambda found: found[0] if found[1] == "\\" else "'", text[head.end() : tail.start()])
        arguments = _value(inside)
        if isinstance(arguments, dict):
            return _value(head[1]), arguments, tail.end()
    return None, None, begin


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys are all different; raises ValueError for others."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _no_number(text: str) -> float:
    """NaN and infinity, which Python reads and JSON does not have."""
    raise ValueError(f"{text} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_constant=_no_number)


def _value(text: str) -> Any:
    """The JSON in ``text``, None if it is none or too deep."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def call_of(text: str) -> Call | None:
    """(name, arguments) if ``text`` is exactly one call and then ends, otherwise None."""
    found = first_call(text)
    return found[0] if found is not None and not text[found[1] :].strip() else None


def judge(answer: str, given: str) -> tuple[bool, bool, bool, bool]:
    """Whether ``given`` is a call in JSON, has the name of ``answer``, its arguments, and both."""
    right, call = call_of(answer), call_of(given)
    if right is None or call is None:
        return False, False, False, False
    name, arguments = call[0] == right[0], _same(call[1], right[1])
    return True, name, arguments, name and arguments


def _same(mine: Any, other: Any) -> bool:
    """Whether two values of JSON are equal: 1 and 1.0 are, 1 and true are not."""
    pairs = [(mine, other)]
    while pairs:  # and no recursion: nesting may be deep
        one, two = pairs.pop()
        if isinstance(one, dict) and isinstance(two, dict) and one.keys() == two.keys():
            pairs += [(value, two[key]) for key, value in one.items()]
        elif isinstance(one, list) and isinstance(two, list) and len(one) == len(two):
            pairs += zip(one, two, strict=True)
        elif isinstance(one, (dict, list)) or isinstance(one, bool) != isinstance(two, bool) or one != two:
            return False
    return True


def shares(ranks: Ranks, asked: Sequence[Question], given: Sequence[str]) -> Shares:
    """The shares of right answers over all ranks; ``given`` are this rank's answers to ``asked``. A collective."""
    pairs = list(zip(asked, given, strict=True))
    judged = [judge(one.answer, written(text)) for one, text in pairs if one.answer]
    silent = [MARK.search(text) is None and first_call(text) is None for one, text in pairs if not one.answer]
    mine = [len(judged), len(silent), sum(silent), *(sum(right[part] for right in judged) for part in range(4))]
    total, without, right, *counts = (sum(column) for column in zip(*ranks.gather(mine), strict=True))
    valid, name, arguments, exact = (count / total for count in counts)
    no_call = right / without if without else None
    return Shares(
        prompts=total, json_valid=valid, name=name, arguments=arguments, exact=exact, without_call=without, no_call=no_call
    )


def score(model: Any, asked: Sequence[Question], codec: Codec, ranks: Ranks) -> Shares:
    """The shares of right answers of ``model``; the ranks share the questions. A collective."""
    mine = asked[ranks.rank :: ranks.world_size]
    return shares(ranks, mine, answers(model, mine, codec, ranks.device))


@sdpa_kernel(exact.NO_CUDNN)
@torch.no_grad()
def answers(model: Any, asked: Sequence[Question], codec: Codec, device: torch.device) -> list[str]:
    """The text that ``model`` generates after each prompt, without the end token. Prompts are padded at the left."""
    given: list[str] = []
    for first in range(0, len(asked), ROWS):
        some = asked[first : first + ROWS]
        width = max(len(one.ids) for one in some)
        padded = [(width - len(one.ids), one.ids) for one in some]
        output = model.generate(
            input_ids=torch.tensor([[codec.pad_id] * short + ids for short, ids in padded], device=device),
            attention_mask=torch.tensor([[0] * short + [1] * len(ids) for short, ids in padded], device=device),
            do_sample=False,
            use_cache=True,
            # A little longer than the answer: an answer that does not end in time is wrong and is cut off.
            max_new_tokens=max(one.answer_tokens for one in some) + 8,
            eos_token_id=codec.end_id,
            pad_token_id=codec.pad_id,
        )
        rows: list[list[int]] = output[:, width:].tolist()
        given += [codec.decode(tokens[: [*tokens, codec.end_id].index(codec.end_id)]) for tokens in rows]
    return given


def evaluate(run: TrainingRun) -> tuple[float, float | None]:
    """(loss per predicted token in nats, share of calls exact to the last token) over the held-out rows of all ranks.

    Greedy decoding gives exactly the target if and only if every teacher-forced argmax does, so one forward suffices. The
    share is None for running text. A collective.
    """
    loss, tokens, wrong = _forward_over(run, run.source.heldout)
    return loss / tokens, 1 - wrong / len(run.source.heldout) if run.source.answers else None


@sdpa_kernel(exact.NO_CUDNN)
@torch.no_grad()
def _forward_over(run: TrainingRun, rows: Sequence[batches.Row]) -> tuple[float, float, float]:
    """(summed loss, predicted tokens, rows of which some token is wrong); the ranks share the ``rows``. A collective."""
    run.model.eval()
    mine = rows[run.ranks.rank :: run.ranks.world_size]
    loss, tokens, wrong = 0.0, 0, 0
    size = ROWS if run.source.answers else run.rows
    for first in range(0, len(mine), size):
        batch = batches.batch(mine[first : first + size], run.source.pad_id).to(run.ranks.device)
        with run.autocast():
            logits = run.model.logits(batch.ids, batch.positions).float()
        loss += float(torch.nn.functional.cross_entropy(logits, batch.targets, reduction="sum"))
        tokens += batch.targets.numel()
        wrong += len(set(batch.owners[logits.argmax(-1) != batch.targets].tolist()))
    run.model.train()
    everyone = run.ranks.gather_floats([loss, tokens, wrong])
    loss_all, tokens_all, wrong_all = (sum(column) for column in zip(*everyone, strict=True))
    return loss_all, tokens_all, wrong_all


@torch.no_grad()
def generate(run: TrainingRun) -> float | None:
    """Generate the answers to ``greedy_rows`` prompts, through the cache; returns the share of exact calls. A collective.

    The ranks share the prompts. If the preset promises that calls are learnt, ``generation`` is recorded. What the base by
    itself would generate follows from one forward (see ``evaluate``), which takes a fiftieth of generating it.
    """
    unjudged = _why_not_judged(run)
    if unjudged is not None:
        run.checks.leave_out("generation", why=unjudged)
    if not run.config.greedy_rows or not run.source.answers:
        return None
    codec = hub.codec_of(run.config)
    rows = min(run.config.greedy_rows, run.config.heldout_rows)
    asked, _ = held_out(dataclasses.replace(run.config, heldout_rows=rows), codec)
    run.model.eval()
    with run.autocast():
        adapter = score(run.model.model, asked, codec, run.ranks)
    if unjudged is None:
        with run.weights_kept():
            for name, adapter_weights in run.adapters.items():
                if ".lora_B." in name:
                    adapter_weights.zero_()  # so that the base computes by itself
            _, _, wrong = _forward_over(run, run.source.heldout[:rows])
        record_generation(run.checks, 1 - wrong / rows, adapter)
    run.model.train()
    return adapter.exact


def record_generation(checks: exact.Checks, base: float, adapter: Shares) -> None:
    """Record ``generation``: the adapter generates the calls exactly, and a share ``base`` of them is all the base would."""
    problem = None
    if adapter.exact < EXACT:
        problem = (
            f"{adapter.exact:.0%} of {adapter.prompts} generated calls are exact, below {EXACT:.0%} "
            f"({adapter.json_valid:.0%} are calls in JSON, {adapter.name:.0%} have the right name, "
            f"{adapter.arguments:.0%} the right arguments)"
        )
    elif base >= EXACT:
        problem = f"the base alone generates {base:.0%} of the calls: these prompts show no learning"
    shares = f"{adapter.exact:.0%} of {adapter.prompts} generated calls exact; {base:.0%} of those of the base alone"
    checks.record("generation", problem=problem, remark=shares)


def _why_not_judged(run: TrainingRun) -> str | None:
    reasons = {
        "rows are running text: there is no call to generate": not run.source.answers,
        "greedy_rows is 0: no call is generated": not run.config.greedy_rows,
        "nobody knows how many calls a real model has to get right; see `evaluate`": run.config.model is not None,
        "no loss is promised, so no call either": run.config.loss_limit is None,
    }
    return next((why for why, holds in reasons.items() if holds), None)
