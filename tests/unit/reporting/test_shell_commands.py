"""A command on the screen is what was meant, as a shell reads it: copied from a narrow terminal too."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.reporting.lines import CONTINUED
from pytest_gpucluster.reporting.table import again, drain_lines
from tests.support.host_lists import expand

COMMAND = ("pytest", "--pyargs", "tests_acceptance", "-m", "compute or health")
EVIL = [
    "bf16 and $HOME",
    "`echo run`",
    "$(echo run)",
    "it's",
    'a "b" c',
    r"back\slash",
    "a\nb",
    "test_busbw[node1-all_reduce] or test_a[node1]",
    "!history",
    "~ * ?",
    "",
    "a  b",
]
WORDS = st.text(st.characters(exclude_categories=["C"]).filter(str.isprintable), max_size=30)
WIDTHS = st.sampled_from([40, 80, 200])


def read_by_bash(lines: list[str]) -> list[str]:
    """The words that bash makes of the lines."""
    printed = subprocess.run(["bash", "-c", "printf '%s\\0' " + "\n".join(lines)], capture_output=True, check=True)
    return printed.stdout.decode("utf-8", "surrogateescape").split("\0")[:-1]


def is_whole(lines: list[str], width: int) -> bool:
    """Whether each line but the last goes on, and none is wider than the screen but by one word."""
    fits = (len(line) <= width or len(shlex.split(line.removesuffix(CONTINUED))) <= 1 for line in lines)
    return all(line.endswith(CONTINUED) for line in lines[:-1]) and all(fits)


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("selection", EVIL)
def test_the_selection_is_one_word(selection: str, width: int) -> None:
    """Whatever a test's id holds, nothing of it is run or broken."""
    lines = again(["-k", selection], COMMAND, width=width, indent="      ")
    assert read_by_bash(lines) == [*COMMAND, "-k", selection]
    assert all(line.isprintable() for line in lines)


@settings(max_examples=50, deadline=None)
@given(WORDS, st.lists(WORDS, max_size=5), WIDTHS)
def test_any_command(selection: str, more: list[str], width: int) -> None:
    """Joined as a shell joins it, it is the command."""
    lines = again(["-k", selection], ["pytest", *more], width=width, indent="      ")
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == ["pytest", *more, "-k", selection]
    assert is_whole(lines, width)


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20), WIDTHS)
def test_control_characters(selection: str, width: int) -> None:
    """They act on no screen, and reach the command."""
    lines = again(["-k", selection], COMMAND, width=width, indent="")
    assert all(line.isprintable() for line in lines)
    assert read_by_bash(lines) == [*COMMAND, "-k", selection]


def test_bytes_that_are_no_text() -> None:
    """As the kernel handed them over."""
    assert read_by_bash(again(["-k", "a\udce9b"], COMMAND, width=80, indent="")) == [*COMMAND, "-k", "a\udce9b"]


def test_an_option_and_its_value_stay_together() -> None:
    """Where both fit into one line."""
    command = ("pytest", "--option=of-some-length", "-p", "no:cacheprovider", "-m", "compute or health")
    assert again(["-k", "test_a[node3-gpu5]"], command, width=50, indent="  ") == [
        "  pytest --option=of-some-length \\",
        "    -p no:cacheprovider -m 'compute or health' \\",
        "    -k 'test_a[node3-gpu5]'",
    ]


@pytest.mark.parametrize("width", [80, 200])
def test_without_a_command(width: int) -> None:
    """What is to be added is still for a shell."""
    words = again(["-k", "test_a[$x] or test_b"], (), width=width, indent="  ")
    assert words == ["  measure again: the same command with -k 'test_a[$x] or test_b'"]


@settings(max_examples=50, deadline=None)
@given(st.sets(st.from_regex(r"\A[a-z][a-z0-9.-]{0,20}[0-9]{0,4}\Z"), min_size=1, max_size=4), st.sampled_from([80, 200]))
def test_any_drained_hosts(hosts: set[str], width: int) -> None:
    """Each command drains some of them with the same reason, all together drain them all."""
    text = "\n".join(drain_lines(sorted(hosts), "it's $bad", width=width)).replace("drain: ", "       ").replace("\\\n", "")
    drained: list[str] = []
    for line in text.split("\n"):
        program, verb, nodes, *rest = shlex.split(line)
        assert (program, verb, rest) == ("scontrol", "update", ["state=drain", "reason=it's $bad"])
        drained += expand(nodes.removeprefix("nodename="))
    assert sorted(drained) == sorted(hosts)


def test_hosts_that_fit_into_no_few_commands() -> None:
    """What is left out is counted, behind a mark that a shell passes over."""
    lines = drain_lines([f"{'very-long-name-' * 4}{letter}" for letter in "abcdefg"], "bad", width=80)
    assert lines[-1] == "drain: # and 3 more nodes, in results.json"
    assert sum(line.startswith("drain: scontrol") for line in lines) == 4
