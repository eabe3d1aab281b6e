"""The hooks that pytest calls in every project: options, marks, and the start of an acceptance run."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.config.settings import INI_HELP, OPTIONS, RESUME, requested_of_node, results_dir, unrecognized
from pytest_gpucluster.plugin import activation
from pytest_gpucluster.plugin.activation import ACTIVE, REFUSAL, RUN, run_of
from pytest_gpucluster.plugin.exit_code import ExitCodeGuard, guard_immediate_exit
from pytest_gpucluster.plugin.pairing import ALL_TESTS, AllTests, register_part, uses_us

if TYPE_CHECKING:
    from pytest_gpucluster.protocol.messages import ReportTarget


SUITE = "tests_acceptance"
NOT_FOUND = re.compile(rf"not found: (?:\./)?{SUITE}(?P<file>[/\w.]*)(?P<test>::\S+)?\Z")
"""How pytest says that it found no such file or folder of the suite."""
MARKS = {
    "distributed(per='cluster')": "the test's body runs on every rank, in a worker, with torch.distributed set up",
    "health": "GPU health, read through NVML",
    "compute": "matrix products",
    "memory": "GPU memory",
    "links": "links inside a node",
    "fabric": "links between nodes",
    "training": "real training",
    "platform": "host, scheduler, file system",
    "over_run(function, per='gpu')": "judges what a reader gave before the first test and at the end, so it runs last",
    "reads": "only reads what is there, so that an audit takes it beside jobs too; reads(only=False): one test does more",
    "compares": "compares places with each other, so all of them are measured, whichever tests are selected",
    "each_entry(argument)": "one test for each entry NAME[...] of the limits, which gets what stands in the brackets",
    "again": "judges what may change, so a run that goes on with an unfinished one judges it again",
    "at_end": "judges what happened during the whole run, so it runs after everything else",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add every option and the ini value."""
    group = parser.getgroup("gpucluster", "GPU cluster acceptance")
    for option in OPTIONS:
        group.addoption(option.name, **option.keywords)
    group.addoption("--gpucluster-resume", action="store_true", dest=RESUME, help=argparse.SUPPRESS)
    parser.addini("gpucluster", INI_HELP, type="bool", default=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, None, None]:
    """Under torchrun, every rank but 0 becomes an agent here, before any conftest or reporter acts.

    Raises:
        pytest.UsageError: an option looks like ours, and neither we nor a conftest take it.
    """
    early_config.stash[ACTIVE] = activation.is_activated(
        early_config, args
    )  # args with those of addopts; later hooks lack them
    if early_config.stash[ACTIVE]:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        launch = activation.launch_or_usage_error()
        if launch is not None and launch.rank > 0:
            roots = [early_config.rootpath, early_config.invocation_params.dir]
            given, target = early_config.known_args_namespace, _report_target(early_config)
            is_blind = given.gpucluster_resume and not Path(target.folder, JOURNAL).exists()  # the run is known elsewhere
            requested = None if is_blind else requested_of_node(given, start=roots[1])
            activation.become_agent(launch, roots=roots, target=target, requested=requested)
    guard_immediate_exit(early_config)
    result = yield
    all_tests = early_config.stash[ALL_TESTS] = AllTests(early_config)
    register_part(early_config, all_tests, "all-tests")
    register_part(early_config, ExitCodeGuard(), "exit-code")  # after every conftest, so outermost
    wrong = unrecognized(parser.parse_known_and_unknown_args(args)[1])
    if wrong is not None:
        raise pytest.UsageError(wrong)
    return result


def _report_target(early_config: pytest.Config) -> ReportTarget:
    """Where this process's command line wants the reports."""
    from pytest_gpucluster.protocol.messages import ReportTarget

    given, start = early_config.known_args_namespace, early_config.invocation_params.dir.absolute()
    junit = getattr(given, "xmlpath", None)
    return ReportTarget(folder=str(results_dir(given, start=start)), junit=str(start / junit) if junit else None)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto`` is one process for each GPU."""
    return run_of(config).session.setup.inventory.gpus_per_node if config.stash.get(ACTIVE, False) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Say how the packaged suite is given, where it is looked for as a folder and there is none.

    Raises:
        pytest.UsageError: pytest's own, with that hint.
    """
    try:
        return (yield)
    except pytest.UsageError as error:
        named = [name for text in error.args if (name := packaged_name(str(text))) is not None]
        if not named:
            raise
        raise pytest.UsageError(*error.args, f"the packaged suite is given by: pytest --pyargs {' '.join(named)}") from None


def packaged_name(text: str) -> str | None:
    """What ``--pyargs`` takes for a file of the packaged suite that pytest did not find; None for any other ``text``."""
    found = NOT_FOUND.search(text)
    if found is None:
        return None
    file = found["file"].removesuffix(".py").strip("/").replace("/", ".")
    return f"{SUITE}{f'.{file}' if file else ''}{found['test'] or ''}"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks; start the run if this is one."""
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")
    if config.stash.get(ACTIVE, False):
        run_of(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start a run that nothing on the command line asked for, because a test uses one of our fixtures.

    Raises:
        pytest.UsageError: no run can start.
    """
    if REFUSAL in config.stash and not hasattr(config, "workerinput"):  # it would only crash a worker of pytest-xdist
        raise config.stash[REFUSAL]
    if hasattr(config, "workerinput") or config.stash.get(ACTIVE, False) or not any(uses_us(item) for item in items):
        return  # under pytest-xdist only the controller can start a run: our fixtures raise the usage error
    is_new = RUN not in config.stash
    run = run_of(config)
    run.pytest_sessionstart()
    if is_new:  # pytest asks only those plugins to modify the items that were registered before
        run.pytest_collection_modifyitems()
        run.collection.pytest_collection_modifyitems(config, items)
