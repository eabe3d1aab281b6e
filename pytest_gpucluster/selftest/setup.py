"""Setup of a self-test: the places it uses, and how much it measures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.thresholds.resolve import Threshold

CALL_DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured.

    ``operations`` holds the size of each timed operation. Each of ``percents`` is taken off its rate, ``repeats`` times.
    ``not_judged`` is why no slow GPU is judged; None: it is.
    """

    operations: Mapping[str, int]
    percents: tuple[float, ...]
    repeats: int
    iterations: int
    warmup_s: float
    rest_s: float
    digest_size: int
    not_judged: str | None


ON_GPUS = Sizes(
    operations={"bf16": 8192, "fp32": 4096, "copy": 1 << 30},
    percents=(3.0, 5.0, 10.0),
    repeats=5,
    iterations=10,
    warmup_s=0.005,
    rest_s=0.05,
    digest_size=1024,
    not_judged=None,
)
IN_A_REHEARSAL = Sizes(
    operations={"bf16": 256, "copy": 1 << 22},
    percents=(50.0,),
    repeats=2,
    iterations=5,
    warmup_s=0.0,
    rest_s=0.0,
    digest_size=64,
    not_judged="the cores of a CPU share too much",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The places that answer, and the limits of this run; ``random`` is seeded, so that a self-test can be repeated."""

    cluster: Cluster
    places: tuple[Place, ...]
    criteria: Mapping[str, Threshold]
    sizes: Sizes
    random: random.Random

    def victims(self) -> Iterator[Place]:
        """The places in random order, again and again: each is a victim as often as any other."""
        order = self.random.sample(self.places, len(self.places))
        while True:
            yield from order

    def run(self, function: Callable[..., Any], *, per: str, deadline_s: float = CALL_DEADLINE_S, **kwargs: Any) -> Results:
        """``cluster.run`` at all places that answer."""
        return self.cluster.run(function, per=per, places=self.places, deadline_s=deadline_s, **kwargs)


def ids(places: Iterable[Place]) -> tuple[str, ...]:
    """The places' ids."""
    return tuple(place.id for place in places)
