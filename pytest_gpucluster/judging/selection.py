"""What pytest's ``-k`` needs to select some tests of a run and no others. Pure: node ids in, an expression out.

``-k`` looks for each word anywhere in the names of a test, its classes, its file and its folders, whatever the case. So a test
is selected by its whole name, with brackets, and others that hold this name are left out by theirs. ``-k`` cannot tell names
apart that differ in upper case, in blanks and signs, or in the words and, or, not: of those all are selected.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging.forecast import SUBJECTS
from pytest_gpucluster.judging.plan import Key
from pytest_gpucluster.places import Place

WORD = re.compile(r"[\w:+\-.\[\]\\/]+")
"""What ``-k`` takes for one word."""
OPERATORS = ("and", "or", "not")
OWN_MARKS = ("again", "at_end", "compares", "distributed", "each_entry", "over_run", "reads")
MARKS = (*SUBJECTS, *OWN_MARKS, "parametrize", "pytestmark")
"""What ``-k`` finds at tests besides their names, so no word of these leaves a test out."""
BETWEEN = "\n"
MOST_NAMED = 16
"""Tests of one criterion that are named one by one."""
Chain = tuple[str, ...]
"""The names in which ``-k`` looks for a test: folders, file, classes, and the name of the test, which is the last one."""


ONLY = "--gpucluster-only"
MOST_HEADS = 6
"""Test functions of one part that are named; where more are bad, all tests of that part are measured again."""


class Selector:
    """Selects tests of a run by the keys of their records."""

    def __init__(self, nodeids: Mapping[Key, str]) -> None:
        """``nodeids``: the node id of each test; the criterion where no test is known, which has its usual name then."""
        self._nodeids = nodeids
        self._is_end_of_others: dict[str, bool] = {}

    def arguments(self, keys: Iterable[Key], part: Place | None) -> list[str]:
        """Pytest's arguments that select the tests of these records; none of no record.

        Tests of one ``part`` are selected by its host and UUID, so that no other part is measured, whatever its number is
        then; where a test of its node is among them, by its host. Of a function that made several of the tests, all tests
        there come along.
        """
        wanted = list(dict.fromkeys(keys))
        if not wanted:
            return []
        if part is not None and not all(_is_at(place, part) for _, place in wanted):
            part = Place(id=f"node{part.node}", node=part.node, hostname=part.hostname)
        name = None if part is None else identity_of(part)
        if part is None or name is None or not all(_is_at(place, part) for _, place in wanted):
            return ["-k", self.select(wanted)]
        heads: dict[str, list[str]] = defaultdict(list)
        for key in wanted:
            test = (self._chains.get(key) or _chain(key, key[0]))[-1]
            end = key[0].partition("[")[2]  # of a criterion NAME[...] what is in the brackets, and the last one
            heads[test.partition("[")[0]].append(end if end and test.endswith(end) else "")
        terms = [_term_of_function(head, ends) for head, ends in heads.items()]
        return [ONLY, name, *(["-k", _any_of(terms)] if len(terms) <= MOST_HEADS else [])]

    def select(self, keys: Iterable[Key]) -> str:
        """The expression that selects the tests of these records.

        More than 16 tests of one criterion that have no common part of a name are selected at all places.
        """
        wanted = grouped((key[0], self._chains.get(key) or _chain(key, key[0])) for key in dict.fromkeys(keys))
        terms = dict.fromkeys(term for criterion, own in wanted.items() for term in self._terms(criterion, own))
        return _any_of([*terms])

    def _terms(self, criterion: str, own: Sequence[Chain]) -> list[str]:
        if len(own) <= MOST_NAMED:
            return [self._term([chain]) for chain in own]
        is_whole = len(self._hits(_common_words(own))) == len(own)
        every = [chain for key, chain in self._chains.items() if key[0] == criterion]
        return [self._term(own if is_whole else every)]

    def _term(self, own: Sequence[Chain]) -> str:
        """The words that all of these tests have, and of each other test that has them a word that is to be left out."""
        if len(own) == 1 and self._is_unlike_others(own[0][-1]):
            return own[0][-1]
        words = _common_words(own)
        low = {_lower(chain) for chain in own}
        kept = {part for chain in low for part in chain}
        left_out: list[str] = []
        for text in self._hits(words):
            chain = tuple(text.split(BETWEEN))
            if chain not in low and not any(word in text for word in left_out):
                left_out += _word_against(chain, words, kept)
        return " and ".join([*words, *(f"not {word}" for word in left_out)])

    def _is_unlike_others(self, name: str) -> bool:
        """Whether no other name can hold this one: seen without a look at every test."""
        head = name.lower().partition("[")[0]
        if head not in self._is_end_of_others:
            self._is_end_of_others[head] = sum(other.endswith(head) for other in self._heads) > 1
        is_closed = name.endswith("]") and WORD.fullmatch(name) is not None
        return is_closed and not self._is_end_of_others[head] and not self._are_nested

    def _hits(self, words: Iterable[str]) -> list[str]:
        """Every test that has all these words: its names in lower case, with a sign between them that no word has."""
        found = self._texts
        for word in words:
            low = word.lower()
            found = [text for text in found if low in text]
        return found

    @cached_property
    def _texts(self) -> list[str]:
        return [BETWEEN.join(_lower(chain)) for chain in self._chains.values()]

    @cached_property
    def _chains(self) -> dict[Key, Chain]:
        return {key: _chain(key, nodeid) for key, nodeid in self._nodeids.items()}

    @cached_property
    def _heads(self) -> set[str]:
        """All names of tests, classes, files and folders without parameters, in lower case."""
        return {part.lower() for part in {part.partition("[")[0] for chain in self._chains.values() for part in chain}}

    @cached_property
    def _are_nested(self) -> bool:
        """Whether some parameter has a bracket of its own."""
        return any("]" in chain[-1][:-1] for chain in self._chains.values())


def _any_of(terms: Sequence[str]) -> str:
    return terms[0] if len(terms) == 1 else " or ".join(f"({term})" if " " in term else term for term in terms)


def _term_of_function(head: str, ends: Sequence[str]) -> str:
    """The tests of one function at one part: of its only criterion that one alone, else all. ``ends``: of their names."""
    end = ends[0] if len({*ends}) == 1 else ""
    return f"{head} and {end}" if WORD.fullmatch(end) else head


def identity_of(part: Place) -> str | None:
    """What :data:`ONLY` takes for this part: ``gpu-node-3:GPU-5f...``; None where its host is not known."""
    if part.hostname is None or part.gpu is None:
        return part.hostname
    return f"{part.hostname}:{part.uuid or part.serial or f'{part.kind}{part.gpu}'}"


def _is_at(place: str | None, part: Place) -> bool:
    """Whether a place is this part, or a GPU of this node."""
    return place is not None and (place == part.id or (part.gpu is None and place.startswith(f"{part.id}-")))


def _chain(key: Key, nodeid: str) -> Chain:
    address, bracket, parameters = nodeid.partition("[")
    if "::" in address:
        path, *names = address.split("::")
        return (*path.split("/"), *names[:-1], f"{names[-1]}{bracket}{parameters}")
    criterion, place = key
    own, _, inner = criterion.partition("[")
    values = "-".join(filter(None, (place, inner.removesuffix("]"))))
    return (f"test_{own}[{values}]" if values else f"test_{own}",)


def _lower(chain: Chain) -> Chain:
    return tuple(part.lower() for part in chain)


def _words(name: str) -> list[str]:
    """What of a name ``-k`` can look for."""
    return [word for word in WORD.findall(name) if word not in OPERATORS]


def _common_words(chains: Sequence[Chain]) -> list[str]:
    """Words of how all these names begin and end; of a single name all of it."""
    names = [chain[-1] for chain in chains]
    first = os.path.commonprefix(names)  # noqa: RUF071 -- of characters
    last = os.path.commonprefix([name[len(first) :][::-1] for name in names])[::-1]  # noqa: RUF071 -- as above
    return list(dict.fromkeys(_words(first) + [word for word in _words(last) if word != "]"]))


def _word_against(chain: Chain, words: Iterable[str], kept: Collection[str]) -> list[str]:
    """A word of another test that none of the ``kept`` has, the shortest first; none if there is none."""
    around = (one for part in reversed(chain) for word in words for one in _around(part, word.lower()))
    head, bracket, _ = chain[-1].partition("[")
    candidates = (*around, f"{head}{bracket}", *(word for part in reversed(chain) for word in _words(part)))
    usable = (one for one in candidates if WORD.fullmatch(one) and one not in OPERATORS)
    return [one for one in usable if not any(one in name for name in (*kept, *MARKS))][:1]


def _around(part: str, word: str) -> list[str]:
    """The word as it stands in a name, with the character behind or before it."""
    start, end = part.find(word), part.find(word) + len(word)
    return [part[start : end + 1], part[max(0, start - 1) : end]] if start >= 0 else []
