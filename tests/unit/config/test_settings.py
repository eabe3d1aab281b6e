"""Options and environment, read once at the door."""

from __future__ import annotations

import subprocess
from importlib import metadata
from typing import Any

import pytest

from pytest_gpucluster import session
from pytest_gpucluster.config.settings import Expect, parse_expect, parse_level, reaches
from pytest_gpucluster.config.torchrun import read_launch
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory import detect
from tests.support import REPOSITORY

TORCHRUN = {
    "RANK": "11",
    "WORLD_SIZE": "16",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def test_torchruns_environment() -> None:
    """Every variable has its place."""
    launch = read_launch(TORCHRUN)
    assert launch is not None
    assert (launch.rank, launch.local_rank, launch.group_rank, launch.num_nodes) == (11, 3, 1, 2)
    assert (launch.master_addr, launch.master_port, launch.agent_hosts_store) == ("node1", 29500, True)


def test_a_plain_start_is_none() -> None:
    """Without torchrun's variables this machine is everything, whatever else is set."""
    assert read_launch({"PATH": "/bin", "MASTER_ADDR": "left over", "MASTER_PORT": "1"}) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_names_what_is_absent(name: str) -> None:
    """WORLD_SIZE without a store to meet in is a mistake, not a cluster of one."""
    environment = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ConfigurationError, match=f"set without {name}: .*Start with torchrun, or unset"):
        read_launch(environment)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"])
@pytest.mark.parametrize("text", ["", "two", "1.5"])
def test_numbers_are_numbers(name: str, text: str) -> None:
    """The variable and what stands in it."""
    with pytest.raises(ConfigurationError, match=f"{name}={text!r} is not a whole number"):
        read_launch({**TORCHRUN, name: text})


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (None, Expect()),
        ("", Expect()),
        ("nodes=2", Expect(nodes=2)),
        (" gpus_per_node = 8 , nodes = 2 ", Expect(nodes=2, gpus_per_node=8)),
    ],
)
def test_expect(text: str | None, found: Expect) -> None:
    """Either number, both, or none."""
    assert parse_expect(text) == found


@pytest.mark.parametrize("text", ["nodes", "node=2", "nodes=2,nodes=2", "2x8", "nodes=0", "nodes=-1", "nodes=2.0", "nodes=1e3"])
def test_expect_refused(text: str) -> None:
    """A promise that is not understood is none."""
    with pytest.raises(ConfigurationError, match="--gpucluster-expect"):
        parse_expect(text)


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


@pytest.mark.parametrize("version", ["2.7.0", "2.13.0+cu130", "3.0a1", "10.0"])
def test_torch_new_enough(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Compared as numbers: 2.13 is after 2.7."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    session.require_torch()


@pytest.mark.parametrize("version", ["2.6.0", "1.13.0+cu117", "2.0"])
def test_torch_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Refused with the version that is there and the one that is needed."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ConfigurationError, match=rf"torch {version.replace('+', '.')} is too old: at least 2\.7"):
        session.require_torch()


def test_oldest_torch_is_the_one_that_is_installed_at_least() -> None:
    """Said twice, because an older one may come in past pip; both must say the same."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={".".join(map(str, session.OLDEST_TORCH))}",' in text


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed is said as such."""

    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ConfigurationError, match="torch is not installed"):
        session.require_torch()


def test_a_driver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML that never answers is a broken machine, said within the deadline, even if its process cannot be ended."""
    asleep = subprocess.Popen(["sleep", "600"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    monkeypatch.setattr(detect, "DEADLINE_S", 0.2)
    monkeypatch.setattr(detect.subprocess, "Popen", lambda *_args, **_options: asleep)
    monkeypatch.setattr(asleep, "kill", lambda: None)  # as in state D
    with pytest.raises(ConfigurationError, match="the driver hangs"):
        detect.detect_gpus()
    assert asleep.poll() is None
    asleep.terminate()
    asleep.communicate(timeout=10)


def test_levels() -> None:
    """A quick criterion is part of every run, a soak one only of a soak."""
    assert reaches("standard", "quick")
    assert reaches("soak", "soak")
    assert not reaches("standard", "soak")
