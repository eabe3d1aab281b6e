"""A loaded thresholds file: resolved limits, the chosen profile, overlays, and changed limits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

import pytest

from pytest_gpucluster.config import yaml_lines
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.plan import rule_against
from pytest_gpucluster.places import Inventory
from pytest_gpucluster.thresholds import layers, resolve
from pytest_gpucluster.thresholds.limit import Limit
from pytest_gpucluster.thresholds.lint import check, load
from pytest_gpucluster.thresholds.resolve import OF_FABRIC
from pytest_gpucluster.thresholds.schema import Needs
from pytest_gpucluster.thresholds.specs import GpuSpec
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.thresholds.file import ThresholdsFile

    Write = Callable[[str], Path]

GOOD = (Path(__file__).parent / "good_thresholds.yaml").read_text(encoding="utf-8")
OVERLAY = "schema: 1\nextends: packaged\n"
H200 = "NVIDIA H200"
SHAPE = {"nodes": 2, "gpus_per_node": 8, "world_size": 16}


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a file named site.yaml into the working directory."""
    monkeypatch.chdir(tmp_path)

    def to_file(text: str) -> Path:
        path = tmp_path / "site.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return to_file


def problems_of(path: Path) -> list[str]:
    """The lines of the error that loading a bad file raises."""
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    return str(caught.value).splitlines()


def resolved(file: ThresholdsFile, profile: str, key: str) -> resolve.Threshold:
    """One entry for one profile."""
    return file.criteria(file.profiles[profile])[key]


# Resolution


def test_defaults_and_what_is_written(write: Write) -> None:
    """An entry without overrides, with the line of its limit."""
    file = load(write(GOOD))
    threshold = resolved(file, "h200-sxm", "busbw[all_reduce]")
    assert (threshold.per, threshold.level, threshold.severity) == ("node", "standard", "required")
    assert (threshold.needs, threshold.skip, threshold.noise) == (Needs(places=2), None, None)
    assert (threshold.file, threshold.line) == ("site.yaml", 37)
    assert list(file.criteria(file.profiles["lab"])) == ["bf16_tflops", "gpu_count", "busbw[all_reduce]"]


def test_an_override_replaces_the_whole_limit_and_merges_the_recipe(write: Write) -> None:
    """Kind, number and 'of' go together; other recipe keys stay; the line is that of the override."""
    file = load(write(GOOD))
    base, lab = (resolved(file, name, "bf16_tflops") for name in ("h200-sxm", "lab"))
    assert base.limit(gpus=1, cluster=SHAPE) == Limit(kind="above", value=700, unit="TFLOPS")
    assert lab.limit(gpus=1, cluster=SHAPE) == Limit(kind="min", value=494.5, unit="TFLOPS")
    assert lab.recipe == {"sizes": [4096, 8192], "iterations": 5}
    assert base.recipe["iterations"] == 50
    assert (base.line, lab.line) == (11, 20)


def test_an_override_with_a_plain_number_drops_of(write: Write) -> None:
    """The ancestor's 'of' does not multiply the child's number."""
    text = GOOD.replace("profiles:\n  h200", "profiles:\n  lab-b: {inherits: lab}\n  h200")
    text = text.replace("      rehearsal: {above", "      lab-b: {above: 600}\n      rehearsal: {above")
    file = load(write(text))
    assert resolved(file, "lab-b", "bf16_tflops").limit(gpus=1, cluster=SHAPE).text == "> 600 TFLOPS"
    assert resolved(file, "lab-b", "bf16_tflops").recipe["iterations"] == 5


def test_skip_is_inherited_and_can_be_lifted(write: Write) -> None:
    """``skip: null`` in a descendant makes the criterion apply again."""
    text = GOOD.replace("rehearsal: {rehearsal: true}", "rehearsal: {rehearsal: true}\n  sub: {inherits: rehearsal}")
    assert resolved(load(write(text)), "sub", "gpu_count").skip == "no GPU"
    lifted = text.replace("{skip: no GPU}", "{skip: no GPU}\n      sub: {skip: null}")
    assert resolved(load(write(lifted)), "sub", "gpu_count").skip is None


RULES = """rehearsal:
    rehearsal: true
    rules:
      rates: {for: ["*_tflops", "busbw[*]"], above: 0, bound_waived: a CPU, noise: null, recipe: {iterations: 2, more: 1}}
      small: {for: [bf16_tflops], recipe: {iterations: 3, sizes: [64]}}
      no_gpu: {for: ["*_count"], skip: no GPU}
      counts: {for: ["*_count", "busbw[all_reduce]"], level: soak}
"""
WITH_RULES = (
    GOOD.replace("rehearsal: {rehearsal: true}\n", RULES)
    .replace("      rehearsal: {skip: no GPU}\n", "")
    .replace('    profiles:\n  "busbw', '  "busbw')
)


