"""The shape of thresholds.yaml: its keys, their types and their choices. Also the source of its JSON schema."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Collection, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetPydanticSchema,
    JsonValue,
    StringConstraints,
    ValidationError,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from pytest_gpucluster.config.schema_errors import FileSection, described, did_you_mean, listed, shape_problems
from pytest_gpucluster.config.settings import MOST_EXPECTED, SOAK_S
from pytest_gpucluster.config.yaml_lines import Document, KeyPath, Problem, read
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.grouping import grouped

PartOf = Callable[[KeyPath], FileSection]

Unit = Literal[
    "TFLOPS",
    "TOPS",
    "TB/s",
    "GB/s",
    "us",
    "ms",
    "s",
    "%",
    "ratio",
    "GiB",
    "W",
    "C",
    "MHz",
    "GPUs",
    "nodes",
    "errors",
    "rows",
    "reasons",
    "nats/token",
    "tokens/s/GPU",
    "files/s",
    "IOPS",
    "links",
    "count",
]
Model = TypeVar("Model", bound=BaseModel)
Level = Literal["quick", "standard", "soak"]
Fabric = Literal["infiniband", "roce", "efa", "tcpx", "tcpxo", "nvlink", "sockets", "none"]
Text = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]


def expecting(words: str) -> WrapValidator:
    """Say what was expected in our words instead of one complaint for each member of a union."""

    def validate(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            raise PydanticCustomError("expected", "{words}", {"words": words}) from error

    return WrapValidator(validate)


def _validate_as_written(value: Any, handler: Any) -> Any:
    handler(value)
    return value


def _with_a_word(text: str) -> str:
    """Refuse a text without a letter or digit; the number of a ticket is a reason."""
    if not any(map(str.isalnum, text)):
        raise PydanticCustomError("expected", "{words}", {"words": "text with a word in it"})
    return text


Words = Annotated[Text, AfterValidator(_with_a_word)]
_AS_WRITTEN = WrapValidator(_validate_as_written)
"""A whole number stays one, so that messages show it as the file has it."""
Form = Annotated[Literal[1], WrapValidator(lambda value, handler: handler(value if type(value) is int else described(value)))]
"""The number of the form of a file, 1. Neither true nor 1.0, which Python takes for equal."""
_Size = Annotated[int, Field(ge=1)]
_Number = Annotated[float, _AS_WRITTEN]
Seconds = Annotated[float, Field(gt=0), _AS_WRITTEN]
Numbers = Annotated[
    _Number | Annotated[dict[_Size | Literal["any"], _Number], Field(min_length=1)],
    expecting("a number or a table of numbers by GPUs in the group, such as {2: 310, 8: 400, any: 300}"),
]
Shapes = Annotated[
    dict[Annotated[str, StringConstraints(pattern=r"^[1-9]\d*x[1-9]\d*$")], _Number],
    Field(min_length=1),
    expecting("a table of numbers by nodes x GPUs of a node, such as {2x8: 350}"),
]
Count = Annotated[int, Field(ge=1), expecting("a whole number above 0")]
_UP_TO_NODES, _UP_TO_GPUS = (f"a whole number from 1 to {MOST_EXPECTED[name]}" for name in ("nodes", "gpus_per_node"))
_Nodes = Annotated[int, Field(ge=1, le=MOST_EXPECTED["nodes"])]
_Gpus = Annotated[int, Field(ge=1, le=MOST_EXPECTED["gpus_per_node"])]
_Plain = Annotated[Any, GetPydanticSchema(lambda _type, handler: handler(JsonValue))]
_SharedPath = Annotated[str, StringConstraints(pattern=r"^/[^\x00]*[^/\x00][^\x00]*$")]
SharedPaths = Annotated[list[_SharedPath], expecting("a list of absolute paths of folders, such as [/mnt/shared]")]
_Bound = Annotated[_Number | Text, expecting("a number in the entry's unit, or a figure such as gpu.bf16_tflops")]
Recipe = Annotated[dict[str, _Plain], expecting("a mapping of plain data with text keys")]


def _without_default(field: dict[str, Any]) -> None:
    field.pop("default", None)


_LEFT_OUT: Any = Field(default=None, json_schema_extra=_without_default)
"""For keys that may be left out, but not be null."""


class _StrictModel(BaseModel):
    """Known keys only, and no conversion of types."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    def written(self) -> dict[str, Any]:
        """The keys that the file has, with their values; no defaults."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: value.written() if isinstance(value, _StrictModel) else value for name, value in values.items()}


class ClusterSection(_StrictModel):
    """``cluster:``."""

    name: Text | None = None
    nodes: Annotated[Literal["auto"] | _Nodes, expecting(f"'auto' or {_UP_TO_NODES}")] = "auto"
    gpus_per_node: Annotated[Literal["auto"] | _Gpus, expecting(f"'auto' or {_UP_TO_GPUS}")] = "auto"
    shared_paths: SharedPaths = []
    kernel_log: Literal["required", "optional"] = "optional"
    rails: Literal["measured", "skipped"] = "skipped"


class ProfileTerms(_StrictModel):
    """What one of ``profiles:`` says of a kind of cluster."""

    gpu: Text | None = None
    inherits: Text | None = None
    accept_at: Level = "standard"
    accept_soak_s: Seconds = SOAK_S
    fabric: Fabric = "none"
    rehearsal: bool = False
    nodes: Annotated[_Nodes, expecting(_UP_TO_NODES)] | None = None
    gpus_per_node: Annotated[_Gpus, expecting(_UP_TO_GPUS)] | None = None
    nic_gb_s_per_gpu: Annotated[float, Field(gt=0), _AS_WRITTEN] | None = None
    nodes_per_domain: Count = 1


class Needs(_StrictModel):
    """``needs:`` of an entry: what has to be there, or the criterion is skipped by rule."""

    places: Count = 1
    nodes: Count = 1
    gpus_per_node: Count = 1
    domains: Annotated[int, Field(ge=0), expecting("a whole number, at least 0")] = 0
    shared_paths: bool = False
    kernel_log: bool = False
    rails: bool = False
    slurm: bool = False
    program: Text | None = None
    root: bool = False
    error_counts: bool = False
    hardware: Text | None = None


class _Keys(_StrictModel):
    """What an entry and an override of it share."""

    above: Numbers = _LEFT_OUT
    below: Numbers = _LEFT_OUT
    min: Numbers = _LEFT_OUT
    max: Numbers = _LEFT_OUT
    of: Text = _LEFT_OUT
    shapes: Shapes = _LEFT_OUT
    level: Level = "standard"
    severity: Literal["required", "advisory"] = "required"
    recipe: Recipe = {}
    needs: Needs = Needs()
    fabrics: Annotated[list[Fabric], Field(min_length=1)] | None = None
    requires: Text | None = None
    noise: Annotated[float, Field(gt=0, lt=1), _AS_WRITTEN] | None = None
    stalls: Annotated[float, Field(ge=0, lt=1), _AS_WRITTEN] | None = None
    deadline_s: Seconds | None = None
    takes_s: Annotated[float, Field(gt=0, le=86400), _AS_WRITTEN] | None = None
    bound: _Bound | None = None
    bound_waived: Text | None = None


class Override(_Keys):
    """One of an entry's ``profiles:``."""

    unit: Unit = _LEFT_OUT
    skip: Words | None = None
    why: Text = _LEFT_OUT
    source: Text = _LEFT_OUT


