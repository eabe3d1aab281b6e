"""Many bad values of one part as one sentence: no second cause, no part and no criterion is lost in it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.judging.culprits import find_culprits
from pytest_gpucluster.judging.verdict import ERROR, PASSED, WAIVED, Record
from pytest_gpucluster.reporting.at_a_glance import GoodPeers, sentence_of
from pytest_gpucluster.reporting.bad_parts import MOST_LINES
from tests.support.entries import limit
from tests.support.fleet_records import failed, fleet, outcomes
from tests.unit.reporting.test_bad_parts import lines_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_gpucluster.judging.culprits import Culprit

GPU = "node0-gpu3"
RATES = {f"rate_{number}": (70.0, limit("above", 90, "TFLOPS")) for number in range(7)}
OTHERS = {
    "ecc_uncorrected": (2.0, limit("max", 0, "errors")),
    "nvlink_links": (17.0, limit("min", 18, "links")),
    "gpu_memory": (60.0, limit("min", 79, "GiB")),
    "xid_during_run": (1.0, limit("max", 0, "errors")),
    "finetune_loss": (float("nan"), limit("below", 0.5, "nats/token")),
    "hbm_bandwidth": (2.0, limit("above", 4.1, "TB/s")),
    "straggler[rate_1]": (30.0, limit("max", 5, "%")),
    "training_throughput_gpu": (70.0, limit("above", 90, "tokens/s/GPU")),
}
LONG = "ip-10-0-0-112.us-west-2.compute.internal.example.org"


def bad_values(names: Iterable[str], place: str = GPU, **changes: Any) -> list[Record]:
    """A failure of each criterion at one part."""
    values = {**RATES, **OTHERS}
    return [failed(name, place, values[name][0], limit=values[name][1], **changes) for name in names]


def peers() -> GoodPeers:
    """Siblings that reach 100 of each rate."""
    good = [failed(name, "a", 100.0, limit=one) for name, (_, one) in {**RATES, **OTHERS}.items()]
    return GoodPeers(replace(record, outcome=PASSED) for record in good)


def flat(lines: Iterable[str]) -> str:
    """The text without its breaks."""
    return " ".join(" ".join(lines).split())


def test_each_kind_of_slowness_is_said() -> None:
    """A GPU that computes and reads its memory slowly has two causes; slow training follows from them."""
    text = sentence_of(bad_values([*RATES, "hbm_bandwidth", "training_throughput_gpu"]), peers())
    assert text == ("computes 30 % slower than its siblings, reads and writes its memory 98 % slower: 8 rates, training")
    assert sentence_of(bad_values(["training_throughput_gpu"]), peers()).startswith("trains 30 % slower")


@pytest.mark.parametrize("name", ["ecc_uncorrected", "nvlink_links", "gpu_memory", "xid_during_run", "finetune_loss"])
def test_what_is_no_rate_keeps_its_row(name: str) -> None:
    """An error, a link or a loss is a cause of its own: its value, its limit and the part that it names are shown."""
    for short in (False, True):
        bad = bad_values([*RATES, name], evidence={"part": "mlx5_7"})
        changes = {"command": ()} if short else {}
        text = flat(lines_of(fleet(1, 8), bad, **changes))
        assert re.search(rf"{name} [0-9n][0-9an]*[^;]*, limit", text), text
        assert text.count("rate_") == (0 if short or name == "finetune_loss" else 1)  # which is of the handover


def test_slower_by_less_than_half_a_percent_is_not_slower() -> None:
    """Where the siblings are as slow, the values say more than ``0 % slower``."""
    near = GoodPeers(Record(criterion=name, place="a", outcome=PASSED, value=70.1, limit=one[1]) for name, one in RATES.items())
    assert sentence_of(bad_values(RATES), near) == "7 values outside their limits: 7 rates"


def test_a_waived_value_is_said_to_be_waived() -> None:
    """As each row says it."""
    first, *others = bad_values(RATES)
    waived = replace(first, waiver={"reason": "known"}, waivable=True)
    assert sentence_of([waived, *others], peers()).endswith(f"7 rates; 1 {WAIVED}")


def test_an_error_of_a_part_is_not_behind_its_sentence() -> None:
    """Where a line says what is bad of a part, it has what was not measured too, and how much is bad in all."""
    error = Record(criterion="gpu_memory", place=GPU, outcome=ERROR, reason="gone", blames="gpu", culprits=(GPU,))
    others = [failed("bf16_tflops", f"node{node}-gpu1", 498) for node in range(1, 8)]
    rows = outcomes(fleet(8, 8), [*bad_values(RATES), error, *others])
    lines = lines_of(fleet(8, 8), records=rows, width=300)
    (line,) = (after for head, after in itertools.pairwise(lines) if GPU in head)
    assert "8 bad: " in line
    assert "1 not measured: gone" in line


@st.composite
def bad_fleets(draw: st.DrawFn) -> tuple[dict[str, Any], list[Record]]:
    """4 nodes of 8 with up to 9 bad parts, each with some failures and errors; the hosts may have long names."""
    places = fleet(4, 8)
    if draw(st.booleans()):
        places = {key: replace(one, hostname=f"{one.node}-{LONG}") for key, one in places.items()}
    bad = []
    for place in draw(st.lists(st.sampled_from([*places]), min_size=1, max_size=9, unique=True)):
        for record in bad_values(draw(st.lists(st.sampled_from([*RATES, *OTHERS]), min_size=1, unique=True)), place):
            error = {"outcome": ERROR, "value": None, "limit": None, "reason": f"{record.criterion} was not measured"}
            bad.append(replace(record, **error) if draw(st.integers(0, 5)) == 0 else record)
    return places, bad


@settings(max_examples=60, deadline=None)
@given(bad_fleets(), st.sampled_from([40, 80, 200]))
def test_every_bad_part_is_named_and_every_criterion_named_or_counted(found: tuple[Any, list[Record]], width: int) -> None:
    """Whatever is bad, and on any screen."""
    places, bad = found
    rows = outcomes(places, bad)
    lines = lines_of(places, records=rows, width=width)
    assert len(lines) <= MOST_LINES
    text = flat(lines)
    more = re.search(r"and (\d+) more, in ", text)  # of 21 parts and causes, or more, one line says how many are not shown
    left_out = [culprit for culprit in find_culprits(rows, places) if not is_shown(culprit, text)]
    assert len(left_out) <= (int(more[1]) if more else 0), text


def is_shown(culprit: Culprit, text: str) -> bool:
    """Whether a part is named with one of its criteria or their number, and a shared cause with the number of its places."""
    if culprit.place is None:
        return f"{len(culprit.places)} " in text
    is_named = any(record.criterion[:10] in text for record in culprit.records)
    return culprit.place in text and (
        is_named or re.search(rf"\b{len(culprit.records)} (bad|values|rates|not)", text) is not None
    )
