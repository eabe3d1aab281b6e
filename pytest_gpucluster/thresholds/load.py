"""Read and check a whole thresholds file, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_gpucluster.config.schema_errors import listed
from pytest_gpucluster.config.yaml_lines import Problem
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds.file import ThresholdsFile
from pytest_gpucluster.thresholds.layers import read_source
from pytest_gpucluster.thresholds.lint import problems_of
from pytest_gpucluster.thresholds.schema import CriterionEntry

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.thresholds.layers import SourceFile


def load(path: Path | None) -> ThresholdsFile:
    """Read and check a thresholds file; None stands for the packaged one.

    Raises:
        ConfigurationError: one line per problem, ``file:line`` first, at most 10 of them.
    """
    file, problems = check(path)
    if file is None or problems:
        raise ConfigurationError(listed(problems))
    return file


def check(path: Path | None) -> tuple[ThresholdsFile | None, list[Problem]]:
    """Read a file once and find everything that is wrong with it; None stands for the packaged one.

    Returns:
        The file, None where its shape is wrong outside of entries; and its problems, in its order. An entry of the wrong
        shape is left out, and checked no further.
    """
    source = read_source(path)
    file, problems = ThresholdsFile.validate(source)
    found = problems if file is None else problems + problems_of(file)
    # Problems of this file come first: they may be the cause of many in the packaged one.
    in_order = sorted(set(found), key=lambda one: (one.file != source.document.file, one.file, one.line, one.message))
    return file, [*source.refused, *_forgotten_extends(source, in_order), *in_order]


def _forgotten_extends(source: SourceFile, problems: list[Problem]) -> list[Problem]:
    """A file that says less than it must, and has ``extends`` nowhere: it may be meant as an overlay."""
    data = source.document.data
    if not problems or not data or "extends" in data or source.base is not None:
        return []
    packaged = read_source(None)
    required = {name for name, one in CriterionEntry.model_fields.items() if one.is_required()}
    known, entries = packaged.document.data.get("criteria", {}), data.get("criteria")
    shared = [entries[key] for key in entries if key in known] if isinstance(entries, dict) else []
    is_short = "profiles" not in data or any(isinstance(one, dict) and not required <= one.keys() for one in shared)
    if not is_short or source.path.absolute() == packaged.path.absolute():
        return []
    text = "did you forget `extends: packaged`? Without it a file stands alone and needs all that follows."
    return [Problem(file=source.document.file, line=1, message=text)]
