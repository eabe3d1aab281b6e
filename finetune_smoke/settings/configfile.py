"""Settings in a YAML file (``--config FILE``): the fields of Config by name, or the sections of a recipe (recipe_file.py).

The file is untrusted: it must hold plain data only, known keys, and values of the field's type and range. Each message has
file and line. ``text`` writes the settings of a run, from which the same run can be started.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from finetune_smoke.settings import recipe_file
from finetune_smoke.settings.config import Config, InputError, flaw, meant, other_type
from pytest_gpucluster.config import yaml_lines

NAME = "config.yaml"
TYPES = typing.get_type_hints(Config)
HEADER = """\
# The settings of the run that made this folder. To repeat it: python -m finetune_smoke --config THIS_FILE, with
# --output or --checkpoint-dir naming another folder, since nothing is overwritten.
"""


def read(path: Path, *, tell: Callable[[str], None] = lambda _line: None) -> dict[str, object]:
    """The settings in ``path`` by field of Config; raises InputError with file and line for an invalid entry.

    ``tell`` is called with a line for each key of a recipe that means something else here.
    """
    file = str(path)
    document = yaml_lines.read(path, file=file)
    is_recipe = not document.problems and recipe_file.is_one(document.data)
    problems = document.problems or (recipe_file.problems(document) if is_recipe else _problems(document))
    if not problems and is_recipe:
        for remark in recipe_file.remarks(document.data):
            tell(f"{file}: {remark}")
        return recipe_file.settings(document.data)
    if not problems:
        return {str(name): _value(TYPES[str(name)], value) for name, value in document.data.items()}
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    raise InputError(f"{problems[0]}{more}")


def text(config: Config) -> str:
    """``config`` as a file that ``read`` turns into the same settings."""
    lines = [f"{name}: {_written(value)}\n" for name, value in dataclasses.asdict(config).items()]
    return HEADER + "".join(lines)


def _problems(document: yaml_lines.Document) -> tuple[yaml_lines.Problem, ...]:
    found = []
    for name, value in document.data.items():
        wrong = flaw_of(str(name), value)
        if wrong is not None:
            found.append(document.problem((name,), wrong))
    return tuple(found)


def flaw_of(name: str, value: object) -> str | None:
    """What is wrong with ``value`` as the setting ``name``, which may be none; None if it can be used."""
    kind = TYPES.get(name)
    if kind is None:
        known = sorted(field.name for field in dataclasses.fields(Config))
        return f"no such setting: {name}; {meant(name, known)}"
    kinds = typing.get_args(kind) or (kind,)
    if float in kinds:
        kinds = (int, *kinds)
    return flaw(name, value) if type(value) in kinds else other_type(name, value, kinds)


def _value(kind: object, value: object) -> object:
    """``value``, a whole number as a float if the field is a float."""
    return float(value) if type(value) is int and float in (kind, *typing.get_args(kind)) else value


def _written(value: Any) -> str:
    if isinstance(value, str):  # always in quotes, and in ASCII
        return yaml.safe_dump(value, default_style='"', width=float("inf")).rstrip("\n")
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
