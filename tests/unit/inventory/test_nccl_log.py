"""NCCL's log of a process: what was told is kept, and the algorithm is read."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.inventory import nccl_log
from pytest_gpucluster.inventory.nccl_log import choice_of, log_text, own_log, parse_choice

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HEAD = "gpu-node-0:4242:4301 [0] NCCL INFO "
NVLS = f"{HEAD}AllReduce: 1073741824 Bytes -> Algo NVLS proto SIMPLE channel{{Lo..Hi}}={{0..15}}\n"


class Nccl:
    """Writes a log as NCCL does: it reads its settings with the first line after a reset, and begins the file anew."""

    def __init__(self) -> None:
        self._is_reset = True
        self._path, self._subsystems = "", ""

    def reset(self) -> None:
        """As ``ncclResetDebugInit``."""
        self._is_reset = True

    def write(self, line: str, subsystem: str = "INIT") -> None:
        """A line of this subsystem, if it is on."""
        if self._is_reset:
            self._is_reset = False
            self._path, self._subsystems = os.environ["NCCL_DEBUG_FILE"], os.environ["NCCL_DEBUG_SUBSYS"]
            with open(self._path, "w", encoding="utf-8"):  # noqa: PTH123 -- a path of the environment
                pass
        if subsystem in self._subsystems.split(","):
            with open(self._path, "a", encoding="utf-8") as log:  # noqa: PTH123 -- as above
                log.write(line)


@pytest.fixture
def nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """An NCCL that this process has loaded, with a worker's settings."""
    found = Nccl()
    monkeypatch.setenv("GPUCLUSTER_NCCL_LOG", str(tmp_path / "nccl.log"))
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl.log"))
    monkeypatch.setenv("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV")
    monkeypatch.setattr(nccl_log, "_reader_of_settings", lambda: found.reset)
    return found


def launches(nccl: Nccl, line: str = NVLS) -> Callable[[], None]:
    """A collective, of which NCCL tells this."""
    return lambda: nccl.write(line, "TUNING")


def test_the_choice_is_read_and_what_was_told_is_kept(nccl: Nccl, tmp_path: Path) -> None:
    """Before, in between and after: nothing twice, nothing lost, in its order."""
    nccl.write("first\n")
    launches(nccl, "not told\n")()
    assert choice_of(launches(nccl)) == ("NVLS", "SIMPLE")
    assert log_text(own_log()) == f"first\n{NVLS}"
    nccl.write("second\n")
    launches(nccl, "not told\n")()
    assert choice_of(launches(nccl, NVLS.replace("NVLS", "RING"))) == ("RING", "SIMPLE")
    nccl.write("third\n")
    assert log_text(own_log()).split("\n")[::2] == ["first", "second", "third"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["nccl.log", "nccl.log.earlier"]
    nccl_log.remove(tmp_path / "nccl.log")
    assert not list(tmp_path.iterdir())


def test_the_settings_are_restored_where_the_call_fails(nccl: Nccl, tmp_path: Path) -> None:
    """NCCL writes on as before."""

    def fails() -> None:
        raise RuntimeError("no memory")

    nccl.write("first\n")
    with pytest.raises(RuntimeError):
        choice_of(fails)
    assert (os.environ["NCCL_DEBUG_FILE"], os.environ["NCCL_DEBUG_SUBSYS"]) == (str(tmp_path / "nccl.log"), "INIT,NET,ENV")
    launches(nccl, "not told\n")()
    assert "not told" not in log_text(own_log())


def test_nothing_is_told_where_nccl_cannot_be_asked(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call is made all the same: no such function, no variable, no file."""
    called: list[int] = []
    assert choice_of(lambda: called.append(1)) is None  # no file yet
    nccl.write("first\n")
    with monkeypatch.context() as patch:
        patch.delenv("GPUCLUSTER_NCCL_LOG")
        assert (own_log(), log_text(own_log())) == (None, "")
        assert choice_of(lambda: called.append(2)) is None
    monkeypatch.setattr(nccl_log, "_reader_of_settings", lambda: None)
    assert choice_of(lambda: called.append(3)) is None
    assert called == [1, 2, 3]


def test_without_nccl_there_is_no_function() -> None:
    """A library that this process has not loaded is not loaded for this."""
    assert nccl_log._reader_of_settings() is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", None),
        (NVLS, ("NVLS", "SIMPLE")),
        (f"{HEAD}Broadcast: 8 Bytes -> Algo RING proto LL channel{{Lo..Hi}}={{0..0}}\n", ("RING", "LL")),
        (f"{HEAD}AllReduce: 8 Bytes -> Algo NVLS_TREE proto SIMPLE channel{{Lo..Hi}}={{0..3}}\n", ("NVLS_TREE", "SIMPLE")),
        (f"{HEAD}AllReduce: 1048576 Bytes -> Algo 1 proto 2 time 41.2\n", None),
        (NVLS + NVLS.replace("NVLS", "TREE"), ("TREE", "SIMPLE")),
    ],
)  # fmt: skip
def test_a_choice(text: str, expected: tuple[str, str] | None) -> None:
    """The last one with names; older versions of NCCL have numbers."""
    assert parse_choice(text) == expected
