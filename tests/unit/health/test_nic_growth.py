"""What went wrong on NICs between two readings of a sysfs that changes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.health.growth import read_limits
from pytest_gpucluster.health.nic_growth import GREATEST, WRAP, NicReadings, judge_flaps, judge_nic_counters
from pytest_gpucluster.inventory.nics import read_nics
from pytest_gpucluster.inventory.reading import NotAvailable
from tests.support.findings import NOTHING, said
from tests.support.sysfs import MadeSys, efa, infiniband, port_with, roce
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pytest_gpucluster.judging.finding import Finding

PORT = "mlx5_1 port 1 (0000:22:00.0)"
PACKAGED = packaged().criteria(packaged().profiles["h200-sxm"])["nic_errors"].recipe["limits"]
LIMITS = read_limits(PACKAGED)
HOUR_S = 3600.0


class Host:
    """A host with three ports of a fabric, all of them healthy, whose counters stand at some number."""

    def __init__(self, folder: Path, kind: Callable[..., Any] = infiniband) -> None:
        """Read it for the first time."""
        self.fabric = {infiniband: "infiniband", roce: "roce", efa: "efa"}[kind]  # type: ignore[index]
        self.made = MadeSys(folder / "sys", *(kind(number) for number in range(3)))
        self.flaps: Any = None

    def between(self, change: Callable[[MadeSys], None], *, seconds: float = HOUR_S, **limits: Any) -> Finding:
        """What is found if this happens between the two readings."""
        first = read_nics(root=self.made.root)
        change(self.made)
        readings = NicReadings(first=first, last=read_nics(root=self.made.root), seconds=seconds)
        self.flaps = judge_flaps(readings, fabric=self.fabric, limits=limits or LIMITS).value
        return judge_nic_counters(readings, fabric=self.fabric, limits=limits or LIMITS)


def counter(name: str, value: int) -> Callable[[MadeSys], None]:
    """One counter of the second adapter gets a value."""

    def change(made: MadeSys) -> None:
        if name == "carrier_changes":
            made.carrier("mlx5_1", value)
        else:
            made.change("mlx5_1", f"{'counters' if name in GREATEST else 'hw_counters'}/{name}", str(value))

    return change


def traffic(made: MadeSys) -> None:
    """What every run does to the counters."""
    for name in ("mlx5_0", "mlx5_1", "mlx5_2"):
        for path in ("counters/port_xmit_data", "counters/port_rcv_packets", "counters/port_xmit_wait"):
            made.change(name, path, "123456789012")


@pytest.mark.parametrize("kind", [infiniband, roce])
def test_traffic_is_no_error(tmp_path: Path, kind: Callable[..., Any]) -> None:
    """A healthy run: nothing grew but traffic."""
    assert said(Host(tmp_path, kind).between(traffic)) == NOTHING


@pytest.mark.parametrize("name", sorted(LIMITS))
def test_every_limit_can_be_missed(tmp_path: Path, name: str) -> None:
    """At its limit a counter is within; one more is named with port, growth, rate and limit, and no other port is."""
    start = 2 if name == "carrier_changes" else 0
    limit = LIMITS[name]
    allowed = int(limit.most if limit.period_s is None else limit.most * 60 / limit.period_s)
    within = Host(tmp_path / "within").between(counter(name, start + allowed), seconds=60)
    assert (within.count, within.names, within.doubts) == (0, (), ())
    assert (f"{PORT}: {name} +{allowed} in 60 s" in "".join(within.evidence.get("within", ()))) is (allowed > 0)
    beyond = Host(tmp_path / "beyond").between(counter(name, start + allowed + 1), seconds=60)
    assert (beyond.count, beyond.names, beyond.doubts) == (1, (PORT,), ())
    assert beyond.facts[0].startswith(f"{PORT}: {name} +{allowed + 1} in 60 s ({(allowed + 1) * 60} an hour)")
    assert beyond.facts[0].endswith(limit.text)


@pytest.mark.parametrize(("kind", "name"), [(infiniband, "link_downed"), (roce, "carrier_changes"), (roce, "link_downed")])
def test_a_flap(tmp_path: Path, kind: Callable[..., Any], name: str) -> None:
    """A cable that is gone for a moment: one loss, with its rate, by whichever counter shows it."""
    host = Host(tmp_path, kind)
    growth = host.between(counter(name, 4 if name == "carrier_changes" else 1), seconds=4 * HOUR_S)
    assert (host.flaps, growth.count, growth.names) == (1, 1, (PORT,))
    assert f"{name} +{2 if name == 'carrier_changes' else 1}" in growth.facts[0]
    assert ("0.25 an hour" in growth.facts[0]) is (name == "link_downed")


@pytest.mark.parametrize("seconds", [1.0, 60.0, 8 * HOUR_S])
def test_a_rate_is_judged_by_the_time(tmp_path: Path, seconds: float) -> None:
    """A symbol error in 8 hours is nothing; 100 in a minute are too many."""
    growth = Host(tmp_path).between(counter("symbol_error", 100), seconds=seconds)
    assert (growth.count == 0) is (seconds > HOUR_S)


def test_a_counter_without_a_limit_is_shown(tmp_path: Path) -> None:
    """Packets out of order judge nothing, and stand in the evidence."""
    growth = Host(tmp_path, roce).between(counter("out_of_sequence", 7))
    assert said(growth) == NOTHING
    assert growth.evidence == {"within": (f"{PORT}: out_of_sequence +7 in 60 min (7 an hour)",)}


@pytest.mark.parametrize("name", ["np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "rp_cnp_ignored"])
def test_congestion_is_shown(tmp_path: Path, name: str) -> None:
    """A healthy network marks packets and slows senders down: no error, and a number to look at. Without growth: nothing."""
    host = Host(tmp_path, roce)
    host.made.change("mlx5_1", f"hw_counters/{name}", "5")
    assert host.between(traffic).evidence == {}
    growth = host.between(counter(name, 12))
    assert said(growth) == NOTHING
    assert growth.evidence == {"within": (f"{PORT}: {name} +7 in 60 min (7 an hour)",)}


@pytest.mark.parametrize(
    ("before", "after", "shown"),
    [
        ({"rx_prio3_pause": 4}, {"rx_prio3_pause": 4}, ""),
        ({"rx_prio3_pause": 4}, {"rx_prio3_pause": 9}, "rx_prio3_pause +5 in 60 min (5 an hour)"),
        ({"tx_pause_storm_error_events": 0}, {"tx_pause_storm_error_events": 1}, "tx_pause_storm_error_events +1 in 60 min"),
        ({"rx_prio3_pause": 4}, {"rx_prio3_pause": 0}, ""),  # somebody reset them, which is no doubt about errors
        ({"rx_prio3_pause": 4}, {}, ""),
        (None, {"rx_prio3_pause": 9}, ""),
        ({"rx_prio3_pause": 4}, None, ""),
    ],
)
def test_pauses_are_shown(before: dict[str, int] | None, after: dict[str, int] | None, shown: str) -> None:
    """PFC holds a priority of the network up: where that grew it stands in the evidence, and no port is bad or unknown."""
    first, last = (
        [replace(nic, ports=[replace(nic.ports[0], pauses=NotAvailable("why") if one is None else one)])]
        for nic, one in ((port_with()[0], before), (port_with()[0], after))
    )
    found = judge_nic_counters(NicReadings(first=first, last=last, seconds=HOUR_S), fabric="roce", limits=LIMITS)
    quiet = judge_nic_counters(NicReadings(first=port_with(), last=port_with(), seconds=HOUR_S), fabric="roce", limits=LIMITS)
    assert (found.count, found.names, found.doubts) == (quiet.count, quiet.names, quiet.doubts)
    assert shown in "".join(found.evidence.get("within", ("",)))
    assert bool(shown) is bool(found.evidence.get("within"))


@pytest.mark.parametrize("name", ["link_downed", "port_xmit_data", "rnr_nak_retry_err"])
def test_a_reset_is_never_green(tmp_path: Path, name: str) -> None:
    """Any counter that fell shows it, traffic included; the other ports are still judged."""
    host = Host(tmp_path)
    folder = "hw_counters" if name == "rnr_nak_retry_err" else "counters"
    host.made.change("mlx5_1", f"{folder}/{name}", "12")

    def reset(made: MadeSys) -> None:
        made.change("mlx5_1", f"{folder}/{name}", "0")
        made.change("mlx5_2", "counters/link_downed", "1")

    growth = host.between(reset)
    assert growth.names == ("mlx5_2 port 1 (0000:32:00.0)",)
    (doubt,) = growth.doubts
    assert doubt.startswith(f"{PORT}: {name} fell from 12 to 0: the counters were reset")


def test_what_grew_after_a_reset_counts(tmp_path: Path) -> None:
    """Two link losses since the reset are two at least."""
    host = Host(tmp_path)
    counter("link_downed", 12)(host.made)
    growth = host.between(counter("link_downed", 2))
    assert (growth.count, host.flaps, growth.names) == (1, 2, (PORT,))
    assert growth.unknown


@pytest.mark.parametrize("name", sorted(set(GREATEST) & set(LIMITS)))
def test_a_counter_at_its_greatest_value_shows_nothing(tmp_path: Path, name: str) -> None:
    """It stays there whatever happens, so nothing is known; what grew into it is bad by what is known."""
    host = Host(tmp_path / "full")
    counter(name, GREATEST[name])(host.made)
    growth = host.between(traffic)
    assert growth.judged is None
    assert f"{name} stands at its greatest value" in growth.doubts[0]
    host = Host(tmp_path / "filled")
    counter(name, 1)(host.made)
    growth = host.between(counter(name, GREATEST[name]), seconds=0.001)
    assert (growth.count, growth.doubts) == (1, ())


@given(before=st.integers(0, WRAP - 1), growth=st.integers(0, WRAP // 8))
def test_a_driver_s_counter_goes_over_its_end(before: int, growth: int) -> None:
    """The growth is the same wherever the counter stood. One that stands at its end shows none, clean or not."""
    assume((before + growth) % WRAP != WRAP - 1)
    first, last = (port_with(rnr_nak_retry_err=value % WRAP) for value in (before, before + growth))
    limits = read_limits({"rnr_nak_retry_err": {"total": 0}})
    found = judge_nic_counters(NicReadings(first=first, last=last, seconds=1), fabric="roce", limits=limits)
    assert (found.count, found.doubts) == (int(growth > 0), ())
    assert growth == 0 or f"+{growth} " in found.facts[0]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("path", ["counters", "counters/link_downed", "hw_counters/rnr_nak_retry_err"])
def test_counters_that_cannot_be_read(tmp_path: Path, path: str, when: str) -> None:
    """Said, with the port; the others are judged on."""
    host = Host(tmp_path)
    if when == "before":
        host.made.refuse("mlx5_1", path)
        growth = host.between(lambda made: made.change("mlx5_2", "counters/link_downed", "1"))
    else:
        growth = host.between(lambda made: (made.refuse("mlx5_1", path), made.change("mlx5_2", "counters/link_downed", "1"))[1])
    assert growth.names == ("mlx5_2 port 1 (0000:32:00.0)",)
    assert [*growth.unknown] == [PORT]


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda made: made.pull_down("mlx5_1"), "is DOWN at the end, and was ACTIVE"),
        (lambda made: made.change("mlx5_1", "phys_state", "2: Polling"), "is Polling at the end, and was LinkUp"),
        (lambda made: made.remove("mlx5_1"), "is gone"),
    ],
)
def test_a_port_that_does_not_come_back(tmp_path: Path, change: Callable[[MadeSys], None], fact: str) -> None:
    """Its counters need not have grown."""
    growth = Host(tmp_path).between(change)
    assert (growth.count, growth.facts) == (1, (f"{PORT}: {fact}",))


def test_a_port_that_was_down_all_the_time(tmp_path: Path) -> None:
    """That is no event of the run."""
    host = Host(tmp_path)
    host.made.pull_down("mlx5_1")
    assert said(host.between(traffic)) == NOTHING


def test_a_port_that_comes_during_the_run(tmp_path: Path) -> None:
    """What it counted before is not known."""
    growth = Host(tmp_path).between(lambda made: made.add(infiniband(5)))
    assert growth.doubts == ("mlx5_5 port 1 (0000:62:00.0) came during the run",)


def test_readings_that_are_none(tmp_path: Path) -> None:
    """No class, no port, no time between them: nothing is green."""
    nics = read_nics(root=MadeSys(tmp_path / "sys", infiniband(0)).root)
    absent = read_nics(root=tmp_path / "nowhere")
    assert isinstance(absent, NotAvailable)
    for first, last, seconds in ((absent, nics, 1), (nics, absent, 1), (nics, nics, 0), (nics, nics, -5), ([], [], 1)):
        growth = judge_nic_counters(NicReadings(first=first, last=last, seconds=seconds), fabric="infiniband", limits=LIMITS)
        assert (growth.count, len(growth.doubts)) == (0, 1)


def test_an_adapter_that_counts_nothing(tmp_path: Path) -> None:
    """EFA has no counters of the architecture; without any, nothing would be judged."""
    host = Host(tmp_path, efa)
    assert host.between(lambda _made: None).doubts == ()
    host.made.refuse("rdmap1s27", "hw_counters")
    assert "its counters are not available" in host.between(lambda _made: None).doubts[0]


@pytest.mark.parametrize(
    "recipe",
    [
        {},
        {"link_downed": 0},
        {"link_downed": {}},
        {"link_downed": {"total": 0, "per_s": 1}},
        {"link_downed": {"per_week": 1}},
        {"link_downed": {"total": "0"}},
        {"link_downed": {"total": True}},
        {"link_downed": {"total": None}},
        {"link_downed": {"total": -1}},
        {"link_downed": {"total": float("nan")}},
        {"link_downed": {"total": float("inf")}},
    ],
)
def test_limits_of_another_form(recipe: Any) -> None:
    """A limit that judges nothing is wrong usage."""
    with pytest.raises(ConfigurationError, match="limits: "):
        read_limits(recipe)


def on_port(*changes: tuple[str, str | None]) -> Callable[[MadeSys], None]:
    """Files and folders of the second adapter's port: a text, or None for none."""

    def change(made: MadeSys) -> None:
        port = made.root / "class" / "infiniband" / "mlx5_1" / "ports" / "1"
        for path, text in changes:
            if text is not None:
                (port / path).write_text(text, encoding="ascii")
            elif path.endswith("/"):
                for file in (port / path).iterdir():
                    file.unlink()
            else:
                (port / path).rename(made.root / path)

    return change