class ProfileRule(Override):
    """One of a profile's ``rules:``: an override for every entry whose name is ``for`` (``*`` stands for any text)."""

    for_: Annotated[list[Text], Field(alias="for", min_length=1)]

    def written(self) -> dict[str, Any]:
        """What the rule says of each of its entries."""
        return {name: value for name, value in super().written().items() if name != "for_"}

    def names(self, key: str) -> bool:
        """Whether the rule is for an entry."""
        return _pattern(*self.for_).fullmatch(key) is not None

    def unused_names(self, keys: Collection[str]) -> list[str]:
        """The names that are those of no entry."""
        return [one for one in self.for_ if not any(map(_pattern(one).fullmatch, keys))]


@functools.cache
def _pattern(*names: str) -> re.Pattern[str]:
    """What matches each of these names, ``*`` for any text: 27,000 keys are compared at each start."""
    return re.compile("|".join(".*".join(map(re.escape, name.split("*"))) for name in names))


class ProfileEntry(ProfileTerms):
    """One of ``profiles:``."""

    rules: dict[str, ProfileRule] = {}


class EntryKeys(_Keys):
    """What an entry says of its criterion, whatever the profile."""

    criterion: Text
    per: Literal["gpu", "node", "cluster"] = "gpu"
    measured_with: Text = _LEFT_OUT
    ids: Annotated[list[Text], expecting("a list of texts, such as [BM01-005]")] = []
    unit: Unit
    why: Text
    source: Text


