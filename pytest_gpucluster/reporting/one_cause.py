"""Many failed values of one part as one sentence: what it does worse, by how much, at which clock, where it shows. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING

from pytest_gpucluster.judging.verdict import WAIVED, counted_as
from pytest_gpucluster.reporting.at_a_glance import HANDOVER
from pytest_gpucluster.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pytest_gpucluster.judging.verdict import Record

MOST_ROWS = 6
"""So many failed values of a part have a row each. More are one sentence, and rows with ``-v``."""
FOLLOWS = "trains"
SLOWER = {
    "computes": ("TFLOPS", "TOPS"),
    "reads and writes its memory": ("TB/s",),
    "moves data": ("GB/s", "Gbit/s"),
    FOLLOWS: ("tokens/s/GPU",),
}
"""What a part does slower, by the units of the values that show it. All that apply are said, training only alone."""
LEAST_LAG_PERCENT = 0.5
"""Less is shown as 0 %."""
COMPARED = ("straggler", "slow_host", "slow_pair", "slow_rail")
"""Families that compare a part with others."""
TRAINING = ("training", "finetune", "memory_scaling")
CLOCK, SAME_CLOCK_RATIO = "SM MHz", 0.97
"""A clock of at least this part of that of its siblings is full."""


class GoodPeers:
    """What passed at other places: values and clocks by criterion."""

    def __init__(self, passed: Iterable[Record]) -> None:
        """``passed``: the records of good values."""
        self.values: dict[str, list[float]] = {}
        self._clocks: dict[str, list[float]] = {}
        for record in passed:
            if record.value is not None:
                self.values.setdefault(record.criterion, []).append(record.value)
            if (clock := _clock_of(record)) is not None:
                self._clocks.setdefault(record.criterion, []).append(clock)

    def lag_percent(self, record: Record) -> float | None:
        """How much less than the median of the others a value is, in percent of that; None without others."""
        others = self.values.get(record.criterion)
        middle = statistics.median(others) if others else 0.0
        return 100 * (1 - record.value / middle) if record.value is not None and middle > 0 else None

    def clock(self, records: Iterable[Record]) -> str:
        """`` at full clock``, or both clocks; empty where one is not known."""
        known = [(clock, self._clocks[one.criterion]) for one in records if (clock := _clock_of(one)) and self._has(one)]
        if not known:
            return ""
        own, others = min(known, key=lambda pair: pair[0] / statistics.median(pair[1]))
        usual = statistics.median(others)
        return " at full clock" if own >= SAME_CLOCK_RATIO * usual else f" at {own:.0f} of {usual:.0f} MHz"

    def _has(self, record: Record) -> bool:
        return bool(self._clocks.get(record.criterion))


def _clock_of(record: Record) -> float | None:
    clock = record.evidence.get(CLOCK)
    return float(clock) if isinstance(clock, (int, float)) and clock > 0 else None


def sentence_of(failed: Sequence[Record], siblings: GoodPeers) -> str:
    """``computes 30 % slower than its siblings at full clock: 9 rates, 4 stragglers, training``.

    Args:
        failed: the values of one part that miss their limit, at least one.
        siblings: what passed elsewhere.
    """
    lags: dict[str, list[float]] = {}
    for record in failed:
        lag = siblings.lag_percent(record) if _is_rate(record) else None
        if lag is not None and lag >= LEAST_LAG_PERCENT:
            lags.setdefault(_verb_of(record), []).append(lag)
    verbs = [verb for verb in SLOWER if verb in lags]
    first, *others = verbs[:-1] if verbs[1:] and verbs[-1] == FOLLOWS else verbs or [""]
    how = [f"{verb} {statistics.median(lags[verb]):.0f} % slower" for verb in filter(None, (first, *others))]
    if how:
        how[0] += f" than its siblings{siblings.clock([one for one in failed if _verb_of(one) == first])}"
    waived = sum(counted_as(record) == WAIVED for record in failed)
    what = ", ".join(how) or f"{counted(len(failed), 'value')} outside their limits"
    text = f"{what}: {', '.join(_symptoms(failed))}"
    return f"{text}; {waived} {WAIVED}" if waived else text


def rows_beside(failed: Sequence[Record], *, has_first: bool) -> list[Record]:
    """The values that keep a row beside the sentence: the one that stands for all, and what may be a cause of its own."""
    first = first_of(failed) if has_first else None
    return [record for record in failed if record is first or _kind_of(record) is None]


def first_of(failed: Sequence[Record]) -> Record:
    """The one that stands for all: of the handover's criteria the first, else the first."""
    order = [*HANDOVER]
    return min(failed, key=lambda record: order.index(record.criterion) if record.criterion in HANDOVER else len(order))


def _is_rate(record: Record) -> bool:
    return bool(_verb_of(record)) and record.limit is not None and record.limit.is_floor


def _verb_of(record: Record) -> str:
    return next((verb for verb, units in SLOWER.items() if record.unit in units), "")


def _symptoms(failed: Sequence[Record]) -> list[str]:
    """In what it shows: how many rates, comparisons and values of training, and the names of all else."""
    kinds = Counter(map(_kind_of, failed))
    names = list(dict.fromkeys(record.criterion for record in failed if _kind_of(record) is None))
    found = [counted(kinds[kind], kind) for kind in ("rate", "straggler") if kinds[kind]]
    training = ["training"] if kinds["training"] == 1 else [f"{kinds['training']} of training"] if kinds["training"] else []
    return [*found, *training, *names]


def _kind_of(record: Record) -> str | None:
    """What a value is counted as; None for one that may be a cause of its own: an error, a link, a loss."""
    if record.criterion.partition("[")[0] in COMPARED:
        return "straggler"
    if record.criterion.startswith(TRAINING) and (_is_rate(record) or record.unit == "%"):
        return "training"
    return "rate" if _is_rate(record) else None
