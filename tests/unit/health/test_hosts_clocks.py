"""How far clocks are apart, and what the time of the question hides."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.health.hosts import ClockReading, ClockTerms, Skew, judge_clock, read_skews, skews
from pytest_gpucluster.places import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def shown(offset_s: float, took_s: float = 0.002, at_s: float = 1e9) -> ClockReading:
    """A clock that is ahead by ``offset_s``, shown in the middle of a question."""
    return ClockReading(shown_s=at_s + took_s / 2 + offset_s, sent_s=at_s, received_s=at_s + took_s)


def skews_of(*offsets_s: float) -> list[float]:
    """The skew of each host in seconds."""
    found = skews({f"node{at}": shown(offset_s) for at, offset_s in enumerate(offsets_s)})
    return [found[f"node{at}"].skew_s for at in range(len(found))]


@pytest.mark.parametrize(
    ("offsets_s", "expected_s"),
    [
        ((0.0, 0.0, 0.0), [0, 0, 0]),
        ((0.0, -2.5, 0.0, 0.001), [0.001, 2.5, 0.001, 0.001]),
        ((0.0, 2.5), [2.5, 2.5]),
        ((5.0, 5.0, 5.0), [0, 0, 0]),
        ((0.0,), []),
    ],
)
def test_skews(offsets_s: tuple[float, ...], expected_s: list[float]) -> None:
    """From most clocks: a controller whose clock is wrong itself blames nobody else. Of two hosts both are named."""
    assert skews_of(*offsets_s) == pytest.approx(expected_s, abs=2e-4)


def test_a_slow_question_shows_little() -> None:
    """Half of its time is not known, and that of the others is added."""
    found = skews({"node0": shown(0, 0.002), "node1": shown(0.05, 0.4), "node2": shown(0, 0.004)})
    assert found["node1"].doubt_s == pytest.approx(0.2 + 0.0015, abs=1e-6)
    assert not found["node1"].is_known(0.1)
    assert found["node0"].doubt_s == pytest.approx(0.001 + 0.101, abs=1e-6)


@pytest.mark.parametrize(
    ("skew_s", "doubt_s", "known"),
    [(0.0, 0.05, True), (2.5, 0.2, True), (0.09, 0.02, False), (0.11, 0.02, False), (0.0, 0.2, False)],
)
def test_what_is_known(skew_s: float, doubt_s: float, known: bool) -> None:  # noqa: FBT001 -- the expected value
    """On which side of the limit the clock surely is."""
    skew = Skew(skew_s=skew_s, doubt_s=doubt_s)
    assert skew.is_known(0.1) is known
    assert skew.is_within(0.1) is (known and skew_s < 0.1)


def test_a_clock_that_was_set_meanwhile() -> None:
    """A question that ends before it began has no doubt below zero."""
    assert ClockReading(shown_s=1.0, sent_s=2.0, received_s=1.5).doubt_s == 0


@pytest.mark.parametrize(
    ("skew", "judged"),
    [
        (None, None),
        (Skew(skew_s=0.09, doubt_s=0.02), None),
        (Skew(skew_s=2.5, doubt_s=0.2), 2.5),
        (Skew(skew_s=3600.0, doubt_s=0.2), 3600.0),
    ],
)
def test_a_clock_is_judged_where_its_skew_is_known(skew: Skew | None, judged: float | None) -> None:
    """Otherwise it is unknown, with the reason."""
    found = judge_clock(skew, limit_s=0.1)
    assert (found.judged, bool(found.doubts)) == (judged, judged is None)
    assert ("NTP client" in str(found.advice)) == (judged is not None)


def test_the_only_host_that_answers_is_not_blamed() -> None:
    """Its clock cannot be compared because others are absent: they are bad, and it is not."""
    place = Place(id="node0", node=0, gpu=None, rank=None, hostname="gpu-node-0")
    error = judge_clock(None, limit_s=0.1).error(place)
    assert error.culprits == ()
    assert str(error) == "gpu-node-0 (node0): no part is named: its clock cannot be compared: no other host answered"


# --- a controller that is busy ---

TERMS = ClockTerms(looks=3, within_s=0.1, wait_s=20)


@dataclass
class Hosts:
    """Hosts whose clocks are ahead by ``offsets_s``; the question takes what ``takes_s`` says of its moment."""

    offsets_s: dict[str, float]
    takes_s: Callable[[float], float]
    silent_after_s: float = math.inf
    now_s: float = 1000.0
    asked: list[tuple[str, ...]] = field(default_factory=list)

    def ask(self, hosts: Sequence[str]) -> dict[str, ClockReading]:
        """Time passes while they answer."""
        self.asked.append(tuple(hosts))
        took_s, sent_s = self.takes_s(self.now_s - 1000), self.now_s
        self.now_s += took_s
        answering = hosts if sent_s - 1000 <= self.silent_after_s else []
        return {host: shown(self.offsets_s[host] + 0.3 * took_s, took_s, sent_s) for host in answering}

    def wait(self, seconds: float) -> None:
        """Nothing else happens."""
        self.now_s += seconds

    def skews(self) -> dict[str, Skew]:
        """What the asking shows."""
        return read_skews(self.ask, list(self.offsets_s), TERMS, now_s=lambda: self.now_s, pause=self.wait)


def outcome(skew: Skew) -> str:
    """Of the limit of 0.1 s."""
    found = judge_clock(skew, limit_s=0.1)
    return "unknown" if found.doubts else "within" if skew.skew_s < 0.1 else "apart"


ALIKE = {f"node{at}": 0.001 * at for at in range(3)}


@pytest.mark.parametrize("busy_s", [0.0, 2.0, 8.0, 18.0])
def test_a_busy_controller_asks_until_it_knows(busy_s: float) -> None:
    """Questions take 0.3 s until the load is over, and then 5 ms: healthy hosts are within the limit."""
    hosts = Hosts(ALIKE, lambda at_s: 0.3 if at_s < busy_s else 0.005)
    assert {outcome(skew) for skew in hosts.skews().values()} == {"within"}
    assert hosts.now_s - 1000 < busy_s + 2


def test_one_quick_answer_in_ten_is_enough() -> None:
    """Of each host the quickest counts."""
    turns = itertools.count()
    hosts = Hosts(ALIKE, lambda _at_s: 0.01 if next(turns) % 10 == 7 else 0.4)
    assert {outcome(skew) for skew in hosts.skews().values()} == {"within"}


def test_waiting_has_an_end() -> None:
    """A controller that stays busy says that nothing is known, after 20 s and the last question."""
    hosts = Hosts(ALIKE, lambda _at_s: 0.3)
    assert {outcome(skew) for skew in hosts.skews().values()} == {"unknown"}
    assert 20 <= hosts.now_s - 1000 < 21


@pytest.mark.parametrize("takes_s", [0.002, 0.3])
def test_a_clock_that_is_wrong_is_found_without_waiting(takes_s: float) -> None:
    """By 2.5 s: no doubt of 0.3 s hides that, and the others are asked no longer than it takes to know them."""
    hosts = Hosts({**ALIKE, "node3": 2.5}, lambda at_s: takes_s if at_s < 4 else 0.002)
    found = {host: outcome(skew) for host, skew in hosts.skews().items()}
    assert found == {**dict.fromkeys(ALIKE, "within"), "node3": "apart"}
    assert hosts.now_s - 1000 < 6


def test_quiet_hosts_are_asked_once() -> None:
    """All in one call."""
    hosts = Hosts(ALIKE, lambda _at_s: 0.005)
    assert {outcome(skew) for skew in hosts.skews().values()} == {"within"}
    assert hosts.asked == [tuple(ALIKE)]


def test_a_host_that_falls_silent_keeps_its_first_answer() -> None:
    """It is judged by that, or left open."""
    hosts = Hosts(ALIKE, lambda _at_s: 0.3, silent_after_s=1.0)
    assert set(hosts.skews()) == set(ALIKE)
