"""What is wrong with a shared path, and which host is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from pytest_gpucluster.health.shared_paths import PathObservations, PathRequirements, judge_path
from pytest_gpucluster.inventory.host import Mount
from pytest_gpucluster.measurements.shared_paths import LockCount, MarksSeen, PathMark, Replaced
from tests.support.findings import NOTHING, said

PATH = "/mnt/shared"
Said = tuple[tuple[str, ...], tuple[str, ...]]
NFS = Mount(folder=PATH, kind="nfs4", source="server:/export")
REQUIRED = PathRequirements(least_free_gib=1, least_free_inodes=10000)
HOSTS = ["node0", "node1", "node2", "node3"]


def bad(text: str) -> Said:
    """One fault, and nothing unknown."""
    return (text,), ()


def mark(host: str, **changes: Any) -> PathMark:
    """A file that was written."""
    known: dict[str, Any] = {"problem": None, "mount": NFS, "folder": f"own-{host}", "free_gib": 5.0, "free_inodes": 1 << 20}
    return PathMark(**{**known, **changes})


def saw(missed: dict[str, str] | None = None) -> MarksSeen:
    """What one host saw: everything but these hosts' files."""
    by_folder = {f"own-{host}": why for host, why in (missed or {}).items()}
    return MarksSeen(slowest_s=0.01, missed=by_folder, absent=[one for one, why in by_folder.items() if why == "does not show"])


def healthy(hosts: list[str] = HOSTS, **changes: Any) -> PathObservations:
    """Everybody sees everything, and had to wait for a lock."""
    marks = {host: mark(host) for host in hosts}
    seen = {host: saw() for host in hosts}
    counted = {host: LockCount(updates=10, last=10 * (at + 1), waited=3) for at, host in enumerate(hosts)}
    replaced = {host: Replaced(replaced=9 if at == 0 else 0, reads=50, faults={}, stale=1) for at, host in enumerate(hosts)}
    turns = {"marks": marks, "rewritten": marks, "seen": seen, "seen_again": seen}
    looks = PathObservations(**turns, counted=counted, flocked=counted, replaced=replaced)
    return dataclasses.replace(looks, **changes)


def judged(looks: PathObservations, hosts: list[str] = HOSTS, required: PathRequirements = REQUIRED) -> dict[str, Said]:
    """The hosts at which something is wrong or not known."""
    found = {host: said(one) for host, one in judge_path(PATH, looks, required, hosts=hosts).items()}
    return {host: one for host, one in found.items() if one != NOTHING}


def missing(pairs: list[tuple[int, int]], why: str = "does not show") -> dict[str, MarksSeen]:
    """Who (a number) misses whose file."""
    return {host: saw({HOSTS[writer]: why for reader, writer in pairs if reader == at}) for at, host in enumerate(HOSTS)}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_healthy(count: int) -> None:
    """Nothing is wrong; a single host shares with nobody and needs nobody."""
    hosts = HOSTS[:count]
    assert judged(healthy(hosts), hosts) == {}


def test_one_host_apart_is_named_alone() -> None:
    """The host that sees no other's file is named with its file system; those that miss its file are not."""
    apart = missing([(2, other) for other in (0, 1, 3)] + [(other, 2) for other in (0, 1, 3)])
    marks = {**healthy().marks, "node2": mark("node2", mount=Mount(folder="/", kind="overlay", source="overlay"))}
    counted = {host: one for host, one in healthy().counted.items() if host != "node2"}
    counted["node3"] = LockCount(updates=10, last=30, waited=0)
    found = judged(healthy(marks=marks, seen=apart, seen_again=apart, counted=counted))
    assert found == {"node2": bad(f"{PATH} is not shared: no file of the 3 other hosts shows here (overlay overlay at /)")}


def test_of_two_hosts_both_are_named() -> None:
    """Nobody can tell which of the two is not on the shared file system."""
    hosts, apart = HOSTS[:2], {host: missing([(0, 1), (1, 0)])[host] for host in HOSTS[:2]}
    found = judged(healthy(hosts, seen=apart, seen_again=apart, counted={}), hosts)
    assert list(found) == hosts
    assert all("is not shared: the other host's file does not show here" in one[0][0] for one in found.values())


@pytest.mark.parametrize(
    ("pairs", "named"),
    [
        ([(0, 2), (1, 2), (3, 2)], {"node2": "loses files: the file came after 1.4 s, of this host, on node0, node1, node3"}),
        ([(2, 0), (2, 1)], {"node2": "loses files: the file came after 1.4 s here, of node0, node1"}),
        (
            [(0, 1)],
            {
                "node0": "loses files: the file came after 1.4 s here, of node1",
                "node1": "loses files: the file came after 1.4 s, of this host, on node0",
            },
        ),
    ],
)
@pytest.mark.parametrize("turn", ["seen", "seen_again"])
def test_who_misses_more_is_named(pairs: list[tuple[int, int]], named: dict[str, str], turn: str) -> None:
    """The writer whom all miss, or the reader that misses many; both of a single pair."""
    looks = healthy(**{turn: missing(pairs, "came after 1.4 s")})
    words = "the file, written again," if turn == "seen_again" else "the file"
    expected = {host: bad(f"{PATH} {text.replace('the file', words)}") for host, text in named.items()}
    assert judged(looks) == expected


