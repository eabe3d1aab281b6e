"""Which planted faults left the tests between two commits: ``python tests/project/planted_faults.py BEFORE [AFTER]``.

A planted fault is a case of a test: its node id with the parameters. A test that goes through its cases in a loop names them
by a mark, ``@pytest.mark.cases("a", "b")``, and counts as ``test[a]`` and ``test[b]``: a parametrized test that becomes a loop
loses nothing. A case that was only renamed is printed as left and as new.
The exit code is 1 where one left. Both commits are collected with this environment, the slow tests too.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

TO = "GPUCLUSTER_PLANTED_FAULTS_TO"
"""The file that the pytest of a commit writes what it collected to."""


def ids_of(item: pytest.Item) -> Iterator[str]:
    """The cases of one collected test."""
    names = [str(name) for mark in item.iter_markers("cases") for name in mark.args]
    yield from (f"{item.nodeid}[{name}]" for name in names) if names else [item.nodeid]


def pytest_configure(config: pytest.Config) -> None:
    """Let a commit have the mark whose own settings do not."""
    config.addinivalue_line("markers", "cases(*names): what a test that loops goes through")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write every case, in a pytest that :func:`collected` started with this file as a plugin."""
    found = sorted({one for item in session.items for one in ids_of(item)})
    Path(os.environ[TO]).write_text("".join(f"{one!a}\n" for one in found), encoding="ascii")


def collected(commit: str, repository: Path) -> set[str]:
    """The cases of a commit, from a clone of its own.

    Raises:
        SystemExit: pytest collects it with an error; its last lines are shown.
    """
    with tempfile.TemporaryDirectory(prefix="gpucluster-") as folder:
        clone, listed = Path(folder, "clone"), Path(folder, "ids")
        subprocess.run(["git", "clone", "--quiet", "--shared", "--no-checkout", repository, clone], check=True)
        subprocess.run(["git", "-C", clone, "checkout", "--quiet", "--detach", commit], check=True)
        paths = os.pathsep.join([str(clone), str(Path(__file__).parent)])
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
        variables = {**os.environ, "PYTHONPATH": paths, TO: str(listed)}
        done = subprocess.run([*command, "tests"], cwd=clone, env=variables, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"{commit}: pytest collects the tests with exit code {done.returncode}:\n{done.stdout[-2000:]}")
        return set(listed.read_text(encoding="ascii").splitlines())


def report(before: set[str], after: set[str]) -> str:
    """What left and what is new, and how many there are of each."""
    left, new = sorted(before - after), sorted(after - before)
    lines = [*(f"left {one}" for one in left), *(f"new  {one}" for one in new)]
    return "\n".join([*lines, f"{len(before)} cases before, {len(after)} after: {len(left)} left, {len(new)} are new"])


def main(before: str, after: str = "HEAD") -> int:
    """Print the comparison of two commits; 1 where a case left."""
    repository = Path(__file__).parents[2]
    earlier, later = collected(before, repository), collected(after, repository)
    sys.stdout.write(f"{report(earlier, later)}\n")
    return 1 if earlier - later else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
