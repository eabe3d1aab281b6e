"""What a run as a whole has to keep: a shorter soak, a lower level, fewer GPUs than were promised, and what becomes of it."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import pytest

from pytest_gpucluster import run_setup
from pytest_gpucluster.cluster.binding import Binding
from pytest_gpucluster.config.settings import Expect, Settings, parse_level
from pytest_gpucluster.config.torchrun import Launch
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.detect import Detected
from pytest_gpucluster.inventory.identity import Identity
from pytest_gpucluster.judging.promises import changed_terms, doubled_gpus, doubled_serials, shape, short_soak, unexpected_gpus
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.judging.waivers import Waiver, Waivers
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.run_setup import prepare
from pytest_gpucluster.session import Session
from pytest_gpucluster.thresholds.lint import load
from pytest_gpucluster.thresholds.resolve import Profile
from pytest_gpucluster.thresholds.schema import ProfileEntry
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from pathlib import Path

H200 = "NVIDIA H200"
SITE = Profile(name="site", gpu="h200-sxm", spec=None, chain=("site",), accept_at="soak")
STANDARD = Profile(name="h200-sxm", gpu="h200-sxm", spec=None, chain=("h200-sxm",), fabric="infiniband", nic_gb_s_per_gpu=50)
TWO = Inventory(num_nodes=2, gpus_per_node=8, device="cuda")


@pytest.mark.parametrize(
    ("level", "changes", "reason"),
    [
        ("soak:45s", {}, "a soak of 45 s, and the profile asks for 8 h 0 min"),
        ("soak", {}, None),
        ("soak:2d", {}, None),
        ("soak:45s", {"accept_soak_s": 45.0}, None),
        ("soak:1h", {"accept_soak_s": 7200.0}, "a soak of 60 min, and the profile asks for 2 h 0 min"),
        ("soak:45s", {"accept_at": "standard"}, None),
        ("soak:45s", {"rehearsal": True}, None),
        ("standard", {}, None),
    ],
)
def test_a_soak_must_last_as_long_as_the_profile_asks(level: str, changes: dict[str, Any], reason: str | None) -> None:
    """A soak of seconds is too short; a profile that accepts below level soak asks for no duration."""
    named, soak_s = parse_level(level)
    assert short_soak(SITE.model_copy(update=changes), level=named, soak_s=soak_s) == reason


@pytest.mark.parametrize(
    ("profile", "expected", "named_terms"),
    [
        ({}, TWO, []),
        ({"accept_at": "soak"}, TWO, []),  # more than the packaged one asks
        ({"accept_at": "quick"}, TWO, ["accept_at quick instead of standard"]),
        ({"nic_gb_s_per_gpu": 25.0}, TWO, ["nic_gb_s_per_gpu 25.0 instead of 50"]),
        ({"nic_gb_s_per_gpu": None}, TWO, ["nic_gb_s_per_gpu not promised instead of 50"]),
        ({"nic_gb_s_per_gpu": 100.0}, TWO, []),
        ({"fabric": "sockets"}, TWO, ["fabric sockets instead of infiniband"]),
        ({}, replace(TWO, num_nodes=3), []),
        (
            {},
            replace(TWO, num_nodes=1, gpus_per_node=4),
            ["nodes 1 instead of 2 (the file)", "gpus_per_node 4 instead of 8 (the file)"],
        ),
        ({"accept_at": "quick", "rehearsal": True}, replace(TWO, num_nodes=1), []),
    ],
)
def test_a_run_that_asks_for_less_is_named(profile: dict[str, Any], expected: Inventory, named_terms: list[str]) -> None:
    """A run that asks for more is not named, nor is a rehearsal, which accepts nothing."""
    promises: dict[str, Any] = {"the file": Expect(nodes=2, gpus_per_node=8), "the profile": Expect(nodes=1)}
    assert changed_terms(STANDARD.model_copy(update=profile), STANDARD, expected, promises) == named_terms


PACKAGED = {name: one for name, one in packaged().profiles.items() if name == one.gpu}
NULLABLE = [name for name, field in ProfileEntry.model_fields.items() if type(None) in get_args(field.annotation)]


@pytest.mark.parametrize(
    ("name", "term"), [(name, term) for name in PACKAGED for term in NULLABLE if getattr(PACKAGED[name], term) is not None]
)
def test_a_term_that_a_site_sets_to_null(name: str, term: str, tmp_path: Path) -> None:
    """A packaged promise that an overlay takes away is named, or the file is refused; whichever profile and key it is."""
    file = tmp_path / "site.yaml"
    file.write_text(f"schema: 1\nextends: packaged\nprofiles: {{{name}: {{{term}: null}}}}\n", encoding="utf-8")
    try:
        limits = load(file)
    except ConfigurationError as refused:
        assert f"profile {name!r}" in str(refused)  # noqa: PT017 -- either is right
        return
    profile, standard = limits.profiles[name], limits.standard(limits.profiles[name])
    assert standard is not None
    terms = changed_terms(profile, standard, replace(TWO, num_nodes=1, gpus_per_node=1), {"the packaged profile": standard})
    assert [*terms, *limits.changed_entries(profile)]


def test_a_shorter_soak_than_the_packaged_profiles() -> None:
    """A shorter soak is named as well."""
    less = SITE.model_copy(update={"accept_soak_s": 60.0})
    assert changed_terms(less, SITE, TWO, {}) == ["a soak of 60 s instead of 8 h 0 min"]
    assert changed_terms(SITE, None, TWO, {}) == []


def launched(ranks: int) -> Launch:
    """A launch by torchrun on one node."""
    shape = {"rank": 0, "world_size": ranks, "local_rank": 0, "local_world_size": ranks, "group_rank": 0}
    store = {"master_addr": "127.0.0.1", "master_port": 1, "run_id": "run", "agent_hosts_store": True, "restart_count": 0}
    return Launch(**{**shape, **store})


def session(folder: Path, monkeypatch: pytest.MonkeyPatch, limits: str | None, **options: Any) -> Session:
    """A run on a node of eight H200, which starts nothing."""
    hidden = options.pop("hidden", 0)
    monkeypatch.setattr(run_setup, "detect_gpus", lambda: Detected(names=(H200,) * (8 - hidden), num_hidden=hidden))
    ranks, profile = options.pop("ranks", None), options.pop("profile", None)
    level, soak_s = parse_level(options.pop("level", "standard"))
    file = folder / "site.yaml"
    if limits is not None:
        file.write_text(f"schema: 1\nextends: packaged\n{limits}", encoding="utf-8")
    settings = Settings(
        thresholds=None if limits is None else file,
        profile=profile,
        expect=Expect(**options),
        level=level,
        soak_s=soak_s,
        results_dir=folder / "results",
        gate=False,
        inline=False,
    )
    return Session(prepare(settings, None if ranks is None else launched(ranks), start=folder), rootdir=folder)


def decided(made: Session) -> str:
    """The verdict's line when every selected test has passed."""
    made.plan.set_outcome(Record(criterion="bf16_tflops", place="node0-gpu0", outcome="passed"))
    return made.decide().line


