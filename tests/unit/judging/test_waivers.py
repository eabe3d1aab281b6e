"""Waivers: which outcomes they cover, until when, and which files are refused."""

from __future__ import annotations

import datetime as dt
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging import verdict as v
from pytest_gpucluster.judging import waivers
from pytest_gpucluster.judging.verdict import OUTCOMES, Record, Terms, decide
from pytest_gpucluster.judging.waivers import Waiver, Waivers
from pytest_gpucluster.places import Place

if TYPE_CHECKING:
    from pathlib import Path

TODAY = dt.date(2026, 11, 21)
GPU = Place(id="node0-gpu3", node=0, gpu=3, rank=3, hostname="gpu-node-0", uuid="GPU-6f1c", serial="1654")
NODE = Place(id="node0", node=0, hostname="gpu-node-0")
WAIVER = Waiver(criterion="tflops", place="GPU-6f1c", until="2026-12-31", who="J. Doe", why="RMA 4711", where="waivers.yaml:3")
GOOD = "schema: 1\nwaivers:\n  - {criterion: tflops, place: GPU-6f1c, until: 2026-12-31, who: J. Doe, why: RMA 4711}\n"
WORDLESS = ["-", '"."', "'...'", '"- -"', "'\t-\t'", "'(!)'", "'\u2014'", "''", "' '"]
WORDS = [
    "RMA 4711",
    "hot",
    "47-11",
    "x",
    "\u66f4\u6362",
    "\u0438\u0437\u043d\u043e\u0441",
    "\u00fcbel",
    "\u0628\u0637\u064a\u0621",
]


def waiver(**changes: str | None) -> Waiver:
    """A waiver for the GPU, with changes."""
    return Waiver(**{**{name: getattr(WAIVER, name) for name in Waiver.__slots__}, **changes})


def record(outcome: str = v.FAILED, *, place: str | None = GPU.id, waivable: bool = True) -> Record:
    """A record of the criterion at a place, measured in full by default."""
    return Record(criterion="tflops", place=place, outcome=outcome, reason="too slow", waivable=waivable)


@pytest.mark.parametrize(
    ("changes", "outcome", "where", "covered"),
    [
        ({}, v.FAILED, GPU, True),
        ({}, v.NOISY, GPU, True),
        ({"place": "1654"}, v.FAILED, GPU, True),
        ({"place": "gpu-node-0"}, v.FAILED, NODE, True),
        ({"place": None}, v.FAILED, None, True),
        ({"place": "gpu-node-0"}, v.FAILED, GPU, False),
        ({"place": None}, v.FAILED, GPU, False),
        ({"place": "GPU-other"}, v.FAILED, GPU, False),
        ({"criterion": "other"}, v.FAILED, GPU, False),
        ({"until": "2026-11-20"}, v.FAILED, GPU, False),
        ({"until": "2026-11-21"}, v.FAILED, GPU, True),
        ({}, v.ERROR, GPU, False),
        ({}, v.MISSING, GPU, False),
        ({}, v.PASSED, GPU, False),
    ],
)
def test_covers(changes: dict[str, str | None], outcome: str, where: Place | None, covered: bool) -> None:  # noqa: FBT001
    """A waiver covers its criterion at its part until its last day, and never an outcome without a measurement."""
    found = Waivers([waiver(**changes)], today=TODAY).apply(record(outcome, place=where and where.id), where)
    assert (found.waiver is not None) == covered
    assert found.outcome == outcome
    if covered:
        assert found.reason is not None
        assert found.reason.startswith("waived: tflops")
        assert found.reason.endswith("too slow")


@pytest.mark.parametrize("outcome", v.OUTCOMES)
def test_an_incomplete_measurement_is_not_covered(outcome: str) -> None:
    """A waiver answers for a value, not for missing rounds or repeats."""
    found = Waivers([waiver()], today=TODAY).apply(record(outcome, waivable=False), GPU)
    assert found.waiver is None
    forced = replace(record(outcome, waivable=False), waiver={"who": "J. Doe"})
    assert v.counted_as(forced) == outcome


def test_unbound_place_is_not_covered() -> None:
    """A place that never connected has no UUID for a waiver to name."""
    assert Waivers([waiver()], today=TODAY).apply(record(), Place(id=GPU.id, node=0, gpu=3)).waiver is None
    assert Waivers([waiver(place=None)], today=TODAY).apply(record(), Place(id=GPU.id, node=0, gpu=3)).waiver is None