def test_rules_of_a_profile(write: Write) -> None:
    """They are laid over each entry that they name, in their order and below its own override; one that skips stands alone."""
    file = load(write(WITH_RULES))
    rate, links, count = (resolved(file, "rehearsal", key) for key in ("bf16_tflops", "busbw[all_reduce]", "gpu_count"))
    assert (rate.written_limit, rate.line) == ("above 0.001", 29)  # by its own override
    assert rate.recipe == {"sizes": [64], "iterations": 3, "more": 1}
    assert (links.written_limit, links.line, links.level, links.noise) == ("above 0", 9, "soak", None)
    assert (count.skip, count.level) == ("no GPU", "standard")
    assert resolved(file, "h200-sxm", "bf16_tflops").recipe == {"sizes": [4096, 8192], "iterations": 50}
    child = load(write(WITH_RULES.replace("  rehearsal:\n    re", "  sub: {inherits: rehearsal}\n  rehearsal:\n    re")))
    assert resolved(child, "sub", "busbw[all_reduce]").written_limit == "above 0"


def test_rules_below_an_overlay(write: Write) -> None:
    """The packaged rules are for packaged entries only; an overlay's rules are for all, and are merged rule by rule."""
    entry = "{criterion: New., above: 90, unit: TFLOPS, why: heat, source: sheet}"
    text = f"{OVERLAY}criteria:\n  new_tflops: {entry}\n  bf16_tflops: {{min: 600, profiles: {{rehearsal: {{noise: 0.5}}}}}}\n"
    text += "  gpu_model: {profiles: {rehearsal: {skip: null}}}\n"
    file = load(write(text))
    assert resolved(file, "rehearsal", "new_tflops").written_limit == "above 90"
    packaged = resolved(file, "rehearsal", "bf16_tflops")
    assert (packaged.written_limit, packaged.noise) == ("above 0", 0.5)
    assert resolved(file, "rehearsal", "gpu_model").skip is None
    rules = "profiles: {rehearsal: {rules: {mine: {for: ['*_tflops'], above: 5, bound_waived: mine}}}}\n"
    file = load(write(text + rules))
    limits = [resolved(file, "rehearsal", f"{name}_tflops").written_limit for name in ("new", "bf16", "fp16")]
    assert limits == ["above 5", "above 5", "above 5"]
    assert resolved(file, "rehearsal", "hbm_bandwidth").written_limit == "above 0"
    lax = load(write(f"{OVERLAY}profiles: {{h200-sxm: {{rules: {{lax: {{for: ['fp*_tflops'], severity: advisory}}}}}}}}\n"))
    assert [*lax.changed_entries(lax.profiles["h200-sxm"])] == [f"fp{bits}_tflops" for bits in (16, 8, 32, 64)]


def test_a_criterion_without_its_figure_is_skipped_by_rule(write: Write) -> None:
    """A criterion is skipped where the profile's spec has no figure for what it requires; not elsewhere, nor in a rehearsal."""
    text = GOOD.replace("  rehearsal: {rehearsal: true}", "  ampere: {gpu: a100-sxm}\n  rehearsal: {rehearsal: true}")
    text = text.replace("bound: gpu.bf16_tflops", "requires: gpu.fp8_tflops\n    bound: gpu.fp8_tflops")
    text = text.replace("above: 700", "above: 1200").replace("of: gpu.bf16_tflops", "of: gpu.fp8_tflops")
    file = load(write(text))
    ampere = resolved(file, "ampere", "bf16_tflops")
    assert ampere.skip == "needs gpu.fp8_tflops, and A100 SXM 80 GB has none"
    inventory = Inventory(num_nodes=1, gpus_per_node=8, device="cuda")
    rule = rule_against(ampere, inventory)
    assert rule is not None
    assert rule.text == rule.cause == ampere.skip
    assert [resolved(file, name, "bf16_tflops").skip for name in ("h200-sxm", "lab", "rehearsal")] == [None] * 3
    own = text.replace("      lab:\n", "      ampere: {skip: not bought for it}\n      lab:\n")
    assert resolved(load(write(own)), "ampere", "bf16_tflops").skip == "not bought for it"
    assert "A100 SXM 80 GB has no gpu.fp8_tflops" in problems_of(write(text.replace("requires: gpu.fp8_tflops\n    ", "")))[0]


