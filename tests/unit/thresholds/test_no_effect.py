"""What a file says without effect: for which profile, and which line wins."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.thresholds import layers, no_effect
from pytest_gpucluster.thresholds.lint import load
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpucluster.thresholds.file import ThresholdsFile

    Load = Callable[[str], ThresholdsFile]

GOOD = (Path(__file__).parent / "good_thresholds.yaml").read_text(encoding="utf-8")
OVERLAY = "schema: 1\nextends: packaged\n"
BY_SHEET = ("h20", "b300-sxm", "gh200", "h200-nvl", "rtx-pro-6000", "l40s")
OTHERS = ("h100-nvl", "b200-sxm", "gb200-nvl72", "gb300-nvl72", *BY_SHEET)
"""Packaged profiles with limits of their own for most rates."""
SITE = "profiles:\n  site: {inherits: h200-sxm, fabric: roce}\n"
PACKAGED = layers.packaged_path().read_text(encoding="utf-8").splitlines()


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """Load a text as ``site.yaml`` in the working directory."""
    monkeypatch.chdir(tmp_path)

    def from_text(text: str) -> ThresholdsFile:
        path = tmp_path / "site.yaml"
        path.write_text(text, encoding="utf-8")
        return load(path)

    return from_text


def line_of(entry: str, *words: str) -> int:
    """The packaged line below ``entry`` that has each of ``words`` in order, counted from 1."""
    at = PACKAGED.index(f"  {entry}:")
    for word in words:
        at = next(number for number in range(at + 1, len(PACKAGED)) if PACKAGED[number].strip().startswith(word))
    return at + 1


def in_lint(file: ThresholdsFile) -> list[str]:
    """The remarks of the lint, as lines."""
    return [str(one) for one in no_effect.remarks(file)]


def in_run(file: ThresholdsFile, profile: str) -> list[str]:
    """The remarks of a run, as lines."""
    return [str(one) for one in no_effect.remarks_of_run(file, file.profiles[profile])]


def test_a_packaged_override_wins_over_an_entry_of_mine(loaded: Load) -> None:
    """The packaged file has limits of its own for H200 and others: one line; the entry of the overlay acts on H100 alone."""
    file = loaded(f"{OVERLAY}criteria:\n  hbm_bandwidth: {{above: 2.0}}\n")
    wins = f"no effect for profile h200-sxm: thresholds.yaml:{line_of('hbm_bandwidth', 'h200-sxm:', 'above')} overrides it"
    lines = in_lint(file)
    assert len(lines) == 1
    assert lines[0].startswith(f"site.yaml:4: {wins}")
    assert "'above' in 'hbm_bandwidth'" in lines[0]
    assert no_effect.problems(file) == []
    assert lines[0].endswith(f" So it is for {', '.join(['a100-sxm', 'h100-pcie', *OTHERS])}.")
    assert in_run(file, "h200-sxm") == [lines[0].partition(" So it is for ")[0]]
    assert in_run(file, "h100-sxm") == []
    assert file.criteria(file.profiles["h200-sxm"])["hbm_bandwidth"].numbers == {"any": 4.1}


@pytest.mark.parametrize(
    ("criteria", "expected"),
    [
        ("  hbm_bandwidth: {profiles: {h200-sxm: {above: 4.0}}}\n", []),
        ("  hbm_bandwidth: {profiles: {h100-sxm: {above: 2.5}}}\n", ["h200-sxm", "b200-sxm", "gb200-nvl72", "gb300-nvl72"]),
        ("  ecc_growth: {max: 0}\n", []),  # what it says holds, whoever says it
        ("  launch_latency: {below: 25}\n", []),
        ("  bf16_tflops: {above: 650}\n", ["a100-sxm", "h100-pcie", *OTHERS]),
        ("  bf16_tflops: {profiles: {site: {above: 650}}}\n", []),
        ("  hbm_bandwidth: {above: 2.0}\n", ["h200-sxm", "a100-sxm", "h100-pcie", *OTHERS, "site"]),
        ("  hbm_bandwidth: {why: because, source: a contract}\n", []),
    ],
)
def test_which_layers_win(criteria: str, expected: list[str], loaded: Load) -> None:
    """An entry, a parent's override and a child's override: the profiles for which what is written has no effect."""
    own = SITE if "site" in criteria or "site" in expected else ""
    file = loaded(f"{OVERLAY}{own}criteria:\n{criteria}")
    found = [line for line in in_lint(file) if ": no effect for profile " in line]
    names = [name for line in found for name in re.search(r"for profile ([^:]+):(?:.* So it is for (.+)\.)?", line).groups("")]  # type: ignore[union-attr]
    assert ", ".join(filter(None, names)) == ", ".join(expected)


def test_each_key_of_an_entry_may_lose(loaded: Load) -> None:
    """Not only the limit: also a key of the recipe, and the noise, that a packaged override has."""
    file = loaded(f"{OVERLAY}criteria:\n  bf16_tflops: {{recipe: {{sizes: [64], dtype: bfloat16}}, noise: 0.5}}\n")
    assert [line.split("overrides it")[1] for line in in_run(file, "rehearsal")] == [
        " ('noise' in 'bf16_tflops'). Write yours under 'profiles: {rehearsal: ...}'.",
        " ('recipe.sizes' in 'bf16_tflops'). Write yours under 'profiles: {rehearsal: ...}'.",
    ]
    assert in_run(file, "h200-sxm") == in_lint(file) == []


def test_a_criterion_that_the_profile_skips(loaded: Load) -> None:
    """A limit for a criterion that the chosen profile leaves out: the line that skips it is named; other profiles use it."""
    file = loaded(f"{OVERLAY}criteria:\n  busbw_scaling: {{min: 0.5}}\n")
    skips = f"thresholds.yaml:{line_of('busbw_scaling', 'lab-2x2:')} skips it"
    assert [line for line in in_run(file, "lab-2x2") if f"no effect for profile lab-2x2: {skips}" in line]
    assert in_run(file, "h200-sxm") == []


def test_a_site_profile_that_no_gpu_chooses(loaded: Load) -> None:
    """A profile that is not named like a spec is taken by option only; the run says so where another was taken."""
    file = loaded(f"{OVERLAY}{SITE}")
    assert in_lint(file) == [
        "site.yaml:4: profile 'site' is taken with --gpucluster-profile site only: no GPU has a spec of that name."
    ]
    assert in_run(file, "h200-sxm") == [
        "site.yaml:4: no effect: profile 'site' is not the profile of this run, h200-sxm; say --gpucluster-profile site."
    ]
    assert in_run(file, "site") == []
    child = loaded(f"{OVERLAY}{SITE}  site-b: {{inherits: site}}\n")
    assert all("'site-b'" in line for line in in_run(child, "site"))
    assert in_run(child, "site-b") == []


def test_terms_of_a_profile_that_lose(loaded: Load) -> None:
    """A child's term wins over its parent's, and the cluster section over the shape of a profile."""
    fabric = loaded(f"{OVERLAY}profiles:\n  h200-sxm: {{fabric: roce}}\n")
    assert [line for line in in_run(fabric, "lab-2x2") if "no effect for profile lab-2x2: thresholds.yaml:" in line]
    assert in_lint(fabric) == []
    shape = loaded(f"{OVERLAY}cluster: {{nodes: 4}}\nprofiles:\n  h200-sxm: {{nodes: 2}}\n")
    assert in_run(shape, "h200-sxm") == [
        "site.yaml:5: no effect for profile h200-sxm: site.yaml:3 overrides it ('nodes' in profile 'h200-sxm')."
    ]
    assert in_run(loaded(f"{OVERLAY}cluster: {{nodes: 2}}\nprofiles:\n  h200-sxm: {{nodes: 2}}\n"), "h200-sxm") == []


def test_an_older_key_is_shown_in_its_new_spelling(loaded: Load) -> None:
    """By the lint alone, at its line. What it says holds, so a run has nothing to remark."""
    file = loaded(f"{OVERLAY}criteria:\n  transport: {{needs_nodes: 3, recipe: {{needs_nodes: 1}}}}\n")
    assert in_lint(file) == ["site.yaml:4: 'needs_nodes' is deprecated: write 'needs: {nodes: ...}' (in 'transport')."]
    assert in_run(file, "h200-sxm") == []


def test_what_no_profile_uses_is_a_problem(loaded: Load) -> None:
    """A limit that every profile overrides is dead; the twin that one profile still uses is not."""
    dead = GOOD.replace("        min: 0.5\n", "        above: 500\n", 1).replace("        of: gpu.bf16_tflops\n", "", 1)
    dead = dead.replace("      rehearsal: {above", "      h200-sxm: {above: 690}\n      rehearsal: {above", 1)
    found = no_effect.problems(loaded(dead))
    assert [(one.line, one.message.split(":")[0]) for one in found] == [(11, "no effect for any profile")]
    assert "site.yaml:22 overrides it for h200-sxm" in found[0].message
    assert no_effect.problems(loaded(GOOD)) == []
    own_skips = GOOD.replace("rehearsal: {skip: no GPU}", "h200-sxm: {skip: not bought}\n      rehearsal: {skip: no GPU}")
    assert no_effect.problems(loaded(own_skips)) == []


def test_who_wins_for_many_profiles_is_named_once(loaded: Load) -> None:
    """With all of them: a line of the packaged file wins for several."""
    limit = "{above: 720, profiles: {h100-sxm: {above: 710}}}"
    (dead,) = no_effect.problems(loaded(f"{OVERLAY}criteria:\n  bf16_tflops: {limit}\n"))
    winners = [one.rpartition(" ")[2] for one in dead.message.split(" overrides it")[:-1]]
    assert len(winners) == len({*winners}) > 1
    assert " overrides it for gb200-nvl72, gb300-nvl72; " in dead.message


def test_a_rule_wins_over_an_entry_of_mine(loaded: Load) -> None:
    """As a packaged override does; and a rule of mine that no entry follows is a problem."""
    file = loaded(f"{OVERLAY}criteria:\n  hbm_bandwidth: {{noise: 0.5}}\n  bf16_soak: {{above: 650}}\n")
    lines = [line.partition(" overrides it")[0] for line in in_run(file, "rehearsal")]
    rule = next(number for number, line in enumerate(PACKAGED) if line.strip() == "rates:")
    noise, above = (next(n for n in range(rule, rule + 9) if key in PACKAGED[n]) + 1 for key in ("noise:", "above:"))
    said = "no effect for profile rehearsal: thresholds.yaml"
    assert lines == [f"site.yaml:4: {said}:{noise}", f"site.yaml:5: {said}:{above}"]
    rules = "{rules: {mine: {for: [gpu_count], max: 3}, yours: {for: [gpu_count], max: 4}}}"
    own = loaded(f"{OVERLAY}profiles:\n  h100-nvl: {rules}\n")
    assert [(one.line, one.message.partition(": ")[0]) for one in no_effect.problems(own)] == [(4, "no effect for any profile")]
    assert "('max' in rule 'mine' of profile 'h100-nvl')" in no_effect.problems(own)[0].message


def test_a_copy_of_the_packaged_file_says_nothing(loaded: Load) -> None:
    """Neither its layers, which the packaged file means, nor its profiles; one changed limit is no reason for more."""
    text = "\n".join(PACKAGED)
    for copied in (text, text.replace("above: 700", "above: 690", 1)):
        file = loaded(copied)
        assert no_effect.problems(file) == in_lint(file) == []
        assert [line for profile in file.profiles for line in in_run(file, profile)] == []


def test_the_packaged_file_says_nothing() -> None:
    """The layers of the packaged file are what it means; nobody is told about them."""
    file = packaged()
    assert no_effect.problems(file) == in_lint(file) == []
    assert [line for profile in file.profiles for line in in_run(file, profile)] == []