@pytest.mark.parametrize("kind", [infiniband, roce])
@pytest.mark.parametrize(
    ("rate", "bad", "doubts"),
    [
        ("200 Gb/sec (4X HDR)", 1, 0),
        ("200 Gb/sec (2X NDR)", 1, 0),
        ("2.5 Gb/sec (1X SDR)", 1, 0),
        ("", 0, 1),
        ("-1 Gb/sec", 0, 1),
        ("400 Gb/sec (4X NDR)", 0, 0),
        ("800 Gb/sec (4X XDR)", 0, 0),
    ],
)
def test_a_port_that_is_slower_at_the_end(tmp_path: Path, kind: Callable[..., Any], rate: str, bad: int, doubts: int) -> None:
    """A link that was trained again with fewer lanes, or at a lower rate: no counter says it where the cut was short."""
    found = Host(tmp_path, kind).between(on_port(("rate", rate)))
    assert (found.count, len(found.doubts)) == (bad, doubts)
    assert "is at" not in str(found.facts) or ("at the end, and was at 400" in found.facts[0] and PORT in found.facts[0])


def test_a_port_that_is_down_and_slower(tmp_path: Path) -> None:
    """That it is down is said once; the rate of a port without a link is no finding, nor is that of one that never had it."""
    gone = (("state", "1: DOWN"), ("phys_state", "3: Disabled"), ("rate", "10 Gb/sec (4X SDR)"))
    assert Host(tmp_path / "down").between(on_port(*gone)).count == 1
    host = Host(tmp_path / "never")
    on_port(*gone)(host.made)
    assert said(host.between(on_port(("rate", "2.5 Gb/sec (1X SDR)")))) == NOTHING