SOAKED = "profiles: {site: {inherits: h200-sxm, accept_at: soak}}\n"


@pytest.mark.parametrize(
    ("limits", "options", "line"),
    [
        (None, {}, "ACCEPTED: 1 passed"),
        (None, {"gpus_per_node": 8}, "ACCEPTED: 1 passed"),
        (None, {"ranks": 8}, "ACCEPTED: 1 passed"),
        (None, {"ranks": 4}, "INCOMPLETE: 1 passed (more GPUs than expected: this node has 8, 4 expected)"),
        (None, {"hidden": 6}, "ACCEPTED: 1 passed; terms changed: CUDA_VISIBLE_DEVICES hides 6 of 8 GPUs here"),
        ("cluster: {nodes: 4}\n", {}, "ACCEPTED: 1 passed"),
        (
            "cluster: {nodes: 4}\n",
            {"nodes": 1},
            "ACCEPTED: 1 passed; terms changed: nodes 1 instead of 4 (the cluster section)",
        ),
        (
            "profiles: {h200-sxm: {accept_at: quick}}\n",
            {"level": "quick"},
            "ACCEPTED: 1 passed; terms changed: accept_at quick instead of standard",
        ),
        (
            None,
            {"profile": "lab-2x2", "nodes": 1, "ranks": 8},
            (
                "ACCEPTED: 1 passed; limits changed: inter_node_busbw[all_reduce], inter_node_busbw[all_gather], "
                "inter_node_busbw[reduce_scatter] and 3 more; terms changed: "
                "accept_at quick instead of standard, fabric sockets instead of infiniband, nodes 1 instead of 2 (the profile)"
            ),
        ),
        (SOAKED, {"profile": "site", "level": "soak"}, "ACCEPTED: 1 passed"),
        (
            SOAKED,
            {"profile": "site", "level": "soak:45s"},
            "INCOMPLETE: 1 passed (a soak of 45 s, and the profile asks for 8 h 0 min)",
        ),
    ],
)
def test_in_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str | None, options: dict[str, Any], line: str
) -> None:
    """GPUs without a rank, fewer nodes than the file has, a lower level, or seconds of soak give no plain ACCEPTED."""
    made = session(tmp_path, monkeypatch, limits, **options)
    said = f" on {made.state.terms.shape}"
    assert decided(made).count(said) == 1
    assert decided(made).replace(said, "") == line
    facts = made.state.facts()
    assert facts["soak_s"] == made.setup.settings.soak_s
    assert facts["changed_terms"] == list(made.decide().terms.changed_terms)


