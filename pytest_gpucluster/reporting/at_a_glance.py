"""What the end of a run shows of its values by default: a line a subject, and the rows that somebody must read. Pure.

Many failed values of one part as one sentence: what it does worse, by how much, at which clock, where it shows. Pure.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pytest_gpucluster.grouping import grouped
from pytest_gpucluster.judging import verdict
from pytest_gpucluster.judging.failure_text import format_beside
from pytest_gpucluster.judging.forecast import SUBJECTS
from pytest_gpucluster.reporting import table_rows
from pytest_gpucluster.text import counted
from pytest_gpucluster.thresholds.limit import SIGNS

HANDOVER = {
    "bf16_tflops": "Matrix products (BF16)",
    "hbm_bandwidth": "GPU memory bandwidth",
    "busbw[all_reduce]": "All-reduce inside a node",
    "inter_node_busbw[all_reduce]": "All-reduce between nodes",
    "busbw_scaling": "Bandwidth kept from one node to all",
    "training_scaling_node": "Training: one GPU to one node",
    "training_scaling_cluster": "Training: one node to all",
    "finetune_loss": "Loss of the fine-tune",
    "finetune_throughput": "Speed of the fine-tune",
}
"""The criteria that the handover's documents name with a number, in their order. Each has a row where it applies."""
CAPTIONS = {
    "gpu_count": "GPUs of a node",
    "nvlink_links": "NVLinks",
    "gpu_memory": "memory",
    "bf16_tflops": "BF16",
    "bf16_sustained": "BF16 sustained",
    "fp8_tflops": "FP8",
    "hbm_bandwidth": "HBM",
    "busbw[all_reduce]": "all-reduce",
    "inter_node_busbw[all_reduce]": "all-reduce between nodes",
    "host_to_device": "to GPU",
    "device_to_host": "from GPU",
    "nodes_reachable": "reachable",
    "training_throughput_gpu": "one GPU",
    "training_scaling_node": "scaling",
    "training_scaling_cluster": "scaling to all nodes",
    "finetune_loss": "loss",
    "launch_latency": "launch",
}
"""The numbers that people look for, in their order, each with its words. A line of a subject has as many of its own as fit."""
NEAR_PERCENT = 5.0
"""A value this close to its limit has a row, where the entry states no noise."""
NEAR = ", near"
MOST_ROWS = 8
"""Of bad criteria beside those of the handover; more are named in a line. And the most rows of criteria near their limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectLine:
    """One subject: its name, what became of its checks, and the numbers that people look for, the first one first.

    ``style``: the outcome that gives the state its colour.
    """

    subject: str
    state: str
    style: str
    numbers: tuple[str, ...]

    def text(self, *, width: int, columns: tuple[int, int]) -> tuple[str, str, str]:
        """Name, state and as many numbers as fit ``width``; ``columns`` are those of name and state."""
        line = f"{self.subject:<{columns[0]}}  ", f"{self.state:<{columns[1]}}"
        used, shown = len("".join(line)) + 3, ""
        for number in self.numbers:
            more = f"{shown}, {number}" if shown else number
            if used + len(more) > width:
                break
            shown = more
        return (*line, f"   {shown}" if shown else "")


def subject_lines(
    by_criterion: Mapping[str, Sequence[verdict.Record]],
    subjects: Mapping[str, str],
    *,
    unjudged: Mapping[str, int],
    is_rehearsal: bool,
) -> list[SubjectLine]:
    """A line for each subject in which something was judged or measured, in the order of the plan.

    Args:
        by_criterion: the outcomes of each criterion that has any.
        subjects: the subject of each criterion.
        unjudged: criteria of which something is missing or was not selected, with how many are missing: their subject is not
            "all" good.
        is_rehearsal: no number of it says anything, so none is shown.
    """
    members = grouped((subjects[criterion], (criterion, records)) for criterion, records in by_criterion.items())
    missing: Counter[str] = Counter()
    for criterion, number in unjudged.items():
        missing[subjects[criterion]] += number
    return [
        _line(subject, dict(own), missing=missing.get(subject), has_numbers=not is_rehearsal)
        for subject, own in sorted(members.items(), key=lambda one: (*SUBJECTS, one[0]).index(one[0]))
    ]


def _line(subject: str, own: Mapping[str, Sequence[verdict.Record]], *, missing: int | None, has_numbers: bool) -> SubjectLine:
    """``missing``: how many outcomes are; None where all is judged."""
    every = [record for records in own.values() for record in records if verdict.counted_as(record) != verdict.SKIPPED]
    judged = [verdict.counted_as(record) for record in every if not verdict.is_only_measured(record)]
    measured, misses = len(every) - len(judged), sum(record.advisory for record in every)
    is_good = {*judged} <= {verdict.PASSED}
    more = [verdict.MISSING] * (missing or 0) if verdict.MISSING in judged else []  # of criteria that have no outcome at all
    every_one = "all " if missing is None and len(judged) > 1 else ""
    said = f"{every_one}{len(judged)} {table_rows.OK}" if is_good else table_rows.outcome_text([*judged, *more])
    words = [said] if judged else []
    words += [f"{missing} {verdict.WORDS[verdict.MISSING]}"] if missing and not more else []
    words += [f"{measured} {table_rows.MEASURED}"] if measured else []
    words += [verdict.count_misses(misses)] if misses else []
    known = [name for name in CAPTIONS if name in own] or list(own)
    numbers = tuple(filter(None, (_number(name, own[name]) for name in known))) if has_numbers else ()
    return SubjectLine(
        subject=subject,
        state=", ".join(words),
        style=_style(judged, is_good=is_good, misses=misses, missing=missing),
        numbers=numbers,
    )


def _style(judged: Sequence[str], *, is_good: bool, misses: int, missing: int | None) -> str:
    if is_good and missing:
        return verdict.MISSING
    return verdict.NOISY if is_good and misses else table_rows.severest_of(judged) if judged else table_rows.MEASURED


def _number(criterion: str, records: Sequence[verdict.Record]) -> str:
    """``HBM 4.37 to 4.39 TB/s (> 4.1)``; nothing where no limit judges it, or where it is a bound of zero."""
    readings = table_rows.readings_of(records)
    limits = {reading.limit for reading in readings}
    if len(limits) != 1 or any(map(verdict.is_only_measured, records)):
        return ""
    (limit,) = limits
    if limit.value == 0:
        return ""
    bound, *ends = format_beside(limit, *_ends([reading.value for reading in readings]))
    unit = f" {limit.unit}" if limit.unit not in table_rows.COUNTS else ""
    return f"{CAPTIONS.get(criterion, criterion)} {' to '.join(dict.fromkeys(ends))}{unit} ({SIGNS[limit.kind]} {bound})"


def _ends(values: Sequence[float]) -> tuple[float, float]:
    known = [value for value in values if math.isfinite(value)] or [*values]
    return min(known), max(known)


def chosen_rows(
    by_criterion: Mapping[str, Sequence[verdict.Record]], names: table_rows.PlaceNames, *, noise: Mapping[str, float] | None
) -> tuple[list[table_rows.TableRow], list[str]]:
    """The criteria of the handover, then what is bad, then what is near its limit.

    Args:
        by_criterion: the outcomes of each criterion.
        names: names places in short.
        noise: the noise that entries state, 0 to 1; None where no value says how near it is.

    Returns:
        Their rows, and the names of bad criteria whose rows are left out.
    """
    first = {name: by_criterion[name] for name in HANDOVER if name in by_criterion}
    others = {name: records for name, records in by_criterion.items() if name not in first}
    bad = [name for name, records in others.items() if table_rows.is_bad(records) or any(record.advisory for record in records)]
    judged = by_criterion if noise is not None else {}
    distances = {name: _distance(records, (noise or {}).get(name)) for name, records in judged.items()}
    near = {name for name, distance in distances.items() if distance <= 1}
    close = sorted(near.difference(first, bad), key=lambda name: distances[name])[:MOST_ROWS]
    more = bad if len(bad) > MOST_ROWS else []
    shown = [*first, *(name for name in bad if name not in more), *(name for name in others if name in close)]
    rows = {name: table_rows.row_of(name, by_criterion[name], names) for name in shown}
    return [replace(row, outcome=f"{row.outcome}{NEAR}") if name in near else row for name, row in rows.items()], more


def _distance(records: Sequence[verdict.Record], noise: float | None) -> float:
    """How far the worst good value is from its limit, in units of what is near; above 1: it is not near, or nothing says."""
    if table_rows.is_bad(records) or any(map(verdict.is_only_measured, records)):
        return math.inf
    readings = table_rows.readings_of(records)  # a count, or the least of what must be there, does not vary from run to run
    varying = (one for one in readings if one.limit.unit not in table_rows.COUNTS and one.limit.kind != "min")
    percents = [one.limit.margin_percent(one.value) for one in varying]
    known = [percent for percent in percents if percent is not None and percent >= 0]
    return min(known, default=math.inf) / (NEAR_PERCENT if noise is None else 100 * noise)


def measured_texts(by_criterion: Mapping[str, Sequence[verdict.Record]]) -> list[str]:
    """``busbw GB/s: all_gather 332.8, broadcast 330``: all values that no number judges, a family in one text."""
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for criterion, records in by_criterion.items():
        found = table_rows.readings_of([record for record in records if verdict.is_only_measured(record)])
        if found:
            limit = found[0].limit
            ends = dict.fromkeys(table_rows.value_cells(limit, value)[1] for value in _ends([one.value for one in found]))
            family, bracket, inner = criterion.partition("[")
            name = f"{inner.removesuffix(']')} " if bracket else ""
            families[family, limit.unit].append(f"{name}{' to '.join(ends)}")
    return [
        f"{family} {unit}: {', '.join(texts)}" if len(texts) > 1 else f"{family} {texts[0]} {unit}"
        for (family, unit), texts in families.items()
    ]


MOST_ROWS_OF_A_CAUSE = 6
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

    def __init__(self, passed: Iterable[verdict.Record]) -> None:
        """``passed``: the records of good values."""
        good = [*passed]
        self.values = grouped((record.criterion, record.value) for record in good if record.value is not None)
        self._clocks = grouped((record.criterion, clock) for record in good if (clock := _clock_of(record)) is not None)

    def lag_percent(self, record: verdict.Record) -> float | None:
        """How much less than the median of the others a value is, in percent of that; None without others."""
        others = self.values.get(record.criterion)
        middle = statistics.median(others) if others else 0.0
        return 100 * (1 - record.value / middle) if record.value is not None and middle > 0 else None

    def clock(self, records: Iterable[verdict.Record]) -> str:
        """`` at full clock``, or both clocks; empty where one is not known."""
        seen = ((_clock_of(one), self._clocks.get(one.criterion)) for one in records)
        known = [(clock, others) for clock, others in seen if clock is not None and others]
        if not known:
            return ""
        own, others = min(known, key=lambda pair: pair[0] / statistics.median(pair[1]))
        usual = statistics.median(others)
        return " at full clock" if own >= SAME_CLOCK_RATIO * usual else f" at {own:.0f} of {usual:.0f} MHz"


def _clock_of(record: verdict.Record) -> float | None:
    clock = record.evidence.get(CLOCK)
    return float(clock) if isinstance(clock, (int, float)) and clock > 0 else None


def sentence_of(failed: Sequence[verdict.Record], siblings: GoodPeers) -> str:
    """``computes 30 % slower than its siblings at full clock: 9 rates, 4 stragglers, training``.

    Args:
        failed: the values of one part that miss their limit, at least one.
        siblings: what passed elsewhere.
    """
    seen = ((_verb_of(record), siblings.lag_percent(record)) for record in failed if _is_rate(record))
    lags = grouped((verb, lag) for verb, lag in seen if lag is not None and lag >= LEAST_LAG_PERCENT)
    verbs = [verb for verb in SLOWER if verb in lags]
    first, *others = verbs[:-1] if verbs[1:] and verbs[-1] == FOLLOWS else verbs or [""]
    how = [f"{verb} {statistics.median(lags[verb]):.0f} % slower" for verb in filter(None, (first, *others))]
    if how:
        how[0] += f" than its siblings{siblings.clock([one for one in failed if _verb_of(one) == first])}"
    waived = sum(verdict.counted_as(record) == verdict.WAIVED for record in failed)
    what = ", ".join(how) or f"{counted(len(failed), 'value')} outside their limits"
    text = f"{what}: {', '.join(_symptoms(failed))}"
    return f"{text}; {waived} {verdict.WAIVED}" if waived else text


def rows_beside(failed: Sequence[verdict.Record], *, has_first: bool) -> list[verdict.Record]:
    """The values that keep a row beside the sentence: the one that stands for all, and what may be a cause of its own."""
    first = first_of(failed) if has_first else None
    return [record for record in failed if record is first or _kind_of(record) is None]


def first_of(failed: Sequence[verdict.Record]) -> verdict.Record:
    """The one that stands for all: of the handover's criteria the first, else the first."""
    return min(failed, key=lambda record: (*HANDOVER, record.criterion).index(record.criterion))


def _is_rate(record: verdict.Record) -> bool:
    return bool(_verb_of(record)) and record.limit is not None and record.limit.is_floor


def _verb_of(record: verdict.Record) -> str:
    return next((verb for verb, units in SLOWER.items() if record.unit in units), "")


def _symptoms(failed: Sequence[verdict.Record]) -> list[str]:
    """In what it shows: how many rates, comparisons and values of training, and the names of all else."""
    kinds = Counter(map(_kind_of, failed))
    names = list(dict.fromkeys(record.criterion for record in failed if _kind_of(record) is None))
    found = [counted(kinds[kind], kind) for kind in ("rate", "straggler") if kinds[kind]]
    training = ["training"] if kinds["training"] == 1 else [f"{kinds['training']} of training"] if kinds["training"] else []
    return [*found, *training, *names]


def _kind_of(record: verdict.Record) -> str | None:
    """What a value is counted as; None for one that may be a cause of its own: an error, a link, a loss."""
    if record.criterion.partition("[")[0] in COMPARED:
        return "straggler"
    if record.criterion.startswith(TRAINING) and (_is_rate(record) or record.unit == "%"):
        return "training"
    return "rate" if _is_rate(record) else None
