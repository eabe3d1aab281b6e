"""Whether a pytest session is an acceptance run, and who becomes an agent in it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from pytest_gpucluster.config.settings import settings_from
from pytest_gpucluster.config.torchrun import Launch, read_launch
from pytest_gpucluster.plugin.pairing import as_usage_error, is_under_xdist

if TYPE_CHECKING:
    from pytest_gpucluster.controller.controller import Controller
    from pytest_gpucluster.plugin.run import Run
    from pytest_gpucluster.protocol.messages import ReportTarget


OLDEST_PYTEST = 8
NO_SELFTEST = {
    "gpucluster_inline": "kills workers, and --gpucluster-inline has none",
    "gpucluster_audit": "works the GPUs, and --gpucluster-audit only reads",
}
"""The options that a self-test cannot have beside it, and why."""


def refuse_old_pytest() -> None:
    """A pytest that came in past pip would end somewhere inside, without a word about its version."""
    if getattr(pytest, "version_tuple", (6,))[0] < OLDEST_PYTEST:
        raise pytest.UsageError(
            f"pytest {pytest.__version__} is too old for gpucluster: at least {OLDEST_PYTEST} is needed (8 and 9 were run)"
        )


if not hasattr(pytest, "StashKey"):  # pytest 6: nothing below can be imported
    refuse_old_pytest()

RUN = pytest.StashKey["Run"]()

ACTIVE = pytest.StashKey[bool]()

REFUSAL = pytest.StashKey[BaseException]()
"""Why no run can start, found while pytest collects a file: there it would become a traceback, so it is raised later."""

NOT_REQUESTED = "under torchrun or pytest-xdist, fixtures of gpucluster need --gpucluster or the ini option gpucluster=true"


def is_activated(config: pytest.Config, args: Sequence[str]) -> bool:
    """Whether this run is ours: ``tests_acceptance`` named, the ini option set, or one of our options given."""
    options = vars(getattr(config, "known_args_namespace", config.option))
    given = (value for name, value in options.items() if name.startswith("gpucluster"))
    if any(value is not None and value is not False for value in given):  # an empty value is one too
        return True
    if any("tests_acceptance" in re.split(r"[/.\\]", str(arg).partition("::")[0]) for arg in args):
        return True
    return bool(config.getini("gpucluster"))


def launch_or_usage_error() -> Launch | None:
    """How this process was started; half of torchrun's environment is a usage error, and so is a Python without asserts."""
    if sys.flags.optimize:
        raise pytest.UsageError("python -O (PYTHONOPTIMIZE) removes every assert: a test passes that shows nothing; unset it")
    with as_usage_error():
        return read_launch()


def become_agent(launch: Launch, *, roots: list[Path], target: ReportTarget, requested: dict[str, str] | None) -> None:
    """Replace this process by its agent: same pid for torchrun, and nothing of pytest left.

    ``target``: where this process would write reports; its agent does if it keeps the journal replica.
    ``requested``: what its options ask for. The controller compares that with its own; None: they ask for nothing.
    """
    from pytest_gpucluster.agent import main
    from pytest_gpucluster.controller.controller import address_of, rank_of
    from pytest_gpucluster.protocol.codec import Secret

    secret = Secret.of_run(launch)
    settings = main.AgentSettings(
        ranks=(rank_of(launch),),
        address=address_of(launch),
        roots=main.resolved(roots),
        secret_fd=secret.to_pipe() if secret is not None else None,
        target=target,
        requested=requested,
    )
    command = main.command(settings)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606 -- this very interpreter


def run_of(config: pytest.Config) -> Run:
    """The run, made at the first use."""
    if RUN not in config.stash:
        refuse_old_pytest()
        from pytest_gpucluster.plugin.run import Run

        launch = launch_or_usage_error()
        if hasattr(config, "workerinput") and not config.stash.get(ACTIVE, False):
            pytest.fail(NOT_REQUESTED, pytrace=False)  # a usage error would only crash this worker of pytest-xdist
        if launch is not None and not config.stash.get(ACTIVE, False):
            pytest.exit(NOT_REQUESTED, returncode=pytest.ExitCode.USAGE_ERROR)  # ends set-up too, as a usage error does not
        refuse_mixed_starts(config, launch)
        relayed = None
        if is_under_xdist(config):
            from pytest_gpucluster.plugin import xdist

            relayed = xdist.connect(config) if hasattr(config, "workerinput") else None
        with as_usage_error():
            settings = settings_from(config.option, start=config.invocation_params.dir)
            run = config.stash[RUN] = Run(config, settings, launch, controller=cast("Controller | None", relayed))
        run.register()
        if is_under_xdist(config):
            xdist.register(config, run, relayed)
    return config.stash[RUN]


def refuse_mixed_starts(config: pytest.Config, launch: Launch | None) -> None:
    """A self-test needs workers that may die, and works the GPUs. pytest-xdist (``-n``) has its own, on one node alone."""
    option = config.option
    for name, why in NO_SELFTEST.items():
        if option.gpucluster_selftest and getattr(option, name):
            raise pytest.UsageError(f"--gpucluster-selftest {why}; leave one of them out")
    if is_under_xdist(config):
        wrong = {
            "pytest-xdist (-n) cannot be used under torchrun: each rank has its GPU already; leave -n out": launch is not None,
            "--gpucluster-inline runs in one process; leave -n out": option.gpucluster_inline,
            "gpucluster resume asks the parts before any test is distributed, and that run had -n: begin another": (
                option.gpucluster_resume
            ),
            "--gpucluster-only asks the parts before any test is distributed; leave -n out": option.gpucluster_only,
            "a soak measures all GPUs in turns of its own; leave -n out": (option.gpucluster_level or "").startswith("soak"),
            "--gpucluster-selftest needs all GPUs at once; leave -n out": option.gpucluster_selftest,
        }
        if any(wrong.values()):
            raise pytest.UsageError(next(text for text, is_given in wrong.items() if is_given))
    elif getattr(option, "tx", None) and option.dist != "no":
        raise pytest.UsageError("pytest-xdist's --tx cannot be used here: one process for each GPU of this machine is -n auto")