class CriterionEntry(EntryKeys):
    """One of ``criteria:``."""

    profiles: dict[str, Override] = {}


NOT_DATED = "not dated"


class KnownFault(_StrictModel):
    """A fault of versions of a component: ``fixed`` are the first ones without it, of each branch; ``since`` the first with it.

    ``machine``, ``flavour``, ``algorithm`` and ``nodes`` say where it counts: on these processors, in kernels of this flavour,
    where NCCL chooses this algorithm, from so many nodes on.
    """

    fixed: Annotated[list[Text], Field(min_length=1), expecting("a list of texts, such as ['1.17.8']")]
    since: Text | None = None
    older: Literal["failure", "remark"] = "failure"
    fault: Text
    source: Text
    date: Text = NOT_DATED
    machine: Text | None = None
    flavour: Text | None = None
    algorithm: Text | None = None
    nodes: Count = 1


class Versions(_StrictModel):
    """``versions:``, and the packaged ``known_versions.yaml``: the faults of each component; a site's replace the packaged."""

    driver: list[KnownFault] = []
    cuda: list[KnownFault] = []
    cuda_toolkit: list[KnownFault] = []
    nccl: list[KnownFault] = []
    nic_firmware: list[KnownFault] = []
    nvswitch: list[KnownFault] = []
    kernel: list[KnownFault] = []
    runc: list[KnownFault] = []
    docker: list[KnownFault] = []
    container_toolkit: list[KnownFault] = []
    ofed: list[KnownFault] = []


class File(_StrictModel):
    """A whole file, after ``extends`` has been followed."""

    model_config = ConfigDict(title="thresholds.yaml of pytest-gpucluster")

    schema_: Annotated[Form, Field(alias="schema")]
    extends: Literal["packaged"] | None = None
    cluster: ClusterSection = ClusterSection()
    profiles: Annotated[dict[str, ProfileEntry], Field(min_length=1)]
    criteria: dict[str, CriterionEntry] = {}
    versions: Versions = Versions()


_TOP_KEYS = ("schema", "extends", "cluster", "profiles", "criteria", "versions")


def validate(document: Document, *, packaged: Collection[str] = ()) -> tuple[File | None, list[Problem]]:
    """Validate the shape of a file: the content, and what is wrong with it.

    Entries of the wrong shape are left out of the content. Other faults of shape leave no content. ``packaged`` are the
    criteria of the file that an overlay extends; empty for a file that stands alone.
    """
    if document.problems:
        return None, list(document.problems)
    try:
        return File.model_validate(document.data), []
    except ValidationError as error:
        errors = error.errors()
    unknown = _unknown_entries(errors, document, packaged) if packaged else {}
    left = [one for one in errors if not (one["type"] == "missing" and one["loc"][1:2] and one["loc"][1] in unknown)]

    def hint(path: KeyPath, word: str, choices: Sequence[str]) -> str:
        if path[-1] == "unit":
            return unit_hint(word, _plain_number(document, path[:-1]), choices)
        return did_you_mean(word, choices)

    problems = [*unknown.values(), *shape_problems(left, document, part_of=part_of, hint=hint)]
    if not all(item["loc"][:1] == ("criteria",) and len(item["loc"]) > 1 for item in errors):
        return None, problems
    wrong = {item["loc"][1] for item in errors}
    criteria = {key: entry for key, entry in document.data["criteria"].items() if key not in wrong}
    return File.model_validate({**document.data, "criteria": criteria}), problems


