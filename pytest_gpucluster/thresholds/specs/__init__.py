"""What each GPU can do: one YAML file per product, every number with its unit in the key, from the vendor's sheet."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError

from pytest_gpucluster.config.schema_errors import FileSection, closest
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds.schema import read_model


@dataclass(frozen=True, slots=True)
class Unit:
    """The unit of a field."""

    text: str


def _not_empty(value: Any) -> Any:
    if not value or not all(value):
        raise PydanticCustomError("empty", "empty")
    return value


_POSITIVE = Field(gt=0)
_Text = Annotated[str, AfterValidator(_not_empty)]
_Count = Annotated[int, _POSITIVE, Unit("count")]
_TFlops = Annotated[float, _POSITIVE, Unit("TFLOPS")]
_TFlopsIfAny = Annotated[float | None, _POSITIVE, Unit("TFLOPS")]


UNTRIED = "never"
NOT_AMD = (
    "AMD GPUs are not judged here: every reading comes from NVIDIA's NVML and every limit from NVIDIA's parts. For MI300X and "
    "its successors take ROCm CVS, AMD's cluster validation suite (https://github.com/ROCm/cvs)."
)
_AMD = re.compile(r"(?i)(?<![a-z0-9])(amd|radeon|instinct|rocm|hip|mi\d{2,3}[a-z]?)(?![a-z0-9])")
SHARES: Mapping[str, re.Pattern[str]] = MappingProxyType(
    {"a virtual GPU (vGPU)": re.compile(r"-\d+[ABCQ](ME|NIC)?$"), "an instance of a GPU in MIG mode": re.compile(r" MIG \d")}
)
"""How NVIDIA names what is not a whole GPU: ``NVIDIA H100-40C``, ``NVIDIA H100 80GB HBM3 MIG 1g.10gb``."""
SHEETS_ROUND = 17 / 16
"""Hardware may exceed a rate of its sheet by so much: NVML shows 26.562 GB/s for an NVLink of 25, and 4.92 TB/s for 4.8."""
PCIE_LANE_GB_S: Mapping[int, float] = MappingProxyType({3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563})
"""What a lane of each PCIe generation carries one way, line code taken off, in GB/s (PCI-SIG)."""
DERIVED: Mapping[str, str] = MappingProxyType(dict.fromkeys(("pcie_gb_s", "nvlink_copy_gb_s", "nvlink_sum_gb_s"), "GB/s"))
"""Figures that follow from others, each with its unit: bounds of values, to which no floor has to be near."""


class SpecFile(BaseModel):
    """The file of one GPU product. Rates are dense, links one way.

    ``fp64_tflops`` is that of the tensor cores, ``nvlink_ber`` the bit error rate that NVML tells of a link at most, None
    where it tells none. A rate that is None: the GPU has no such units, or no NVLinks. ``names``: the whole names
    that NVML may give the product. ``memory_gib``: what NVML reports. ``seen``: when and on what we ran on it, or ``never``.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    title: _Text
    names: Annotated[tuple[str, ...], Field(strict=False), AfterValidator(_not_empty)]
    sms: _Count
    bf16_tflops: _TFlops
    fp16_tflops: _TFlops
    fp8_tflops: _TFlopsIfAny
    tf32_tflops: _TFlopsIfAny
    fp32_tflops: _TFlops
    fp64_tflops: _TFlops
    int8_tops: Annotated[float | None, _POSITIVE, Unit("TOPS")]
    hbm_tb_s: Annotated[float, _POSITIVE, Unit("TB/s")]
    memory_gib: Annotated[float, _POSITIVE, Unit("GiB")]
    nvlink_links: Annotated[int | None, _POSITIVE, Unit("links")]
    nvlink_gb_s: Annotated[float | None, _POSITIVE, Unit("GB/s")]
    nvlink_ber: Annotated[float | None, _POSITIVE, Unit("ratio")]
    pcie_gen: _Count
    pcie_width: _Count
    power_w: Annotated[float, _POSITIVE, Unit("W")]
    boost_mhz: Annotated[float, _POSITIVE, Unit("MHz")]
    source: _Text
    seen: _Text


