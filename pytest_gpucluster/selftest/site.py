"""Where a self-test is made, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.selftest.assessment import Trial, Unshown
    from pytest_gpucluster.thresholds.resolve import Threshold

    Outcome = tuple[list[Trial], list[Unshown]]

CALL_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is measured: ``operations`` with their sizes; ``percents`` of the rate are taken away, ``repeats`` times each.

    ``unjudged``: why nothing slow is judged; None where it is.
    """

    operations: Mapping[str, int]
    percents: tuple[float, ...]
    repeats: int
    iterations: int
    warmup_s: float
    rest_s: float
    digest_size: int
    unjudged: str | None


ON_GPUS = Effort(
    operations={"bf16": 8192, "fp32": 4096, "copy": 1 << 30},
    percents=(3.0, 5.0, 10.0),
    repeats=5,
    iterations=10,
    warmup_s=0.005,
    rest_s=0.05,
    digest_size=1024,
    unjudged=None,
)
IN_A_REHEARSAL = Effort(
    operations={"bf16": 256, "copy": 1 << 22},
    percents=(50.0,),
    repeats=2,
    iterations=5,
    warmup_s=0.0,
    rest_s=0.0,
    digest_size=64,
    unjudged="the cores of a CPU share too much",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The places that answer, and by what this run judges; ``chance`` is seeded, so that a self-test can be told again."""

    cluster: Cluster
    places: tuple[Place, ...]
    criteria: Mapping[str, Threshold]
    effort: Effort
    chance: random.Random

    def victims(self) -> Iterator[Place]:
        """The places in an order of chance, again and again: each is a victim as often as any other."""
        order = self.chance.sample(self.places, len(self.places))
        while True:
            yield from order

    def run(self, function: Callable[..., Any], *, per: str, deadline_s: float = CALL_DEADLINE_S, **kwargs: Any) -> Results:
        """``cluster.run`` at all places that answer."""
        return self.cluster.run(function, per=per, places=self.places, deadline_s=deadline_s, **kwargs)


def ids(places: Iterable[Place]) -> tuple[str, ...]:
    """Their ids."""
    return tuple(place.id for place in places)
