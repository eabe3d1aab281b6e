"""``gpucluster run CRITERION``: a packaged criterion, with its own recipe and limit, measured and judged here by pytest."""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from typing import TYPE_CHECKING

from pytest_gpucluster.commands import arguments
from pytest_gpucluster.commands.names_of_tests import SUITE, file_in_suite
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds.load import load

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

OF_FUNCTIONS: Mapping[str, object] = {"place": [], "per": "gpu", "deadline_s": None, "inline": False, "json": False}
"""Options that fit a function alone, by their names in argparse's namespace, each with what it is where it is not given."""


def is_criterion(text: str) -> bool:
    """Whether what is to be run can be a criterion: ``bf16_tflops``, ``busbw[all_reduce]``. A function has a colon."""
    return bool(text) and not {":", "/"} & {*text.partition("[")[0]} and not text.endswith(".py")


def main(chosen: argparse.Namespace) -> int:
    """Become pytest. Its reports go to a new temporary folder, which it shows: those of a handover stay as they are.

    Raises:
        ConfigurationError: there is no such criterion, or an option is given that fits a function alone.
    """
    words = pytest_arguments(chosen)
    sys.stderr.write(f"gpucluster run: {shlex.join(['pytest', *words])}\n")
    folder = tempfile.mkdtemp(prefix="gpucluster-run-")
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "pytest", *words, f"--gpucluster-results={folder}"]
    os.execv(command[0], command)  # noqa: S606 -- this very interpreter


def pytest_arguments(chosen: argparse.Namespace) -> list[str]:
    """The arguments of pytest that measure and judge what is chosen: a criterion, or all that are called ``NAME[...]``.

    Raises:
        ConfigurationError: there is no such criterion, or an option is given that fits a function alone.
    """
    name, _, parameter = chosen.function.removesuffix("]").partition("[")
    entries = load(None).content.criteria
    found = [entries[key] for key in entries if chosen.function in (key, key.partition("[")[0])]
    if not found:
        near = did_you_mean(chosen.function, list(entries))
        form = f"{arguments.FORM}, for example {arguments.EXAMPLE}"
        raise ConfigurationError(f"{chosen.function!r} is no criterion, and names no function; {form}.{near}")
    _require_plain(chosen)
    if all(entry.level == "soak" for entry in found):
        say = f"pytest --pyargs {SUITE} --gpucluster-level soak:10m -k {name}"
        raise ConfigurationError(f"{chosen.function} is judged over a soak alone; say {say}")
    words = ["--pyargs", f"{SUITE}.{file_in_suite(name).stem}::test_{name}", *(("-k", parameter) if parameter else ())]
    words += ["--gpucluster-profile", "rehearsal"] if chosen.device == "cpu" else []
    return [*words, *(("--gpucluster-expect", chosen.expect) if chosen.expect else ())]


def _require_plain(chosen: argparse.Namespace) -> None:
    """Refuse arguments and options of a function: a criterion has its recipe, and is judged at all its places."""
    options = (f"--{name.replace('_', '-')}" for name, unset in OF_FUNCTIONS.items() if getattr(chosen, name) != unset)
    given = [*chosen.words, *options]
    if given:
        text = f"{', '.join(given)}: a criterion is measured by its own recipe, at all its places; to measure otherwise"
        raise ConfigurationError(f"{text}, {arguments.FORM}, or write another recipe in a thresholds file")
