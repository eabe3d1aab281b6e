"""The GPU specs: which GPU is which, and that a wrong file is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.thresholds import file, lint, no_effect, resolve, specs
from pytest_gpucluster.thresholds.lint import load
from pytest_gpucluster.thresholds.specs import FIELD_UNITS, GpuSpec, SpecFile, load_specs, read_specs, spec_for_gpu

FOLDER = Path(specs.__file__).parent


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA GB200", "gb200-nvl72"),
        ("NVIDIA GB300", "gb300-nvl72"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("NVIDIA GH200 480GB", "gh200"),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name: str, expected: str) -> None:
    """The name is the one that NVML gives."""
    assert spec_for_gpu(name).id == expected


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20-3e",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA L40",
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA H100 PCIe 96GB",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA L4",
        "H200",
        "nvidia h200",
        " NVIDIA H200",
        "",
    ],
)
def test_any_other_part_is_unknown_and_the_error_says_how_to_add_it(name: str) -> None:
    """Another form factor or memory has other limits, so nothing is guessed."""
    with pytest.raises(ConfigurationError) as caught:
        spec_for_gpu(name)
    assert f"unknown GPU {name!r}. Known: 'NVIDIA A100-SXM4-80GB' (a100-sxm)" in str(caught.value)
    assert "To add it: copy pytest_gpucluster/thresholds/specs/h200-sxm.yaml" in str(caught.value)


def test_h200_is_what_nvml_reports_here() -> None:
    """143771 MiB, 18 links of 25 GB/s one way, and the peak at 1.83 GHz."""
    spec = load_specs()["h200-sxm"]
    assert spec.memory_gib == pytest.approx(143771 / 1024, rel=1e-3)
    assert spec.nvlink_gb_s == spec.nvlink_links * 25
    assert spec.bf16_tflops == pytest.approx(spec.sms * 4096 * 1.83e9 / 1e12, rel=1e-3)


@pytest.mark.parametrize("spec", load_specs().values(), ids=lambda spec: spec.id)
def test_rates_are_dense_and_one_way(spec: GpuSpec) -> None:
    """The ratios that a sheet's sparse or two-way number would break."""
    assert spec.tf32_tflops == pytest.approx(spec.bf16_tflops / 2, rel=0.025)  # sheets of one GB200 differ by 2 %
    assert spec.int8_tops == pytest.approx(2 * spec.bf16_tflops, rel=0.01) or spec.id in ("gb300-nvl72", "b300-sxm")  # little
    assert spec.fp8_tflops is None or spec.fp8_tflops == pytest.approx(2 * spec.bf16_tflops, rel=0.01)
    assert spec.nvlink_links is None or (spec.nvlink_gb_s or 0) / spec.nvlink_links in {25, 50}
    assert (spec.nvlink_links is None) == (spec.nvlink_gb_s is None)


@pytest.mark.parametrize("spec", load_specs().values(), ids=lambda spec: spec.id)
def test_every_spec_says_whether_it_was_ever_run(spec: GpuSpec) -> None:
    """Only H100 and H200 were."""
    assert spec.source
    assert (spec.seen == "never run here") is (spec.id not in ("h100-sxm", "h200-sxm"))


def test_every_number_has_a_unit() -> None:
    """A limit can name every number of a spec, and nothing else."""
    kinds = {name: field.annotation for name, field in SpecFile.model_fields.items()}
    assert list(FIELD_UNITS) == [name for name, kind in kinds.items() if kind not in {str, tuple[str, ...]}]


def test_a_spec_cannot_be_changed() -> None:
    """Neither a spec nor the mapping of specs can be changed."""
    with pytest.raises(ValidationError, match="frozen"):
        load_specs()["b200-sxm"].sms = 1  # type: ignore[misc]  # the point of the test
    with pytest.raises(TypeError):
        load_specs()["b200-sxm"] = load_specs()["h200-sxm"]  # type: ignore[index]  # the point of the test


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("sms: 132", "sms: 132.5", "specs/x.yaml:3: 'sms' must be a whole number, not 132.5."),
        ("sms: 132", "sms: '132'", "specs/x.yaml:3: 'sms' must be a whole number, not '132'."),
        ("sms: 132", "sms: 0", "specs/x.yaml:3: 'sms' must be above 0, not 0."),
        ("sms: 132", "sm: 132", "specs/x.yaml:3: 'sm' is not a key of a GPU spec. Keys: title, names, sms"),
        ("sms: 132", "id: other\nsms: 132", "specs/x.yaml:3: 'id' is not a key of a GPU spec."),
        ("sms: 132\n", "\n", "specs/x.yaml:1: 'sms' is missing."),
        ("hbm_tb_s: 4.8", "hbm_tb_s: -4.8", "'hbm_tb_s' must be above 0, not -4.8."),
        ("hbm_tb_s: 4.8", "hbm_tb_s: .inf", ".inf is not a number"),
        ("hbm_tb_s: 4.8", "hbm_tb_s: null", "'hbm_tb_s' must be a number, not nothing."),
        ("names: [NVIDIA H200]", "names: NVIDIA H200", "specs/x.yaml:2: 'names' must be a list, not 'NVIDIA H200'."),
        ("names: [NVIDIA H200]", "names: []", "specs/x.yaml:2: 'names' is empty."),
        (
            "names: [NVIDIA H200]",
            "names: !!python/tuple [a]",
            "specs/x.yaml:2: the tag '!!python/tuple' is not allowed",
        ),
        ("seen: 2026", "seen: ''\n#", "'seen' is empty."),
    ],
)
def test_a_bad_spec_is_refused(old: str, new: str, expected: str, tmp_path: Path) -> None:
    """The message has file, line and what was expected."""
    text = (FOLDER / "h200-sxm.yaml").read_text()
    assert old in text
    (tmp_path / "x.yaml").write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigurationError) as caught:
        read_specs(tmp_path)
    assert expected in str(caught.value)