def test_packaged_dtypes_require_their_units() -> None:
    """A GPU without FP8, TF32 or INT8 is skipped by rule; every figure that a spec may lack is required by its criterion."""
    criteria = packaged().criteria(packaged().profiles["h200-sxm"])
    may_lack = {name for name, kind in get_type_hints(GpuSpec).items() if type(None) in get_args(kind)}
    assert may_lack == {"fp8_tflops", "tf32_tflops", "int8_tops", "nvlink_ber", "nvlink_links", "nvlink_gb_s"}
    judged = {key: key for key in may_lack - {"nvlink_ber", "nvlink_gb_s"}} | {
        f"nvlink_ber[{kind}]": "nvlink_ber" for kind in ("effective", "symbol")
    }
    assert {key: criteria[key].requires for key in judged} == {key: f"gpu.{figure}" for key, figure in judged.items()}


def test_profiles_inherit(write: Write) -> None:
    """A key that the child does not have comes from its ancestor."""
    file = load(write(GOOD))
    lab, rehearsal = file.profiles["lab"], file.profiles["rehearsal"]
    assert (lab.gpu, lab.fabric, lab.accept_at) == ("h200-sxm", "sockets", "quick")
    assert (lab.nodes, lab.gpus_per_node, lab.chain) == (2, 2, ("h200-sxm", "lab"))
    assert lab.spec is not None
    assert (rehearsal.spec, rehearsal.rehearsal, rehearsal.nodes) == (None, True, None)
    assert (file.cluster.nodes, file.cluster.gpus_per_node) == (2, None)


def test_limit_by_group_size(write: Write) -> None:
    """The table is exact; another size is an error that names entry and sizes, unless 'any' is there."""
    threshold = resolved(load(write(GOOD)), "h200-sxm", "busbw[all_reduce]")
    assert threshold.limit(gpus=8, cluster=SHAPE).text == "> 400 GB/s"
    with pytest.raises(ConfigurationError, match=r"site.yaml:37: 'busbw\[all_reduce\]' has no limit for 3 GPUs, only for 2, 8"):
        threshold.limit(gpus=3, cluster=SHAPE)
    anything = resolved(load(write(GOOD.replace("8: 400}", "any: 400}"))), "h200-sxm", "busbw[all_reduce]")
    assert anything.limit(gpus=3, cluster=SHAPE).value == 400


def test_limit_of_the_cluster(write: Write) -> None:
    """A part of the expected shape; a shape without that number is an error."""
    threshold = resolved(load(write(GOOD)), "h200-sxm", "gpu_count")
    assert threshold.limit(gpus=8, cluster=SHAPE).text == ">= 8 GPUs"
    with pytest.raises(ConfigurationError, match=r"a part of cluster.gpus_per_node, which is not known here"):
        threshold.limit(gpus=8, cluster={})


# Which profile


def test_profile_by_gpu_name() -> None:
    """Equal and known GPUs choose their profile; without a GPU the run is a rehearsal."""
    file = packaged()
    assert file.profile_for(name=None, gpu_names=[H200, H200]).name == "h200-sxm"
    assert file.profile_for(name=None, gpu_names=["NVIDIA H100 80GB HBM3"]).name == "h100-sxm"
    assert file.profile_for(name=None, gpu_names=[]).name == "rehearsal"


def test_profile_by_name() -> None:
    """An explicit name wins where it fits; a rehearsal fits everywhere."""
    file = packaged()
    assert file.profile_for(name="lab-2x2", gpu_names=[H200]).name == "lab-2x2"
    assert file.profile_for(name="rehearsal", gpu_names=[H200, "NVIDIA L4"]).name == "rehearsal"
    assert file.profile_for(name="rehearsal", gpu_names=[]).name == "rehearsal"


