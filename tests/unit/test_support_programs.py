"""tests/support/programs.py: a program that is installed and does not work is not used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.programs import why_not_working

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_a_program_that_works() -> None:
    """Its exit code is 0."""
    assert why_not_working("sh", "-c", "exit 0") is None


def test_a_program_that_is_not_there() -> None:
    """The reason names it."""
    assert why_not_working("no-such-program-x", "--version") == "no-such-program-x is not installed here"


def test_a_program_that_is_installed_and_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm's scontrol without a slurm.conf: the reason has its exit code and its last words."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'fatal: Could not establish a configuration source' >&2\nexit 1\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert why_not_working("scontrol", "show", "hostnames", "a[1-2]") == (
        "scontrol show hostnames a[1-2] does not work here (exit code 1): fatal: Could not establish a configuration source"
    )


def test_a_program_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no program."""
    (tmp_path / "dcgmi").write_bytes(b"\x7fELF")
    (tmp_path / "dcgmi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    reason = why_not_working("dcgmi", "--version")
    assert reason is not None
    assert reason.startswith("dcgmi does not work here")
