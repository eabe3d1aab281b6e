"""The process groups that stand between calls.

A group ends by all of its members leaving it, or by all of their workers being killed.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from pytest_gpucluster.protocol.messages import Group

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class ProcessGroups:
    """The groups whose members have joined and not left."""

    def __init__(self) -> None:
        """There is no group."""
        self._standing: list[Group] = []
        self._nonce = secrets.token_hex(8)
        self._num_made = 0

    def remove_others(self, wanted: Sequence[tuple[int, ...]]) -> list[int]:
        """Forget the groups that stand in the way of the wanted ones; returns the ranks that have to leave them."""
        members = {rank for ranks in wanted for rank in ranks}
        return self._remove([one for one in self._standing if members & {*one.ranks} and one.ranks not in wanted])

    def remove_of(self, ranks: Collection[int]) -> list[int]:
        """Forget the groups of these ranks; returns all ranks that have to leave them."""
        return self._remove([one for one in self._standing if {*ranks} & {*one.ranks}])

    def join(self, wanted: Sequence[tuple[int, ...]]) -> tuple[Group, ...]:
        """The groups of these ranks, those that stand and new ones."""
        known = {group.ranks: group for group in self._standing}
        for ranks in wanted:
            if ranks not in known:
                known[ranks] = Group(id=f"pg/{self._nonce}/{self._num_made}", ranks=ranks)
                self._num_made += 1
                self._standing.append(known[ranks])
        return tuple(known[ranks] for ranks in wanted)

    def remove_broken(self, failed: Collection[int]) -> list[int]:
        """Forget the groups in which a rank failed; returns their other ranks, whose workers have to be killed."""
        return [rank for rank in self.remove_of(failed) if rank not in failed]

    def _remove(self, groups: list[Group]) -> list[int]:
        self._standing = [group for group in self._standing if group not in groups]
        return sorted({rank for group in groups for rank in group.ranks})