class GpuSpec(SpecFile):
    """One GPU product; ``id`` is the name of its file."""

    id: str

    @property
    def pcie_gb_s(self) -> float | None:
        """What the PCIe link carries one way, in GB/s; None for a generation that nobody knows here."""
        lane_gb_s = PCIE_LANE_GB_S.get(self.pcie_gen)
        return None if lane_gb_s is None else lane_gb_s * self.pcie_width

    @property
    def peer_gb_s(self) -> float:
        """What a GPU sends to others of its node, in GB/s one way: by its NVLinks, by PCIe where it has none."""
        return self.nvlink_gb_s or self.pcie_gb_s or math.inf

    nvlink_copy_gb_s = peer_gb_s
    """What the NVLinks carry of copies, which no switch can add up; in GB/s."""
    nvlink_sum_gb_s = peer_gb_s
    """What they carry of a sum, in GB/s; where switches add up (NVLS), its bus bandwidth may be higher."""

    def most(self, figure: str) -> float | None:
        """More than this the GPU cannot reach, in the unit of the figure; None if the GPU has no such figure.

        Sheets give rates of products at a clock of their own (H200: 989 TFLOPS at 1830 MHz), and the GPU may run at its boost
        clock. An SM does a power of two of operations a clock, so the rate at the boost clock follows: 132 SMs x 4096 x
        1980 MHz are 1070 TFLOPS. Other figures may be :data:`SHEETS_ROUND` higher.
        """
        value: float | None = getattr(self, figure, None)
        if value is None:
            return None
        if FIELD_UNITS.get(figure) not in ("TFLOPS", "TOPS"):
            return value * SHEETS_ROUND
        clocks_per_s = self.sms * self.boost_mhz * 1e6
        per_clock = 2.0 ** round(math.log2(value * 1e12 / clocks_per_s))
        return max(value, per_clock * clocks_per_s / 1e12)

    @property
    def is_untried(self) -> bool:
        """Whether this project never ran on such a GPU."""
        return self.seen.startswith(UNTRIED)


FIELD_UNITS: Mapping[str, str] = MappingProxyType(
    {name: unit.text for name, field in SpecFile.model_fields.items() for unit in field.metadata if isinstance(unit, Unit)}
)
"""The numbers a limit may name (``of: gpu.bf16_tflops``), each with its unit."""


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
    by_name = {name: spec for spec in load_specs().values() for name in spec.names}
    if nvml_name not in by_name:
        raise ConfigurationError(_unknown(nvml_name, {name: spec.id for name, spec in by_name.items()}))
    return by_name[nvml_name]


def names_amd(name: str) -> bool:
    """Whether the name of a GPU or a profile means a GPU of AMD: ``amd/mi300x``, ``AMD Instinct MI300X``, ``mi325x-oam``."""
    return _AMD.search(name) is not None


def _unknown(nvml_name: str, by_name: Mapping[str, str]) -> str:
    if names_amd(nvml_name):
        return f"unknown GPU {nvml_name!r}. {NOT_AMD}"
    share = next((words for words, form in SHARES.items() if form.search(nvml_name)), None)
    if share is not None:
        return f"unknown GPU {nvml_name!r}: it is {share}, a share of one. Judge the whole GPU, on its host or passed through."
    known = ", ".join(f"{name!r} ({spec_id})" for name, spec_id in by_name.items())
    close = closest(nvml_name, list(by_name))
    hint = f" It is not {close[0]!r}: another form factor or memory has other limits." if close else ""
    return (
        f"unknown GPU {nvml_name!r}. Known: {known}.{hint} To add it: copy "
        "pytest_gpucluster/thresholds/specs/h200-sxm.yaml to a file named after the GPU, put this name under 'names' and the "
        "numbers of its data sheet below, then add a profile of that name with measured limits to thresholds.yaml "
        "(docs/how-to/new-gpu.md)."
    )


def _read_spec(path: Path) -> GpuSpec:
    """One file, checked: known keys only, each of its type, every number above 0."""
    part = FileSection(noun="a GPU spec", inside="", keys=tuple(SpecFile.model_fields))
    content, _ = read_model(path, SpecFile, file=f"specs/{path.name}", part_of=lambda _path: part)
    return GpuSpec(id=path.stem, **dict(content))
