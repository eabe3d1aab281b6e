"""The ``gpucluster`` command: everything around a run that is not the run. Exit 2 for wrong usage, 1 for "not good"."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

WRONG_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    chosen = _parser().parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"gpucluster {chosen.command}: {error}\n")
        return WRONG_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="gpucluster", description="Around the acceptance of a GPU cluster.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    report = commands.add_parser("report", help="write JUnit and results.json again, from the journal of a run")
    report.add_argument("folder", type=Path, metavar="DIR", help="the results directory of the run")
    report.add_argument("--junitxml", type=Path, metavar="FILE", help="default: DIR/junit.xml")
    report.set_defaults(run=_report)
    lint = commands.add_parser("lint", help="check a thresholds file; nothing is run")
    lint.add_argument("file", type=Path, nargs="?", metavar="FILE", help="default: the packaged file")
    lint.add_argument("--schema", action="store_true", help="print the JSON schema for editors instead")
    lint.set_defaults(run=_lint)
    return parser


def _report(chosen: argparse.Namespace) -> int:
    from pytest_gpucluster.reporting.rebuild import rebuild

    verdict = rebuild(chosen.folder, junit=chosen.junitxml)
    sys.stdout.write(f"verdict {verdict.line}\n")
    return 0 if verdict.word in ("ACCEPTED", "ACCEPTED_WITH_WAIVERS", "REHEARSED") else 1


def _lint(chosen: argparse.Namespace) -> int:
    import json

    from pytest_gpucluster import lint
    from pytest_gpucluster.thresholds_merge import packaged_path

    if chosen.schema:
        sys.stdout.write(json.dumps(lint.schema(), indent=1) + "\n")
        return 0
    path = chosen.file or packaged_path()
    problems = lint.lint(path)
    for problem in problems:
        sys.stdout.write(f"{problem.file}:{problem.line}: {problem.message}\n")
    if not problems:
        sys.stdout.write(f"{path}: no problems\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
