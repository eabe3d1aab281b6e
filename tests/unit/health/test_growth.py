"""Growth of counters between two readings: one mechanism for GPUs, NVLinks and NICs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pytest_gpucluster.health.growth import (
    CounterGroup,
    compare_counters,
    growth_of,
    judge_counters,
    judge_earlier_recoveries,
    judge_gpu_counters,
    judge_memory_errors,
    judge_nvlink_counters,
    judge_replays,
    per_minute,
    read_limits,
)
from pytest_gpucluster.inventory.nvlinks import GENERATION_5, LinkCounters
from pytest_gpucluster.inventory.nvml import GpuCounters
from pytest_gpucluster.inventory.reading import NotAvailable, healthy
from pytest_gpucluster.judging.finding import HERE, Finding
from tests.support.thresholds_files import packaged

REFUSED = NotAvailable("Not Supported")
CRITERIA = packaged().criteria(packaged().profiles["h200-sxm"])
LINKS = read_limits(CRITERIA["nvlink_errors"].recipe["limits"])
GPU = read_limits(CRITERIA["gpu_errors_soak"].recipe["limits"])


def of_gpu(*, ecc: Any = 7, replays: Any = 40) -> GpuCounters:
    """A GPU with these counters of its memory and its PCIe link."""
    return replace(counters(), ecc_uncorrected=ecc, pcie_replays=replays)


def counters(*, nvlinks: Any = None, **of_link_4: Any) -> GpuCounters:
    """A GPU with eighteen links; link 4 has these counters, and 5 elsewhere."""
    known = {"replays": 5, "recoveries": 5, "crc_flits": 5, "crc_data": 5}
    links = [healthy(LinkCounters, link=link, **known) for link in range(18)]
    links[4] = replace(links[4], **of_link_4)
    errors = {"recoveries": 5, "bad packets": 2}
    return healthy(GpuCounters, pcie_errors=errors, nvlinks=links if nvlinks is None else nvlinks)


def test_other_errors_of_the_pcie_link_are_told() -> None:
    """What grew; nothing of what was reset, or came with the last reading alone."""
    last = replace(counters(), pcie_errors={"recoveries": 8, "bad packets": 0, "fatal errors": 1})
    shown = judge_replays(counters(), last, seconds=60.0).evidence
    assert shown == {"replays": 0, "seconds": 60.0, "recoveries": 3}
    assert judge_replays(last, replace(last, pcie_errors={}), seconds=60.0).evidence == {"replays": 0, "seconds": 60.0}


def grow(last: GpuCounters, *, seconds: float = 100.0) -> Finding:
    """What happened on the links since the healthy reading."""
    return judge_nvlink_counters({HERE: (counters(), last)}, seconds=seconds, limits=LINKS)


def within(found: Finding) -> tuple[str, ...]:
    """What grew, and is not bad."""
    return tuple(found.evidence.get("within", ()))


@pytest.mark.parametrize(("first", "last", "growth"), [(0, 0, 0), (3, 5, 2), (7, 7, 0)])
def test_growth(first: int, last: int, growth: int) -> None:
    """The later reading less the earlier one."""
    assert growth_of(first, last) == growth


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
    assert growth_of(first, last) == NotAvailable(why)


@pytest.mark.parametrize(("growth", "seconds", "rate"), [(1, 1.0, 1.0), (9, 60.0, 9.0), (9, 120.0, 4.5), (0, 0.0, 0.0)])
def test_rate_a_minute(growth: int, seconds: float, rate: float) -> None:
    """A shorter time counts as a minute."""
    assert per_minute(growth, seconds) == rate


def test_links_that_count_nothing_are_healthy() -> None:
    """Whatever the counters stood at before."""
    assert (grow(counters()).judged, grow(counters()).doubts, within(grow(counters()))) == (0, (), ())


@pytest.mark.parametrize(("counter", "growth"), [("replays", 1), ("recoveries", 1), ("recoveries", 7)])
def test_every_replay_and_recovery_counts(counter: str, growth: int) -> None:
    """By the link's number."""
    found = grow(counters(**{counter: 5 + growth}))
    assert found.count == 1
    assert found.facts[0].startswith(f"link 4 {counter} +{growth} in 100 s")


