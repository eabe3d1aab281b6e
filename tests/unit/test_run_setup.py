"""Which versions of torch a run accepts."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from pytest_gpucluster import run_setup
from pytest_gpucluster.errors import ConfigurationError
from tests.support import REPOSITORY


@pytest.mark.parametrize("version", ["2.7.0", "2.13.0+cu130", "3.0a1", "10.0"])
def test_torch_new_enough(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Compared as numbers: 2.13 is after 2.7."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    run_setup.require_torch()


@pytest.mark.parametrize("version", ["2.6.0", "1.13.0+cu117", "2.0"])
def test_torch_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Refused with the version that is there and the one that is needed."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ConfigurationError, match=rf"torch {version.replace('+', '.')} is too old: at least 2\.7"):
        run_setup.require_torch()


def test_oldest_torch_is_the_one_that_is_installed_at_least() -> None:
    """Said twice, because an older one may come in past pip; both must say the same."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={".".join(map(str, run_setup.OLDEST_TORCH))}",' in text


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed is said as such."""

    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ConfigurationError, match="torch is not installed"):
        run_setup.require_torch()
