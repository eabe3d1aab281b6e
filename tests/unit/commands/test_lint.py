"""``gpucluster lint``: which lines it prints, and its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.commands import main
from pytest_gpucluster.thresholds.layers import packaged_path

if TYPE_CHECKING:
    from collections.abc import Callable

    Lint = Callable[..., tuple[int, list[str]]]

OVERLAY = "schema: 1\nextends: packaged\n"
OWN = """\
  {name}:
    criterion: A sentence.
    per: cluster
    min: 1
    unit: count
    why: a reason
    source: a contract
"""
ALONE = "schema: 1\nprofiles: {rehearsal: {gpu: null, rehearsal: true}}\ncriteria:\n"
TEST = "def test_{name}(criterion):\n    criterion.require(1)\n"


@pytest.fixture
def lint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Lint:
    """Write files by name into the working directory, lint by the words given: the exit code and the lines."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str, **files: str) -> tuple[int, list[str]]:
        for name, text in files.items():
            suffix = ".py" if name.startswith("test_") else ".yaml"
            Path(f"{name}{suffix}").write_text(text, encoding="utf-8")
        code = main.main(["lint", *words])
        return code, capsys.readouterr().out.splitlines()

    return run


def test_the_packaged_file_has_no_problems(lint: Lint) -> None:
    """Without a name the packaged file is checked, and nothing is remarked."""
    assert lint() == (0, [f"{packaged_path()}: no problems"])


def test_a_unit_of_one_s_own_is_told_once(lint: Lint) -> None:
    """At its own line, with the unit to write; the packaged numbers are right, and stay unnamed."""
    code, lines = lint("a.yaml", a=f"{OVERLAY}criteria:\n  hbm_bandwidth: {{unit: GB/s, above: 2000}}\n")
    said = "'hbm_bandwidth' is measured in TB/s, not in GB/s: leave 'unit' out (in 'hbm_bandwidth'). For 2000 GB/s say 2 TB/s."
    assert (code, [line.partition(": ")[2] for line in lines]) == (1, [said])
    assert lines[0].startswith("a.yaml:")


def test_the_beginning_of_a_name_is_the_nearest(lint: Lint) -> None:
    """``h200`` is cut short, and no misspelt ``gh200``."""
    _, lines = lint("a.yaml", a=f"{OVERLAY}profiles:\n  site: {{inherits: h200}}\n")
    assert lines[-1].endswith("Did you mean 'h200-sxm'?")


def test_waivers_of_the_run_are_checked_too(lint: Lint) -> None:
    """Those beside the file, or where it starts; by the criteria of the file. A file of waivers is no file of limits."""
    good = "schema: 1\nwaivers:\n  - {criterion: bf16_tflops, until: 2026-12-31, who: J. Doe, why: known}\n"
    assert lint("a.yaml", a=OVERLAY, waivers=good) == (0, ["a.yaml: no problems"])
    code, lines = lint("a.yaml", waivers=good.replace("2026-12-31", "31.12.2026"))
    assert (code, lines) == (1, ["waivers.yaml:3: 'until' must be a day like 2026-12-31, not '31.12.2026' (in waiver 1)."])
    code, lines = lint(waivers=good.replace("bf16_tflops", "bf16_tflop"))
    assert (code, len(lines)) == (1, 1)
    assert "waivers.yaml:3: " in lines[0]
    assert "Did you mean 'bf16_tflops'?" in lines[0]
    text = "waivers.yaml: waivers are checked with the limits of their run: gpucluster lint [FILE of limits]"
    assert lint("waivers.yaml") == (1, [text])


def test_several_files_each_with_its_lines(lint: Lint) -> None:
    """One bad file is enough for exit code 1; the good one is said to be good."""
    good, bad = f"{OVERLAY}", f"{OVERLAY}criterias: {{}}\n"
    assert lint("a.yaml", "b.yaml", a=good, b=good) == (0, ["a.yaml: no problems", "b.yaml: no problems"])
    code, lines = lint("a.yaml", "b.yaml", a=good, b=bad)
    assert code == 1
    assert lines[0] == "a.yaml: no problems"
    assert lines[1].startswith("b.yaml:3: 'criterias' is not a key")