@pytest.mark.parametrize("counter", ["crc_flits", "crc_data"])
def test_crc_errors_count_by_their_rate(counter: str) -> None:
    """Above 100 a second; fewer are shown."""
    at, above = (grow(counters(**{counter: 5 + growth})) for growth in (10000, 10001))
    assert at.count == 0
    assert within(at)[0].startswith(f"{counter}, most on link 4, +10000 in 100 s")
    assert above.count == 1
    assert above.facts[0].startswith(f"{counter}, most on link 4, +10001 in 100 s")


def test_crc_errors_of_all_links_are_one_rate() -> None:
    """Many links with a few errors each."""
    links = [
        healthy(LinkCounters, link=link, replays=5, recoveries=5, crc_flits=605, crc_data=5, nvlink5=REFUSED)
        for link in range(18)
    ]
    assert grow(counters(nvlinks=links)).count == 1


@pytest.mark.parametrize("counter", ["replays", "recoveries", "crc_flits", "crc_data"])
@pytest.mark.parametrize(("last", "why"), [(REFUSED, "Not Supported"), (0, "the counters were reset")])
def test_a_counter_that_is_not_known_is_said(counter: str, last: Any, why: str) -> None:
    """By its link; the other links are still judged."""
    found = grow(counters(**{counter: last}))
    assert len(found.doubts) == 1
    assert found.doubts[0].startswith("link 4 ")
    assert why in found.doubts[0]
    links = counters(**{counter: last}).nvlinks
    assert isinstance(links, list)
    links[6] = replace(links[6], recoveries=6)
    assert grow(counters(nvlinks=links)).facts[0].startswith("link 6 recoveries +1 ")


NEW = {"symbol errors": 3, "recoveries": 0}
OLD_REFUSED = dict.fromkeys(("replays", "recoveries", "crc_flits", "crc_data"), REFUSED)


def of_generation_5(**of_link_4: Any) -> GpuCounters:
    """A GPU whose links count as those of Blackwell do, and refuse the old counters."""
    links = [
        healthy(LinkCounters, link=link, **OLD_REFUSED, nvlink5={**NEW, **(of_link_4 if link == 4 else {})})
        for link in range(18)
    ]
    return counters(nvlinks=links)


@pytest.mark.parametrize(
    ("change", "fact", "doubt"),
    [
        ({}, None, None),
        ({"recoveries": 2}, "link 4 recoveries +2 ", None),
        ({"symbol errors": 4}, "link 4 symbol errors +1 ", None),
        ({"symbol errors": 2}, "link 4 symbol errors +2 ", "link 4 symbol errors fell from 3 to 2: the counters were reset"),
        ({"recoveries": REFUSED}, None, "link 4 recoveries is not available: Not Supported"),
    ],
)
def test_links_of_generation_5(change: dict[str, Any], fact: str | None, doubt: str | None) -> None:
    """Every growth counts, and the old counters, which they refuse, are no error."""
    found = judge_nvlink_counters({HERE: (of_generation_5(), of_generation_5(**change))}, seconds=100.0, limits=LINKS)
    assert [text.startswith(str(fact)) for text in found.facts] == [True] * (fact is not None)
    assert [text.startswith(str(doubt)) for text in found.doubts] == [True] * (doubt is not None)


@pytest.mark.parametrize("refused_first", [True, False])
def test_links_that_refuse_the_new_counters_at_one_reading(*, refused_first: bool) -> None:
    """Whatever the old ones say: it is not known what the new ones counted."""
    has = [healthy(LinkCounters, link=link, nvlink5=NEW) for link in range(2)]
    refuses = [has[0], replace(has[1], nvlink5=REFUSED)]
    pair = (refuses, has) if refused_first else (has, refuses)
    first, last = (counters(nvlinks=links) for links in pair)
    found = judge_nvlink_counters({HERE: (first, last)}, seconds=100.0, limits=LINKS)
    assert found.facts == ()
    assert [text.partition(" is ")[0] for text in found.doubts] == [f"link 1 {name}" for name in LINKS if name in NEW]
    assert all("Not Supported" in text for text in found.doubts)


def test_every_counter_of_generation_5_is_judged() -> None:
    """One that the packaged limits leave out would grow in silence."""
    assert set(GENERATION_5) <= set(LINKS)
    assert {name: GPU[name] for name in LINKS} == LINKS  # a soak judges by the same limits


def test_links_that_refuse_old_and_new_counters_are_unknown() -> None:
    """Nothing is known, so nothing is green."""
    links = [healthy(LinkCounters, link=0, **OLD_REFUSED, nvlink5=REFUSED)]
    found = judge_nvlink_counters({HERE: (counters(nvlinks=links),) * 2}, seconds=1.0, limits=LINKS)
    assert len(found.doubts) == 4


