"""The packaged limits as they were released, apart from thresholds.yaml: whoever edits that file is compared with these.

``packaged_limits.json`` beside this file holds all of thresholds.yaml that can change an outcome, and the figures of every
GPU. ``python docs/generate_criteria.py`` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.config.yaml_lines import Document, read
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds.specs import GpuSpec, load_specs

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PATH = Path(__file__).with_name("packaged_limits.json")
WORDS = ("criterion", "why", "source", "bound_waived")
"""Keys of an entry whose text changes no outcome."""
NOT_FIGURES = {"title", "source", "seen"}


def read_lock() -> tuple[Document, Mapping[str, GpuSpec]]:
    """The released limits in the shape of a thresholds file, and the figures of each GPU by its id.

    Raises:
        ConfigurationError: the file is not there, or damaged.
    """
    try:
        found = json.loads(PATH.read_text(encoding="utf-8"), object_hook=with_sizes)
        specs = {name: GpuSpec(id=name, **figures) for name, figures in found.pop("specs").items()}
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{PATH} cannot be read ({error}); install the package again") from None
    return Document(file=PATH.name, data=found), specs


def locked_text(thresholds: Path) -> str:
    """What ``packaged_limits.json`` holds for a packaged thresholds file."""
    data = read(thresholds, file=thresholds.name).data
    specs = {name: spec.model_dump(mode="json", exclude={"id"}) for name, spec in load_specs().items()}
    return json.dumps({**_without_words(data), "specs": specs}, indent=1) + "\n"


def changed_figures(gpu_names: Sequence[str], specs: Mapping[str, GpuSpec]) -> list[str]:
    """The GPUs, by NVML's names, that ``specs`` describe otherwise than the released figures do.

    A GPU that was not known at the release is not named: nothing was promised for it.
    """
    _, released = read_lock()
    return [f"figures of {name}" for name in sorted(set(gpu_names)) if _of(name, released) not in (None, _of(name, specs))]


def with_sizes(mapping: dict[str, Any]) -> dict[str | int, Any]:
    """A mapping as YAML has it: JSON makes text of the sizes in a table of limits."""
    return {int(key) if key.isdecimal() else key: value for key, value in mapping.items()}


def _of(name: str, specs: Mapping[str, GpuSpec]) -> dict[str, Any] | None:
    found = next((spec for spec in specs.values() if name in spec.names), None)
    return None if found is None else found.model_dump(exclude=NOT_FIGURES)


def _without_words(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {key: "-" if key in WORDS else _without_words(value) for key, value in data.items()}
