"""Which expected node each host is: by the list where there is one, whoever is absent."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.cluster.binding import AnsweringNode, Binding, number_nodes, only_own, refuse_other_versions
from pytest_gpucluster.config.host_list import expand, expected_hosts, is_same_host
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.identity import Identity
from pytest_gpucluster.places import Inventory

if TYPE_CHECKING:
    from collections.abc import Callable

HOSTS = ("gpu-node-0", "gpu-node-1", "gpu-node-2", "gpu-node-3")


def numbered(answering: dict[str, int], hosts: tuple[str, ...], *, num_nodes: int = 4) -> dict[str, int]:
    """The number by hostname; ``answering`` has torchrun's number of each host."""
    nodes = [AnsweringNode(hostname=hostname, group_rank=rank) for hostname, rank in answering.items()]
    found = number_nodes(nodes, Inventory(num_nodes=num_nodes, gpus_per_node=2, device="cpu", hosts=hosts))
    return {node.hostname: number for node, number in found.items()}


@pytest.mark.parametrize("absent", [some for number in range(4) for some in itertools.combinations(range(4), number)])
@pytest.mark.parametrize("hosts", [HOSTS, HOSTS[::-1], tuple(f"{host}.site.example" for host in HOSTS)])
def test_whoever_is_absent_a_host_keeps_its_number(hosts: tuple[str, ...], absent: tuple[int, ...]) -> None:
    """The N-th host of the list is node N, in whatever order torchrun numbered the nodes, also by names without domain."""
    come = [host.partition(".")[0] for at, host in enumerate(hosts) if at not in absent]
    for order in (come, come[::-1]):
        found = numbered({host: rank for rank, host in enumerate(order)}, hosts)
        assert found == {host.partition(".")[0]: at for at, host in enumerate(hosts) if at not in absent}


def test_without_a_list_who_answers_comes_first() -> None:
    """In natural order of hostnames."""
    assert numbered({"n10": 0, "n9": 1, "n2": 2}, ()) == {"n2": 0, "n9": 1, "n10": 2}


def test_a_stranger_never_gets_the_number_of_a_host_of_the_list() -> None:
    """It is beyond the expected nodes, and the host of the list is missing."""
    assert numbered({"gpu-node-0": 0, "spare": 1, "gpu-node-2": 2}, HOSTS) == {"gpu-node-0": 0, "gpu-node-2": 2, "spare": 4}


def test_a_list_that_is_shorter_leaves_the_last_numbers_to_others() -> None:
    """Promised nodes that no list names."""
    assert numbered({"z": 0, "b": 1, "y": 2}, ("a", "b")) == {"b": 1, "y": 2, "z": 3}


def test_addresses_are_in_torchruns_order() -> None:
    """No hostname equals one; also where other entries are names."""
    assert numbered({"a": 2, "c": 0}, ("10.0.0.1", "10.0.0.2", "10.0.0.3"), num_nodes=3) == {"c": 0, "a": 2}
    assert numbered({"a": 0, "x": 1}, ("a", "fd00::2"), num_nodes=2) == {"a": 0, "x": 1}


def test_names_of_another_kind_are_in_torchruns_order() -> None:
    """A list of aliases, of which no hostname is one."""
    assert numbered({"a": 2, "c": 0}, ("ib1", "ib2", "ib3"), num_nodes=3) == {"c": 0, "a": 2}


@pytest.mark.parametrize(
    ("hosts", "answering", "told"),
    [
        (("ib1", "ib2"), ("a", "c"), "no host of this run has a name of the list of hosts (ib1, ib2): its order is torchrun's"),
        (("old1", "old2", "old3", "old4", "10.0.0.1"), ("a",), "(old1, old2, old3 and 1 more)"),
        (("ib1", "A"), ("a", "c"), None),  # one of them has, so the other one is more than expected
        (("a.site", "ib2"), ("a",), None),
        (("10.0.0.1", "fd00::2"), ("a", "c"), None),  # no host is called so
        ((), ("a", "c"), None),
        (("ib1", "ib2"), (), None),  # nobody answers
    ],
)
def test_a_list_that_names_no_host_of_the_run_is_in_the_verdict(
    hosts: tuple[str, ...], answering: tuple[str, ...], told: str | None
) -> None:
    """It may be that of another cluster, left in the environment; it was taken in silence."""
    inventory = Inventory(num_nodes=2, gpus_per_node=1, device="cpu", hosts=hosts)
    identities: Any = {f"node{at}-cpu0": SimpleNamespace(hostname=name) for at, name in enumerate(answering)}
    found = Binding(inventory=inventory, places=inventory.places, identities=identities).remarks
    assert [told in one for one in found] == [True] if told is not None else found == ()


def test_several_nodes_on_one_host() -> None:
    """Its entries in torchrun's order."""
    nodes = [AnsweringNode(hostname="h", group_rank=rank) for rank in (2, 0)]
    found = number_nodes(nodes, Inventory(num_nodes=3, gpus_per_node=1, device="cpu", hosts=("h", "h", "x")))
    assert {node.group_rank: number for node, number in found.items()} == {0: 0, 2: 1}


TWINS = ("gpu1.a", "gpu1.b", "gpu2.a", "gpu2.b")