def test_contents_that_stay_old() -> None:
    """Seen the first time and not when written again: an attribute cache that keeps too long."""
    found = judged(healthy(seen_again=missing([(1, 0), (1, 2)], "shows other contents (4096 bytes)")))
    assert found["node1"][0] == (
        f"{PATH} loses files: the file, written again, shows other contents (4096 bytes) here, of node0, node2",
    )


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"problem": "is a file, no folder", "folder": ""}, "is a file, no folder"),
        ({"free_gib": 0.25}, "has 0.25 GiB free, and 1 GiB are required"),
        ({"free_inodes": 12}, "has room for 12 files, and 10000 are required"),
    ],
)
def test_one_host_s_own_fault(changes: dict[str, Any], text: str) -> None:
    """Named at that host, and the others pass."""
    looks = healthy()
    assert judged(dataclasses.replace(looks, marks={**looks.marks, "node3": mark("node3", **changes)})) == {
        "node3": bad(f"{PATH} {text}")
    }


def test_a_file_system_without_a_number_of_inodes() -> None:
    """Btrfs and its like count none."""
    assert judged(healthy(marks={host: mark(host, free_inodes=None) for host in HOSTS})) == {}


def test_full_at_the_second_writing() -> None:
    """Said once, at that host."""
    looks = healthy()
    again = {**looks.marks, "node1": mark("node1", problem="is full")}
    assert judged(dataclasses.replace(looks, rewritten=again))["node1"][0] == (f"{PATH} is full, at the second writing",)


def test_locks_that_do_not_hold() -> None:
    """Fewer updates arrived than were made: every host is named, since nobody can tell whose lock failed."""
    counted = {host: LockCount(updates=10, last=11, waited=0) for host in HOSTS}
    found = judged(healthy(counted=counted))
    assert list(found) == HOSTS
    assert found["node0"][0] == (f"{PATH} has locks that do not hold between hosts: of 40 updates under a lock 11 arrived",)


def test_flock_that_does_not_hold() -> None:
    """Named as flock; locks by fcntl hold."""
    flocked = {host: LockCount(updates=10, last=11, waited=0) for host in HOSTS}
    text = f"{PATH} has locks by flock that do not hold between hosts: of 40 updates under a lock 11 arrived"
    assert judged(healthy(flocked=flocked)) == {host: bad(text) for host in HOSTS}
    refused = {**healthy().flocked, "node1": LockCount(updates=0, last=0, waited=0, problem="Function not implemented")}
    assert judged(healthy(flocked=refused)) == {"node1": bad(f"{PATH} gives no lock by flock: Function not implemented")}
    nobody = {host: dataclasses.replace(one, waited=0) for host, one in healthy().flocked.items()}
    assert set(judged(healthy(flocked=nobody))) == set(HOSTS)


def test_a_rename_that_is_not_atomic() -> None:
    """At the host that saw it; a rename that is refused too."""
    torn = {**healthy().replaced, "node2": Replaced(replaced=0, reads=50, faults={"no file": 3}, stale=0)}
    text = f"{PATH} has a rename that is not atomic: 3 of 50 reads saw no file"
    assert judged(healthy(replaced=torn)) == {"node2": bad(text)}
    refused = {**healthy().replaced, "node0": Replaced(replaced=0, reads=0, faults={}, stale=0, problem="Permission denied")}
    assert judged(healthy(replaced=refused)) == {"node0": bad(f"{PATH} gives no rename over a file: Permission denied")}


def test_a_file_that_nobody_replaced() -> None:
    """Then every reader saw it whole, and nothing says that a rename is atomic."""
    slow = {host: dataclasses.replace(one, replaced=0) for host, one in healthy().replaced.items()}
    found = judged(healthy(replaced=slow))
    assert set(found) == set(HOSTS)
    assert all("no host replaced a file while it was read" in str(one) for one in found.values())


def test_locks_that_are_refused() -> None:
    """At the host that got none."""
    counted = {**healthy().counted, "node1": LockCount(updates=0, last=0, waited=0, problem="No locks available")}
    assert judged(healthy(counted=counted)) == {"node1": bad(f"{PATH} gives no lock: No locks available")}


@pytest.mark.parametrize("counted", [{}, {"node0": LockCount(updates=9, last=9, waited=0)}, "nobody waited"])
def test_locks_of_which_nothing_is_known(counted: Any) -> None:
    """Never green: not tried, tried by one host alone, or never contended."""
    if counted == "nobody waited":
        counted = {host: dataclasses.replace(one, waited=0) for host, one in healthy().counted.items()}
    found = judged(healthy(counted=counted))
    assert list(found) == HOSTS
    assert all(doubts and not facts for facts, doubts in found.values())


def test_locks_that_nobody_asks_for() -> None:
    """Left out by the recipe."""
    assert judged(healthy(counted={}), required=dataclasses.replace(REQUIRED, locks=False)) == {}


def test_a_host_without_another_one_to_compare_with() -> None:
    """The only one of two that could use the path: nothing says that it is shared."""
    hosts = HOSTS[:2]
    looks = healthy(hosts)
    alone = dataclasses.replace(looks, marks={"node0": looks.marks["node0"]})
    assert judged(alone, hosts) == {"node0": ((), (f"{PATH}: no other host could use it, so nothing says that it is shared",))}


def test_a_folder_that_stays() -> None:
    """What could not be removed is said."""
    found = judged(healthy(left={"node1": "is mounted read-only"}))
    assert found == {"node1": bad(f"{PATH} is mounted read-only, so this run's own folder could not be removed")}