def test_a_file_that_cannot_be_read(lint: Lint) -> None:
    """The line has no line number, since no line is meant."""
    assert lint("nope.yaml") == (1, ["nope.yaml: cannot be read: No such file or directory."])


def test_a_limit_without_effect_is_a_remark(lint: Lint) -> None:
    """Where one profile still uses the limit, the exit code stays 0."""
    code, lines = lint("site.yaml", site=f"{OVERLAY}criteria:\n  hbm_bandwidth: {{above: 2.0}}\n")
    assert code == 0
    assert lines[0].startswith("site.yaml:4: no effect for profile h200-sxm: thresholds.yaml:")
    assert lines[1:] == ["site.yaml: no problems, 1 remark"]


def test_a_limit_that_no_profile_uses_is_a_problem(lint: Lint) -> None:
    """Every profile of the file overrides the entry."""
    override = "    profiles: {rehearsal: {min: 2}}\n"
    code, lines = lint("site.yaml", site=ALONE + OWN.format(name="share") + override, test_share=TEST.format(name="share"))
    assert code == 1
    assert lines == ["site.yaml:7: no effect for any profile: site.yaml:11 overrides it for rehearsal ('min' in 'share')."]


def test_a_copy_of_the_packaged_file(lint: Lint) -> None:
    """Byte for byte: what is no problem there is none here."""
    assert lint("site.yaml", site=packaged_path().read_text(encoding="utf-8")) == (0, ["site.yaml: no problems"])


# An entry needs a test


def test_a_misspelt_entry_beside_the_packaged_ones(lint: Lint) -> None:
    """No packaged test judges it; the near name is given, and how to name tests of one's own."""
    text = packaged_path().read_text(encoding="utf-8")
    code, lines = lint("site.yaml", site=text + "\n" + OWN.format(name="bf16_tflopz"))
    assert code == 1
    number = text.count("\n") + 2
    assert [line for line in lines if line.startswith(f"site.yaml:{number}: no test judges 'bf16_tflopz'")] == lines[-1:]
    assert "Did you mean 'bf16_tflops'?" in lines[-1]
    assert "--tests" in lines[-1]


@pytest.mark.parametrize("name", ["bf16_tflopz", "scratch_free"])
def test_an_own_entry_in_an_overlay(name: str, lint: Lint) -> None:
    """A problem, until a test file beside the thresholds file has its test, whatever the name is like."""
    text = f"{OVERLAY}criteria:\n{OWN.format(name=name)}"
    code, lines = lint("site.yaml", site=text)
    assert (code, len(lines)) == (1, 1)
    assert lines[0].startswith(f"site.yaml:4: no test judges {name!r}: ")
    assert lint("site.yaml", test_own=TEST.format(name=name)) == (0, ["site.yaml: no problems"])


@pytest.mark.parametrize("folder", ["", "a/b/c"])
def test_the_last_of_many_test_files_is_read_too(folder: str, tmp_path: Path, lint: Lint) -> None:
    """Reading stopped after 200 files, and then no test judged the entry."""
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for number in range(201):
        (tmp_path / folder / f"test_a{number:03}.py").write_text("def test_other(): pass\n", encoding="utf-8")
    (tmp_path / folder / "test_b.py").write_text(TEST.format(name="disk"), encoding="utf-8")
    own = "".join(OWN.format(name=name) for name in ("disk", "share"))
    code, lines = lint("site.yaml", site=f"{OVERLAY}criteria:\n{own}  launch_latency: {{below: 30}}\n")
    assert (code, len(lines)) == (1, 1)
    assert "no test judges 'share': none of the packaged suite, nor one of 202 other test files" in lines[0]
    (tmp_path / folder / "test_c.py").write_text(TEST.format(name="share"), encoding="utf-8")
    assert lint("site.yaml") == (0, ["site.yaml: no problems"])