@pytest.mark.parametrize(
    ("name", "gpu_names", "expected"),
    [
        ("h20-sxm", [H200], "has no profile 'h20-sxm'. Profiles: h100-sxm, h200-sxm, a100-sxm, h100-pcie, h100-nvl, b200-"),
        ("h200-sxm", [], "No GPU but a GPU profile asked for: 'h200-sxm' is for H200 SXM."),
        ("h100-sxm", [H200, H200], "Profile 'h100-sxm' is for H100 SXM 80 GB, but the GPUs are 2 x 'NVIDIA H200'."),
        ("h200-sxm", ["NVIDIA A10", "NVIDIA L4"], "the GPUs are 1 x 'NVIDIA A10', 1 x 'NVIDIA L4'"),
        (None, [H200, "NVIDIA H200 NVL"], "GPUs of several models: 1 x 'NVIDIA H200', 1 x 'NVIDIA H200 NVL'."),
        (None, ["NVIDIA H20-3e"], "unknown GPU 'NVIDIA H20-3e'. Known: "),
        (None, ["NVIDIA H200-141C"] * 2, "unknown GPU 'NVIDIA H200-141C': it is a virtual GPU (vGPU)"),
        (None, ["GRID A100X-4-20C"], "it is a virtual GPU (vGPU), a share of one. Judge the whole GPU"),
        (None, ["NVIDIA H100XM-80CME"], "it is a virtual GPU (vGPU)"),
        (None, ["NVIDIA H100 80GB HBM3 MIG 1g.10gb"], "it is an instance of a GPU in MIG mode, a share of one. Judge"),
    ],
)
def test_a_profile_is_never_guessed(name: str | None, gpu_names: list[str], expected: str) -> None:
    """Unknown profiles, and missing, wrong, mixed or unknown GPUs, are errors that say what to do."""
    with pytest.raises(ConfigurationError) as caught:
        packaged().profile_for(name=name, gpu_names=gpu_names)
    assert expected in str(caught.value)


def test_a_known_gpu_without_a_profile(write: Write) -> None:
    """A file that stands alone may have no profile of a GPU that is known: an error that says how to add it."""
    with pytest.raises(ConfigurationError, match=r"The GPUs are 'NVIDIA B200'.* has no profile 'b200-sxm'"):
        load(write(GOOD)).profile_for(name=None, gpu_names=["NVIDIA B200"])


def test_a_named_profile_takes_a_machine_with_one_wrong_gpu() -> None:
    """The wrong GPU then fails gpu_model at its place, and the run goes on."""
    assert packaged().profile_for(name="h200-sxm", gpu_names=[H200, "NVIDIA L4"]).name == "h200-sxm"


def test_no_rehearsal_profile(write: Write) -> None:
    """A file may leave the rehearsal profile out; a run without a GPU is then an error."""
    file = write(GOOD[: GOOD.index("criteria:")].replace("  rehearsal: {rehearsal: true}\n", ""))
    with pytest.raises(ConfigurationError, match=r"No GPU was found.*has no profile 'rehearsal'"):
        load(file).profile_for(name=None, gpu_names=[])


# Overlays


def test_an_overlay_changes_what_it_names(write: Write) -> None:
    """Entry by entry: the rest of the entry and all other entries stay, each with its own file and line."""
    path = write(f"{OVERLAY}cluster: {{nodes: 4}}\ncriteria:\n  bf16_tflops: {{above: 650, recipe: {{iterations: 9}}}}\n")
    file = load(path)
    threshold = resolved(file, "h200-sxm", "bf16_tflops")
    assert threshold.limit(gpus=1, cluster=SHAPE).text == "> 650 TFLOPS"
    assert (threshold.file, threshold.line) == ("site.yaml", 5)
    assert threshold.recipe["iterations"] == 9
    assert threshold.recipe["sizes"] == [4096, 8192, 16384]
    assert threshold.noise == 0.03
    other = resolved(file, "h200-sxm", "hbm_bandwidth")
    assert other.file.endswith("thresholds.yaml")
    assert (file.cluster.nodes, file.cluster.gpus_per_node) == (4, None)
    assert [*file.changed_entries(file.profiles["h200-sxm"])] == ["bf16_tflops"]
    assert [*file.changed_entries(file.profiles["rehearsal"])] == []


def test_an_overlay_adds_entries_profiles_and_overrides(write: Write) -> None:
    """Something new is not a changed limit; an override of a new profile is."""
    entry = "{criterion: New., per: gpu, max: 90, unit: C, why: heat, source: sheet}"
    text = f"{OVERLAY}profiles:\n  site: {{inherits: h200-sxm}}\ncriteria:\n  temperature: {entry}\n"
    text += "  hbm_bandwidth: {profiles: {site: {above: 3.9}}}\n"
    file = load(write(text))
    site = file.profiles["site"]
    assert file.criteria(site)["temperature"].limit(gpus=1, cluster=SHAPE).text == "<= 90 C"
    assert file.criteria(site)["hbm_bandwidth"].limit(gpus=1, cluster=SHAPE).value == 3.9
    assert [*file.changed_entries(site)] == ["hbm_bandwidth"]
    assert [*file.changed_entries(file.profiles["h200-sxm"])] == []


