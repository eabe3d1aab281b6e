"""Settings in a YAML file (``--config FILE``): the fields of Config by name, or the sections of a recipe.

The file is untrusted: it must hold plain data only, known keys, and values of the field's type and range. Each message has
file and line. A recipe (``training_config.yaml``) is taken as it is: each key stands for a setting of ours, or asks for what
this program always does; then any other value is refused in a line.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from finetune_smoke.settings.config import TYPES, Config, InputError, flaw
from pytest_gpucluster.config import yaml_lines

NAME = "config.yaml"
HEADER = """\
# The settings of the run that made this folder. To repeat it: python -m finetune_smoke --config THIS_FILE, with
# --output or --checkpoint-dir naming another folder, since nothing is overwritten.
"""

RECIPE: dict[str, dict[str, str]] = {
    "model": {"name": "model", "torch_dtype": ""},
    "lora": {"r": "lora_rank", "alpha": "lora_alpha", "dropout": "lora_dropout", "target_modules": "target_modules"},
    "training": {
        "per_device_train_batch_size": "rows",
        "gradient_accumulation_steps": "accumulation",
        "learning_rate": "learning_rate",
        "max_steps": "steps",
        "warmup_steps": "warmup_steps",
        "bf16": "",
        "gradient_checkpointing": "gradient_checkpointing",
        "dataloader_num_workers": "loader_workers",
        "prefetch_factor": "prefetch",
        "output_dir": "checkpoint_dir",
        "save_steps": "checkpoint_every",
    },
    "data": {"dataset_name": "dataset", "max_seq_length": "row_tokens"},
    "distributed": {"deepspeed": ""},
}
"""The sections of a recipe, and the setting that each key stands for; none for the keys of :data:`FIXED`."""

FIXED: dict[str, tuple[tuple[object, ...], str]] = {
    "torch_dtype": (("bfloat16", "bf16", "auto"), "the base is bfloat16 on a GPU, and nothing else"),
    "bf16": ((True,), "products are bfloat16 on a GPU, and nothing else"),
    "deepspeed": ((None,), "there is no DeepSpeed here; --strategy fsdp shards the base by FSDP2: write null"),
}
"""Keys for what this program always does: their only values, and what is said of any other."""

ELSEWHERE = {
    "torch_dtype": "the base alone: adapters are float32, and on a CPU all is",
    "bf16": "products on a GPU: on a CPU all is float32",
    "dataloader_num_workers": "threads of each rank",
    "prefetch_factor": "steps ahead, of all threads together",
    "output_dir": "the folder of checkpoints and of final/",
}
"""Keys that do not do here what they do elsewhere."""

WANTED = {
    bool: "true or false", int: "a whole number", float: "a number", list: "a list of names", type(None): "null",
    str: "text (in quotes if it looks like a number)",
}  # fmt: skip


def read(path: Path, *, tell: Callable[[str], None] = lambda _line: None) -> dict[str, object]:
    """The settings in ``path`` by field of Config; raises InputError with file and line for an invalid entry.

    ``tell`` is called with a line for each key of a recipe that means something else here.
    """
    document = yaml_lines.read(path, file=str(path))
    is_recipe = not document.problems and _is_recipe(document.data)
    problems = document.problems or [*_problems(document, is_recipe=is_recipe)]
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise InputError(f"{problems[0]}{more}")
    if not is_recipe:
        return {str(name): _converted(str(name), value) for name, value in document.data.items()}
    given: dict[str, object] = {}
    for section, keys in document.data.items():
        for name, value in (keys or {}).items():
            if name in ELSEWHERE:
                tell(f"{path}: {section}.{name} means {ELSEWHERE[name]}")
            if setting := RECIPE[str(section)][name]:
                given[setting] = _converted(setting, value)
    return {**given, "rows_shared": False} if "rows" in given else given  # rows are those of each rank, as ``per_device`` says


def text(config: Config) -> str:
    """``config`` as a file that ``read`` turns into the same settings."""
    lines = [f"{name}: {_written(value)}\n" for name, value in dataclasses.asdict(config).items()]
    return HEADER + "".join(lines)


def flaw_of(name: str, value: object) -> str | None:
    """What is wrong with ``value`` as the setting ``name``, which may be none; None if it can be used."""
    if name not in TYPES:
        return f"no such setting: {name}; {_meant(name, sorted(TYPES))}"
    kinds = _kinds(name)
    return flaw(name, value) if type(value) in kinds else _other_type(name, value, kinds)


def _problems(document: yaml_lines.Document, *, is_recipe: bool) -> Iterator[yaml_lines.Problem]:
    for name, value in document.data.items():
        if wrong := (_section_flaw if is_recipe else flaw_of)(str(name), value):
            yield document.problem((name,), wrong)
        elif is_recipe:
            for key, inner in (value or {}).items():
                if wrong := _key_flaw(str(name), str(key), inner):
                    yield document.problem((name, key), wrong)


def _kinds(setting: str) -> tuple[type, ...]:
    """What a file may give a setting: where a number is wanted, also a whole one."""
    kinds = typing.get_args(TYPES[setting]) or (TYPES[setting],)
    return (int, *kinds) if float in kinds else kinds


def _converted(setting: str, value: Any) -> object:
    """``value`` as the setting has it: a whole number as a float if that is one, a list of names with commas between."""
    if isinstance(value, list):
        return ",".join(value)
    return float(value) if type(value) is int and float in _kinds(setting) else value


def _written(value: Any) -> str:
    if isinstance(value, str):  # always in quotes, and in ASCII
        return yaml.safe_dump(value, default_style='"', width=float("inf")).rstrip("\n")
    return json.dumps(value) if value is None or isinstance(value, bool) else repr(value)


def _meant(name: str, known: Sequence[str]) -> str:
    """The known name that a wrong one is near to, as a question; else all of them."""
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _shown(value: object) -> str:
    return "nothing" if value is None else repr(value)[:60]


def _other_type(name: str, value: object, kinds: Sequence[type]) -> str:
    """The message that ``value``, under ``name``, is none of ``kinds``."""
    wanted = " or ".join(WANTED[kind] for kind in kinds if not (kind is int and float in kinds))
    try:
        is_number = isinstance(value, str) and not {int, float}.isdisjoint(kinds) and math.isfinite(float(value))
    except ValueError:
        is_number = False
    return f"{name} is {_shown(value)}: {wanted} is needed" + (": write it without quotes" if is_number else "")


def _is_recipe(data: dict[Any, Any]) -> bool:
    """Whether a file's data has sections: no setting of ours is a mapping, and none but ``model`` is named as a section."""
    return any(isinstance(value, dict) for value in data.values()) or any(name in data for name in RECIPE if name != "model")