@pytest.mark.parametrize(
    ("kind", "hidden", "doubt"),
    [
        (roce, ("counters/", "hw_counters/"), "it shows none of the counters link_downed"),
        (roce, ("counters", "hw_counters/"), "it shows none of the counters link_downed"),
        (roce, ("hw_counters",), "its hw_counters are not available: No such file"),
        (roce, ("counters", "hw_counters"), "its counters are not available"),
        (infiniband, ("counters/", "hw_counters/"), "it shows none of the counters link_downed"),
        (infiniband, ("counters/",), "cannot be read: the driver does not count it"),
        (infiniband, ("counters",), "cannot be read: No such file"),
        (infiniband, ("hw_counters",), None),
        (roce, ("counters",), None),
        (roce, ("counters/",), None),
    ],
)
def test_counters_that_a_port_does_not_show(
    tmp_path: Path, kind: Callable[..., Any], hidden: tuple[str, ...], doubt: str | None
) -> None:
    """What has a limit and is not read is unknown, unless ports of this kind need not count it."""
    host = Host(tmp_path, kind)
    on_port(*((path, None) for path in hidden))(host.made)
    found = host.between(lambda _made: None)
    assert (found.count, len(found.doubts)) == (0, doubt is not None)
    assert doubt is None or doubt in found.doubts[0]


@pytest.mark.parametrize("value", [2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
@pytest.mark.parametrize("name", ["link_downed", "symbol_error", "local_ack_timeout_err", "port_rcv_errors"])
def test_a_counter_at_the_end_of_its_bits(tmp_path: Path, name: str, value: int) -> None:
    """It ends there, or is not counted: unknown, whatever greatest value its table gives it, and no port is bad."""
    found = Host(tmp_path).between(counter(name, value))
    assert (found.judged, found.facts, len(found.doubts)) == (None, (), 1)
