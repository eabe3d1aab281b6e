"""Read and check a whole thresholds file, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.config.schema_errors import listed
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds import lint

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.thresholds.file import ThresholdsFile


def load(path: Path | None) -> ThresholdsFile:
    """Read and check a thresholds file; None stands for the packaged one.

    Raises:
        ConfigurationError: one line per problem, ``file:line`` first, at most 10 of them.
    """
    file, problems = lint.check(path)
    if file is None or problems:
        raise ConfigurationError(listed(problems))
    return file