def test_all_are_named_the_used_ones_first() -> None:
    """Unused and expired waivers are listed too, after the used ones."""
    made = Waivers([waiver(until="2026-01-01"), waiver(criterion="other"), waiver()], today=TODAY)
    made.apply(record(), GPU)
    assert [fact["state"] for fact in made.facts] == ["used", "expired", "unused"]
    assert [line.partition(":")[0] for line in made.lines] == [
        "waived",
        "waiver has expired, as if absent",
        "waiver not needed",
    ]


def waived(outcome: str) -> Record:
    """A record with a waiver, whether the outcome can have one or not."""
    return Record(criterion="w", place=None, outcome=outcome, waiver={"who": "J. Doe"}, waivable=True)


@given(
    st.lists(st.sampled_from(OUTCOMES), max_size=8),
    st.lists(st.sampled_from(OUTCOMES), max_size=4),
    st.booleans(),
    st.booleans(),
)
def test_accepted_with_waivers_means_just_that(
    outcomes: list[str],
    with_waiver: list[str],
    rehearsal: bool,  # noqa: FBT001
    reached: bool,  # noqa: FBT001
) -> None:
    """Something waived, something passed, nothing else wrong; never plain ACCEPTED while something is waived."""
    plain = [Record(criterion=f"c{number}", place=None, outcome=outcome) for number, outcome in enumerate(outcomes)]
    found = decide([*plain, *map(waived, with_waiver)], Terms(rehearsal=rehearsal, level_reached=reached))
    used = [outcome for outcome in with_waiver if outcome in v.WAIVABLE]
    rest = [*outcomes, *(outcome for outcome in with_waiver if outcome not in v.WAIVABLE)]
    clean = set(rest) <= {v.PASSED, v.SKIPPED} and v.PASSED in rest and reached and not rehearsal
    assert (found.word == v.WITH_WAIVERS) == (clean and bool(used))
    assert (found.word == v.ACCEPTED) == (clean and not used)
    if used:
        assert f"{len(used)} waived" in found.line


def test_file(tmp_path: Path) -> None:
    """Waivers of a good file keep their lines."""
    file = tmp_path / "waivers.yaml"
    file.write_text(GOOD, encoding="utf-8")
    assert waivers.load(file, criteria=["tflops"]) == [WAIVER]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("criterion: tflops", "criterion: tflop", ":3: there is no criterion 'tflop'. Did you mean 'tflops'?"),
        ("until: 2026-12-31", "until: 31.12.2026", ":3: 'until' must be a day like 2026-12-31, not '31.12.2026'"),
        ("until: 2026-12-31", "until: 2026-02-30", ":3: 'until' must be a day like 2026-12-31"),
        ("until: 2026-12-31, ", "", ":3: 'until' is missing (in waiver 1)"),
        ("who: J. Doe, ", "", ":3: 'who' is missing"),
        ("why: RMA 4711", "why: ' '", ":3: 'why' must be text that is not empty"),
        ("place: GPU-6f1c", "place: node0-gpu3", ":3: a place id may mean another part tomorrow"),
        ("place: GPU-6f1c", "places: GPU-6f1c", ":3: 'places' is not a key of a waiver"),
        ("schema: 1", "schema: 2", ":1: 'schema' is 2"),
        ("schema: 1", "schema: true", ":1: 'schema' is 'true'"),
        ("- {", "- !!python/object:os.system {", "tag"),
        ("  - {", "  - &a {", "the anchor '&a' is not allowed"),
        ("waivers:", "waiver:", ":1: 'waivers' is missing"),
    ],
)
def test_wrong_files(tmp_path: Path, before: str, after: str, told: str) -> None:
    """Each wrong file is refused with the line of its fault."""
    file = tmp_path / "waivers.yaml"
    assert before in GOOD
    file.write_text(GOOD.replace(before, after), encoding="utf-8")
    with pytest.raises(ConfigurationError) as caught:
        waivers.load(file, criteria=["tflops"])
    assert told in str(caught.value)


@pytest.mark.parametrize(("key", "wrong"), [(key, wrong) for key in ("why", "who") for wrong in WORDLESS])
def test_a_waiver_without_a_word(tmp_path: Path, key: str, wrong: str) -> None:
    """Nobody answers for a failure by a dash or an ellipsis: they were taken for a reason and for a name."""
    file = tmp_path / "waivers.yaml"
    file.write_text(GOOD.replace({"why": "RMA 4711", "who": "J. Doe"}[key], wrong), encoding="utf-8")
    with pytest.raises(ConfigurationError, match=rf":3: '{key}' must be text"):
        waivers.load(file, criteria=["tflops"])