def test_two_specs_may_not_claim_one_name(tmp_path: Path) -> None:
    """With one name in two specs, the choice would be a guess."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text((FOLDER / "b200-sxm.yaml").read_text())
    with pytest.raises(ConfigurationError, match="GPU specs 'one' and 'two' both claim 'NVIDIA B200'"):
        read_specs(tmp_path)


BY_SHEET = ("h20", "b300-sxm", "gh200", "h200-nvl", "rtx-pro-6000", "l40s")
"""Profiles whose limits are shares of a data sheet."""
PUBLISHED = ("h100-sxm", "h200-sxm", "a100-sxm", "h100-pcie", "h100-nvl", "b200-sxm", "gb200-nvl72", "gb300-nvl72")
SHARES = {f"{name}_tflops": f"{name}_tflops" for name in ("bf16", "fp16", "fp8", "tf32", "fp32", "fp64")} | {
    "bf16_sustained": "bf16_tflops",
    "bf16_soak": "bf16_tflops",
    "int8_tops": "int8_tops",
    "hbm_bandwidth": "hbm_tb_s",
}


@pytest.mark.parametrize("key", SHARES)
def test_a_limit_by_the_sheet_is_the_least_share_that_others_are_asked_for(key: str) -> None:
    """Below every profile with a number of its own, and above half of it; what the GPU lacks is skipped."""
    limits, figure = load(None), SHARES[key]
    asked = {}
    for name in (*PUBLISHED, *BY_SHEET):
        entry, spec = limits.criteria(limits.profiles[name])[key], limits.profiles[name].spec
        assert spec is not None
        assert (entry.skip is None) == (getattr(spec, figure) is not None)
        if entry.skip is None:
            asked[name] = entry.limit(gpus=1, cluster={}).value / getattr(spec, figure)
    least = min(share for name, share in asked.items() if name in PUBLISHED and share)
    assert [name for name in BY_SHEET if name in asked and not 0.97 * least <= asked[name] <= least] == []


def test_a_gpu_without_nvlink_is_not_asked_for_links() -> None:
    """Skipped by rule with the reason; what the GPUs carry for each other is bound by PCIe, so a better rate is an error."""
    limits = load(None)
    for name in ("l40s", "rtx-pro-6000"):
        criteria, spec = limits.criteria(limits.profiles[name]), load_specs()[name]
        for key in ("nvlink_links", "nvlink_errors", "fabric_state", "gpu_pairs"):
            assert criteria[key].skip == f"needs gpu.nvlink_links, and {spec.title} has none"
        bound = criteria["busbw[all_gather]"].best_possible(gpus=8, cluster={})
        assert bound is not None
        assert bound.value == pytest.approx((spec.pcie_gb_s or 0) * specs.SHEETS_ROUND)
    assert limits.criteria(limits.profiles["h20"])["nvlink_links"].limit(gpus=8, cluster={}).value == 18


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "AMD Instinct MI325X OAM", "Instinct MI355X", "AMD Radeon PRO V710"])
def test_a_gpu_of_amd_is_refused_with_the_suite_for_it(name: str) -> None:
    """Nothing is said of a file to copy."""
    with pytest.raises(ConfigurationError, match="ROCm CVS") as caught:
        spec_for_gpu(name)
    assert "copy" not in str(caught.value)


@pytest.mark.parametrize("name", ["amd/mi300x", "mi300x", "MI325X-8x", "rocm", "amd"])
def test_a_profile_of_amd_is_refused_with_the_suite_for_it(name: str) -> None:
    """By option, and in a file."""
    with pytest.raises(ConfigurationError, match=r"has no profile .*ROCm CVS"):
        load(None).profile_for(name=name, gpu_names=["NVIDIA H200"])


@pytest.mark.parametrize("name", ["h200-amdahl", "mixed", "gb300", "site-mi", "chip-h200"])
def test_other_unknown_profiles_are_not_taken_for_amd(name: str) -> None:
    """Letters within a word are no sign."""
    with pytest.raises(ConfigurationError, match="has no profile") as caught:
        load(None).profile_for(name=name, gpu_names=["NVIDIA H200"])
    assert "ROCm" not in str(caught.value)


def test_a_gpu_is_added_by_a_file_of_figures_and_a_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As CONTRIBUTING.md says: it is found by its name, and every limit that is a part of a figure follows."""
    text = (FOLDER / "h200-sxm.yaml").read_text(encoding="utf-8").replace("memory_gib: 140.4", "memory_gib: 240.5")
    (tmp_path / "h200-next.yaml").write_text(text.replace("[NVIDIA H200]", "[NVIDIA H200 next]"), encoding="utf-8")
    added = {**load_specs(), **read_specs(tmp_path)}
    for module in (specs, file, lint, no_effect, resolve):
        monkeypatch.setattr(module, "load_specs", lambda: added)
    site = tmp_path / "site.yaml"
    site.write_text(
        "schema: 1\nextends: packaged\nprofiles:\n  h200-next: {inherits: h200-sxm, gpu: h200-next}\n", encoding="utf-8"
    )
    limits = load(site)
    profile = limits.profile_for(name=None, gpu_names=["NVIDIA H200 next"] * 8)
    limit = limits.criteria(profile)["gpu_memory"].limit(gpus=1, cluster={})
    assert profile.name == "h200-next"
    assert limit.value == pytest.approx(0.98 * 240.5)
