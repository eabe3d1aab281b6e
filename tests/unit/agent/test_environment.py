"""The environment of a worker: the log of NCCL is written and found, whatever the site has set."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.agent.worker_process import overridden_variables, site_log, worker_environment
from pytest_gpucluster.measurements.transport import parse_nccl_log
from pytest_gpucluster.protocol.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Mapping

RANK = Rank(rank=0, world_size=2, local_rank=0, local_world_size=2, group_rank=0)
LEVELS = (None, "VERSION", "WARN", "INFO", "TRACE", "", "warn")
SUBSYSTEMS = (None, "COLL", "^NET", "GRAPH,TUNING", "ALL")
FILES = (None, "site.%h.%p.log")
LOG = """\
n0:1:1 [0] NCCL WARN NET/IB : no device
n0:1:1 [0] NCCL INFO Using network Socket
n0:1:1 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] [send] via NET/Socket/0
"""


def nccl_writes(environment: Mapping[str, str], folder: Path) -> None:
    """What NCCL does with its variables, read from its debug.cc: a level, subsystems of the INFO lines, a file."""
    levels = ("NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE")
    wanted = environment.get("NCCL_DEBUG", "").upper()
    level = levels.index(wanted) if wanted in levels else 0
    subsystems = environment.get("NCCL_DEBUG_SUBSYS", "INIT,BOOTSTRAP,ENV")
    names = {"INIT", "NET", "ENV", "COLL", "GRAPH"} if "ALL" in subsystems else {*subsystems.strip("^").split(",")}
    has_net = ("NET" in names) != subsystems.startswith("^")
    lines = [line for line in LOG.splitlines(keepends=True) if level >= (2 if "WARN" in line else 3 if has_net else 99)]
    if lines and "NCCL_DEBUG_FILE" in environment:
        path = folder / environment["NCCL_DEBUG_FILE"].replace("%h", "n0").replace("%p", "1")
        path.write_text("".join(lines), encoding="utf-8")


@pytest.mark.parametrize(("level", "subsystem", "file"), [*itertools.product(LEVELS, SUBSYSTEMS, FILES)])
def test_the_log_is_found_whatever_the_site_set(
    level: str | None, subsystem: str | None, file: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The channel is in the file that the measurement reads, and no file of the site is written by this worker."""
    site = {"NCCL_DEBUG": level, "NCCL_DEBUG_SUBSYS": subsystem, "NCCL_DEBUG_FILE": file}
    site = {
        name: str(tmp_path / value) if name == "NCCL_DEBUG_FILE" else value for name, value in site.items() if value is not None
    }
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in site.items():
        monkeypatch.setenv(name, value)
    own = tmp_path / "own"
    own.mkdir()
    environment = {**site, **worker_environment(RANK, own, nodes={})}
    nccl_writes(environment, tmp_path)
    found = Path(environment["GPUCLUSTER_NCCL_LOG"]).read_text(encoding="utf-8")
    assert [one.kind for one in parse_nccl_log(found)] == ["NET/Socket"]
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_what_differs_from_the_site_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's values and the workers' values; nothing where the site set nothing, or the same."""
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert overridden_variables() == {}
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert overridden_variables() == {}
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_DEBUG_FILE", "/var/log/nccl.log")
    assert overridden_variables() == {
        "NCCL_DEBUG": {"site": "WARN", "workers": "INFO"},
        "NCCL_DEBUG_FILE": {"site": "/var/log/nccl.log", "workers": "a file of each worker"},
    }


@pytest.mark.parametrize(("level", "lines"), [(None, 0), ("VERSION", 0), ("WARN", 1), ("warn", 1), ("INFO", 3), ("TRACE", 3)])
def test_the_lines_that_the_site_asked_for(
    level: str | None, lines: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings for WARN, all for INFO: what the worker would have printed. Nothing without a log."""
    monkeypatch.delenv("NCCL_DEBUG", raising=False)
    if level is not None:
        monkeypatch.setenv("NCCL_DEBUG", level)
    assert site_log(tmp_path) == ""
    (tmp_path / "nccl.log").write_text(LOG, encoding="utf-8")
    assert site_log(tmp_path) == "".join(LOG.splitlines(keepends=True)[:lines])
