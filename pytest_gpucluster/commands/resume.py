"""``gpucluster resume``: goes on with an unfinished run, by the command that started it. Exit code 4 where that is refused."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpucluster.config.run_files import JOURNAL
from pytest_gpucluster.config.torchrun import Launch, read_launch
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.reporting.unfinished_run import read_unfinished_run
from pytest_gpucluster.text import visible

REFUSED = 4
"""The exit code of pytest for wrong usage: whoever resumes by pytest's options gets the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """The shape in which torchrun had started a run: ``ranks`` on each node."""

    nodes: int
    ranks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """How a run was started, as its journal has it: pytest's arguments, the folder, and torchrun's shape, if it was used."""

    arguments: tuple[str, ...]
    folder: str
    torchrun: Torchrun | None


def main(chosen: argparse.Namespace) -> int:
    """Become pytest, or torchrun on one node; the exit code is that of the run, or 4 with a sentence."""
    try:
        words, folder = command(chosen.folder.absolute(), chosen.beyond, launch=read_launch())
        sys.stdout.flush()
        os.chdir(folder)
        os.execv(words[0], words)  # noqa: S606 -- this very interpreter
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"gpucluster resume: {visible(str(error))}\n")
        return REFUSED


def command(results: Path, more: Sequence[str], *, launch: Launch | None) -> tuple[list[str], Path]:
    """The command that goes on with the run in ``results``, and the folder to start it in.

    Args:
        results: the results directory, absolute.
        more: further arguments of pytest.
        launch: how torchrun started this process; None without torchrun.

    Raises:
        ConfigurationError: there is no unfinished run, or it cannot be started again from here.
    """
    ours = ("--gpucluster", "--gpucluster-resume", f"--gpucluster-results={results}", *more)
    if launch is not None and launch.rank > 0 and not (results / JOURNAL).exists():
        return [sys.executable, "-m", "pytest", *ours], Path.cwd()  # an agent, on a node that does not have the results
    unfinished = read_unfinished_run(results, completes=True)
    _require_own(results)
    found = _command_of(unfinished.state.history.started, results)
    if not Path(found.folder).is_dir():
        raise ConfigurationError(f"the run in {results} was started in {found.folder}, which is no folder here")
    pytest = ["-m", "pytest", *found.arguments, *ours]
    if found.torchrun is None or launch is not None:
        return [sys.executable, *pytest], Path(found.folder)
    shape = (f"--nnodes={found.torchrun.nodes}", f"--nproc-per-node={found.torchrun.ranks}")
    if found.torchrun.nodes > 1:
        again = shlex.join([*found.arguments, *more, f"--gpucluster-results={results}"])
        raise ConfigurationError(
            f"the run in {results} was on several nodes; enter this on each, in {found.folder}, with its own R: "
            f"gpucluster launch --run {' '.join(shape)} --node-rank=R --master-addr=HOST -- {again}"
        )
    return [sys.executable, "-m", "pytest_gpucluster.commands.torchrun", "--standalone", *shape, *pytest], Path(found.folder)


def _require_own(results: Path) -> None:
    """Refuse the journal of another user: its command would be run with the rights of this one.

    Raises:
        ConfigurationError: it is another user's.
    """
    owner = (results / JOURNAL).stat().st_uid
    if owner not in (os.geteuid(), 0):
        raise ConfigurationError(f"the journal in {results} belongs to another user ({owner}), whose command is not run")


def _command_of(started: Mapping[str, Any], results: Path) -> Command:
    try:
        return msgspec.convert(started.get("command"), Command)
    except msgspec.ValidationError:
        version = started.get("versions", {}).get("pytest-gpucluster")
        raise ConfigurationError(
            f"the journal in {results} does not say how its run was started: it was merged from others, or is of another "
            f"version ({version}). Begin another run in another results directory"
        ) from None
