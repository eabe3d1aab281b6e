"""Siblings that hide each other: never passed; and how seldom healthy ones are taken for such, by simulation."""

from __future__ import annotations

import random
import statistics
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.judging.siblings import Compared, Healthy, Shortfall, Siblings, compare, with_repeats
from tests.support.healthy_siblings import SEEN, draw_hosts, straggler_entries

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Hosts = Sequence[Sequence[float]]

FP32, HBM = "fp32_tflops", "hbm_bandwidth"
NAMED, OPEN, PASSED = "named", "open", "passed"


def outcome(one: Compared, limit_percent: float) -> str:
    """What the criterion makes of it."""
    if one.doubt is not None:
        return OPEN
    return PASSED if one.shortfall.percent <= max(limit_percent, one.allowed_percent) else NAMED


def judged(quantity: str, hosts: Hosts, models: Sequence[str] = ()) -> tuple[list[str], list[Compared]]:
    """The outcome and the comparison of each GPU, host by host, by the packaged entry."""
    entry = straggler_entries()[quantity]
    limit_percent = float(entry.limit(gpus=1, cluster={}).value)
    rates = dict(enumerate(rate for host in hosts for rate in host))
    siblings = Siblings(
        rates=rates,
        models=dict(enumerate(models or ["H200"] * len(rates))),
        hosts=dict(enumerate(number for number, host in enumerate(hosts) for _ in host)),
    )
    compared = compare(siblings, Healthy(**entry.recipe), limit_percent=limit_percent)
    found = [compared[gpu] for gpu in rates if gpu in compared]
    return [outcome(one, limit_percent) for one in found], found


# --- what was accepted before, and its healthy twins ---


@pytest.mark.parametrize(
    ("quantity", "rates", "percent"),
    [
        (FP32, (51.3, 49, 47.5, 46), 6.12),
        (FP32, (51.3, 51.2, 49, 48.9, 47.5, 47.4, 46, 45.9), 6.13),
        (HBM, (4.7, 4.45, 4.15), 9.29),
        (HBM, (4.7, 4.4), 6.38),
    ],
)
def test_siblings_that_hide_each_other_are_left_open(quantity: str, rates: Sequence[float], percent: float) -> None:
    """Nobody is named, nobody passes, and the distance of the last one is shown."""
    outcomes, found = judged(quantity, [rates])
    assert outcomes == [OPEN] * len(rates)
    assert found[-1].shortfall.percent == pytest.approx(percent, abs=0.01)


@pytest.mark.parametrize(
    "hosts", [[(51.3, 51.2, 51.25, 51.0)], [(51.3, 51.0)], [(51.3, 51.1), (51.0, 50.9)], [(51.2,), (51.0,)]]
)
def test_healthy_siblings_pass(hosts: Hosts) -> None:
    """Four, two, two hosts of two, and two hosts of one."""
    assert set(judged(FP32, hosts)[0]) == {PASSED}


@pytest.mark.parametrize("slow", [1, 2, 3])
def test_less_than_half_of_eight_are_named(slow: int) -> None:
    """Each slow one is named, and the others pass."""
    assert judged(HBM, [[4.16] * slow + [4.38] * (8 - slow)])[0] == [NAMED] * slow + [PASSED] * (8 - slow)


@pytest.mark.parametrize("slow", [4, 5, 6, 7])
def test_where_half_or_most_are_slow_nobody_passes(slow: int) -> None:
    """Without a majority of fast ones nothing shows which of them are right."""
    assert judged(HBM, [[4.16] * slow + [4.38] * (8 - slow)])[0] == [OPEN] * 8


def test_the_named_one_does_not_make_the_others_unlike() -> None:
    """Of three, one at half the rate: two that are alike pass; two that are not stay open."""
    assert judged(HBM, [(4.38, 2.19, 4.37)])[0] == [PASSED, NAMED, PASSED]
    assert judged(HBM, [(4.38, 2.19, 4.16)])[0] == [OPEN, NAMED, OPEN]


def test_one_host_that_disagrees_leaves_open_all_of_the_model() -> None:
    """Another model on the same hosts passes."""
    models = ["H200", "H200", "H200", "H200", "H100", "H100", "H100", "H100"] * 2
    slower = [(4.7, 4.7, 4.4, 4.4, 3.0, 3.0, 3.0, 3.0), (4.4, 4.1, 4.1, 4.7, 3.0, 3.0, 3.0, 3.0)]
    outcomes, _ = judged(HBM, slower, models)
    assert {found for found, model in zip(outcomes, models, strict=True) if model == "H100"} == {PASSED}
    assert OPEN in outcomes
    assert {found for found, model in zip(outcomes, models, strict=True) if model == "H200"} <= {OPEN, NAMED}


def test_hosts_that_differ_by_far_are_left_open() -> None:
    """Three hosts of one GPU each, and three steps between them."""
    assert judged(HBM, [(4.4,), (4.2,), (4.0,)])[0] == [OPEN] * 3


