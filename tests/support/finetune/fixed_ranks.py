"""Checks over ranks that answer what a test says."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from finetune_smoke.checks.exact import Checks

if TYPE_CHECKING:
    from finetune_smoke.checks import exact
    from finetune_smoke.ranks import Ranks


class FixedRanks:
    """Ranks whose every gather gives what the test says."""

    def __init__(self, *everyone: Any) -> None:
        """``everyone``: per rank what it answers."""
        self.everyone = [list(answer) if isinstance(answer, tuple) else [answer] for answer in everyone]
        self.world_size = len(everyone)

    def gather(self, _values: object) -> list[list[Any]]:
        """The answers."""
        return self.everyone

    gather_floats = gather


def checks_over(*everyone: Any) -> Checks:
    """Empty checks over such ranks."""
    return Checks(cast("Ranks", FixedRanks(*everyone)))


def only_result(record: Checks, name: str) -> exact.CheckResult:
    """The verdict of the one check that looked."""
    (found,) = record.results().items()
    assert found[0] == name
    return found[1]
