"""Which GPU computes wrong bits, where several should compute the same ones. Pure: digests in, names out.

A GPU that is always wrong agrees with itself, so only other GPUs can show the fault. In a group of three or more, a strict
majority decides. Of two that differ, nobody can say which one is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.text import counted

Member = TypeVar("Member", bound=Hashable)
Value = TypeVar("Value", bound=Hashable)

FEWEST_TO_NAME = 3


def majority(values: Collection[Value]) -> Value | None:
    """The value that more than half have; None if there is no such value. Without a majority nobody can be named."""
    if not values:
        return None
    value, votes = Counter(values).most_common(1)[0]
    return value if is_majority(votes, len(values)) else None


def is_majority(votes: int, total: int) -> bool:
    """Whether so many are more than half: the one rule by which a part may be named for what the others have."""
    return 2 * votes > total


def only_itself(num_rounds: int) -> str:
    """The remark about a GPU that agrees with itself, where no other of its model could be compared."""
    return f"compared with itself over {counted(num_rounds, 'round')}; no other GPU to compare with"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeGroup(Generic[Member]):
    """Members whose digests should be equal: GPUs of one model."""

    name: str
    digests: Mapping[Member, str]

    @property
    def members(self) -> tuple[Member, ...]:
        """Every member, in the order given."""
        return tuple(self.digests)

    @property
    def differs(self) -> bool:
        """Whether there is more than one digest."""
        return len(set(self.digests.values())) > 1

    @property
    def majority(self) -> str | None:
        """The digest that more than half of three or more members have; None if there is no such digest."""
        if len(self.digests) < FEWEST_TO_NAME:
            return None
        return majority(self.digests.values())

    @property
    def outvoted(self) -> tuple[Member, ...]:
        """The members outside the majority; empty without a majority."""
        usual = self.majority
        return () if usual is None else tuple(member for member, digest in self.digests.items() if digest != usual)

    def describe(self) -> str:
        """The comparison in words: ``1 of 8 is not like the others``, or that no member can be named."""
        size, outvoted = len(self.digests), len(self.outvoted)
        if size == 1:
            return f"the only {self.name}: nothing to compare with"
        if not self.differs:
            return f"{size} of {size} are alike"
        if outvoted:
            return f"{outvoted} of {size} {'is' if outvoted == 1 else 'are'} not like the others"
        if size == 2:
            return f"{' and '.join(map(str, self.members))} differ; it takes three to say which is wrong"
        return f"{size} hold {counted(len(set(self.digests.values())), 'different digest')}, none of them in the majority"


def groups_of(digests_by_member: Mapping[Member, str], group_of: Mapping[Member, str]) -> tuple[AlikeGroup[Member], ...]:
    """Put members into the groups whose digests should be equal.

    Args:
        digests_by_member: one digest each; members that could not be measured are left out.
        group_of: the group of each member, such as the GPU's model. May know more members.
    """
    groups = grouped((group_of[member], (member, digest)) for member, digest in digests_by_member.items())
    return tuple(AlikeGroup(name=name, digests=dict(digests)) for name, digests in groups.items())


def suspicions(
    digests_by_member: Mapping[Member, Mapping[str, str]], group_of: Mapping[Member, str]
) -> dict[Member, dict[str, str]]:
    """What speaks against each member, by kind of computation. The table of an unsuspected member is empty.

    In a group that differs without a majority, every member is suspected, because any of them may be wrong.

    Args:
        digests_by_member: each member's digests by kind. A kind that a member does not have is not compared there.
        group_of: as for :func:`groups_of`.
    """
    against: dict[Member, dict[str, str]] = {member: {} for member in digests_by_member}
    kinds = dict.fromkeys(kind for digests in digests_by_member.values() for kind in digests)
    for kind in kinds:
        held = {member: digests[kind] for member, digests in digests_by_member.items() if kind in digests}
        for group in groups_of(held, group_of):
            words = group.describe()
            for member in group.outvoted or (group.members if group.differs else ()):
                against[member][kind] = words
    return against


def suspicions_in_round(
    digests_by_member: Mapping[Member, Mapping[str, str]],
    group_of: Mapping[Member, str],
    *,
    first: Mapping[Member, Mapping[str, str]],
    unsteady: Mapping[Member, Mapping[str, str]],
) -> dict[Member, dict[str, str]]:
    """What speaks against each member in one of many rounds, by kind of computation.

    Args:
        digests_by_member: as for :func:`suspicions`.
        group_of: as for :func:`groups_of`.
        first: each member's digests in its first round. A single member of a group has nothing else to compare with.
        unsteady: the kinds that did not repeat within this round, in words.
    """
    unlike = suspicions(digests_by_member, group_of)
    against: dict[Member, dict[str, str]] = {}
    for member, digests in digests_by_member.items():
        changed = {kind for kind, digest in digests.items() if digest != first[member].get(kind, digest)}
        reasons = (
            unsteady[member],
            {kind: f"among its model {words}" for kind, words in unlike[member].items()},
            dict.fromkeys(sorted(changed), "not as in its first round"),
        )
        kinds = dict.fromkeys(kind for by_kind in reasons for kind in by_kind)
        against[member] = {kind: "; ".join(by_kind[kind] for by_kind in reasons if kind in by_kind) for kind in kinds}
    return against
