"""Synthetic function calls, drawn by a seed from catalogue.json, and the tokenizer for them.

A prompt offers three functions and makes one request; the answer is the call as JSON. The tokens of an argument's
value are drawn from closed classes and stand in the prompt and nowhere else, so they cannot be produced without
attention to the right place of the prompt.
"""

from __future__ import annotations

import json
import math
import random
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

_CONSONANTS, _VOWELS = "BDFGKLMNPRSTVZ", "AEIOU"
_PAIRS = [c + v for c in _CONSONANTS for v in _VOWELS][:48]
_CATALOGUE = json.loads(Path(__file__).with_name("catalogue.json").read_text(encoding="utf-8"))

VALUES: dict[str, list[list[str]]] = {
    "city": [_CATALOGUE["cities"]],
    "name": [_CATALOGUE["names"]],
    "language": [_CATALOGUE["languages"]],
    "currency": [_CATALOGUE["currencies"]],
    "unit": [["celsius", "fahrenheit"]],
    "date": [[f"2027-{month:02d}" for month in range(1, 13)], [f".{day:02d}" for day in range(1, 29)]],
    "time": [[f"{hour:02d}h" for hour in range(24)], [f"{minute:02d}m" for minute in range(0, 60, 5)]],
    "amount": [[f"{hundreds}00" for hundreds in range(10, 74)]],
    "id": [_PAIRS, [f"-{number}" for number in range(10, 58)], [f"-{pair.lower()}x" for pair in _PAIRS]],
    "code": [[f"{pair[::-1]}q" for pair in _PAIRS], [f"/{pair[::-1].lower()}" for pair in _PAIRS]],
}
"""Kind of argument -> the parts of a value; a part is one token of a closed class."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function that can be called: argument name -> kind, and the phrasings of a request."""

    arguments: dict[str, str]
    phrasings: list[str]


FUNCTIONS: dict[str, Function] = {name: Function(**parts) for name, parts in _CATALOGUE["functions"].items()}


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, its only right answer, and the entropy of that answer for a model that does not read the prompt, in nats."""

    prompt: str
    response: str
    entropy_nats: float


def entropy_nats(kind: str) -> float:
    """Entropy of a value of ``kind``: every part is drawn uniformly from its class."""
    return sum(math.log(len(part)) for part in VALUES[kind])


def example(seed: int, split: str, index: int) -> Example:
    """Example ``index`` of ``split`` ("train" or "heldout"): always the same for the same arguments.

    A hash of function and values decides the split, so no held-out call occurs in training.
    """
    rng = random.Random(f"{seed}/{split}/{index}")
    names = sorted(FUNCTIONS)
    while True:
        name = rng.choice(names)
        kinds = FUNCTIONS[name].arguments
        values = {argument: "".join(map(rng.choice, VALUES[kind])) for argument, kind in kinds.items()}
        response = json.dumps({"name": name, "arguments": values})
        if (zlib.crc32(response.encode()) % 8 == 0) == (split == "heldout"):
            break
    offered = [name, *rng.sample([other for other in names if other != name], 2)]
    rng.shuffle(offered)
    request = rng.choice(FUNCTIONS[name].phrasings).format(**values)
    return Example(
        prompt=f"<|sys|>{'; '.join(offered)}<|usr|>{request}<|asst|>",
        response=response,
        entropy_nats=math.log(len(names)) + sum(entropy_nats(kind) for kind in kinds.values()),
    )


def _fragments() -> list[str]:
    """The vocabulary in order: specials, value parts, names, what stands between values, JSON glue, ASCII."""
    texts = ["<|pad|>", "<|end|>", "<|sys|>", "<|usr|>", "<|asst|>"]
    texts += [text for parts in VALUES.values() for part in parts for text in part]
    texts += list(FUNCTIONS)
    for function in FUNCTIONS.values():
        texts += [f'{argument}": "' for argument in function.arguments]
        for phrasing in function.phrasings:
            texts += [text for text in re.split(r"\{\w+\}", phrasing) if text]
    texts += ['{"name": "', '", "arguments": {"', '", "', '"}}', "; "]
    texts += [chr(code) for code in range(32, 127)]
    return list(dict.fromkeys(texts))


class Tokenizer:
    """A fixed vocabulary made from the catalogue above; greedy longest match; lossless on printable ASCII."""

    def __init__(self) -> None:
        """Build the vocabulary, and the pattern that finds the longest fragment at each place."""
        self.fragments = _fragments()
        self._ids = {text: number for number, text in enumerate(self.fragments)}
        self._longest = re.compile("|".join(map(re.escape, sorted(self.fragments, key=len, reverse=True))))
        self.pad_id, self.end_id = self._ids["<|pad|>"], self._ids["<|end|>"]

    def __len__(self) -> int:
        """Size of the vocabulary."""
        return len(self.fragments)

    def encode(self, text: str) -> list[int]:
        """Tokens of ``text``; raises KeyError for a character outside printable ASCII."""
        found = self._longest.findall(text)
        if sum(map(len, found)) != len(text):
            unknown = next(character for character in text if character not in self._ids)
            raise KeyError(f"no token for {unknown!r}")
        return [self._ids[fragment] for fragment in found]

    def decode(self, ids: list[int]) -> str:
        """The text that ``ids`` stand for."""
        return "".join(self.fragments[number] for number in ids)
