"""The sections in which training recipes are written: model, lora, training, data, distributed.

Such a file (``training_config.yaml``) is taken as it is. Each key stands for a setting of ours; a key that asks for what this
program always does is accepted with the value that says so, and any other value is refused in a line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from finetune_smoke.settings.config import flaw, meant, other_type

if TYPE_CHECKING:
    from pytest_gpucluster.config import yaml_lines

SECTIONS = ("model", "lora", "training", "data", "distributed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What a key may be (``kinds``) and the ``setting`` it stands for; ``fixed``: the only values, where it is none.

    ``means`` says where a key does not do here what it does elsewhere.
    """

    kinds: tuple[type, ...]
    setting: str | None = None
    fixed: tuple[object, ...] = ()
    refusal: str = ""
    means: str = ""
    convert: Callable[[Any], object] = lambda value: value


def _modules(names: Any) -> str:
    return names if isinstance(names, str) else ",".join(names)


KEYS: dict[tuple[str, str], Key] = {
    ("model", "name"): Key(kinds=(str,), setting="model"),
    ("model", "torch_dtype"): Key(
        kinds=(str,),
        fixed=("bfloat16", "bf16", "auto"),
        refusal="the base is bfloat16 on a GPU, and nothing else",
        means="the base alone: adapters are float32, and on a CPU all is",
    ),
    ("lora", "r"): Key(kinds=(int,), setting="lora_rank"),
    ("lora", "alpha"): Key(kinds=(int,), setting="lora_alpha"),
    ("lora", "dropout"): Key(kinds=(float, int), setting="lora_dropout", convert=float),
    ("lora", "target_modules"): Key(kinds=(list, str), setting="target_modules", convert=_modules),
    ("training", "per_device_train_batch_size"): Key(kinds=(int,), setting="rows"),
    ("training", "gradient_accumulation_steps"): Key(kinds=(int,), setting="accumulation"),
    ("training", "learning_rate"): Key(kinds=(float, int), setting="learning_rate", convert=float),
    ("training", "max_steps"): Key(kinds=(int,), setting="steps"),
    ("training", "warmup_steps"): Key(kinds=(int,), setting="warmup_steps"),
    ("training", "bf16"): Key(
        kinds=(bool,),
        fixed=(True,),
        refusal="products are bfloat16 on a GPU, and nothing else",
        means="products on a GPU: on a CPU all is float32",
    ),
    ("training", "gradient_checkpointing"): Key(kinds=(bool,), setting="gradient_checkpointing"),
    ("training", "dataloader_num_workers"): Key(kinds=(int,), setting="loader_workers", means="threads of each rank"),
    ("training", "prefetch_factor"): Key(kinds=(int,), setting="prefetch", means="steps ahead, of all threads together"),
    ("training", "output_dir"): Key(kinds=(str,), setting="checkpoint_dir", means="the folder of checkpoints and of final/"),
    ("training", "save_steps"): Key(kinds=(int,), setting="checkpoint_every"),
    ("data", "dataset_name"): Key(kinds=(str,), setting="dataset"),
    ("data", "max_seq_length"): Key(kinds=(int,), setting="row_tokens"),
    ("distributed", "deepspeed"): Key(
        kinds=(type(None),), refusal="there is no DeepSpeed here; --strategy fsdp shards the base by FSDP2: write null"
    ),
}


def is_one(data: dict[Any, Any]) -> bool:
    """Whether a file's data has sections: no setting of ours is a mapping, and none but ``model`` is named as a section."""
    return any(isinstance(value, dict) for value in data.values()) or any(name in data for name in SECTIONS if name != "model")


def problems(document: yaml_lines.Document) -> tuple[yaml_lines.Problem, ...]:
    """What is wrong in the file, by line."""
    found = []
    for section, keys in document.data.items():
        wrong = _section_flaw(str(section), keys)
        if wrong is not None:
            found.append(document.problem((section,), wrong))
            continue
        for name, value in (keys or {}).items():
            wrong = _flaw(str(section), str(name), value)
            if wrong is not None:
                found.append(document.problem((section, name), wrong))
    return tuple(found)


def _section_flaw(section: str, keys: object) -> str | None:
    """What is wrong with a section as a whole; one without keys is as if it were not there."""
    if section not in SECTIONS:
        near = meant(section, SECTIONS)
        guess = f"; {near}" if near.endswith("?") else ""
        return f"no such section: {section}; a recipe has {', '.join(SECTIONS)}, each with its keys{guess}"
    return None if keys is None or isinstance(keys, dict) else f"{section} is {keys!r:.60}: keys with values are needed"


def settings(data: dict[Any, Any]) -> dict[str, object]:
    """The settings that the sections stand for; rows are those of each rank, as ``per_device`` says."""
    given: dict[str, object] = {}
    for section, keys in data.items():
        for name, value in (keys or {}).items():
            key = KEYS[str(section), str(name)]
            if key.setting is not None:
                given[key.setting] = key.convert(value)
    return {**given, "rows_shared": False} if "rows" in given else given


def remarks(data: dict[Any, Any]) -> list[str]:
    """A line for each key of the file that means something else here."""
    named = {(str(section), str(name)) for section, keys in data.items() for name in keys or {}}
    return [
        f"{section}.{name} means {key.means}" for (section, name), key in KEYS.items() if key.means and (section, name) in named
    ]


def _flaw(section: str, name: str, value: object) -> str | None:
    key = KEYS.get((section, name))
    if key is None:
        known = [one for of, one in KEYS if of == section]
        return f"no such key: {section}.{name}; {meant(name, known)}"
    if key.refusal and (type(value) not in key.kinds or (key.fixed and value not in key.fixed)):
        return f"{section}.{name} is {'nothing' if value is None else repr(value)[:60]}: {key.refusal}"
    if type(value) not in key.kinds or (isinstance(value, list) and not _names(value)):
        return other_type(f"{section}.{name}", value, key.kinds)
    return None if key.setting is None else flaw(key.setting, key.convert(value))


def _names(items: list[object]) -> bool:
    return bool(items) and all(isinstance(item, str) and item.strip() for item in items)