def counted(usual: int, odd: dict[tuple[int, int], int], *, generation: int = 4, gpus: int = 8) -> dict[str, GpuCounters]:
    """GPUs of 18 links, each of which was trained again so often; ``odd`` by GPU and link."""

    def link(gpu: int, number: int) -> LinkCounters:
        count = odd.get((gpu, number), usual)
        if generation == 4:
            return healthy(LinkCounters, link=number, recoveries=count)
        new = {**dict.fromkeys(GENERATION_5, 0), "recoveries": count}
        return healthy(LinkCounters, link=number, recoveries=REFUSED, nvlink5=new)

    return {f"gpu{gpu}": healthy(GpuCounters, nvlinks=[link(gpu, number) for number in range(18)]) for gpu in range(gpus)}


@pytest.mark.parametrize("generation", [4, 5])
@pytest.mark.parametrize(
    ("usual", "odd", "named"),
    [
        (0, {(2, 7): 505}, {"gpu2"}),
        (0, {(2, 7): 10, (5, 1): 12}, {"gpu2", "gpu5"}),
        (0, {(2, link): 30 for link in range(18)}, {"gpu2"}),
        (40, {(0, 0): 505}, {"gpu0"}),
        (0, {(2, 7): 9}, set()),
        (60, {(2, 7): 505}, set()),
        (505, {}, set()),
        (0, {(gpu, link): 30 for gpu in range(4) for link in range(18)}, set()),
    ],
)
def test_recoveries_before_the_run(usual: int, odd: dict[tuple[int, int], int], named: set[str], generation: int) -> None:
    """The link that stands out from most links of its node; what all have, or half, is nobody's."""
    found = judge_earlier_recoveries(counted(usual, odd, generation=generation))
    assert {*found.bad} == named
    for (gpu, link), count in odd.items() if named else ():
        texts = found.bad[f"gpu{gpu}"]
        assert any(f"link {link} had been trained again {count} times before the run" in text for text in texts)
    assert (found.advice is not None) is bool(named)


def test_recoveries_that_are_not_known() -> None:
    """They accuse nobody, and hide nobody: what is refused is unknown by its growth."""
    known = counted(0, {(2, 7): 505})
    refused = healthy(GpuCounters, nvlinks=REFUSED)
    assert {*judge_earlier_recoveries({**known, "gpu0": refused}).bad} == {"gpu2"}
    assert judge_earlier_recoveries({"gpu0": refused}).bad == {}
    assert judge_earlier_recoveries({"gpu0": counters(nvlinks=[healthy(LinkCounters, link=0, recoveries=505)])}).bad == {}


def test_links_that_come_go_or_are_refused_are_unknown() -> None:
    """Nothing is known of them, so nothing is green."""
    links = counters().nvlinks
    assert isinstance(links, list)
    assert grow(counters(nvlinks=links[:-1])).doubts == ("link 17 is gone at the end",)
    more = counters(nvlinks=[*links, replace(links[0], link=18)])
    assert grow(more).doubts == ("link 18 came during the run",)
    assert grow(counters(nvlinks=REFUSED)).doubts == ("the NVLinks are not available: Not Supported",)
    assert judge_nvlink_counters({HERE: (counters(nvlinks=REFUSED), counters())}, seconds=1.0, limits=LINKS).unknown
    assert grow(counters(), seconds=0.0).doubts == ("no time passed between the two readings",)


@pytest.mark.parametrize(
    ("last", "seconds", "fact", "is_shown"),
    [
        (of_gpu(), 60.0, None, False),
        (of_gpu(ecc=9), 60.0, "ecc_uncorrected +2 ", False),
        (of_gpu(replays=48), 5.0, None, True),
        (of_gpu(replays=49), 5.0, "pcie_replays +9 ", False),
        (of_gpu(replays=49), 120.0, None, True),
    ],
)
def test_growth_of_memory_and_pcie(last: GpuCounters, seconds: float, fact: str | None, is_shown: bool) -> None:  # noqa: FBT001
    """Each counter by its own limit; a shorter time counts as a minute."""
    found = judge_gpu_counters(of_gpu(), last, seconds=seconds, limits=GPU, has_peers=False)
    assert [text.startswith(str(fact)) for text in found.facts] == [True] * (fact is not None)
    assert (bool(within(found)), found.doubts) == (is_shown, ())