def test_an_overlays_limit_replaces_of_and_waiver(write: Write) -> None:
    """A plain number over a part of the spec is a plain number."""
    file = load(write(f"{OVERLAY}criteria: {{gpu_memory: {{min: 135}}}}\n"))
    assert resolved(file, "h200-sxm", "gpu_memory").of is None
    assert resolved(file, "h200-sxm", "gpu_memory").limit(gpus=1, cluster=SHAPE).text == ">= 135 GiB"


def test_an_overlay_is_checked_where_it_is_written(write: Write) -> None:
    """The fault has the overlay's line, though the entry is the packaged one."""
    lines = problems_of(write(f"{OVERLAY}criteria:\n  bf16_tflops:\n    above: 2000\n  hbm_bandwidth: null\n"))
    assert lines[0].startswith("site.yaml:5: 'bf16_tflops': 2000 TFLOPS is 202 % of gpu.bf16_tflops")
    assert lines[1] == "site.yaml:6: 'hbm_bandwidth' must be a mapping, not nothing."


def test_an_overlays_own_problem_comes_first(write: Write) -> None:
    """Six packaged profiles are in the circle too; the line that closes it is the overlay's."""
    lines = problems_of(write(f"{OVERLAY}profiles: {{h100-sxm: {{inherits: h200-sxm}}}}\n"))
    assert lines[0] == "site.yaml:3: profile 'h100-sxm' inherits itself in a circle."


OLDER_KEYS = {
    "inter_node_busbw[all_reduce]": ("needs: 4", "needs: {places: 4}"),
    "inter_node_busbw[all_gather]": ("needs_nodes: 3", "needs: {nodes: 3}"),
    "inter_node_busbw[reduce_scatter]": ("needs: 4, needs_nodes: 3", "needs: {places: 4, nodes: 3}"),
    "inter_node_busbw[all_to_all]": ("needs: {places: 4}, needs_nodes: 3", "needs: {places: 4, nodes: 3}"),
    "inter_node_busbw_soak": (
        "profiles: {h200-sxm: {needs_nodes: 1, needs: 3}}",
        "profiles: {h200-sxm: {needs: {nodes: 1, places: 3}}}",
    ),
    # a copy of an entry with the older key added
    "busbw[all_reduce]": ("needs: {nodes: 9}, needs_nodes: 3", "needs: {nodes: 3}"),
    "busbw[all_gather]": ("needs_domains: 2, needs_shared_paths: true", "needs: {domains: 2, shared_paths: true}"),
    "busbw[reduce_scatter]": ("needs_kernel_log: true, needs_rails: true", "needs: {kernel_log: true, rails: true}"),
    "busbw[all_to_all]": ("needs_slurm: true, needs_program: dcgmi", "needs: {slurm: true, program: dcgmi}"),
    "busbw[broadcast]": ("recipe: {needs_nodes: 3}", "recipe: {needs_nodes: 3}"),  # a recipe is a site's own
}
"""An entry each, what it says by older keys, and by those of today."""


@pytest.fixture(scope="module")
def by_older_keys(tmp_path_factory: pytest.TempPathFactory) -> list[ThresholdsFile]:
    """Two files that say the same of many entries, the first by the older keys."""
    file = tmp_path_factory.mktemp("site") / "site.yaml"
    return [loaded(file, {key: said[number] for key, said in OLDER_KEYS.items()}) for number in (0, 1)]


def loaded(file: Path, entries: dict[str, str]) -> ThresholdsFile:
    """An overlay with these keys of entries: one file for all cases, as each costs a third of a second."""
    file.write_text(f"{OVERLAY}criteria:\n" + "".join(f"  '{key}': {{{text}}}\n" for key, text in entries.items()))
    return load(file)


@pytest.mark.parametrize("key", OLDER_KEYS)
def test_the_older_keys_of_what_an_entry_needs(key: str, by_older_keys: list[ThresholdsFile]) -> None:
    """They mean the same, part by part over what the packaged entry needs, in an entry and in an override."""
    older, newer = (resolved(file, "h200-sxm", key) for file in by_older_keys)
    assert older == newer
    changes = [file.changed_entries(file.profiles["h200-sxm"])[key] for file in by_older_keys]
    assert changes[0] == changes[1]
    assert (older.needs != resolved(packaged(), "h200-sxm", key).needs) is ("recipe" not in OLDER_KEYS[key][0])