@pytest.mark.parametrize(("key", "text"), [("who", "Li"), ("who", "J"), ("who", "\u674e"), *(("why", word) for word in WORDS)])
def test_a_word_of_any_alphabet_is_one(tmp_path: Path, key: str, text: str) -> None:
    """Also one of two Chinese characters; the number of a ticket is a reason."""
    file = tmp_path / "waivers.yaml"
    file.write_text(GOOD.replace({"why": "RMA 4711", "who": "J. Doe"}[key], text), encoding="utf-8")
    assert getattr(waivers.load(file, criteria=["tflops"])[0], key) == text


def test_where_the_file_is_looked_for(tmp_path: Path) -> None:
    """The file is next to the thresholds file or where the run starts; two files are refused."""
    site, start = tmp_path / "site", tmp_path / "start"
    site.mkdir()
    start.mkdir()
    assert waivers.find(site / "limits.yaml", start) is None
    (site / "waivers.yaml").write_text(GOOD, encoding="utf-8")
    assert waivers.find(site / "limits.yaml", start) == site / "waivers.yaml"
    assert waivers.find(None, start) is None
    assert waivers.find(site / "limits.yaml", site) == site / "waivers.yaml"
    (start / "waivers.yaml").write_text(GOOD, encoding="utf-8")
    assert waivers.find(None, start) == start / "waivers.yaml"
    with pytest.raises(ConfigurationError, match="two files with waivers"):
        waivers.find(site / "limits.yaml", start)


def test_states_of_a_rebuilt_report() -> None:
    """The waivers of a rebuilt report have the states and the lines that the live report has."""
    begun = Waivers([waiver(criterion="other"), waiver()], today=TODAY)
    facts = begun.facts
    waived = begun.apply(record(), GPU)
    assert [row["state"] for row in facts] == ["unused", "unused"]
    again = waivers.states_from(facts, [waived, record(v.PASSED)])
    assert again == begun.facts
    assert waivers.lines_of(again) == begun.lines


OTHER = replace(GPU, id="node1-gpu1", node=1, gpu=1, rank=5, hostname="gpu-node-1", uuid="GPU-77aa")


@pytest.mark.parametrize(
    ("named", "places", "covered"),
    [
        ("1654", (GPU, OTHER), set()),  # one serial at two GPUs
        ("1654", (GPU, replace(OTHER, serial="1655")), {GPU}),
        ("1654", (GPU, replace(OTHER, serial=None, uuid="1654")), set()),
        ("GPU-6f1c", (GPU, OTHER), {GPU}),
        ("GPU-6f1c", (GPU, replace(OTHER, uuid="GPU-6f1c")), set()),
        ("1654", (GPU, replace(OTHER, rank=None, hostname=None, uuid=None, serial=None)), {GPU}),
    ],
)
def test_a_waiver_that_names_two_gpus_covers_none(named: str, places: tuple[Place, ...], covered: set[Place]) -> None:
    """Nobody knows which of them somebody answers for; whatever is unambiguous is covered as ever."""
    made = Waivers([waiver(place=named)], today=TODAY)
    objections = made.bind(places)
    found = {place for place in places if made.apply(record(place=place.id), place).waiver is not None}
    assert found == covered
    if covered:
        assert objections == []
        return
    assert [fact["state"] for fact in made.facts] == ["ambiguous"]
    assert made.lines[0].startswith("waiver names more than one part, as if absent: tflops at ")
    assert len(objections) == 1
    assert "names gpu-node-0 gpu 3 and gpu-node-1 gpu 1" in objections[0]
    assert "waivers.yaml:3" in objections[0]


@pytest.mark.parametrize("hostname", ["gpu-node-0", "gpu-node-1", None])
def test_a_waiver_of_a_hostname_that_two_nodes_have_covers_none(hostname: str | None) -> None:
    """It covered the criteria of both machines, and somebody answers for one of them."""
    other = replace(NODE, id="node1", node=1, hostname=hostname)
    made = Waivers([waiver(place="gpu-node-0")], today=TODAY)
    objections = made.bind([GPU, OTHER, NODE, other])
    found = {place.id for place in (NODE, other) if made.apply(record(place=place.id), place).waiver is not None}
    if hostname != NODE.hostname:
        assert (found, objections) == ({"node0"}, [])
        return
    assert found == set()
    assert objections == ["a waiver for tflops (waivers.yaml:3) names node0 and node1, and covers neither"]


def test_an_expired_waiver_or_one_of_a_host_is_not_ambiguous() -> None:
    """What covers nothing needs no objection. A hostname is no name of the GPUs on that node."""
    assert Waivers([waiver(place="1654", until="2026-11-20")], today=TODAY).bind([GPU, OTHER]) == []
    hosts = Waivers([waiver(place="gpu-node-0")], today=TODAY)
    assert hosts.bind([GPU, OTHER, NODE]) == []
    assert hosts.apply(record(place=NODE.id), NODE).waiver is not None
