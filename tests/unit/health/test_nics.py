"""Which ports of NICs are bad: beside the promise, and beside the other hosts."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.health.nics import PortPromise, judge_ports
from pytest_gpucluster.inventory.nics import read_nics
from pytest_gpucluster.places import Place
from tests.support.sysfs import HDR, MadeSys, infiniband, roce

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.inventory.nics import Nic
    from pytest_gpucluster.judging.finding import Finding

PORTS = 4
PORT_2 = "mlx5_2 port 1 (0000:32:00.0)"
PROMISE = PortPromise(fabric="infiniband")


class Hosts:
    """Hosts with four ports each, one more that has no cable, and two Ethernet ones: all alike and healthy.

    A host gets files of its own when a test asks for it; 400 files are half a second of a busy machine.
    """

    def __init__(self, folder: Path, number: int) -> None:
        """None has files yet."""
        self._folder, self._number = folder, number
        self._made: dict[int, MadeSys] = {}

    def host(self, at: int) -> MadeSys:
        """The files of one."""
        if at not in self._made:
            self._made[at] = usual_host(self._folder / f"host{at}")
        return self._made[at]

    @property
    def made(self) -> list[MadeSys]:
        """The files of all."""
        return [self.host(at) for at in range(self._number)]

    def judge(self, promise: PortPromise = PROMISE) -> list[Finding]:
        """What is seen of each host."""
        nics = [read_nics(root=self._made[at].root) if at in self._made else usual_nics() for at in range(self._number)]
        return list(judge_ports({f"host{at}": read for at, read in enumerate(nics)}, promise).values())


def usual_host(folder: Path) -> MadeSys:
    """A healthy host; its counters are not there, which no test here needs."""
    made = MadeSys(folder, *(infiniband(at, counted=False) for at in range(PORTS + 1)))
    made.pull_down(f"mlx5_{PORTS}")
    for number in (8, 9):
        made.add(roce(number, counted=False))
    return made


@functools.cache
def usual_nics() -> list[Nic]:
    """What is read of a healthy host."""
    with TemporaryDirectory() as folder:
        return read_nics(root=usual_host(Path(folder)).root)


def fewer(seen: list[Finding]) -> list[int]:
    """How many ports fewer than expected each host has; 0 too where nothing is known."""
    return [one.judged or 0 for one in seen]


def half_rate(made: MadeSys) -> None:
    """A link that came up at half of its rate."""
    made.change("mlx5_2", "rate", HDR)


def initializing(made: MadeSys) -> None:
    """A cable is there, and no subnet manager has spoken to the port."""
    made.change("mlx5_2", "state", "2: INIT")


def unplugged(made: MadeSys) -> None:
    """No cable."""
    made.pull_down("mlx5_2")


def gone(made: MadeSys) -> None:
    """The adapter fell off the bus."""
    made.remove("mlx5_2")


def renamed(made: MadeSys) -> None:
    """The adapter fell off the bus, and the names of those after it moved up."""
    made.remove("mlx5_2")
    folder = made.root / "class" / "infiniband"
    (folder / "mlx5_3").rename(folder / "mlx5_2")


@pytest.mark.parametrize("promise", [PROMISE, PortPromise(fabric="infiniband", ports=PORTS, gbit_s=400.0)])
@pytest.mark.parametrize(
    "rate", ["0 Gb/sec (4X NDR)", "-400 Gb/sec", "nan Gb/sec", "4000000 Gb/sec (4X NDR)", "1e999 Gb/sec", "N/A"]
)
@pytest.mark.parametrize("on_all", [False, True])
def test_a_rate_that_is_none(tmp_path: Path, rate: str, promise: PortPromise, *, on_all: bool) -> None:
    """A port that is up and says so is not green, on one host or on all; the healthy ones are."""
    hosts = Hosts(tmp_path, 3)
    for made in hosts.made if on_all else [hosts.host(0)]:
        made.change("mlx5_2", "rate", rate)
    are_good = [not seen.doubts and seen.judged == 0 for seen in hosts.judge(promise)]
    assert are_good == ([False] * 3 if on_all else [False, True, True])


@pytest.mark.parametrize("number", [2, 3, 4])
def test_healthy_hosts(tmp_path: Path, number: int) -> None:
    """Nothing is bad; the port that is down everywhere is off by design, and Ethernet ports are others."""
    for made in (hosts := Hosts(tmp_path, number)).made:
        made.pull_down("mlx5_9")
    for seen in hosts.judge():
        assert (seen.judged, seen.names, seen.doubts) == (0, (), ())
        assert seen.evidence == {"up": "4 at 400 Gb/s", "expected": "4 at 400 Gb/s"}


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize(
    ("plant", "fact"),
    [
        (unplugged, "DOWN, Polling"),
        (initializing, "INIT, LinkUp"),
        (half_rate, "200 Gb/sec (4X HDR)"),
        (gone, "is absent"),
        (renamed, "is absent"),
    ],
)
def test_one_port_is_named(tmp_path: Path, number: int, plant: Callable[[MadeSys], None], fact: str) -> None:
    """That host has one bad port, whatever the names became; its peers have none."""
    hosts = Hosts(tmp_path, number)
    plant(hosts.host(1))
    seen = hosts.judge()
    assert fewer(seen) == [0, 1, *[0] * (number - 2)]
    assert (seen[1].names, seen[1].facts) == ((PORT_2,), (f"{PORT_2}: {fact}",))
    assert seen[1].evidence["expected"] == "4 at 400 Gb/s"


def test_a_whole_host_without_links(tmp_path: Path) -> None:
    """Each of its ports is bad, but for the one that is off everywhere."""
    hosts = Hosts(tmp_path, 3)
    for number in range(PORTS):
        hosts.host(2).pull_down(f"mlx5_{number}")
    seen = hosts.judge()
    assert fewer(seen) == [0, 0, PORTS]
    assert len(seen[2].names) == PORTS
    assert seen[2].evidence["up"] == "none"


def test_one_host_with_a_port_more(tmp_path: Path) -> None:
    """Of three hosts one has a cable in the spare port: the others lack nothing."""
    hosts = Hosts(tmp_path, 3)
    spare = f"mlx5_{PORTS}"
    for path, text in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": HDR}.items():
        hosts.host(0).change(spare, path, text)
    assert fewer(hosts.judge()) == [0, 0, 0]


def test_no_port_is_up_anywhere(tmp_path: Path) -> None:
    """Peers that are all down prove nothing where the fabric is promised."""
    hosts = Hosts(tmp_path, 2)
    for made in hosts.made:
        for number in range(PORTS):
            made.pull_down(f"mlx5_{number}")
    seen = hosts.judge()
    assert fewer(seen) == [1, 1]
    assert len(seen[0].names) == PORTS + 1


def test_no_adapter_at_all(tmp_path: Path) -> None:
    """With the class and no adapter, every host lacks a port; without the class, nothing was read."""
    hosts = Hosts(tmp_path, 2)
    for made in hosts.made:
        for number in range(PORTS + 1):
            made.remove(f"mlx5_{number}")
    assert [(one.judged, one.evidence["up"], one.doubts) for one in hosts.judge()] == [(1, "none", ())] * 2
    hosts.host(0).root = tmp_path / "nowhere"
    assert "no infiniband adapter could be read: No such file" in hosts.judge()[0].doubts[0]
    assert fewer(hosts.judge()) == [0, 1]


def test_an_adapter_whose_ports_cannot_be_listed(tmp_path: Path) -> None:
    """Its port may be up, so nothing is bad; that is said, and another bad port is still found."""
    hosts = Hosts(tmp_path, 2)
    ports = hosts.host(0).port("mlx5_2").parent
    ports.rename(tmp_path / "aside")
    seen = hosts.judge()
    assert fewer(seen) == [0, 0]
    assert seen[0].doubts[0].startswith("mlx5_2 (0000:32:00.0): its ports are not available")
    hosts.host(0).pull_down("mlx5_1")
    assert fewer(hosts.judge()) == [1, 0]


@pytest.mark.parametrize(
    ("promise", "found"),
    [
        (PortPromise(fabric="infiniband", ports=4), [0, 0]),
        (PortPromise(fabric="infiniband", ports=4, gbit_s=400), [0, 0]),
        (PortPromise(fabric="infiniband", ports=5), [1, 1]),
        (PortPromise(fabric="infiniband", ports=4, gbit_s=800), [4, 4]),
        (PortPromise(fabric="infiniband", gbit_s=800), [4, 4]),
        (PortPromise(fabric="infiniband", ports=3), [0, 0]),
        (PortPromise(fabric="roce", ports=2), [0, 0]),
        (PortPromise(fabric="efa"), [1, 1]),
    ],
)
def test_what_the_profile_says_wins(tmp_path: Path, promise: PortPromise, found: list[int]) -> None:
    """A number or a rate of the profile holds where all hosts are alike, too."""
    assert fewer(Hosts(tmp_path, 2).judge(promise)) == found


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    ("state", "physical"),
    [
        ("2: INIT", "5: LinkUp"),
        ("3: ARMED", "5: LinkUp"),
        ("5: ACTIVE_DEFER", "5: LinkUp"),
        ("1: DOWN", "5: LinkUp"),
        ("1: DOWN", "6: LinkErrorRecovery"),
        ("4: ACTIVE", "6: LinkErrorRecovery"),
        ("1: DOWN", "4: PortConfigurationTraining"),
        ("2: INIT", "2: Polling"),
    ],
)
def test_a_linked_port_is_not_off_by_design(tmp_path: Path, state: str, physical: str, number: int) -> None:
    """Its cable is in on every host, and no subnet manager runs on that rail: shown on each of them."""
    hosts = Hosts(tmp_path, number)
    for made in hosts.made:
        made.change("mlx5_2", "state", state)
        made.change("mlx5_2", "phys_state", physical)
    for seen in hosts.judge():
        shown = f"{state.partition(' ')[2]}, {physical.partition(' ')[2]}"
        assert (seen.judged, seen.facts) == (1, (f"{PORT_2}: {shown}",))


def test_a_linked_port_beside_the_ports_that_the_recipe_states(tmp_path: Path) -> None:
    """``ports: 3`` says that the fourth is meant so."""
    hosts = Hosts(tmp_path, 2)
    for made in hosts.made:
        initializing(made)
    assert fewer(hosts.judge(PortPromise(fabric="infiniband", ports=3))) == [0, 0]
    assert fewer(hosts.judge(PortPromise(fabric="infiniband", ports=4))) == [1, 1]


@pytest.mark.parametrize("state", ["1: DOWN", "0: NOP"])
@pytest.mark.parametrize("physical", ["2: Polling", "3: Disabled", "1: Sleep"])
def test_a_port_without_a_link_is_off_by_design(tmp_path: Path, state: str, physical: str) -> None:
    """Where it is so on every host."""
    hosts = Hosts(tmp_path, 2)
    for made in hosts.made:
        made.change("mlx5_2", "state", state)
        made.change("mlx5_2", "phys_state", physical)
    assert fewer(hosts.judge()) == [0, 0]


TOTAL = PortPromise(fabric="infiniband", total_gb_s=PORTS * 50)


@pytest.mark.parametrize("number", [2, 3])
def test_all_ports_at_half_of_what_the_profile_promises(tmp_path: Path, number: int) -> None:
    """Peers that are all alike hide nothing: each port is named with its rate."""
    hosts = Hosts(tmp_path, number)
    for made in hosts.made:
        for at in range(PORTS):
            made.change(f"mlx5_{at}", "rate", HDR)
    for seen in hosts.judge(TOTAL):
        assert (seen.judged, len(seen.facts)) == (PORTS, PORTS + 1)
        assert f"{PORT_2}: {HDR}" in seen.facts
        assert seen.evidence["promised"] == "1600 Gb/s of all ports"
    assert fewer(hosts.judge(PortPromise(fabric="infiniband", total_gb_s=PORTS * 25))) == [0] * number


def test_one_port_of_the_promise_is_off_everywhere(tmp_path: Path) -> None:
    """Down on every host is off by design only where the others carry what is promised."""
    hosts = Hosts(tmp_path, 2)
    for made in hosts.made:
        unplugged(made)
    for seen in hosts.judge(TOTAL):
        assert seen.judged == 1
        assert f"{PORT_2}: DOWN, Polling" in seen.facts


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(("shown", "of"), [(3, 4), (7, 8), (5, 8)])
def test_adapters_that_no_host_shows(tmp_path: Path, number: int, shown: int, of: int) -> None:
    """Ports at their full rate are not to blame for those that are not there: these are counted, and none is named."""
    made = [MadeSys(tmp_path / f"host{at}", *map(infiniband, range(shown))) for at in range(number)]
    for seen in judged(made, PortPromise(fabric="infiniband", total_gb_s=of * 50)):
        assert seen.facts == (f"{of - shown} more at this rate are promised: 400 Gb/sec (4X NDR)",)
        assert seen.value == of - shown


def test_one_slow_port_among_too_few(tmp_path: Path) -> None:
    """It is named, and those at the full rate are not."""
    made = MadeSys(tmp_path, *map(infiniband, range(3)))
    made.change("mlx5_2", "rate", HDR)
    (seen,) = judged([made], TOTAL)
    assert seen.facts == (f"{PORT_2}: {HDR}",)


def test_ports_that_carry_the_promise(tmp_path: Path) -> None:
    """Exactly, or with a few more ports for storage: nothing is bad. One that cannot be read is a doubt."""
    hosts = Hosts(tmp_path, 2)
    assert fewer(hosts.judge(TOTAL)) == [0, 0]
    for made in hosts.made:
        for path, text in {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": HDR}.items():
            made.change(f"mlx5_{PORTS}", path, text)
    assert fewer(hosts.judge(TOTAL)) == [0, 0]
    hosts.host(0).refuse("mlx5_2", "rate")
    seen = hosts.judge(TOTAL)
    assert (seen[0].judged, len(seen[0].doubts), seen[1].judged) == (None, 1, 0)


def test_one_host_alone(tmp_path: Path) -> None:
    """Nothing to compare with: said. With a number from the profile it is judged, and the bad port is named."""
    hosts = Hosts(tmp_path, 1)
    doubt = hosts.judge()[0].doubts[0]
    assert "one host answers" in doubt
    assert doubt.endswith("or write it: nic_ports: {profiles: {NAME: {recipe: {ports: N}}}}")
    error = hosts.judge()[0].error(Place(id="node0", node=0))
    assert (error.culprits, error.blames) == ((), "unknown")
    promise = PortPromise(fabric="infiniband", ports=PORTS, gbit_s=400)
    assert hosts.judge(promise)[0].doubts == ()
    half_rate(hosts.host(0))
    (seen,) = hosts.judge(promise)
    assert (seen.judged, PORT_2 in seen.names) == (1, True)


@pytest.mark.parametrize("path", ["state", "phys_state", "rate", "link_layer"])
def test_a_port_that_cannot_be_read(tmp_path: Path, path: str) -> None:
    """It is said, with the port; no other port or host is blamed for it; a bad port beside it is still found."""
    hosts = Hosts(tmp_path, 2)
    hosts.host(0).refuse("mlx5_2", path)
    seen = hosts.judge()
    assert fewer(seen) == [0, 0]
    assert PORT_2 in seen[0].doubts[0]
    assert seen[1].doubts == ()
    hosts.host(0).pull_down("mlx5_1")
    seen = hosts.judge()
    assert fewer(seen) == [1, 0]
    assert seen[0].names == ("mlx5_1 port 1 (0000:22:00.0)",)


def test_a_port_that_is_down_needs_no_more(tmp_path: Path) -> None:
    """Down is known, though the physical state cannot be read."""
    hosts = Hosts(tmp_path, 2)
    hosts.host(0).pull_down("mlx5_2")
    hosts.host(0).refuse("mlx5_2", "phys_state")
    seen = hosts.judge()
    assert (fewer(seen), seen[0].doubts, seen[0].names) == ([1, 0], (), (PORT_2,))


def functions_only(folder: Path, number: int, *, pf: int = 0) -> list[MadeSys]:
    """Hosts whose container shows so many virtual functions of InfiniBand, and physical adapters."""
    made = [MadeSys(folder / f"host{at}", *map(infiniband, range(PORTS))) for at in range(number)]
    for one in made:
        for port in range(pf, PORTS):
            device = (one.root / "class" / "infiniband" / f"mlx5_{port}" / "device").resolve()
            (device / "physfn").symlink_to(device)
    return made


def judged(made: list[MadeSys], promise: PortPromise = PROMISE) -> list[Finding]:
    """What is seen of each of these hosts."""
    hosts = {f"host{at}": read_nics(root=one.root) for at, one in enumerate(made)}
    return list(judge_ports(hosts, promise).values())


@pytest.mark.parametrize(
    "promise",
    [
        PROMISE,
        PortPromise(fabric="infiniband", ports=4),
        PortPromise(fabric="infiniband", ports=4, gbit_s=400),
        PortPromise(fabric="infiniband", total_gb_s=200),
    ],
)
def test_a_container_that_has_virtual_functions_only(tmp_path: Path, promise: PortPromise) -> None:
    """They are all that a job has: they are judged, and shown as what they are."""
    made = functions_only(tmp_path, 2)
    for seen in judged(made, promise):
        assert (seen.judged, seen.doubts, seen.evidence["up"]) == (0, (), "4 at 400 Gb/s")
        assert seen.evidence["virtual functions"] == [f"mlx5_{port}" for port in range(PORTS)]
    made[1].pull_down("mlx5_2")
    good, bad = judged(made, promise)
    assert (good.judged, bad.judged, bad.names) == (0, 1, (PORT_2,))


def test_a_host_that_has_both_is_judged_by_its_physical_ports(tmp_path: Path) -> None:
    """Two physical adapters and two functions of them, as on a host of virtual machines."""
    made = functions_only(tmp_path, 2, pf=2)
    made[0].pull_down("mlx5_3")
    for seen in judged(made):
        assert (seen.judged, seen.evidence["up"]) == (0, "2 at 400 Gb/s")


def test_adapters_of_nvswitches_are_no_ports_of_the_fabric(tmp_path: Path) -> None:
    """HGX B200: they are InfiniBand ports that lead to no network. Without root nothing tells them apart, and that is shown."""
    hosts = Hosts(tmp_path, 2)
    for made in hosts.made:
        for port in (3, 4):
            vpd = (made.root / "class" / "infiniband" / f"mlx5_{port}" / "device").resolve() / "vpd"
            vpd.write_bytes(b"\x82\x1e\x00Nvidia ConnectX-7 mezzanine\x00\x90V3\x0eSMDL=SW_MNG\x78")
    hosts.host(0).pull_down("mlx5_3")
    for seen in hosts.judge():
        assert (seen.judged, seen.evidence["up"]) == (0, "3 at 400 Gb/s")
        assert seen.evidence["of NVSwitches, not counted"] == ["mlx5_3", "mlx5_4"]
    device = (hosts.host(1).root / "class" / "infiniband" / "mlx5_0" / "device").resolve()
    (device / "vpd").mkdir()  # not even root can read it
    assert hosts.judge()[1].evidence["perhaps of NVSwitches"] == ["mlx5_0"]


def test_adapters_with_other_names_on_each_host(tmp_path: Path) -> None:
    """The ports are good all the same; a remark shows the names, of all hosts where no name is usual."""
    numbers = ((0, 3, 5, 8), (0, 1, 4, 5))
    two = [
        MadeSys(tmp_path / f"host{at}", *(roce(number, bus=0x10 * (slot + 1)) for slot, number in enumerate(chosen)))
        for at, chosen in enumerate(numbers)
    ]
    seen = judged(two, PortPromise(fabric="roce"))
    assert [one.judged for one in seen] == [0, 0]
    assert seen[0].remark is not None
    assert seen[0].remark.startswith("its adapters have other names than on 1 host: mlx5_0, mlx5_3, mlx5_5, mlx5_8, not ")
    third = MadeSys(tmp_path / "third", *(roce(number, bus=0x10 * (slot + 1)) for slot, number in enumerate(numbers[0])))
    four = judged([*two, third, two[0]], PortPromise(fabric="roce"))
    assert [one.remark is None for one in four] == [True, False, True, True]


def test_virtual_functions_have_no_cable(tmp_path: Path) -> None:
    """A virtual function that is down is nobody's fault."""
    hosts = Hosts(tmp_path, 2)
    made = hosts.host(0)
    made.add(infiniband(7))
    device = (made.root / "class" / "infiniband" / "mlx5_7" / "device").resolve()
    (device / "physfn").symlink_to(device)
    made.change("mlx5_7", "state", "1: DOWN")
    assert fewer(hosts.judge()) == [0, 0]