CHANGES = {
    "bf16_tflops": "recipe: {data: zeros}",
    "fp16_tflops": "severity: advisory",
    "fp8_tflops": "level: soak",
    "tf32_tflops": "noise: 0.5",
    "fp32_tflops": "deadline_s: 7",
    "int8_tops": "profiles: {h200-sxm: {skip: too slow}}",
    "bf16_sustained": "min: 700",
    "fp64_tflops": "bound: 9999",
    "hbm_bandwidth": "bound: null",
    "host_memory": "bound: 600",
    "busbw[all_reduce]": "needs: 9",
}
"""An entry each, and what changes its outcome."""


@pytest.fixture(scope="module")
def with_changes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The changed limits of a file with all of :data:`CHANGES`."""
    file = loaded(tmp_path_factory.mktemp("site") / "site.yaml", CHANGES)
    return [*file.changed_entries(file.profiles["h200-sxm"])]


@pytest.mark.parametrize("key", CHANGES)
def test_whatever_can_change_an_outcome_is_a_changed_limit(key: str, with_changes: list[str]) -> None:
    """A recipe, a severity or a skip weakens a criterion as much as a number; no other entry is named."""
    assert key in with_changes
    assert set(with_changes) <= set(CHANGES)


def test_a_changed_bound_is_told_in_words(write: Write) -> None:
    """It decides what is an error: raised, lowered or taken away, it is named with both."""
    file = load(write(f"{OVERLAY}criteria:\n  bf16_tflops: {{bound: 2000}}\n  hbm_bandwidth: {{bound: null}}\n"))
    assert file.changed_entries(file.profiles["h200-sxm"]) == {
        "bf16_tflops": ["bound 2000 instead of gpu.bf16_tflops"],
        "hbm_bandwidth": ["bound None instead of gpu.hbm_tb_s"],
    }
    limit = file.criteria(file.profiles["h200-sxm"])["bf16_tflops"].limit(gpus=1, cluster={})
    assert limit.bound is not None
    assert (limit.bound.value, limit.bound.is_most) == (2000, True)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("takes_s: 0.001", ["takes_s 0.001 instead of 6"]),
        ("takes_s: 1.9", ["takes_s 1.9 instead of 6"]),
        ("takes_s: 2", []),
        ("takes_s: 6", []),
        ("takes_s: 500", []),
        ("takes_s: null", []),
    ],
)
def test_a_far_shorter_time_is_a_changed_limit(written: str, words: list[str], write: Write) -> None:
    """A measurement ends after three times ``takes_s``: below a third of what it takes, fewer repeats are judged."""
    key = "inter_node_busbw[all_reduce]"
    file = load(write(f"{OVERLAY}criteria:\n  '{key}': {{{written}}}\n"))
    assert file.changed_entries(file.profiles["h200-sxm"]).get(key, []) == words


def changed(field: str, value: Any) -> Any:
    """Another valid value of a field of Threshold."""
    others = {
        "per": "node",
        "unit": "TOPS",
        "level": "soak",
        "severity": "advisory",
        "recipe": {"sizes": [1]},
        "of": "gpu.int8_tops",
        "bound": "gpu.int8_tops",
        "skip": "too slow",
        "noise": 0.5,
        "needs": Needs(nodes=7),
    }
    return others[field] if field in others else (value or 0) + 1


def test_every_field_is_compared_or_named_as_harmless(write: Write) -> None:
    """What counts as a changed limit follows from the schema; only a named field does not count."""
    one = resolved(load(write(GOOD)), "h200-sxm", "bf16_tflops")
    for field in set(resolve.Threshold.model_fields) - resolve.CANNOT_CHANGE_AN_OUTCOME - set(layers.KINDS):
        other = one.model_copy(update={field: changed(field, getattr(one, field))})
        assert other.decisive != one.decisive, field
    for field in resolve.CANNOT_CHANGE_AN_OUTCOME:
        assert one.model_copy(update={field: "another"}).decisive == one.decisive, field
    assert set(resolve.Threshold.model_fields) > resolve.CANNOT_CHANGE_AN_OUTCOME
    assert one.model_copy(update={"above": 701}).decisive != one.decisive
    assert one.model_copy(update={"above": None, "min": 700}).decisive != one.decisive
    assert one.model_copy(update={"above": {"any": 700}}).decisive == one.decisive


def test_a_new_key_is_compared(write: Write) -> None:
    """A key that somebody adds to the schema counts, without anybody listing it."""

    class Wider(resolve.Threshold):
        retries: int = 0

    one = resolved(load(write(GOOD)), "h200-sxm", "bf16_tflops")
    same, other = (Wider(retries=number, **one.written()) for number in (0, 2))
    assert same.decisive == {**one.decisive, "retries": 0}
    assert other.decisive != same.decisive


@pytest.mark.parametrize(("text", "files"), [(None, 1), (OVERLAY, 2), (GOOD, 1)])
def test_a_file_is_read_once(text: str | None, files: int, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file itself is read once, and the packaged file once if it is extended."""
    names: list[str] = []
    monkeypatch.setattr(layers, "read", lambda path, **more: names.append(more["file"]) or yaml_lines.read(path, **more))
    found = load(None if text is None else write(text))
    for profile in found.profiles.values():
        found.standard(profile)
        found.changed_entries(profile)
    assert len(names) == len(set(names)) == files


