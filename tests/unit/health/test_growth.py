"""Growth of a GPU's error counters, between two readings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster.health.growth import Growth, gpu_growth, grown, nvlink_growth, pcie_growth, per_minute, together
from pytest_gpucluster.inventory.nvlinks import LinkCounters
from pytest_gpucluster.inventory.nvml import GpuCounters
from pytest_gpucluster.inventory.reading import NotAvailable

REFUSED = NotAvailable("Not Supported")


def of_gpu(*, ecc: Any = 7, replays: Any = 40) -> GpuCounters:
    """A GPU with these counters of its memory and its PCIe link."""
    return replace(counters(), ecc_uncorrected=ecc, pcie_replays=replays)


def counters(*, nvlinks: Any = None, **of_link_4: Any) -> GpuCounters:
    """A GPU with eighteen links; link 4 has these counters, and 5 elsewhere."""
    healthy = LinkCounters(link=0, replays=5, recoveries=5, crc_flits=5, crc_data=5, nvlink5=REFUSED)
    links = [replace(healthy, link=link) for link in range(18)]
    links[4] = replace(links[4], **of_link_4)
    of_gpu = {"ecc_uncorrected": 0, "ecc_corrected": 0, "pcie_replays": 0, "pcie_errors": {"recoveries": 5, "bad packets": 2}}
    return GpuCounters(**of_gpu, nvlinks=links if nvlinks is None else nvlinks)


def test_other_errors_of_the_pcie_link_are_told() -> None:
    """What grew; nothing of what was reset, or came with the last reading alone."""
    last = replace(counters(), pcie_errors={"recoveries": 8, "bad packets": 0, "fatal errors": 1})
    assert pcie_growth(counters(), last) == {"recoveries": 3}
    assert pcie_growth(last, replace(last, pcie_errors={})) == {}


def grow(last: GpuCounters, *, seconds: float = 100.0) -> Growth:
    """What happened since the healthy reading."""
    return nvlink_growth(counters(), last, seconds=seconds, crc_per_s=100)


@pytest.mark.parametrize(("first", "last", "growth"), [(0, 0, 0), (3, 5, 2), (7, 7, 0)])
def test_growth(first: int, last: int, growth: int) -> None:
    """The later reading less the earlier one."""
    assert grown(first, last) == growth


@pytest.mark.parametrize(
    ("first", "last", "why"),
    [
        (REFUSED, 0, "Not Supported"),
        (0, REFUSED, "Not Supported"),
        (REFUSED, REFUSED, "Not Supported"),
        (5, 0, "the counter was reset during the run: 5 at its begin, 0 at its end"),
        (5, 4, "the counter was reset during the run: 5 at its begin, 4 at its end"),
    ],
)
def test_what_is_not_known_is_not_zero(first: Any, last: Any, why: str) -> None:
    """A refused reading and a counter that fell have no growth."""
    assert grown(first, last) == NotAvailable(why)


@pytest.mark.parametrize(("growth", "seconds", "rate"), [(1, 1.0, 1.0), (9, 60.0, 9.0), (9, 120.0, 4.5), (0, 0.0, 0.0)])
def test_rate_a_minute(growth: int, seconds: float, rate: float) -> None:
    """A shorter time counts as a minute."""
    assert per_minute(growth, seconds) == rate


def test_links_that_count_nothing_are_healthy() -> None:
    """Whatever the counters stood at before."""
    assert grow(counters()) == Growth()


@pytest.mark.parametrize(("counter", "growth"), [("replays", 1), ("recoveries", 1), ("recoveries", 7)])
def test_every_replay_and_recovery_counts(counter: str, growth: int) -> None:
    """By the link's number."""
    found = grow(counters(**{counter: 5 + growth}))
    assert (found.over, found.facts) == (growth, (f"link 4 {counter} +{growth}",))


@pytest.mark.parametrize(("counter", "words"), [("crc_flits", "CRC errors of flits"), ("crc_data", "CRC errors of data")])
def test_crc_errors_count_by_their_rate(counter: str, words: str) -> None:
    """From 100 a second on; fewer are shown."""
    below, at = (grow(counters(**{counter: 5 + growth})) for growth in (9999, 10000))
    assert (below.over, below.facts, below.within) == (0, (), (f"{words} +9999, 99.99 a second",))
    assert (at.over, at.facts) == (1, (f"{words} +10000, 100 a second, most on link 4 (+10000)",))


def test_crc_errors_of_all_links_are_one_rate() -> None:
    """Many links with a few errors each."""
    links = [LinkCounters(link=link, replays=5, recoveries=5, crc_flits=605, crc_data=5, nvlink5=REFUSED) for link in range(18)]
    assert grow(counters(nvlinks=links)).over == 1


