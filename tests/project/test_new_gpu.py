"""docs/how-to/new-gpu.md, followed word by word in a copy of the package."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.thresholds import released
from tests.project.test_docs import runnable_blocks
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from pathlib import Path

PAGE = REPOSITORY / "docs" / "how-to" / "new-gpu.md"
SPEC = "pytest_gpucluster/thresholds/specs/a800-sxm.yaml"


def followed(folder: Path, *, change: tuple[str, str] = ("", "")) -> list[subprocess.CompletedProcess[str]]:
    """Write the files of the page below a copy, one text of them changed, and run its commands there."""
    blocks = runnable_blocks(PAGE.read_text(encoding="utf-8"))
    package, ignore = folder / "pytest_gpucluster", shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "pytest_gpucluster", package, ignore=ignore)
    shutil.copy(REPOSITORY / "thresholds.yaml", folder)
    text = released.released_text(released.packaged_files(REPOSITORY / "thresholds.yaml"))
    (package / "thresholds" / released.PATH.name).write_text(text, encoding="utf-8")  # as the wheel has it
    for name, text in blocks.items():
        if name != "sh":
            (folder / name).write_text(text.replace(*change) if change[0] else text, encoding="utf-8")
    cli = [sys.executable, "-m", "pytest_gpucluster.cli"]
    unmeasured = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}  # a copy of ours
    variables = {**unmeasured, "PYTHONPATH": str(folder), "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    lines = [shlex.split(line)[1:] for line in blocks["sh"].splitlines()]
    found = []
    for line in lines:
        ran = subprocess.run([*cli, *line], cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=120)
        found.append(ran)
    return found


def test_the_page_adds_a_gpu(tmp_path: Path) -> None:
    """Its files have no problem, and the limit is the stated share of the sheet."""
    lint, shown = followed(tmp_path)
    assert (lint.returncode, shown.returncode) == (0, 0), lint.stdout + lint.stderr + shown.stderr
    assert "no problems" in lint.stdout
    assert "a800-sxm" in shown.stdout
    assert "0.56 of gpu.bf16_tflops" in shown.stdout


@pytest.mark.parametrize("change", [("nvlink_links: 8", "nvlink_link: 8"), ("hbm_tb_s: 2.04", "hbm_tb_s: 2.04 TB/s")])
def test_the_page_finds_a_mistake(tmp_path: Path, change: tuple[str, str]) -> None:
    """A figure of the wrong name or kind is named with its line."""
    lint, _ = followed(tmp_path, change=change)
    assert lint.returncode != 0
    assert "specs/a800-sxm.yaml:" in lint.stdout + lint.stderr
