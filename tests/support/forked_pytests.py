"""Many short runs of ``python -m pytest`` for the start of one: a new Python loads pytest with our plugin, and forks for each.

For what ends by itself before it measures: a wrong usage takes 1.0 CPU seconds as a process of its own, most of them for
imports, and 0.1 as a fork. A run that gets signals, or that has to end what it started, is a launch of its own
(:mod:`tests.support.launching`).
"""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import pytest

from tests.support.processes import MARK, kill_marked, marked

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Name = TypeVar("Name")
LOADS = ("--gpucluster", "-q", "-p", "no:cacheprovider", "no_such_file")
"""A wrong usage, by which pytest itself loads what each of the runs imports: with its asserts rewritten."""
DEADLINE_S = 300.0
"""For all of them together; only one that hangs takes so long, on a busy machine too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What a run left: its exit code (negative for a signal), and everything that it printed."""

    returncode: int
    output: str


def run_each(
    runs: Mapping[Name, tuple[Path, Sequence[str]]], *, folder: Path, environment: Mapping[str, str]
) -> dict[Name, Ended]:
    """Run pytest in each folder with its arguments, one after the other; what they left, by name.

    ``folder`` keeps what they print. A process that a run leaves behind fails the test, and is killed.
    """
    wanted, mark = folder / "runs.json", f"forks of {folder}"
    outputs = {name: folder / f"{number}.out" for number, name in enumerate(runs)}
    rows = [[str(cwd), [*arguments], str(outputs[name])] for name, (cwd, arguments) in runs.items()]
    wanted.write_text(json.dumps(rows), encoding="utf-8")
    variables = {**environment, MARK: mark}
    try:
        command = [sys.executable, __file__, str(wanted)]
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        left = [" ".join(process.cmdline()) for process in marked(mark)]
    finally:
        kill_marked(mark)
    assert not left, f"left behind: {left}"
    codes = json.loads(done.stdout)
    return {
        name: Ended(returncode=code, output=outputs[name].read_text(encoding="utf-8", errors="replace"))
        for name, code in zip(runs, codes, strict=True)
    }


# In the process that forks.


def _become(cwd: str, arguments: list[str], output: str) -> NoReturn:
    """Go on as ``python -m pytest ARGUMENTS`` in this folder."""
    printed = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for number in (1, 2):
        os.dup2(printed, number)
    os.close(printed)
    os.setsid()
    os.chdir(cwd)
    sys.argv[:] = ["-m", *arguments]
    sys.path[0] = cwd
    runpy.run_module("pytest", run_name="__main__", alter_sys=True)
    sys.exit(0)


def main() -> None:
    """Run what the file says, and print the exit codes."""
    rows: list[list[Any]] = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = pytest.main([*LOADS])
    assert code == pytest.ExitCode.USAGE_ERROR, printed.getvalue()
    gc.collect()
    gc.freeze()  # a fork then copies no page for what it never frees
    codes = []
    for row in rows:
        pid = os.fork()
        if pid == 0:
            _become(*row)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    sys.stdout.write(json.dumps(codes))


if __name__ == "__main__":
    main()
