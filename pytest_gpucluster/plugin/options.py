"""The hooks that pytest calls in every project: options, marks, and the start of an acceptance run."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.config.options import INI_HELP, OPTIONS
from pytest_gpucluster.config.torchrun import read_launch
from pytest_gpucluster.plugin.activation import ACTIVE, RUN, become_agent, is_activated, launch_or_usage_error, run_of, uses_us

if TYPE_CHECKING:
    from collections.abc import Generator


MARKS = {
    "distributed(per='cluster')": "the test's body runs on every rank, in a worker, with torch.distributed set up",
    "health": "GPU health, read through NVML",
    "compute": "matrix products",
    "memory": "GPU memory",
    "links": "links inside a node",
    "fabric": "links between nodes",
    "training": "real training",
    "platform": "host, scheduler, file system",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add every option and the ini value."""
    group = parser.getgroup("gpucluster", "GPU cluster acceptance")
    for option in OPTIONS:
        group.addoption(option.name, **option.keywords)
    parser.addini("gpucluster", INI_HELP, type="bool", default=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None, None, None]:
    """Under torchrun, every rank but 0 becomes an agent here, before any conftest or reporter acts."""
    early_config.stash[ACTIVE] = is_activated(early_config, args)  # args hold what addopts adds; later hooks lack that
    if early_config.stash[ACTIVE]:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        launch = launch_or_usage_error()
        if launch is not None and launch.rank > 0:
            become_agent(launch, roots=[early_config.rootpath, early_config.invocation_params.dir])
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Send the agents home when rank 0 ends with 0 without a measurement."""
    code = yield
    if int(code or 0) == 0:
        _say_goodbye(config)
    return code


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto`` is one process for each GPU."""
    return run_of(config).session.setup.inventory.gpus_per_node if config.stash.get(ACTIVE, False) else None


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks; start the run if this is one."""
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")
    if config.stash.get(ACTIVE, False):
        run_of(config)


def _say_goodbye(config: pytest.Config) -> None:
    """Help, markers, fixtures and collection end with 0, so torchrun waits for the other ranks: send them home.

    A usage error needs no word: torchrun ends the other ranks of this node, and its end closes the store. Not at exit:
    a connection made while the interpreter shuts down aborts the process.
    """
    run = config.stash.get(RUN, None)
    if run is not None and run.session.setup.launch is not None and not run.session.recorder.is_open:
        run.session.controller.quit(0)
        return
    launch = read_launch() if run is None and config.stash.get(ACTIVE, False) else None
    if launch is not None:  # pytest 8 answers --version here, before anything is configured
        from pytest_gpucluster.controller.controller import Controller

        Controller(launch, num_local=1, device="cpu", rootdir=config.rootpath).quit(0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start a run that nothing on the command line asked for, because a test uses one of our fixtures."""
    if hasattr(config, "workerinput") or config.stash.get(ACTIVE, False) or not any(uses_us(item) for item in items):
        return  # under pytest-xdist only the controller can start a run: our fixtures raise the usage error
    is_new = RUN not in config.stash
    run = run_of(config)
    run.start()
    if is_new:  # pytest asks only those plugins to modify the items that were registered before
        run.collection.pytest_collection_modifyitems(config, items)