H200S = {place.id: H200 for place in TWO.places}
LESS = dict.fromkeys(list(H200S)[:7], H200)


@pytest.mark.parametrize(
    ("inventory", "found", "words"),
    [
        (TWO, None, "2 nodes x 8 GPUs"),
        (TWO, H200S, "2 nodes x 8 NVIDIA H200"),
        (replace(TWO, num_nodes=1), LESS, "1 node x 8 NVIDIA H200, 1 of 8 absent"),
        (TWO, LESS, "1 of 2 nodes x 8 NVIDIA H200, 1 of 8 absent"),
        (TWO, {}, "0 of 2 nodes x 8 GPUs"),
        (TWO, {**H200S, "node1-gpu7": "NVIDIA H100"}, "2 nodes x 8 GPUs (15 NVIDIA H200, 1 NVIDIA H100)"),
        (TWO, dict.fromkeys(H200S), "2 nodes x 8 GPUs"),
        (Inventory(num_nodes=1, gpus_per_node=2, device="cpu"), None, "1 node x 2 ranks on the CPU"),
        (Inventory(num_nodes=1, gpus_per_node=1, device="cpu"), {"node0-cpu0": None}, "1 node x 1 rank on the CPU"),
    ],
)
def test_the_shape_that_a_verdict_is_about(inventory: Inventory, found: dict[str, str | None] | None, words: str) -> None:
    """By what answered: nobody reads an acceptance of one node as one of sixty-four."""
    assert shape(inventory, found) == words


def test_gpus_of_other_nodes_that_no_rank_was_started_for() -> None:
    """Each worker reports how many GPUs its PyTorch sees."""
    seen: list[Any] = [
        type("Identity", (), {"hostname": host, "torch_gpus": gpus}) for host, gpus in (("b", 8), ("a", 4), ("b", 8))
    ]
    assert unexpected_gpus(seen, replace(TWO, gpus_per_node=4)) == ["8 on b, 4 expected"]
    assert unexpected_gpus(seen, TWO) == []


def test_one_gpu_in_two_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two torchruns on one machine are not two nodes, however many ranks answer."""
    made = session(tmp_path, monkeypatch, None, nodes=2, gpus_per_node=1)
    uuids = ("GPU-1", "GPU-1"), ("GPU-1", "GPU-2"), (None, None)
    places = [
        [replace(place, uuid=uuid) for place, uuid in zip(made.setup.inventory.places, some, strict=True)] for some in uuids
    ]
    assert [doubled_gpus(some) for some in places] == [["GPU-1 answers at node0-gpu0 and node1-gpu0"], [], []]
    bound: Any = type("Bound", (), {"places": places[0], "nodes": (), "unexpected": [], "identities": {}})
    made._object_to_gpus(bound)
    assert decided(made).endswith("(one GPU in two places: GPU-1 answers at node0-gpu0 and node1-gpu0)")


def test_hosts_that_no_list_names_are_in_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside what its limits say; nobody is held back: a list may have other names for the same hosts."""
    monkeypatch.setenv("GPUCLUSTER_HOSTS", "old-[1-2]")
    made = session(tmp_path, monkeypatch, None, nodes=2, gpus_per_node=1)
    inventory, here = made.setup.inventory, Identity(hostname="new-1", group_rank=0, local_rank=0, versions={}, torch_gpus=1)
    made.state.binding = Binding(inventory=inventory, places=inventory.places, identities={"node0-gpu0": here})
    told = "; no host of this run has a name of the list of hosts (old-1, old-2): its order is torchrun's"
    assert told in decided(made)
    made.state.binding = replace(made.state.binding, identities={"node0-gpu0": replace(here, hostname="old-1")})
    assert told not in decided(made)