def _section_flaw(section: str, keys: object) -> str | None:
    """What is wrong with a section as a whole; one without keys is as if it were not there."""
    if section not in RECIPE:
        near = _meant(section, list(RECIPE))
        guess = f"; {near}" if near.endswith("?") else ""
        return f"no such section: {section}; a recipe has {', '.join(RECIPE)}, each with its keys{guess}"
    return None if keys is None or isinstance(keys, dict) else f"{section} is {keys!r:.60}: keys with values are needed"


def _key_flaw(section: str, name: str, value: object) -> str | None:
    known = RECIPE[section]
    if name not in known:
        return f"no such key: {section}.{name}; {_meant(name, list(known))}"
    if name in FIXED:
        possible, refusal = FIXED[name]
        is_one = any(type(value) is type(one) and value == one for one in possible)
        return None if is_one else f"{section}.{name} is {_shown(value)}: {refusal}"
    kinds = tuple(kind for kind in _kinds(known[name]) if kind is not type(None))
    if name == "target_modules":
        kinds = (list, *kinds)
    if type(value) not in kinds or (isinstance(value, list) and not _are_names(value)):
        return _other_type(f"{section}.{name}", value, kinds)
    return flaw(known[name], _converted(known[name], value))


def _are_names(items: list[object]) -> bool:
    return bool(items) and all(isinstance(item, str) and item.strip() for item in items)
