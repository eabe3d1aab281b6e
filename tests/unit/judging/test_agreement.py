"""Who is named, and who must not be, when digests of the same work differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.judging.agreement import AlikeGroup, groups_of, only_itself, suspicions, suspicions_in_round
from pytest_gpucluster.places import Place

if TYPE_CHECKING:
    from collections.abc import Collection

GOOD = "good"


def compared(*digests: str) -> tuple[AlikeGroup[int], ...]:
    """Members 0, 1, 2 .. of one model with these digests."""
    return groups_of(dict(enumerate(digests)), dict.fromkeys(range(len(digests)), "H200"))


def outvoted(groups: tuple[AlikeGroup[Any], ...]) -> tuple[Any, ...]:
    """All members outside the majority of their group."""
    return tuple(member for group in groups for member in group.outvoted)


def unresolved(groups: tuple[AlikeGroup[Any], ...]) -> tuple[AlikeGroup[Any], ...]:
    """Groups that differ and in which no member is outvoted."""
    return tuple(group for group in groups if group.differs and not group.outvoted)


def single(groups: tuple[AlikeGroup[Any], ...]) -> tuple[Any, ...]:
    """The members of groups of one."""
    return tuple(group.members[0] for group in groups if len(group.digests) == 1)


def with_liars(size: int, liars: Collection[int], *, agreed: bool) -> tuple[AlikeGroup[int], ...]:
    """``size`` members of which ``liars`` are wrong, all in the same way or each in its own."""
    return compared(*(("bad" if agreed else f"bad {member}") if member in liars else GOOD for member in range(size)))


# --- one group ---


@pytest.mark.parametrize("size", [2, 3, 8])
def test_alike_is_quiet(size: int) -> None:
    """Equal digests: no member outvoted, no group unresolved, no group of one."""
    found = compared(*[GOOD] * size)
    assert (outvoted(found), unresolved(found), single(found)) == ((), (), ())
    assert found[0].describe() == f"{size} of {size} are alike"


def test_one_of_three_is_named() -> None:
    """The smallest group in which somebody can be named."""
    found = compared(GOOD, "bad", GOOD)
    assert outvoted(found) == (1,)
    assert unresolved(found) == ()
    assert found[0].describe() == "1 of 3 is not like the others"
    assert compared(GOOD, "a", "b", GOOD, GOOD)[0].describe() == "2 of 5 are not like the others"


def test_two_that_differ_name_nobody() -> None:
    """It takes three."""
    found = compared(GOOD, "bad")
    assert outvoted(found) == ()
    assert [group.members for group in unresolved(found)] == [(0, 1)]
    assert unresolved(found)[0].describe() == "0 and 1 differ; it takes three to say which is wrong"


@pytest.mark.parametrize("digests", [("a", "b", "c"), ("a", "a", "b", "b"), ("a", "a", "b", "c")])
def test_without_a_strict_majority_nobody_is_named(digests: tuple[str, ...]) -> None:
    """Half is not a majority, and the commonest digest is not one either."""
    found = compared(*digests)
    assert outvoted(found) == ()
    assert [group.members for group in unresolved(found)] == [tuple(range(len(digests)))]
    words = f"{len(digests)} hold {len(set(digests))} different digests, none of them in the majority"
    assert unresolved(found)[0].describe() == words


def test_one_alone_is_incomparable() -> None:
    """A single member is neither outvoted nor found alike."""
    found = compared(GOOD)
    assert (outvoted(found), unresolved(found), single(found)) == ((), (), (0,))
    assert found[0].describe() == "the only H200: nothing to compare with"


def test_nobody_at_all() -> None:
    """No digest, no finding."""
    assert groups_of({}, {}) == ()


@given(st.data())
def test_one_liar_is_always_named_and_nobody_else(data: st.DataObject) -> None:
    """Wherever it sits, from three members on."""
    size = data.draw(st.integers(3, 200))
    liar = data.draw(st.integers(0, size - 1))
    found = with_liars(size, {liar}, agreed=True)
    assert outvoted(found) == (liar,)
    assert unresolved(found) == single(found) == ()


@given(st.data())
def test_liars_below_half_are_all_named_and_nobody_else(data: st.DataObject) -> None:
    """Also when they tell the same lie."""
    size = data.draw(st.integers(3, 100))
    most = (size - 1) // 2
    liars = data.draw(st.sets(st.integers(0, size - 1), max_size=most))
    found = with_liars(size, liars, agreed=data.draw(st.booleans()))
    assert outvoted(found) == tuple(sorted(liars))
    assert unresolved(found) == ()


@given(st.lists(st.sampled_from("abc"), min_size=2, max_size=12))
def test_a_difference_is_never_silent(digests: list[str]) -> None:
    """Whatever the digests: they are all equal, or somebody is named, or the group is said to differ; never two of these."""
    found = compared(*digests)
    assert [len(set(digests)) == 1, bool(outvoted(found)), bool(unresolved(found))].count(True) == 1
    assert 2 * len(outvoted(found)) < len(digests)


@given(st.permutations([GOOD, GOOD, GOOD, "bad", "worse"]))
def test_order_does_not_matter(digests: list[str]) -> None:
    """Nobody is right for having come first."""
    found = outvoted(compared(*digests))
    assert [digests[member] == GOOD for member in range(5)] == [member not in found for member in range(5)]


# --- several groups ---


@given(st.integers(3, 20), st.integers(3, 20), st.data())
def test_models_are_not_mixed(h100: int, h200: int, data: st.DataObject) -> None:
    """Each model has its own right digest, and its own liar."""
    liars = {data.draw(st.integers(0, h100 - 1)), h100 + data.draw(st.integers(0, h200 - 1))}
    members = range(h100 + h200)
    group_of = {member: "H100" if member < h100 else "H200" for member in members}
    found = groups_of({member: "bad" if member in liars else group_of[member] for member in members}, group_of)
    assert set(outvoted(found)) == liars
    assert [len(group.members) for group in found] == [h100, h200]


def test_every_state_at_once() -> None:
    """Three H200 with a liar, two H100 that differ, one A100; a member without a digest does not count."""
    group_of = {"a": "H200", "b": "H200", "c": "H200", "d": "H100", "e": "H100", "f": "A100", "lost": "H100"}
    found = groups_of({"a": "1", "b": "2", "c": "1", "d": "3", "e": "4", "f": "5"}, group_of)
    assert outvoted(found) == ("b",)
    assert [group.members for group in unresolved(found)] == [("d", "e")]
    assert single(found) == ("f",)


def test_a_member_without_a_group_is_refused() -> None:
    """It would be compared with nobody, in silence."""
    with pytest.raises(KeyError, match="gpu1"):
        groups_of({"gpu0": "a", "gpu1": "a"}, {"gpu0": "H200"})


# --- what there is against each member, by kind ---


def test_suspicions_name_the_kind() -> None:
    """Only the outvoted member has an entry, under the kind it got wrong; every member is in the table."""
    places = [Place(id=f"node0-gpu{gpu}", node=0, gpu=gpu) for gpu in range(4)]
    held = {place: {"bf16": GOOD, "fp8": "bad" if place == places[2] else GOOD} for place in places}
    found = suspicions(held, dict.fromkeys(places, "H200"))
    assert found == {place: {} for place in places} | {places[2]: {"fp8": "1 of 4 is not like the others"}}


def test_suspicion_falls_on_all_where_nobody_can_be_named() -> None:
    """Two that differ are both under suspicion, by name."""
    places = [Place(id=f"node{node}-gpu0", node=node, gpu=0) for node in range(2)]
    found = suspicions({places[0]: {"fp32": "a"}, places[1]: {"fp32": "b"}}, dict.fromkeys(places, "H200"))
    words = "node0-gpu0 and node1-gpu0 differ; it takes three to say which is wrong"
    assert found == {place: {"fp32": words} for place in places}


def test_one_alone_is_under_no_suspicion() -> None:
    """Nor is who lacks a kind that the others have."""
    held = {"a": {"bf16": GOOD, "fp8": GOOD}, "b": {"bf16": GOOD}, "c": {"bf16": GOOD}, "d": {"bf16": "another model's"}}
    group_of = {"a": "H200", "b": "H200", "c": "H200", "d": "A100"}
    assert suspicions(held, group_of) == {"a": {}, "b": {}, "c": {}, "d": {}}


def test_in_a_round_a_kind_counts_once_however_it_was_seen() -> None:
    """Among the model, since the first round, within the round: one entry for each kind, with all that is known."""
    clean = {"bf16": "a", "fp32": "b"}
    first = dict.fromkeys(range(3), clean)
    model = dict.fromkeys(range(3), "H200")
    steady: dict[int, dict[str, str]] = {member: {} for member in range(3)}
    assert suspicions_in_round(first, model, first=first, unsteady=steady) == {0: {}, 1: {}, 2: {}}
    digests = {**first, 1: {"bf16": "x", "fp32": "b"}}
    unsteady = {**steady, 1: {"bf16": "1 of 30 rounds"}, 2: {"fp32": "2 of 30 rounds"}}
    assert suspicions_in_round(digests, model, first=first, unsteady=unsteady) == {
        0: {},
        1: {"bf16": "1 of 30 rounds; among its model 1 of 3 is not like the others; not as in its first round"},
        2: {"fp32": "2 of 30 rounds"},
    }


def test_one_alone_is_compared_with_its_own_first_round() -> None:
    """With nobody of its model beside it, nothing else could tell."""
    found = suspicions_in_round({0: {"bf16": "x"}}, {0: "H200"}, first={0: {"bf16": "a"}}, unsteady={0: {}})
    assert found == {0: {"bf16": "not as in its first round"}}


def test_only_itself() -> None:
    """One GPU has no reference."""
    assert only_itself(104) == "compared with itself over 104 rounds; no other GPU to compare with"
