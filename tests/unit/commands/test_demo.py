"""The command line of the demo: what pytest is asked for, and what is refused before pytest starts."""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from typing import TYPE_CHECKING, NoReturn

import pytest

from pytest_gpucluster.commands import main

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would have taken the place of this process, which ends by that."""
    found: list[list[str]] = []

    def become(_file: str, words: Sequence[str]) -> NoReturn:
        found.append([*words])
        raise SystemExit

    monkeypatch.setattr(os, "execv", become)
    return found


def words_of(started: list[list[str]]) -> Sequence[str]:
    """The arguments of the one pytest."""
    (command,) = started
    fleet = ["-p", "no:cacheprovider", "-p", "pytest_gpucluster.plugin.fleet"]
    assert command[:7] == [sys.executable, "-m", "pytest", *fleet]
    return command[7:]


@pytest.mark.parametrize("words", [["demo"], ["plan", "--fleet", "1x2"], ["audit"]])
@pytest.mark.parametrize("rest", [[], [""], [" ", ""], ["-x", ""], ["", "-k", "", "-m", ""]])
def test_an_empty_word_is_no_folder(words: list[str], rest: list[str], started: list[list[str]]) -> None:
    """As a script writes it by ``"$MORE"``: pytest would collect the current folder. The value of an option may be empty."""
    with pytest.raises(SystemExit):
        main.main([*words, "--", *rest])
    (command,) = started
    assert [before for before, word in pairwise(command) if not word.strip()] == [word for word in rest if word in ("-k", "-m")]


@pytest.mark.parametrize("option", ["--junitxml", "--gpucluster-expect", "--gpucluster-results", "--maxfail", "-o", "-p", "-n"])
def test_an_empty_value_takes_no_other_word(option: str, started: list[list[str]]) -> None:
    """With the empty word left out, the suite would be the name of the JUnit file, and the current folder collected."""
    with pytest.raises(SystemExit):
        main.main(["demo", "--", option, "", "tests_acceptance"])
    (command,) = started
    assert command[-2:] in ([f"{option}=", "tests_acceptance"], ["", "tests_acceptance"])


@pytest.mark.parametrize("switch", ["--gpucluster-gate", "--gpucluster-junit-strict", "--pyargs", "--co", "-x", "-vv"])
def test_after_a_switch_an_empty_word_is_no_folder(switch: str, started: list[list[str]]) -> None:
    """As after any other word."""
    with pytest.raises(SystemExit):
        main.main(["demo", "--", switch, "", "tests_acceptance"])
    (command,) = started
    assert command[-2:] == [switch, "tests_acceptance"]


def test_the_demo_alone_is_a_healthy_node(started: list[list[str]]) -> None:
    """Its results lie beside those of real runs, never among them."""
    with pytest.raises(SystemExit):
        main.main(["demo"])
    assert words_of(started) == [
        "--fleet=1x8", "--gpucluster-profile=h200-sxm", "--fleet-seed=0", "--fleet-command=gpucluster demo --",
        "--gpucluster-results=gpucluster-demo", "--pyargs", "tests_acceptance",
    ]  # fmt: skip


def test_what_stands_after_the_dashes_goes_to_pytest(started: list[list[str]]) -> None:
    """As it is, and last: pytest takes the last of two equal options."""
    planted = ["--bad", "node3-gpu5:slow", "--bad=node7:absent"]
    with pytest.raises(SystemExit):
        main.main(["demo", "--fleet", "16x8", *planted, "--seed=9", "--", "-k", "bf16", "--x=--"])
    words = words_of(started)
    assert words[0] == "--fleet=16x8"
    assert words[2:5] == ["--fleet-seed=9", "--fleet-bad=node3-gpu5:slow", "--fleet-bad=node7:absent"]
    assert words[5] == f"--fleet-command=gpucluster demo --fleet 16x8 {' '.join(planted)} --seed=9 -- -k bf16 --x=--"
    assert words[-4:] == ["tests_acceptance", "-k", "bf16", "--x=--"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fleet", "8"], "'8' is no fleet; say NODESxGPUS"),
        (["--bad", "node0:slwo"], "Did you mean 'slow'"),
        (["--bad", "node1:slow"], "'node1:slow' is outside of the fleet 1x8"),
        (["--profile", "b200"], "there is no simulated b200"),
        (["--profile", "site"], ". Your own profile: -- --gpucluster-thresholds FILE"),
        (["--profile", "h100"], "Did you mean 'h100-sxm'?"),
    ],
)
def test_wrong_usage_starts_nothing(
    arguments: list[str], message: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """One sentence, and the exit code of wrong usage."""
    assert main.main(["demo", *arguments]) == main.WRONG_USAGE
    assert message in capsys.readouterr().err
    assert started == []


def test_options_of_pytest_need_the_dashes(started: list[list[str]]) -> None:
    """Without them they are wrong usage, as in every command."""
    with pytest.raises(SystemExit):
        main.main(["demo", "-k", "bf16"])
    assert started == []


def test_help_names_every_fault(capsys: pytest.CaptureFixture[str]) -> None:
    """Each with what it does."""
    with pytest.raises(SystemExit):
        main.main(["demo", "--help"])
    assert "throttled (is slowed by heat under lasting load)" in " ".join(capsys.readouterr().out.split())