def read_model(path: Path, model: type[Model], *, file: str, part_of: PartOf) -> tuple[Model, Document]:
    """A packaged YAML file by its model, and the document that knows its lines; ``file`` is its name in messages.

    Raises:
        ConfigurationError: the file is malformed.
    """
    document = read(path, file=file)
    if document.problems:
        raise ConfigurationError(listed(document.problems))
    try:
        return model.model_validate(document.data), document
    except ValidationError as error:
        raise ConfigurationError(listed(shape_problems(error.errors(), document, part_of=part_of))) from None


def _unknown_entries(errors: Sequence[Any], document: Document, packaged: Collection[str]) -> dict[str | int, Problem]:
    """New entries of an overlay that lack keys, and are called almost like a packaged one: one problem for each."""
    missing = [error["loc"][1:] for error in errors if error["type"] == "missing" and error["loc"][:1] == ("criteria",)]
    found: dict[str | int, Problem] = {}
    for key, names in grouped((loc[0], str(loc[1])) for loc in missing if len(loc) == 2 and loc[0] not in packaged).items():
        if hint := did_you_mean(str(key), list(packaged)):
            text = f"{key!r} is no packaged criterion, and a new one also needs {', '.join(names)}.{hint}"
            found[key] = document.problem(("criteria", key), text)
    return found


def _plain_number(document: Document, path: KeyPath) -> float | None:
    """The limit that a layer of an entry has, if it is one number in the entry's unit."""
    layer: Any = functools.reduce(operator.getitem, path, document.data)
    numbers = [layer[kind] for kind in ("above", "below", "min", "max") if kind in layer and "of" not in layer]
    return numbers[0] if len(numbers) == 1 and isinstance(numbers[0], (int, float)) else None


def part_of(path: tuple[str | int, ...]) -> FileSection:
    """The mapping a path of keys points to, for messages."""
    match path:
        case (_, key, *_, "needs"):
            found = _section("'needs'", f"'needs' of {str(key)!r}", Needs)
        case ("cluster", *_):
            found = _section("the cluster section", "in 'cluster'", ClusterSection)
        case ("versions",):
            found = _section("the section of versions", "in 'versions'", Versions)
        case ("versions", name, *_):
            found = _section("a fault of versions", f"in 'versions' of {name!r}", KnownFault)
        case ("profiles", name, "rules", rule, *_):
            found = _section("a rule", f"in rule {str(rule)!r} of profile {str(name)!r}", Override, "for")
        case ("profiles", name, *_):
            found = _section("a profile", f"in profile {str(name)!r}", ProfileEntry)
        case ("criteria", key, "profiles", name, *_):
            found = _section("an override", f"in {str(key)!r}, profile {str(name)!r}", Override)
        case ("criteria", key, *_):
            found = _section("a threshold", f"in {str(key)!r}", CriterionEntry)
        case _:
            found = FileSection(noun="a thresholds file", inside="", keys=_TOP_KEYS)
    return found


def _section(noun: str, inside: str, model: type[BaseModel], *more_keys: str) -> FileSection:
    return FileSection(noun=noun, inside=f" ({inside})", keys=(*more_keys, *model.model_fields))


# Units that a file does not take, converted to one that it does take.

