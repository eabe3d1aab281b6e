"""The environment that torchrun gives a process."""

from __future__ import annotations

import pytest

from pytest_gpucluster.config.torchrun import read_launch
from pytest_gpucluster.errors import ConfigurationError

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
    """Every variable becomes a field."""
    launch = read_launch(TORCHRUN)
    assert launch is not None
    assert (launch.rank, launch.local_rank, launch.group_rank, launch.num_nodes) == (11, 3, 1, 2)
    assert (launch.master_addr, launch.master_port, launch.agent_hosts_store) == ("node1", 29500, True)


def test_a_plain_start_is_none() -> None:
    """Without torchrun's variables there is no launch, whatever other variables are set."""
    assert read_launch({"PATH": "/bin", "MASTER_ADDR": "left over", "MASTER_PORT": "1"}) is None


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_half_an_environment_names_the_missing_variable(name: str) -> None:
    """WORLD_SIZE without a store to meet in is a mistake, not a cluster of one."""
    environment = {key: value for key, value in TORCHRUN.items() if key != name}
    with pytest.raises(ConfigurationError, match=f"set without {name}: .*Start with torchrun, or unset"):
        read_launch(environment)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"])
@pytest.mark.parametrize("text", ["", "two", "1.5"])
def test_numbers_are_numbers(name: str, text: str) -> None:
    """The message has the variable and its value."""
    with pytest.raises(ConfigurationError, match=f"{name}={text!r} is not a whole number"):
        read_launch({**TORCHRUN, name: text})