def test_the_spread_of_siblings_may_explain_more_than_the_limit() -> None:
    """5 % below with 4 % allowed, among hosts that differ as healthy ones do: passed, and the wider limit is known."""
    outcomes, found = judged("bf16_sustained", [(640.0,), (670.0,), (680.0,), (655.0,)])
    assert found[0].shortfall.percent > 4
    assert found[0].allowed_percent > found[0].shortfall.percent
    assert outcomes[0] == PASSED


# --- the property ---

STEPS = st.lists(st.floats(min_value=0.7, max_value=1.0), min_size=1, max_size=8)


@given(hosts=st.lists(STEPS, min_size=1, max_size=3).filter(lambda hosts: sum(map(len, hosts)) > 1))
def test_no_set_passes_with_a_member_beyond_its_limit_unless_its_spread_is_healthy(hosts: Hosts) -> None:
    """For any rates: all pass only if nobody lies beyond the limit, or each host and the hosts differ as healthy ones do."""
    entry = straggler_entries()[FP32]
    limit_percent = float(entry.limit(gpus=1, cluster={}).value)
    outcomes, found = judged(FP32, hosts)
    if set(outcomes) != {PASSED} or all(abs(one.shortfall.percent) <= limit_percent for one in found):
        return
    most = 4.6  # the factor for two values and four comparisons, which is the largest here
    within, between = entry.recipe["floor_spread"], entry.recipe["between_hosts"]
    assert all(statistics.stdev(host) / statistics.fmean(host) <= most * within for host in hosts if len(host) > 1)
    means = [statistics.fmean(host) for host in hosts]
    assert len(means) == 1 or statistics.stdev(means) / statistics.fmean(means) <= most * (within + between)


@given(rates=STEPS.filter(lambda rates: len(rates) > 1), factor=st.sampled_from([0.25, 1024.0]), order=st.randoms())
def test_neither_the_unit_nor_the_order_matters(rates: list[float], factor: float, order: random.Random) -> None:
    """The same outcome for the same rate."""
    before = sorted(zip(rates, judged(HBM, [rates])[0], strict=True))
    order.shuffle(rates)
    assert sorted(zip(rates, judged(HBM, [[rate * factor for rate in rates]])[0], strict=True)) == before


# --- how often rightly, how often wrongly: docs/decisions/0011 ---

SHAPES = ((1, 2), (1, 3), (1, 4), (1, 8), (2, 1), (2, 2), (2, 8), (16, 1), (8, 8), (64, 8))
"""Hosts and GPUs of each."""
GPUS = 800
"""Verdicts of each quantity on each shape; the table of decision 11 was made with a thousand times as many."""


def bins(hosts: Hosts) -> Hosts:
    """The same hosts with GPUs of two bins, as far apart as the standard deviation asks, instead of a bell curve."""
    means = [statistics.fmean(host) for host in hosts]
    return [
        [mean + abs(rate - mean) * (-1) ** gpu for gpu, rate in enumerate(host)]
        for mean, host in zip(means, hosts, strict=True)
    ]