def test_a_file_of_its_own_names_what_it_left_out(write: Write) -> None:
    """A file that does not have a packaged entry has changed that limit."""
    file = load(write(GOOD))
    changed = [*file.changed_entries(file.profiles["h200-sxm"])]
    assert "hbm_bandwidth" in changed
    assert len(changed) == len(packaged().content.criteria)


def test_a_new_name_does_not_hide_a_change(write: Write) -> None:
    """A profile that inherits nothing is compared with the packaged one of its GPU."""
    file = load(write(f"{OVERLAY}profiles: {{mine: {{gpu: h200-sxm}}}}\n"))
    assert [*file.changed_entries(file.profiles["mine"])] == ["hbm_bandwidth"]


def test_a_comment_is_no_change(write: Write) -> None:
    """The packaged file under another name has the packaged limits."""
    file = load(write(layers.packaged_path().read_text() + "# the same\n"))
    production = [profile for name, profile in file.profiles.items() if name != "lab-2x2"]
    assert [[*file.changed_entries(profile)] for profile in production] == [[]] * len(production)


@pytest.mark.parametrize("overlay", [None, f"{OVERLAY}profiles: {{mine: {{inherits: lab-2x2}}}}\n"])
def test_a_lab_profile_stands_for_the_production_profile_of_its_gpus(overlay: str | None, write: Write) -> None:
    """A hundredth of the limit between nodes is a changed limit, packaged or not, and through a profile of one's own too."""
    file = load(None if overlay is None else write(overlay))
    profile = file.profiles["lab-2x2" if overlay is None else "mine"]
    standard = file.standard(profile)
    assert standard is not None
    assert standard.name == "h200-sxm"
    assert "inter_node_busbw[all_reduce]" in file.changed_entries(profile)
    assert [*file.changed_entries(file.profiles["h200-sxm"])] == [*file.changed_entries(file.profiles["h100-sxm"])] == []


# The packaged file


def test_the_packaged_file_is_good_and_complete() -> None:
    """No problems, and every profile has a limit or a reason for every entry."""
    assert check(None)[1] == []
    file = packaged()
    tried = ["h100-sxm", "h200-sxm"]
    untried = ["a100-sxm", "h100-pcie", "h100-nvl", "b200-sxm", "gb200-nvl72", "gb300-nvl72"]
    untried += ["h20", "b300-sxm", "gh200", "h200-nvl", "rtx-pro-6000", "l40s"]
    assert list(file.profiles) == [*tried, *untried, "lab-2x2", "rehearsal"]
    assert [one.name for one in file.profiles.values() if one.spec is not None and one.spec.is_untried] == untried
    for profile in file.profiles.values():
        gpus = (profile.gpus_per_node or 8) if profile.name in untried else 2
        shape = {**SHAPE, "gpus_per_node": 4, "world_size": 8} if profile.nodes_per_domain > 1 else SHAPE
        for threshold in file.criteria(profile).values():
            if profile.nic_gb_s_per_gpu is None and threshold.of in OF_FABRIC:
                continue  # what the ports of such a machine carry has to be said
            assert threshold.skip or threshold.limit(gpus=gpus, cluster=shape).text
        assert ([*file.changed_entries(profile)] == []) == (profile.name != "lab-2x2")