def test_a_name_of_another_kind_does_not_hide_a_change(tmp_path: Path) -> None:
    """A descendant of the rehearsal that accepts, or of another GPU, is compared with the packaged profile of its own GPU."""
    file = tmp_path / "site.yaml"
    profiles = "{tame: {inherits: rehearsal, rehearsal: false, gpu: h200-sxm}, old: {inherits: h100-sxm, gpu: h200-sxm}}"
    file.write_text(f"schema: 1\nextends: packaged\nprofiles: {profiles}\n", encoding="utf-8")
    limits = load(file)
    tame, old = (limits.profiles[name] for name in ("tame", "old"))
    assert [one.name for one in map(limits.standard, (tame, old)) if one is not None] == ["h200-sxm", "h200-sxm"]
    assert "bf16_tflops" in limits.changed_entries(tame)
    assert [*limits.changed_entries(old)] == ["hbm_bandwidth"]


@pytest.mark.parametrize(
    ("serials", "uuids", "said"),
    [
        (("165", "165"), ("GPU-1", "GPU-2"), ["two GPUs report serial 165: a gpu 0 and b gpu 0"]),
        (("165", "165"), (None, None), ["two GPUs report serial 165: a gpu 0 and b gpu 0"]),
        (("165", "166"), ("GPU-1", "GPU-2"), []),
        (("165", "165"), ("GPU-1", "GPU-1"), []),  # said already: one GPU in two places
        ((None, None), ("GPU-1", "GPU-2"), []),
        (("0", "0"), ("GPU-1", "GPU-2"), []),
        (("N/A", "N/A"), ("GPU-1", "GPU-2"), []),
    ],
)
def test_one_serial_at_two_gpus(
    serials: tuple[str | None, ...],
    uuids: tuple[str | None, ...],
    said: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts that cannot be told apart; a serial that is none says nothing."""
    made = session(tmp_path, monkeypatch, None, nodes=2, gpus_per_node=1)
    places = [
        replace(place, rank=rank, hostname="ab"[rank], uuid=uuids[rank], serial=serials[rank])
        for rank, place in enumerate(made.setup.inventory.places)
    ]
    assert doubled_serials(places) == said
    before = list(made.state.objections)
    made._object_to_gpus(Binding(inventory=made.setup.inventory, places=tuple(places)))
    objections = [one for one in made.state.objections if one not in before and "one GPU in two places" not in one]
    assert objections == said


def test_a_waiver_of_two_gpus_is_in_the_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict names the waiver and both GPUs, and neither failure is waived."""
    made = session(tmp_path, monkeypatch, None, nodes=2, gpus_per_node=1)
    one = Waiver(criterion="bf16_tflops", place="165", until="2099-12-31", who="J. Doe", why="RMA", where="waivers.yaml:3")
    made.setup = replace(made.setup, waivers=Waivers([one], today=dt.date(2026, 11, 21)))
    places = [
        replace(place, rank=rank, hostname="ab"[rank], uuid=f"GPU-{rank}", serial="165")
        for rank, place in enumerate(made.setup.inventory.places)
    ]
    made._object_to_gpus(Binding(inventory=made.setup.inventory, places=tuple(places)))
    failed = Record(criterion="bf16_tflops", place="node0-gpu0", outcome="failed", waivable=True)
    assert made.setup.waivers.apply(failed, places[0]).waiver is None
    assert "a waiver for bf16_tflops (waivers.yaml:3) names a gpu 0 and b gpu 0, and covers neither" in decided(made)
