"""Which tests have to confirm a suspect before it is named. Pure.

A part is named where tests with two different partners failed, and nothing else explains either. Containers and connections
are tested by several pairs, or by one again and again: more of these have to fail than pass. What is only partly broken has
to be shown to work elsewhere: a container whose edge is named inside, the ends of a connection with others. An edge fails to
two other containers, or the boundary to one of them may be to blame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpucluster.judging.group_search_knowledge import Knowledge

FEWEST = 2
"""Failed tests of two parts without which nobody is named. Tests that show that something works are as many."""
FEWEST_BETWEEN = 3
"""The same for a connection: there are so many that one of them fails twice by error."""


def is_confirmed(known: Knowledge, number: int) -> bool:
    """Whether enough tests confirm a suspect."""
    suspect = known.roster.suspects[number]
    failed = [test.group.parts for test in known.finding(number).evidence if len(test.group.parts) == 2]
    if suspect.kind == "part":
        return len(set(map(frozenset, failed))) >= FEWEST
    tests = zip(known.covered, known.tests, strict=True)
    passed = sum(number in covered and test.result.passed is True for covered, test in tests if len(test.group.parts) == 2)
    if len(failed) - passed < (FEWEST_BETWEEN if suspect.kind == "between" else FEWEST):
        return False
    if suspect.kind == "between":
        return not broken_ends(known, number)
    if suspect.kind == "whole":
        return is_inside(known, suspect.names[0], passing=False)
    return is_inside(known, suspect.names[0], passing=True) and len(reached_from(known, suspect.names[0], failed)) >= FEWEST


def is_inside(known: Knowledge, container: str, *, passing: bool) -> bool:
    """Whether enough more tests inside a container passed than failed for no other reason, pairs among them; or the reverse."""
    roster, tests = known.roster, known.tests
    inside = [at for at, test in enumerate(tests) if all(roster.is_at(name, container) for name in test.group.parts)]
    pairs = [at for at in inside if len(tests[at].group.parts) == 2]
    sign, whole = 1 if passing else -1, roster.number("whole", container)
    fewest = min(FEWEST, roster.sizes[container] - 1)
    return sign * _passes(known, inside, whole) >= fewest and sign * _passes(known, pairs, whole) >= 1


def broken_ends(known: Knowledge, number: int) -> list[str]:
    """The ends of a connection that tests without its other end have not shown to work.

    One of these tests has two parts. Of a connection that was searched it is younger than the first that failed: what passed
    before made the search suspect the connection, and not a part of which two tests were wrong.
    """
    roster, broken = known.roster, []
    one, other = names = roster.suspects[number].names
    own = [test.round for test in known.tests if set(test.group.parts) == set(names) and test.result.passed is False]
    if number in roster.links and one in roster.parts and not own:
        return []
    if one not in roster.parts and "edge" not in roster.in_container:  # there is nowhere else to show that they work
        return [end for end in names if not is_inside(known, end, passing=True)]
    since = min(own) if number in roster.links and own else 0
    for end, far in ((one, other), (other, one)):
        tests = []
        for at, test in enumerate(known.tests):
            is_at = [roster.is_at(name, end) for name in test.group.parts]
            if any(is_at) and not all(is_at) and not any(roster.is_at(name, far) for name in test.group.parts):
                tests.append(at)
        pairs = [at for at in tests if len(known.tests[at].group.parts) == 2 and known.tests[at].round > since]
        suspect = roster.number("part" if end in roster.parts else "edge", end)
        if _passes(known, tests, suspect) < FEWEST or _passes(known, pairs, suspect) < 1:
            broken.append(end)
    return broken


def _passes(known: Knowledge, tests: Iterable[int], number: int) -> int:
    """How many more tests passed than failed where only this suspect explains it."""
    results = [(at, known.tests[at].result.passed) for at in tests]
    return sum(1 if passed else -known.is_clean(at, number) for at, passed in results if passed is not None)


def reached_from(known: Knowledge, container: str, pairs: Iterable[Sequence[str]]) -> set[str]:
    """The other containers, of the same kind, to which pairs reach from a container."""
    found: set[str] = set()
    for pair in pairs:
        inner, outer = sorted(pair, key=lambda name: not known.roster.is_at(name, container))
        ways = [known.roster.parts[name].within for name in (inner, outer)]
        if container in ways[0] and container not in ways[1]:
            found.update(ways[1][ways[0].index(container) :][:1] or (outer,))
    return found