_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_SMALL = {"m": 1e-3, "u": 1e-6, "µ": 1e-6, "n": 1e-9}
_DATA = re.compile(r"(?P<prefix>[kKMGTPE]?)(?P<binary>i?)(?P<base>B|b|[Bb]ytes?|[Bb]its?)(?P<rate>ps|/s|/sec|/second)?")
_BITS_IN_SMALL_LETTERS = re.compile(r"[kmgt](bps|bit/s|bits/s)")
_UNCLEAR = re.compile(r"[kmgtpe]i?b(/s|/sec)?")
"""Bits or bytes, milli or mega: nobody knows."""
_OTHER = re.compile(r"(?P<prefix>[kKMGTPEmuµn]?)(?P<base>FLOPS?|FLOPs|FLOP/s|flops?|OPS?|OP/s|Hz|W|s|sec|seconds?)")
_BASES = {"FLOP": "FLOPS", "OP": "OPS", "H": "Hz", "W": "W", "S": "s"}
_TIMES_S = {"min": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0, "hour": 3600.0, "hours": 3600.0, "d": 86400.0}
_TAKEN = {
    "B/s": {"GB/s": 1e9, "TB/s": 1e12},
    "B": {"GiB": 2.0**30},
    "FLOPS": {"TFLOPS": 1e12},
    "OPS": {"TOPS": 1e12},
    "Hz": {"MHz": 1e6},
    "W": {"W": 1.0},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
}
"""Units of a file by what they measure, each in the basic unit. Numbers are converted to the first one."""
_CLOSE = 0.8


def unit_hint(unit: str, number: float | None, known: Sequence[str]) -> str:
    """What to write instead of a unit: a converted number, or a unit that differs in spelling alone; else nothing."""
    converted = conversion(unit, number)
    if converted is not None or _UNCLEAR.fullmatch(unit):
        return converted or ""
    by_small_letters = {one.lower(): one for one in known}
    near = by_small_letters.get(unit.lower()) or next(iter(get_close_matches(unit, known, n=1, cutoff=_CLOSE)), None)
    near = near or _taken_as(unit)
    return f" Did you mean {near!r}?" if near else ""


def conversion(unit: str, number: float | None) -> str | None:
    """`` For 500 MB/s say 0.5 GB/s.``; None where the file takes the unit, or it is none that can be converted.

    Args:
        unit: as the file has it.
        number: the limit in that unit; None where it is not one number.
    """
    found = _basic(unit)
    if found is None or _taken_as(unit) is not None:
        return None
    kind, factor = found
    target = "us" if kind == "s" and factor < 1e-3 else next(iter(_TAKEN[kind]))
    share = factor / _TAKEN[kind][target]
    if number is None:
        return f" 1 {unit} is {share:.10g} {target}."
    return f" For {number:.10g} {unit} say {number * share:.10g} {target}."


def said_in(number: float | None, unit: str, target: str) -> str:
    """`` For 2000 GB/s say 2 TB/s.``; nothing where the two measure different things, or no number is known."""
    found, wanted = _basic(unit), _basic(target)
    if number is None or found is None or wanted is None or found[0] != wanted[0]:
        return ""
    return f" For {number:.10g} {unit} say {number * found[1] / wanted[1]:.10g} {target}."


def _taken_as(unit: str) -> str | None:
    """The unit of a file that means the same: ``GB/s`` for ``GByte/s``."""
    found = _basic(unit)
    return None if found is None else next((name for name, factor in _TAKEN[found[0]].items() if factor == found[1]), None)


def _basic(unit: str) -> tuple[str, float] | None:
    """What a unit measures, and its size in the basic unit of that."""
    if unit in _TIMES_S:
        return "s", _TIMES_S[unit]
    if _BITS_IN_SMALL_LETTERS.fullmatch(unit):
        return "B/s", _PREFIXES[unit[0].upper()] / 8
    if match := _DATA.fullmatch(unit):
        factor = 1024.0 ** ("KMGTPE".index(match["prefix"].upper()) + 1) if match["binary"] and match["prefix"] else None
        factor = _PREFIXES[match["prefix"]] if factor is None else factor
        is_bits = match["base"] == "b" or match["base"].lower().startswith("bit")
        return "B/s" if match["rate"] else "B", factor / 8 if is_bits else factor
    if match := _OTHER.fullmatch(unit):
        kind = next(kind for start, kind in _BASES.items() if match["base"].upper().startswith(start))
        return kind, {**_PREFIXES, **_SMALL}[match["prefix"]]
    return None
