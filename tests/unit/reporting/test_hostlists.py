"""Lists of hosts as Slurm writes them: they expand to just the hosts that went in."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.reporting.lines import hostlist, short_names
from tests.support.host_lists import expand
from tests.support.programs import why_not_working

NO_SLURM = why_not_working("scontrol", "show", "hostnames", "node[1-2]")
NAMES = st.from_regex(r"\A[a-z][a-z0-9.-]{0,6}[0-9]{0,5}\Z")
MIXED = st.tuples(st.sampled_from(["", "n", "N", "node-", "rack1-n", "a.b", "7"]), st.from_regex(r"\A[0-9]{1,12}\Z"))
ANY = st.one_of(NAMES, MIXED.map("".join), st.text(min_size=1, max_size=8), st.from_regex(r"\A[a0,\[\]\\\n\x1b \-]{1,8}\Z"))


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["login"], "login"),
        (["gpu7"], "gpu7"),
        ([f"gpu-node-{number}" for number in range(23) if number != 17], "gpu-node-[0-16,18-22]"),
        (["n9", "n10", "n8"], "n[8-10]"),
        (["n08", "n09", "n10"], "n[08-10]"),
        (["n099", "n100"], "n[099-100]"),
        (["n1", "n01", "n2", "n02"], "n[1-2,01-02]"),
        (["n1", "n3", "n1"], "n[1,3]"),
        (["b1", "a2", "login", "a1"], "a[1-2],b1,login"),
        (["rack1-n1", "rack2-n1", "rack1-n2"], "rack1-n[1-2],rack2-n1"),
        (["gpu", "gpu0", "gpu1"], "gpu,gpu[0-1]"),
        (["n1.site", "n2.site"], "n1.site,n2.site"),
        (["0", "1", "2"], "0,1,2"),
        (["007", "008", "n1", "n2"], "007,008,n[1-2]"),
        (["n1,n2"], r"n1\x2cn2"),
        (["n[1-9]", "n\n1", "n\x1b2", "n 3", "n\\x2c"], r"n\x0a1,n\x1b2,n\x203,n\x5b1-9\x5d,n\x5cx2c"),
        (["n00", "n0", "n000"], "n[0,00,000]"),
        (["n9", "n09", "n10"], "n[9-10,09]"),
    ],
)
def test_form(names: list[str], text: str) -> None:
    """Ranges, padding, several beginnings, names that do not end with a number."""
    assert hostlist(names) == text


@pytest.mark.parametrize("digits", [15, 16, 30, 5000])
def test_many_digits(digits: int) -> None:
    """No number is too long for Python or Slurm."""
    names = ["n" + "9" * digits, "n" + "8" * digits]
    assert set(expand(hostlist(names))) == set(names)


@given(st.lists(NAMES))
def test_expands_to_the_same_hosts(names: list[str]) -> None:
    """No more and no fewer, each once."""
    found = expand(hostlist(names))
    assert sorted(found) == sorted(set(names))


@given(st.lists(ANY))
def test_any_name(names: list[str]) -> None:
    """Foreign text too: its commas, brackets and control characters stay in its own name, on one line."""
    text = hostlist(names)
    assert sorted(expand(text)) == sorted(set(names))
    assert text.isprintable()


@pytest.mark.skipif(NO_SLURM is not None, reason=str(NO_SLURM))
@settings(max_examples=30, deadline=None)
@given(st.lists(st.one_of(NAMES, MIXED.map("".join)), min_size=1))
def test_slurm_expands_to_the_same_hosts(names: list[str]) -> None:
    """Slurm itself is asked."""
    found = subprocess.run(["scontrol", "show", "hostnames", hostlist(names)], capture_output=True, text=True, check=True)
    assert sorted(found.stdout.split()) == sorted(set(names))


@given(st.sets(st.integers(0, 1100)), st.integers(1, 6))
def test_padded_numbers(numbers: set[int], width: int) -> None:
    """Of any width, also where some numbers are wider."""
    names = {f"node{number:0{width}d}" for number in numbers}
    assert set(expand(hostlist(names))) == names


def test_1024_hosts_are_one_short_text() -> None:
    """Also with some of them left out."""
    assert hostlist([f"node{number:04d}" for number in range(1024) if number not in (17, 600)]) == (
        "node[0000-0016,0018-0599,0601-1023]"
    )


@pytest.mark.parametrize(
    ("names", "among", "short"),
    [
        (["a1.site.org", "a2.site.org"], [], ["a1", "a2"]),
        (["a.north", "a.south"], [], ["a.north", "a.south"]),
        (["a.north"], ["a.north", "a.south", "b.south"], ["a.north"]),
        (["a.north", "b.north"], ["a.north", "a.south", "b.north"], ["a.north", "b"]),
        (["a.north"], ["a"], ["a.north"]),
        (["a.north"], ["A.south"], ["a.north"]),
        (["10.0.0.1", "plain"], [], ["10.0.0.1", "plain"]),
    ],
)
def test_short_names(names: list[str], among: list[str], short: list[str]) -> None:
    """Slurm's nodes have no domain; an address keeps its numbers, and a name stays that of one host of the run."""
    assert short_names(names, among=among) == short
