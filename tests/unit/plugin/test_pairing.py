"""Which test judges which criterion at which place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.places import Place
from pytest_gpucluster.plugin import pairing


def gpu(number: int) -> Place:
    """A GPU of node 1."""
    return Place(id=f"node1-gpu{number}", node=1, gpu=number)


@pytest.mark.parametrize(
    ("name", "place", "key"),
    [
        ("test_tflops", None, "tflops"),
        ("test_tflops[node1-gpu10]", gpu(10), "tflops"),
        ("test_tflops[node1-gpu1]", gpu(1), "tflops"),
        ("test_tflops[all_reduce]", None, "tflops[all_reduce]"),
        ("test_tflops[all_reduce-node1-gpu10]", gpu(10), "tflops[all_reduce]"),
        ("test_tflops[node1-gpu10-all_reduce]", gpu(10), "tflops[all_reduce]"),
        ("test_tflops[fp8-node1-gpu10-e4m3]", gpu(10), "tflops[fp8-e4m3]"),
        ("test_tflops[node1-all_reduce]", Place(id="node1", node=1), "tflops[all_reduce]"),
        ("test_tflops[supernode1-node1]", Place(id="node1", node=1), "tflops[supernode1]"),
        ("test_tflops[node1-supernode1-x]", Place(id="node1", node=1), "tflops[supernode1-x]"),
        ("test_tflops[supernode1-x-node1]", Place(id="node1", node=1), "tflops[supernode1-x]"),
        ("test_tflops[8-8192]", None, "tflops[8-8192]"),
    ],
)
def test_keys(name: str, place: Place | None, key: str) -> None:
    """The entry's key is the test's name without ``test_`` and without the place, other parameters kept in order."""
    assert pairing.criterion_key(name, "test_tflops", place) == key


WORDS = st.from_regex(r"[a-z0-9_]{1,8}", fullmatch=True)


@given(st.lists(WORDS, max_size=3), st.integers(0, 12), st.integers(0, 3))
def test_a_place_never_leaves_a_trace_in_the_key(words: list[str], number: int, position: int) -> None:
    """Wherever pytest puts the place's id among the parameters, the key is the same."""
    place = gpu(number)
    mixed = [*words[:position], place.id, *words[position:]]
    key = pairing.criterion_key(f"test_x[{'-'.join(mixed)}]", "test_x", place)
    assert key == (f"x[{'-'.join(words)}]" if words else "x")


def test_a_test_without_an_entry() -> None:
    """A usage error with the test, the key, the file and the nearest entries."""
    known = ["bf16_tflops", "fp8_tflops", "hbm_bandwidth"]
    pairing.require_entry("bf16_tflops", known, nodeid="t::x", file="f.yaml")
    with pytest.raises(ConfigurationError, match=r"t::x judges .*'bf61_tflops'.*f\.yaml.*Did you mean 'bf16_tflops'"):
        pairing.require_entry("bf61_tflops", known, nodeid="t::x", file="f.yaml")


@pytest.mark.parametrize(
    ("per", "place", "good"),
    [
        ("gpu", gpu(0), True),
        ("gpu", None, False),
        ("gpu", Place(id="node0", node=0), False),
        ("node", Place(id="node0", node=0), True),
        ("node", gpu(0), False),
        ("cluster", None, True),
        ("cluster", gpu(0), False),
    ],
)
def test_place_or_node_or_neither(per: str, place: Place | None, good: bool) -> None:  # noqa: FBT001 -- a parameter
    """A criterion per GPU judged once for all would hide seven GPUs."""
    if good:
        pairing.require_place("x", per, place, nodeid="t::x")
    else:
        with pytest.raises(ConfigurationError, match=rf"t::x: criterion 'x' is per {per}, so its test takes"):
            pairing.require_place("x", per, place, nodeid="t::x")


def test_fixtures_cannot_cross() -> None:
    """The ones that cannot are named; those that can and parametrize values are free."""
    pairing.require_test_arguments(["rank", "device", "size"], {"size": 1}, nodeid="t::x")
    with pytest.raises(ConfigurationError, match="cannot have the fixtures tmp_path, cluster"):
        pairing.require_test_arguments(["rank", "tmp_path", "cluster"], {}, nodeid="t::x")