@pytest.mark.parametrize("name", ["ecc", "replays"])
def test_memory_and_pcie_that_are_refused(name: str) -> None:
    """A counter that is refused is not known."""
    last = of_gpu(**{name: REFUSED})
    assert len(judge_gpu_counters(of_gpu(), last, seconds=60.0, limits=GPU, has_peers=False).doubts) == 1
    found = judge_memory_errors(of_gpu(), last) if name == "ecc" else judge_replays(of_gpu(), last, seconds=60.0)
    assert (found.judged, len(found.doubts)) == (None, 1)


@pytest.mark.parametrize(
    ("volatile", "ever", "value", "is_known"),
    [
        (7, 3, 0, True),
        (8, 3, 1, True),
        (7, 10, 7, True),
        (0, 10, 7, False),
        (0, 3, None, False),
        (8, 2, 1, True),
        (9, REFUSED, 2, True),
    ],
)
def test_memory_errors_of_a_whole_life(volatile: Any, ever: Any, value: int | None, *, is_known: bool) -> None:
    """A boot clears the other counter."""
    first = replace(of_gpu(), ecc_uncorrected_aggregate=3)
    found = judge_memory_errors(first, replace(of_gpu(ecc=volatile), ecc_uncorrected_aggregate=ever))
    assert (found.judged, not found.unknown) == (value, is_known)


def test_reset_counters_are_not_known() -> None:
    """What they count since is the least that happened."""
    found = judge_gpu_counters(of_gpu(), of_gpu(ecc=0, replays=0), seconds=60.0, limits=GPU, has_peers=False)
    assert (found.count, len(found.doubts)) == (0, 1)
    assert "the counters were reset during the run" in found.doubts[0]
    assert judge_gpu_counters(of_gpu(), of_gpu(ecc=1), seconds=60.0, limits=GPU, has_peers=False).count == 1


def test_links_are_judged_where_there_are_peers() -> None:
    """One GPU of a host has no links to others."""
    last = counters(replays=6)
    assert judge_gpu_counters(counters(), last, seconds=60.0, limits=LINKS, has_peers=True).count == 1
    assert judge_gpu_counters(counters(), last, seconds=60.0, limits=LINKS, has_peers=False).count == 0


@pytest.mark.parametrize("period", ["total", "per_s", "per_min", "per_hour"])
@pytest.mark.parametrize("before", [0, 250, 255])
@pytest.mark.parametrize("hours", [0.001, 1, 10_000])
def test_a_full_counter_is_never_clean(period: str, before: int, hours: float) -> None:
    """Whatever its limit, and however long the run: at its greatest value it may have grown by any number."""
    group = CounterGroup(part="port", first={"errors": before}, last={"errors": 255}, greatest={"errors": 255})
    found = compare_counters([group], seconds=3600 * hours, limits=read_limits({"errors": {period: 10}}))
    assert found.judged != 0
    assert found.bad or "greatest value" in found.doubts[0]


def test_a_full_counter_of_pcie_replays() -> None:
    """It has 32 bits."""
    found = judge_replays(of_gpu(replays=0xFFFF_FFFF), of_gpu(replays=0xFFFF_FFFF), seconds=60.0)
    assert found.judged is None
    assert "greatest value" in found.doubts[0]


ENDS = (2**32 - 1, 2**64 - 1)
"""Where counters of 32 and 64 bits end; -1 is NVML's word for a value that it does not have."""


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("before", [0, 5, "end"])
@pytest.mark.parametrize("period", ["total", "per_s", "per_min", "per_hour"])
@pytest.mark.parametrize("hours", [0.001, 1, 10_000])
@pytest.mark.parametrize("wraps_at", [None, 1 << 32])
def test_a_counter_at_the_end_of_its_bits_is_unknown(
    end: int, before: Any, period: str, hours: float, wraps_at: int | None
) -> None:
    """Whoever counts, and whether anybody listed its greatest value: neither clean nor so many errors."""
    first = {"errors": end if before == "end" else before}
    group = CounterGroup(part="port", first=first, last={"errors": end}, wraps_at=wraps_at)
    found = compare_counters([group], seconds=3600 * hours, limits=read_limits({"errors": {period: 10}}))
    assert (found.judged, found.facts) == (None, ())
    assert f"stands at {end}" in found.doubts[0]