@pytest.mark.parametrize("absent", [some for number in range(4) for some in itertools.combinations(range(4), number)])
@pytest.mark.parametrize("shown", [str.lower, str.upper])
def test_hosts_whose_first_labels_are_equal(absent: tuple[int, ...], shown: Callable[[str], str]) -> None:
    """Where a host shows its first label only, torchrun's order of the list tells which of them it is: never the first one."""
    names = [shown(host.partition(".")[0]) for host in TWINS]
    nodes = [AnsweringNode(hostname=name, group_rank=at) for at, name in enumerate(names) if at not in absent]
    found = number_nodes(nodes, Inventory(num_nodes=4, gpus_per_node=1, device="cpu", hosts=TWINS))
    assert {node.group_rank: number for node, number in found.items()} == {node.group_rank: node.group_rank for node in nodes}


@pytest.mark.parametrize(
    ("answering", "counts"), [(["b", "A.site"], True), (["a"], True), (["a", "spare"], False), (["x", "y"], False)]
)
def test_what_an_earlier_run_met_counts_for_its_own_hosts_alone(answering: list[str], *, counts: bool) -> None:
    """Nobody expects these hosts: with another one among those that answer, it may be another cluster, or a repaired one."""
    remembered = Inventory(num_nodes=2, gpus_per_node=1, device="cpu", hosts=("a", "b"), hosts_are_remembered=True)
    found = only_own(remembered, answering)
    assert found.hosts == (("a", "b") if counts else ())
    assert [node.hostname for node in found.nodes] == (["a", "b"] if counts else [None, None])
    given = Inventory(num_nodes=2, gpus_per_node=1, device="cpu", hosts=("a", "b"))
    assert only_own(given, answering) is given


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("a", ["a"]),
        (" b, a ", ["b", "a"]),
        ("gpu-[08-10]", ["gpu-08", "gpu-09", "gpu-10"]),
        ("n[1,3-4],login", ["n1", "n3", "n4", "login"]),
        ("rack[1-2]n[1-2]-ib", ["rack1n1-ib", "rack1n2-ib", "rack2n1-ib", "rack2n2-ib"]),
    ],
)
def test_lists(text: str, names: list[str]) -> None:
    """Commas, and Slurm's short form, in the order of the text."""
    assert list(expand(text)) == names


@pytest.mark.parametrize("text", ["n[1-2", "n1-2]", "n[a-b]", "n[2-1]", "n[]", "n[1-999999999]", "r[1-9999]n[1-9999]"])
def test_what_is_no_list(text: str) -> None:
    """A usage error that says what is wrong, where a user wrote it; Slurm never writes it."""
    with pytest.raises(ConfigurationError, match=r"GPUCLUSTER_HOSTS='.*' is no list of hosts: "):
        expected_hosts({"GPUCLUSTER_HOSTS": text}, num_nodes=2, own="a")
    assert expected_hosts({"SLURM_JOB_NODELIST": text}, num_nodes=2, own="n1") == ()


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({}, ""),
        ({"GPUCLUSTER_HOSTS": ""}, ""),
        ({"GPUCLUSTER_HOSTS": "b,a", "SLURM_JOB_NODELIST": "n[1-2]"}, "b,a"),
        ({"SLURM_JOB_NODELIST": "n[1-3]"}, "n1,n2,n3"),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, "n1,n2"),
        ({"SLURM_JOB_NODELIST": "n[1-4]"}, ""),
        ({"SLURM_JOB_NODELIST": "other[1-3]"}, ""),
        ({"SLURM_JOB_NODELIST": "n[1-8]", "SLURM_STEP_NODELIST": "n[1-3]"}, "n1,n2,n3"),
        ({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_STEP_NODELIST": "n1"}, "n1,n2,n3"),
    ],
)
def test_which_list_counts(variables: dict[str, str], hosts: str) -> None:
    """The launcher's, else Slurm's of this job, if it can name the three nodes of this run."""
    assert expected_hosts(variables, num_nodes=3, own="n1.site") == tuple(filter(None, hosts.split(",")))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("a", "A", True),
        ("a.x", "a", True),
        ("a.x", "a.y", False),
        ("a1", "a", False),
        ("10.0.0.1", "10", False),
    ],
)
def test_names_of_one_host(one: str, other: str, *, same: bool) -> None:
    """Equal, or equal but for a domain."""
    assert is_same_host(one, other) is is_same_host(other, one) is same


class Refusing:
    """Keeps which ranks were refused, and why."""

    def __init__(self) -> None:
        """Nobody is."""
        self.refused: dict[int, str] = {}

    def refuse(self, rank: int, why: str) -> None:
        """Called for each rank with other versions."""
        self.refused[rank] = why


def refused(torch: str, pytest_: str) -> dict[int, str]:
    """Who is refused, of nodes with these versions of torch and pytest, a letter each."""
    controller: Any = Refusing()
    found = {
        rank: Identity(
            hostname=f"n{rank}", group_rank=rank, local_rank=0, versions={"torch": one, "pytest": other}, torch_gpus=1
        )
        for rank, (one, other) in enumerate(zip(torch, pytest_, strict=True))
    }
    refuse_other_versions(controller, found)
    return dict(controller.refused)


@pytest.mark.parametrize(
    ("torch", "pytest_", "guilty"),
    [
        ("aaaa", "aaaa", set()),
        ("aaba", "aaaa", {2}),
        ("baaa", "aaaa", {0}),
        ("baa", "aba", {0, 1}),
        ("ba", "aa", {1}),
        ("bbaa", "aaaa", {2, 3}),
        ("abc", "aaa", {1, 2}),
        ("", "", set()),
    ],
)
def test_who_runs_other_versions_than_most_is_refused(torch: str, pytest_: str, guilty: set[int]) -> None:
    """The first node too: the others are no fault of its own. Without a majority the first one is the measure."""
    found = refused(torch, pytest_)
    assert {*found} == guilty
    if torch == "baaa":
        assert found[0] == "its node runs torch b instead of a: bring every node to one version"
