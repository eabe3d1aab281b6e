"""What each GPU can do: one YAML file per product, every number with its unit in the key, from the vendor's sheet."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, get_type_hints

from pytest_gpucluster.config.schema_errors import Part, shape_problems
from pytest_gpucluster.config.yaml_lines import Document, parse, read_bytes
from pytest_gpucluster.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.config.yaml_lines import Problem

FIELD_UNITS: Mapping[str, str] = MappingProxyType(
    {
        "sms": "count",
        "bf16_tflops": "TFLOPS",
        "fp16_tflops": "TFLOPS",
        "fp8_tflops": "TFLOPS",
        "tf32_tflops": "TFLOPS",
        "fp32_tflops": "TFLOPS",
        "fp64_tflops": "TFLOPS",
        "int8_tops": "TOPS",
        "hbm_tb_s": "TB/s",
        "memory_gib": "GiB",
        "nvlink_links": "links",
        "nvlink_gb_s": "GB/s",
        "pcie_gen": "count",
        "pcie_width": "count",
        "power_w": "W",
        "boost_mhz": "MHz",
    }
)
"""The numbers a limit may name (``of: gpu.bf16_tflops``), each with its unit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """One GPU product. Rates are dense, links one way.

    ``fp64_tflops`` is that of the tensor cores. A rate that is None: the GPU has no such units.
    ``id`` is the file's name, ``names`` the whole names NVML may give the product, ``memory_gib`` what NVML reports,
    ``seen`` when and on what the project ran on it.
    """

    id: str
    title: str
    names: tuple[str, ...]
    sms: int
    bf16_tflops: float
    fp16_tflops: float
    fp8_tflops: float | None
    tf32_tflops: float | None
    fp32_tflops: float
    fp64_tflops: float
    int8_tops: float | None
    hbm_tb_s: float
    memory_gib: float
    nvlink_links: int
    nvlink_gb_s: float
    pcie_gen: int
    pcie_width: int
    power_w: float
    boost_mhz: float
    source: str
    seen: str


@cache
def load_specs() -> Mapping[str, GpuSpec]:
    """Every packaged spec by its id (the file's name), checked.

    Raises:
        ConfigurationError: a spec is malformed, or two claim one NVML name.
    """
    return read_specs(Path(__file__).parent)


def read_specs(folder: Path) -> Mapping[str, GpuSpec]:
    """Read every ``*.yaml`` of a folder; see ``load_specs``."""
    specs = {path.stem: _read_spec(path) for path in sorted(folder.glob("*.yaml"))}
    owners: dict[str, str] = {}
    for spec in specs.values():
        for name in spec.names:
            if name in owners:
                raise ConfigurationError(f"GPU specs {owners[name]!r} and {spec.id!r} both claim {name!r}.")
            owners[name] = spec.id
    return MappingProxyType(specs)


def spec_for_gpu(nvml_name: str) -> GpuSpec:
    """The spec of a GPU by the name NVML gives it, compared whole.

    Raises:
        ConfigurationError: no spec has this name; says how to add one.
    """
    specs = load_specs()
    for spec in specs.values():
        if nvml_name in spec.names:
            return spec
    by_name = {name: spec.id for spec in specs.values() for name in spec.names}
    raise ConfigurationError(_unknown(nvml_name, by_name))


def _unknown(nvml_name: str, by_name: Mapping[str, str]) -> str:
    known = ", ".join(f"{name!r} ({spec_id})" for name, spec_id in by_name.items())
    close = get_close_matches(nvml_name, by_name, n=1)
    hint = f" It is not {close[0]!r}: another form factor or memory has other limits." if close else ""
    return (
        f"unknown GPU {nvml_name!r}. Known: {known}.{hint} To add it: copy "
        "pytest_gpucluster/thresholds/specs/h200-sxm.yaml to a file named after the GPU, put this name under 'names' and the "
        "numbers of its data sheet below, then add a profile of that name with measured limits to thresholds.yaml."
    )


def _read_spec(path: Path) -> GpuSpec:
    """One file, checked: known keys only, each of its type, every number above 0."""
    from pydantic import ConfigDict, ValidationError, create_model  # noqa: PLC0415  # slow, only where specs are read

    file = f"specs/{path.name}"
    content, problems = read_bytes(path, file=file)
    document = parse(content, file=file) if not problems else Document(file=file, problems=problems)
    _refuse(document.problems)
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in document.data.items()}
    hints = {name: (kind, ...) for name, kind in get_type_hints(GpuSpec).items() if name != "id"}
    model = create_model("GpuSpecFile", __config__=ConfigDict(strict=True, extra="forbid"), **hints)  # type: ignore[call-overload]
    try:
        spec = GpuSpec(id=path.stem, **model.model_validate(fields).model_dump())
    except ValidationError as error:
        part = Part(noun="a GPU spec", inside="", keys=tuple(hints))
        _refuse(shape_problems(error.errors(), document, part_of=lambda _path: part))
        raise
    _refuse([*_not_positive(spec, document), *_not_said(spec, document)])
    return spec


def _not_positive(spec: GpuSpec, document: Document) -> list[Problem]:
    values = {name: getattr(spec, name) for name in FIELD_UNITS}
    bad = {name: value for name, value in values.items() if value is not None and value <= 0}
    return [document.problem((name,), f"{name!r} must be above 0, not {value}.") for name, value in bad.items()]


def _not_said(spec: GpuSpec, document: Document) -> list[Problem]:
    texts = {"title": spec.title, "names": spec.names and all(spec.names), "source": spec.source, "seen": spec.seen}
    return [document.problem((name,), f"{name!r} is empty.") for name, text in texts.items() if not text]


def _refuse(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigurationError("\n".join(str(problem) for problem in problems))