@pytest.mark.parametrize("shaped", [list, bins], ids=["normal", "bins"])
@pytest.mark.parametrize("quantity", SEEN)
def test_healthy_siblings_are_not_left_open(quantity: str, shaped: Callable[[Hosts], Hosts]) -> None:
    """Once in 20,000 runs, so never in these."""
    for shape in SHAPES:
        draw = random.Random(f"{quantity} {shape}")
        for _ in range(max(2, GPUS // (shape[0] * shape[1]))):
            outcomes, _ = judged(quantity, shaped(draw_hosts(SEEN[quantity], shape, draw)))
            assert OPEN not in outcomes, shape


def test_the_readings_themselves_are_not_left_open() -> None:
    """Each host that was seen, every two of its GPUs, and all hosts together."""
    for quantity, seen in SEEN.items():
        pairs = [(host[one], host[one + 1]) for host in seen.hosts for one in range(len(host) - 1)]
        for hosts in (*([host] for host in seen.hosts), *([pair] for pair in pairs), seen.hosts):
            assert set(judged(quantity, hosts)[0]) <= {PASSED}, (quantity, hosts)


# --- how often a healthy one is named, on a cluster of any size: docs/decisions/0011 ---

NOISIEST = ("bf16_tflops", "bf16_sustained")
"""In whose rates healthy GPUs differ most, beside the limit."""
LARGE = {(64, 8): 16, (1024, 8): 1}
"""Runs of each size; with 3.5 sigmas for all sizes, some run of each names a healthy GPU."""


def runs_naming(quantity: str, shape: tuple[int, int], *, runs: int, slow_percent: float = 0.0) -> tuple[int, int]:
    """In how many runs a healthy GPU was named, and in how many the first GPU was, which is slower by so much."""
    draw = random.Random(f"{quantity} {shape} {slow_percent}")
    wrong = right = 0
    for _ in range(runs):
        hosts = draw_hosts(SEEN[quantity], shape, draw)
        hosts[0][0] = (1 - slow_percent / 100) * (1 if slow_percent else hosts[0][0])
        outcomes, _ = judged(quantity, hosts)
        right += outcomes[0] == NAMED and slow_percent > 0
        wrong += NAMED in (outcomes[1:] if slow_percent else outcomes)
    return wrong, right


@pytest.mark.parametrize("shape", LARGE)
@pytest.mark.parametrize("quantity", NOISIEST)
def test_of_many_healthy_ones_none_is_named(quantity: str, shape: tuple[int, int]) -> None:
    """In one run of 200 at most, so in none of these."""
    assert runs_naming(quantity, shape, runs=LARGE[shape]) == (0, 0)


@pytest.mark.parametrize(("shape", "slow_percent"), [((1, 8), 10), ((64, 8), 12), ((1024, 8), 12)])
@pytest.mark.parametrize("quantity", NOISIEST)
def test_a_slow_one_among_many_is_named(quantity: str, shape: tuple[int, int], slow_percent: float) -> None:
    """It and no other: a middling GPU that lost 10 or 12 %."""
    assert runs_naming(quantity, shape, runs=1, slow_percent=slow_percent) == (0, 1)


@pytest.mark.parametrize("number", [3, 4, 8])
@pytest.mark.parametrize("quantity", SEEN)
def test_what_is_allowed_on_one_node(quantity: str, number: int) -> None:
    """3.5 sigmas of the siblings, or what the lowest healthy one of a run reaches: 4.7 to 5.2 of the entry's, by size."""
    draw = random.Random(f"{quantity} {number}")
    healthy = Healthy(**straggler_entries()[quantity].recipe)
    lowest_percent = healthy.lowest_percent(number, 1)
    assert 4.7 <= lowest_percent / (100 * healthy.floor_spread) <= 5.2
    for _ in range(20):
        for one in judged(quantity, draw_hosts(SEEN[quantity], (1, number), draw))[1]:
            own_percent = 350 * 1.4826 * one.shortfall.mad / one.shortfall.median
            assert one.allowed_percent == pytest.approx(max(own_percent, lowest_percent))


def stairs(size: int) -> list[float]:
    """Shares of the full slowdown, from none to all of it."""
    return [gpu / (size - 1) for gpu in range(size)]


PLANTS: dict[str, Callable[[int], list[float]]] = {
    "one": lambda size: [1.0] + [0.0] * (size - 1),
    "two": lambda size: [1.0] * min(2, size - 1) + [0.0] * max(1, size - 2),
    "half": lambda size: [1.0] * (size // 2) + [0.0] * (size - size // 2),
    "most": lambda size: [1.0] * (size - 1) + [0.0],
    "stairs": stairs,
}
FROM_PERCENT = {
    "bf16_tflops": 30,
    "bf16_sustained": 10,
    "bf16_at_clock": 10,
    FP32: 5,
    HBM: 10,
    "training_throughput_gpu": 10,
    "host_to_device": 30,
    "device_to_host": 30,
}
"""The slowdown that is found whoever and however many are slow; what smaller ones get says decision 11."""


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("quantity", SEEN)
def test_slow_siblings_are_named_or_left_open(quantity: str, plant: str) -> None:
    """Not one of them passes, on 2, 3, 4 and 8 GPUs of one host; of a flight of stairs the run does not."""
    draw = random.Random(f"{quantity} {plant}")
    for size in (2, 3, 4, 8):
        shares = PLANTS[plant](size)
        for _ in range(20):
            (host,) = draw_hosts(SEEN[quantity], (1, size), draw)
            slowed = [rate * (1 - share * FROM_PERCENT[quantity] / 100) for rate, share in zip(host, shares, strict=True)]
            outcomes, _ = judged(quantity, [slowed])
            slow = [found for found, share in zip(outcomes, shares, strict=True) if share == 1]
            assert PASSED not in slow, (size, slowed)


# A member whose own repeats are disturbed.


@pytest.mark.parametrize(
    ("percent", "allowed_percent", "spread", "is_open"),
    [
        (9.0, 2.0, 0.31, True),
        (9.0, 2.0, 0.05, False),
        (7.0, 2.0, 0.31, False),
        (9.0, 10.0, 0.31, False),
        (50.0, 2.0, 0.0, False),
    ],
)
def test_a_disturbed_link_is_not_named_slow(percent: float, allowed_percent: float, spread: float, *, is_open: bool) -> None:
    """49.97 GB/s with a spread of 31 % beside siblings at 54.8 is left open. A link that is slow in each repeat fails."""
    shortfall = Shortfall(percent=percent, score=9.0, siblings=3, median=54.8, mad=0.1, explained_percent=allowed_percent)
    member = Compared(shortfall=shortfall, allowed_percent=allowed_percent, doubt=None)
    samples = [50.0 * (1 + 1.25 * spread * (at / 19 - 0.5)) for at in range(20)]
    found = with_repeats(member, samples, limit_percent=8.0)
    assert (found.doubt is not None) is is_open
    assert found.shortfall is shortfall
    assert with_repeats(member, samples[:2], limit_percent=8.0) is member