@pytest.mark.parametrize("counter", ["replays", "recoveries", "crc_flits", "crc_data"])
@pytest.mark.parametrize(("last", "why"), [(REFUSED, "Not Supported"), (0, "the counter was reset")])
def test_a_counter_that_is_not_known_is_said(counter: str, last: Any, why: str) -> None:
    """By its link; the other links are still judged."""
    found = grow(counters(**{counter: last}))
    assert len(found.unknown) == 1
    assert found.unknown[0].startswith("link 4 ")
    assert why in found.unknown[0]
    links = counters(**{counter: last}).nvlinks
    assert isinstance(links, list)
    links[6] = replace(links[6], recoveries=6)
    assert grow(counters(nvlinks=links)).facts == ("link 6 recoveries +1",)


NEW = {"symbol errors": 3, "recoveries": 0}
OLD_REFUSED = dict.fromkeys(("replays", "recoveries", "crc_flits", "crc_data"), REFUSED)


def of_generation_5(**of_link_4: Any) -> GpuCounters:
    """A GPU whose links count as those of Blackwell do, and refuse the old counters."""
    links = [LinkCounters(link=link, **OLD_REFUSED, nvlink5={**NEW, **(of_link_4 if link == 4 else {})}) for link in range(18)]
    return counters(nvlinks=links)


@pytest.mark.parametrize(
    ("change", "over", "facts", "unknown"),
    [
        ({}, 0, (), ()),
        ({"recoveries": 2}, 2, ("link 4 recoveries +2",), ()),
        ({"symbol errors": 4}, 1, ("link 4 symbol errors +1",), ()),
        (
            {"symbol errors": 2},
            0,
            (),
            ("link 4 symbol errors: the counter was reset during the run: 3 at its begin, 2 at its end",),
        ),
        ({"recoveries": REFUSED}, 0, (), ("link 4 recoveries: Not Supported",)),
    ],
)
def test_links_of_generation_5(change: dict[str, Any], over: int, facts: tuple[str, ...], unknown: tuple[str, ...]) -> None:
    """Every growth counts, and the old counters, which they refuse, are no error."""
    found = nvlink_growth(of_generation_5(), of_generation_5(**change), seconds=100.0, crc_per_s=100)
    assert (found.over, found.facts, found.unknown) == (over, facts, unknown)


def test_links_that_refuse_old_and_new_counters_are_unknown() -> None:
    """Nothing is known, so nothing is green."""
    links = [LinkCounters(link=0, **OLD_REFUSED, nvlink5=REFUSED)]
    found = nvlink_growth(counters(nvlinks=links), counters(nvlinks=links), seconds=1.0, crc_per_s=100)
    assert len(found.unknown) == 4


def test_links_that_come_go_or_are_refused_are_unknown() -> None:
    """Nothing is known of them, so nothing is green."""
    links = counters().nvlinks
    assert isinstance(links, list)
    assert grow(counters(nvlinks=links[:-1])).unknown == ("link 17 is gone at the end",)
    more = counters(nvlinks=[*links, replace(links[0], link=18)])
    assert grow(more).unknown == ("link 18 came during the run",)
    assert grow(counters(nvlinks=REFUSED)).unknown == ("the NVLinks are not available: Not Supported",)
    assert nvlink_growth(counters(nvlinks=REFUSED), counters(), seconds=1.0, crc_per_s=100).unknown
    assert grow(counters(), seconds=0.0).unknown == ("no time passed between the two readings",)


@pytest.mark.parametrize(
    ("last", "seconds", "growth"),
    [
        (of_gpu(), 60.0, Growth()),
        (of_gpu(ecc=9), 60.0, Growth(2, ("uncorrected memory errors +2",))),
        (of_gpu(replays=48), 5.0, Growth(within=("PCIe replays +8, 8 a minute",))),
        (of_gpu(replays=49), 5.0, Growth(1, ("PCIe replays +9, 9 a minute",))),
        (of_gpu(replays=49), 120.0, Growth(within=("PCIe replays +9, 4.5 a minute",))),
        (of_gpu(ecc=REFUSED), 60.0, Growth(unknown=("uncorrected memory errors: Not Supported",))),
        (of_gpu(replays=REFUSED), 60.0, Growth(unknown=("PCIe replays: Not Supported",))),
    ],
)
def test_growth_of_memory_and_pcie(last: GpuCounters, seconds: float, growth: Growth) -> None:
    """Each counter by its own limit; a refused one is not known."""
    assert gpu_growth(of_gpu(), last, seconds=seconds, replays_per_min=8) == growth


def test_reset_counters_are_not_known() -> None:
    """Both at once."""
    found = gpu_growth(of_gpu(), of_gpu(ecc=0, replays=0), seconds=60.0, replays_per_min=8)
    assert (found.over, len(found.unknown)) == (0, 2)
    assert all("was reset during the run" in why for why in found.unknown)


def test_growth_together() -> None:
    """Sums and lists, in order."""
    one, two = Growth(1, ("a",), ("b",), ("c",)), Growth(2, ("d",))
    assert together([one, two]) == Growth(3, ("a", "d"), ("b",), ("c",))