def test_a_counter_that_goes_on_beyond_32_bits() -> None:
    """It has more bits, and is no less known than any other."""
    limits = read_limits({"errors": {"total": 10}})
    for before, after, bad in ((ENDS[0], ENDS[0] + 3, 0), (ENDS[0] - 1, ENDS[0] + 30, 1), (ENDS[0] - 9, ENDS[0] - 1, 0)):
        group = CounterGroup(part="port", first={"errors": before}, last={"errors": after})
        assert compare_counters([group], seconds=60.0, limits=limits).judged == bad


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("counter", ["replays", "recoveries", "crc_flits", "crc_data"])
@pytest.mark.parametrize("before", [5, "end"])
def test_a_counter_of_an_nvlink_at_its_end(end: int, counter: str, before: Any) -> None:
    """Those that are summed over the links too: no rate is made of it, and no other link hides it."""
    first = counters() if before == 5 else counters(**{counter: end})
    found = judge_nvlink_counters({HERE: (first, counters(**{counter: end}))}, seconds=100.0, limits=LINKS)
    assert found.judged is None
    assert found.doubts[0].startswith(f"link 4 {counter} ")


@pytest.mark.parametrize("end", ENDS)
def test_recoveries_at_the_end_of_their_counter_were_never_counted(end: int) -> None:
    """It is no link that was trained so often."""
    gpus = {number: counters(recoveries=end) if number == 1 else counters() for number in range(4)}
    assert judge_earlier_recoveries(gpus).bad == {}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("before", [7, "end"])
def test_memory_errors_at_the_end_of_their_counter(end: int, before: Any) -> None:
    """Of a GPU that counts nothing any more, nobody knows the errors."""
    first = of_gpu(ecc=end if before == "end" else before)
    assert judge_memory_errors(first, of_gpu(ecc=end)).judged is None
    found = judge_gpu_counters(first, of_gpu(ecc=end), seconds=60.0, limits=GPU, has_peers=False)
    assert (found.judged, found.facts) == (None, ())


BY_NAME = read_limits({"power_brake_s": {"total": 0}, "thermal_s": {"total": 0}})


@pytest.mark.parametrize(
    ("last", "facts", "unknown"),
    [
        ({"power_brake_s": 1.0, "thermal_s": 4.0, "other": 9}, (), False),
        ({"power_brake_s": 1.5, "thermal_s": 4.0}, ("power_brake_s +0.5",), False),
        ({"power_brake_s": 1.5, "thermal_s": 4.25}, ("power_brake_s +0.5", "thermal_s +0.25"), False),
        ({"power_brake_s": 1.5, "thermal_s": REFUSED}, ("power_brake_s +0.5",), True),
        ({"power_brake_s": 0.5, "thermal_s": 4.0}, ("power_brake_s +0.5",), True),
        (REFUSED, (), True),
        ({"other": 9}, (), True),
    ],
)
def test_counters_by_name(last: Any, facts: tuple[str, ...], *, unknown: bool) -> None:
    """Each with a limit is judged; one that was reset, or refused at one end, is unknown too, and so is a part without any."""
    first = {"power_brake_s": 1.0, "thermal_s": 4.0} if last != {"other": 9} else {"other": 3}
    found = judge_counters(first, last, seconds=60.0, limits=BY_NAME)
    assert [text.split(" in ")[0] for text in found.bad.get(HERE, ())] == list(facts)
    assert bool(found.unknown) is unknown


def test_a_part_that_lacks_one_counter() -> None:
    """An older driver gives one of them only."""
    found = judge_counters({"thermal_s": 0.0}, {"thermal_s": 0.0}, seconds=60.0, limits=BY_NAME)
    assert (found.judged, found.unknown) == (0, {})


@pytest.mark.parametrize(
    ("limit", "growth", "seconds", "holds"),
    [
        ({"per_s": 100}, 2, 0.017, True),
        ({"per_s": 100}, 101, 0.017, False),
        ({"per_s": 100}, 200, 2.0, True),
        ({"per_min": 8}, 8, 0.1, True),
        ({"per_min": 8}, 9, 0.1, False),
        ({"per_min": 8}, 9, 120.0, True),
        ({"per_hour": 120}, 5, 60.0, False),
        ({"per_hour": 120}, 2, 60.0, True),
        ({"total": 0}, 0.001, 9999.0, False),
    ],
)
def test_a_short_round_makes_no_high_rate(limit: dict[str, float], growth: float, seconds: float, *, holds: bool) -> None:
    """A limit a second or a minute is for at least that time; one an hour is for the time that passed."""
    assert read_limits({"errors": limit})["errors"].holds(growth, seconds) is holds