def test_an_entry_of_a_file_that_stands_alone(lint: Lint) -> None:
    """Whose tests are is not known there, so a remark, unless test files are named that lack it."""
    text = ALONE + OWN.format(name="share")
    code, lines = lint("site.yaml", site=text)
    assert (code, lines[1:]) == (0, ["site.yaml: no problems, 1 remark"])
    assert lines[0].startswith("site.yaml:4: no test judges 'share'")
    Path("elsewhere").mkdir()
    Path("elsewhere/test_share.py").write_text(TEST.format(name="shares"), encoding="utf-8")
    code, lines = lint("site.yaml", "--tests", "elsewhere")
    assert (code, len(lines)) == (1, 1)
    Path("elsewhere/test_share.py").write_text(TEST.format(name="share"), encoding="utf-8")
    assert lint("site.yaml", "--tests", "elsewhere") == (0, ["site.yaml: no problems"])
    assert lint("site.yaml", "--tests", "elsewhere/test_share.py") == (0, ["site.yaml: no problems"])


PARAMETRIZED = """\
import pytest
NAMES = ["read"]
@pytest.mark.parametrize("way", {values})
def test_disk(way, criterion): ...
"""


@pytest.mark.parametrize(
    ("test", "name", "code"),
    [
        (TEST.format(name="disk"), "disk", 0),
        ("class TestDisk:\n    def test_disk(self, criterion): ...\n", "disk", 0),
        ("async def test_disk(criterion): ...\n", "disk", 0),
        ("import pytest\n@pytest.fixture\ndef judge(criterion): ...\ndef test_disk(judge): ...\n", "disk", 0),
        ("from elsewhere import test_disk\n", "disk", 0),
        ("def test_disk(): ...\n", "disk", 1),
        ("def test_disk(rank, world_size): ...\n", "disk", 1),
        ("def disk(criterion): ...\n", "disk", 1),
        ("# def test_disk(criterion): ...\n", "disk", 1),
        (TEST.format(name="disk"), '"disk[read]"', 1),
        (PARAMETRIZED.format(values='["read", "write"]'), '"disk[read]"', 0),
        (PARAMETRIZED.format(values='["read", "write"]'), '"disk[raed]"', 1),
        (PARAMETRIZED.format(values='["read", "write"]'), "disk", 1),
        (PARAMETRIZED.format(values="NAMES"), '"disk[read]"', 0),
        ("def pytest_generate_tests(metafunc): ...\n" + TEST.format(name="disk"), '"disk[read]"', 0),
    ],
)
def test_which_tests_judge(test: str, name: str, code: int, lint: Lint) -> None:
    """Tests are found in the source, without importing it; parameters are compared where the source has them as text."""
    assert lint("site.yaml", site=f"{OVERLAY}criteria:\n{OWN.format(name=name)}", test_own=test)[0] == code


@pytest.mark.parametrize(("name", "code"), [("'dcgm_diag[eud]'", 0), ("dcgm_diag", 1), ("'dcgm_diags[eud]'", 1)])
def test_the_packaged_test_that_judges_any_parameter(name: str, code: int, lint: Lint) -> None:
    """Every entry ``dcgm_diag[...]`` has a test; one that is called otherwise has none."""
    near = f"{OVERLAY}criteria:\n  bf16_tflops: {{why: mine}}\n{OWN.format(name=name)}"
    assert lint("site.yaml", site=near)[0] == code


def test_tests_are_not_executed(lint: Lint) -> None:
    """A test file beside the thresholds file is read, never run; one that is no Python is no test."""
    source = "from pathlib import Path\nPath('executed').touch()\n"
    lint("site.yaml", site=f"{OVERLAY}criteria:\n{OWN.format(name='disk')}", test_own=source, test_broken="def (\n")
    assert not Path("executed").exists()


def test_a_wrong_path_of_tests_is_wrong_usage(lint: Lint, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 2 and one sentence, for what is absent and for what is no Python."""
    Path("broken.py").write_text("def (\n", encoding="utf-8")
    for path, why in (("absent", "there is no file or folder"), ("broken.py", "is not Python")):
        assert main.main(["lint", "--tests", path]) == 2
        assert why in capsys.readouterr().err