@pytest.mark.parametrize(
    ("key", "gpus", "expected"),
    [
        ("bf16_tflops", 1, ("> 700 TFLOPS", "> 700 TFLOPS")),
        ("hbm_bandwidth", 1, ("> 3 TB/s", "> 4.1 TB/s")),
        ("busbw[all_reduce]", 2, ("> 310 GB/s", "> 310 GB/s")),
        ("busbw[all_reduce]", 4, ("> 335 GB/s", "> 335 GB/s")),
        ("busbw[all_reduce]", 8, ("> 400 GB/s", "> 400 GB/s")),
        ("inter_node_busbw[all_reduce]", 16, ("> 350 GB/s", "> 350 GB/s")),
        ("gpu_count", 8, (">= 8 GPUs", ">= 8 GPUs")),
        ("nodes_reachable", 16, (">= 2 nodes", ">= 2 nodes")),
        ("finetune_loss", 16, ("< 0.5 nats/token", "< 0.5 nats/token")),
    ],
)
def test_the_handover_limits(key: str, gpus: int, expected: tuple[str, str]) -> None:
    """The limits of the handover for H100 and H200."""
    file = packaged()
    found = [resolved(file, name, key).limit(gpus=gpus, cluster=SHAPE).text for name in ("h100-sxm", "h200-sxm")]
    assert tuple(found) == expected


def test_a_rehearsal_asks_of_a_rate_only_that_it_is_there() -> None:
    """No floor on something that depends on the machine's speed is above zero."""
    file = packaged()
    judged = [entry for entry in file.criteria(file.profiles["rehearsal"]).values() if entry.skip is None]
    rates = [entry for entry in judged if entry.unit in ("TFLOPS", "TOPS", "TB/s", "GB/s", "tokens/s/GPU", "%")]
    assert len(rates) > 20
    for entry in rates:
        assert (entry.kind, set(entry.numbers.values())) == ("above", {0}), entry.key
        assert entry.noise is None, entry.key
    speeds = {entry.key for entry in judged if entry.unit in ("us", "ms", "s", "MHz")} | {"finetune_check[step_time_spread]"}
    assert not speeds & {entry.key for entry in judged}


def test_a_rehearsal_is_small() -> None:
    """No recipe of what is measured on a CPU has a size for GPUs; a new entry is named by a rule, or says its own sizes."""
    file = packaged()
    most = {"size_bytes": 1 << 26, "large_size_bytes": 1 << 26, "size": 256, "sizes": 512, "seconds": 0.2, "iterations": 5}
    for entry in file.criteria(file.profiles["rehearsal"]).values():
        for name, value in entry.recipe.items() if entry.skip is None else ():
            largest = max(value, default=0) if isinstance(value, list) else value
            assert name not in most or largest <= most[name], (entry.key, name)
            assert name != "preset" or value == "tiny", entry.key


def test_digest_is_that_of_the_file(write: Write) -> None:
    """The digest is the one that ``sha256sum`` prints, also for an overlay."""
    path = write(OVERLAY)
    assert load(path).sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_packaged_file_extends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packaged file would extend itself for ever."""
    path = tmp_path / "thresholds.yaml"
    path.write_text(OVERLAY)
    monkeypatch.setattr(layers, "packaged_path", lambda: path)
    assert "thresholds.yaml:2: the packaged file extends nothing." in problems_of(path)[0]


def test_the_packaged_file_of_a_wheel_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file inside the package is used first, then the file next to the package."""
    package = tmp_path / "pytest_gpucluster"
    package.mkdir()
    monkeypatch.setattr(layers, "__file__", str(package / "thresholds" / "layers.py"))
    assert layers.packaged_path() == tmp_path / "thresholds.yaml"
    (package / "thresholds.yaml").touch()
    assert layers.packaged_path() == package / "thresholds.yaml"


def test_a_text_that_is_read_twice(write: Write) -> None:
    """Reading spells what entries need in one way; what others parse of the same text stays as it is written."""
    path = write(f"{OVERLAY}criteria:\n  bf16_tflops: {{needs_nodes: 2, profiles: {{h100-sxm: {{needs: 3}}}}}}\n")
    for _ in range(2):
        entry = layers.read_source(path).document.data["criteria"]["bf16_tflops"]
        assert (entry["needs"]["nodes"], entry["profiles"]["h100-sxm"]["needs"]) == (2, {"places": 3})
        written = yaml_lines.parse(path.read_bytes(), file=layers.shown(path)).data["criteria"]["bf16_tflops"]
        assert written == {"needs_nodes": 2, "profiles": {"h100-sxm": {"needs": 3}}}
    path.write_text(path.read_text().replace("needs_nodes: 2", "needs_nodes: 4"))
    assert layers.read_source(path).document.data["criteria"]["bf16_tflops"]["needs"]["nodes"] == 4
