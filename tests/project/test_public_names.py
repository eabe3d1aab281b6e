"""What things outside rely on: options, public names, and that having us installed costs nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import pytest_gpucluster
from pytest_gpucluster.config.settings import OPTIONS as KNOWN
from pytest_gpucluster.plugin import fixtures
from tests.support import REPOSITORY

OPTIONS = {
    "--gpucluster",
    "--gpucluster-thresholds",
    "--gpucluster-profile",
    "--gpucluster-expect",
    "--gpucluster-level",
    "--gpucluster-results",
    "--gpucluster-gate",
    "--gpucluster-inline",
    "--gpucluster-only",
    "--gpucluster-junit",
    "--gpucluster-junit-strict",
    "--gpucluster-audit",
    "--gpucluster-selftest",
    "--gpucluster-summary",
    "--gpucluster-metrics",
    "--gpucluster-termination-message",
}
NAMES = (
    "Blame", "Cluster", "Finding", "GpuLocalizer", "MeasurementError", "NodeLocalizer", "NotAvailable", "Place", "Repeats",
    "Results", "SoakWork", "measurement",
)  # fmt: skip
MODULES = ("agreement", "health", "localization", "scaling", "siblings")
HEAVY = ("torch", "pydantic", "rich", "pynvml", "yaml", "numpy", "transformers", "peft", "junit_xml", "jinja2")


def python(*arguments: str) -> str:
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_options(tmp_path: Path) -> None:
    """``pytest --help`` shows exactly the options of the contract; a new one is a decision."""
    installed = any(point.value == "pytest_gpucluster.plugin" for point in metadata.entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "pytest_gpucluster.plugin"]
    shown = python("-m", "pytest", *plugin, "--rootdir", str(tmp_path), "--help")
    assert set(re.findall(r"--gpucluster[a-z-]*", shown)) == OPTIONS == {option.name for option in KNOWN}
    assert re.search(r"^ *gpucluster \(bool\)", shown, re.MULTILINE)


def test_public_names() -> None:
    """And each can be imported."""
    assert sorted(pytest_gpucluster.__all__) == sorted([*NAMES, *MODULES])
    for name in NAMES:
        assert getattr(pytest_gpucluster, name).__name__ == name
    for name in MODULES:
        assert getattr(pytest_gpucluster, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="no attribute 'Clutser'"):
        pytest_gpucluster.Clutser  # noqa: B018 -- reading it is the test


def test_no_module_hides_a_fixture() -> None:
    """Importing ``plugin/NAME.py`` makes NAME an attribute of the package, in place of a fixture of that name."""
    modules = {path.stem for path in Path(str(fixtures.__file__)).parent.iterdir()}
    assert modules & set(vars(fixtures)) == set()


def test_importing_the_plugin_is_light() -> None:
    """Every project in this environment imports it with pytest: nothing heavy comes along."""
    program = f"import sys, pytest_gpucluster.plugin; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert python("-c", program).strip() == "[]"


def test_public_names_are_light_too() -> None:
    """A test file that imports MeasurementError, as the criteria do, loads no torch in the pytest process."""
    program = "import sys; from pytest_gpucluster import Cluster, MeasurementError, Place; print('torch' in sys.modules)"
    assert python("-c", program).strip() == "False"
