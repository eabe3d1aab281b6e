"""Which two of many units fail together: what tests say about pairs, and which groups find the pair."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.localization.connections import (
    EXPECTED,
    ConnectionEvidence,
    find_bad_connection,
    missed_share,
    probability_explained_by,
)
from pytest_gpucluster.localization.parts import ErrorRates
from pytest_gpucluster.localization.search import split

FAILED, PASSED = 49.0, 1 / 49
"""What a test says about a pair inside it, where 2 % of the tests are wrong."""


def units(number: int, size: int = 1) -> list[tuple[str, ...]]:
    """Units of so many parts."""
    return [tuple(f"{at}.{part}" for part in range(size)) for at in range(number)]


def weight(*names: str, failed: bool) -> ConnectionEvidence:
    """A test of these parts."""
    return ConnectionEvidence(members=frozenset(names), factor=FAILED if failed else PASSED)


def test_before_any_test() -> None:
    """All pairs are alike, and together as probable as a bad connection is."""
    found = find_bad_connection(units(5), [], is_boundary_open=False)
    assert len(found.pairs) == 10
    assert found.chance == pytest.approx(EXPECTED)


def test_the_odds_of_one_pair() -> None:
    """A pair that failed once: its odds against each other pair are those of the test."""
    found = find_bad_connection(units(4), [weight("0.0", "1.0", failed=True)], is_boundary_open=False)
    assert next(iter(found.pairs)) == (0, 1)
    others = (1 - EXPECTED) / EXPECTED * 6 + 5
    assert found.pairs[0, 1] == pytest.approx(49 / (49 + others))


def test_the_boundary_of_two_units() -> None:
    """Both halves of two containers fail with each other: all pairs fail, and not just one."""
    pair = units(6, size=4)
    whole = weight(*pair[1], *pair[4], failed=True)
    crossed = [weight(*pair[1][half], *pair[4][half], failed=True) for half in (slice(0, 2), slice(2, 4))]
    passed = [weight(*pair[at], failed=False) for at in (1, 4)]
    found = find_bad_connection(pair, [whole, whole, whole, *crossed, *passed], is_boundary_open=True)
    assert found.boundary > 0.9
    single = find_bad_connection(pair, [whole, whole, whole, crossed[0], *passed], is_boundary_open=False)
    assert single.boundary == 0
    assert {len(unit) for unit in single.units} == {1}


def test_what_spoils_a_test() -> None:
    """By all other tests: two failed with the pair, so a third with it is explained, and one without it is not."""
    tests = [weight("0.0", "1.0", failed=True) for _ in range(5)] + [weight("2.0", "3.0", failed=True)]
    found = find_bad_connection(units(4), tests, is_boundary_open=False)
    explained = probability_explained_by(found, tests, set())
    assert min(explained[:5]) > 0.9
    assert explained[5] < 0.01
    assert max(probability_explained_by(found, tests, {("0.0", "1.0")})) < 0.01


def test_what_the_rest_would_have_missed() -> None:
    """Of four parts one was in one test only: three pairs of six passed once, three twice."""
    tests = [frozenset("abcd"), frozenset("abc")]
    assert missed_share("abcd", tests, 0.02) == pytest.approx((3 * 0.02 + 3 * 0.02**2) / 6)
    assert missed_share("abcd", [], 0.02) == 1
    assert missed_share("a", [], 0.02) == 0


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.data())
def test_every_pair_is_found(number: int, data: st.DataObject) -> None:
    """Where no test is wrong: groups share no unit, and after two rounds for each bit the pair is found."""
    one, other = sorted(data.draw(st.sets(st.integers(0, number - 1), min_size=2, max_size=2)))
    names, tests = units(number), [weight(*(name for unit in units(number) for name in unit), failed=True)] * 4
    for _ in range(2 * number.bit_length() + 2):
        found = find_bad_connection(names, tests, is_boundary_open=False)
        if found.ends is not None:
            break
        groups = split(found, {name for unit in names for name in unit}, ErrorRates())
        assert sum(map(len, groups)) == len({name for group in groups for name in group})
        assert all(len(group) > 1 for group in groups)
        tests += [weight(*group, failed={f"{one}.0", f"{other}.0"} <= set(group)) for group in groups]
    assert found.ends == (names[one], names[other])
