"""Settings of a run, from the texts of its options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.config.settings import (
    OPTIONS,
    RESUME,
    Expect,
    parse_expect,
    parse_level,
    reaches,
    settings_from,
    unrecognized,
)
from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, Expect()),
        ("nodes=2", Expect(nodes=2)),
        (" gpus_per_node = 8 , nodes = 2 ", Expect(nodes=2, gpus_per_node=8)),
    ],
)
def test_expect(text: str | None, found: Expect) -> None:
    """Either number, both, or none."""
    assert parse_expect(text) == found


@pytest.mark.parametrize(
    "text", ["", ",", "nodes", "node=2", "nodes=2,nodes=2", "2x8", "nodes=0", "nodes=-1", "nodes=2.0", "nodes=1e3"]
)
def test_expect_refused(text: str) -> None:
    """A promise that is not understood is refused."""
    with pytest.raises(ConfigurationError, match="--gpucluster-expect"):
        parse_expect(text)


def test_a_key_given_twice() -> None:
    """The message says which."""
    with pytest.raises(ConfigurationError, match="'nodes=2' gives nodes twice; say"):
        parse_expect("nodes=1,nodes=2")


@pytest.mark.parametrize(
    ("text", "found"),
    [("quick", ("quick", None)), ("soak", ("soak", 28800.0)), ("soak:8h", ("soak", 28800.0)), ("soak:1.5m", ("soak", 90.0))],
)
def test_level(text: str, found: tuple[str, float | None]) -> None:
    """A level, and how long a soak lasts in seconds."""
    assert parse_level(text) == found


@pytest.mark.parametrize("text", ["", "fast", "Quick", "quick:1h", "soak:", "soak:8", "soak:0s", "soak:-1h", "soak:1h30m"])
def test_level_refused(text: str) -> None:
    """Anything else is a usage error that names the option."""
    with pytest.raises(ConfigurationError, match="--gpucluster-level"):
        parse_level(text)


def test_levels() -> None:
    """A quick criterion is part of every run, a soak one only of a soak."""
    assert reaches("standard", "quick")
    assert reaches("soak", "soak")
    assert not reaches("standard", "soak")


@pytest.mark.parametrize(("text", "near"), [("quik", "quick"), ("standart", "standard"), ("sok:8h", "soak")])
def test_a_level_that_is_nearly_right(text: str, near: str) -> None:
    """The level that is called almost so is named; a level with a wrong duration has no nearer name."""
    with pytest.raises(ConfigurationError, match=f"Did you mean '{near}'"):
        parse_level(text)
    with pytest.raises(ConfigurationError) as caught:
        parse_level("quick:8h")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("text", ["nodes=12500", "nodes=4097,gpus_per_node=8", "gpus_per_node=65", f"nodes=1{'0' * 99}"])
def test_more_than_one_run_takes(text: str) -> None:
    """A slip of a digit would collect for minutes, and take all memory."""
    with pytest.raises(ConfigurationError, match=r"more than one run takes, .*gpucluster merge"):
        parse_expect(text)
    assert parse_expect("nodes=4096,gpus_per_node=64") == Expect(nodes=4096, gpus_per_node=64)


@pytest.mark.parametrize(
    ("text", "near"), [("node=2", "nodes"), ("gpus_per_nodes=8", "gpus_per_node"), ("gpu_per_node=8", "gpus_per_node")]
)
def test_an_expectation_that_is_nearly_right(text: str, near: str) -> None:
    """The key that is called almost so is named."""
    with pytest.raises(ConfigurationError, match=f"Did you mean '{near}'"):
        parse_expect(text)


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        ("--gpucluster-lvel", "--gpucluster-level"),
        ("--gpucluster-lvel=quick", "--gpucluster-level"),
        ("--gpucluster_level", "--gpucluster-level"),
        ("--gpucluster-thresh", "--gpucluster-thresholds"),
        ("--gpucluster-treshold", "--gpucluster-thresholds"),
        ("--gpucluster-expected", "--gpucluster-expect"),
        ("--gpucluster-result-dir", "--gpucluster-results"),
        ("--gpucluser-gate", "--gpucluster-gate"),
        ("--gpu-cluster-profile", "--gpucluster-profile"),
        ("--GPUcluster-profile", "--gpucluster-profile"),
        ("--gpuclusters", "--gpucluster"),
        ("--gate", "--gpucluster-gate"),
        ("--level=quick", "--gpucluster-level"),
    ],
)
def test_an_option_that_is_nearly_ours(typed: str, near: str) -> None:
    """A letter, a separator, the beginning or the end is wrong: the option that was meant is named, and no list."""
    said = f"unrecognized arguments: {typed.partition('=')[0]}. Did you mean {near!r}?"
    assert unrecognized([typed, "quick"]) == said
    assert unrecognized([typed], guessed_only=True) == said


def test_an_option_that_is_like_none_of_ours() -> None:
    """All options are listed. What a project may have is passed over where the command line is not its parser's."""
    said = unrecognized(["--gpucluster-zzz", "--gpucluster-lvel"])
    assert said is not None
    assert said.startswith("unrecognized arguments: --gpucluster-zzz; unrecognized arguments: --gpucluster-lvel. Did you mean")
    assert "--gpucluster-thresholds, --gpucluster-profile" in said
    assert unrecognized(["--gpucluster-zzz"], guessed_only=True) is None
    assert unrecognized(["--zzz", "-x", "gpucluster-lvel", "tests", "--cov"]) is None
    assert unrecognized([]) is None


@pytest.mark.parametrize(
    ("given", "resume"),
    [
        ({}, "never"),
        ({"gpucluster_results": "here"}, "unfinished"),
        ({"gpucluster_results": "here", "gpucluster_level": "soak:1m"}, "never"),
        ({"gpucluster_results": "gpucluster-demo", "fleet_command": ["gpucluster", "demo"]}, "never"),
        ({"gpucluster_results": "here", "fleet_command": []}, "unfinished"),
        ({"gpucluster_results": "gpucluster-demo", "fleet_command": ["gpucluster", "demo"], RESUME: True}, "always"),
    ],
)
def test_which_run_goes_on(given: dict[str, Any], resume: str, tmp_path: Path) -> None:
    """One whose directory the user names. A demo names its own: the next one, of another fleet, was refused."""
    options = {option.name.removeprefix("--").replace("-", "_"): None for option in OPTIONS} | given
    assert settings_from(argparse.Namespace(**options), start=tmp_path).resume == resume
