"""The packaged limits by content: whoever edits the packaged file itself, or a GPU's figures, is named."""

from __future__ import annotations

import copy
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from pytest_gpucluster import run_setup
from pytest_gpucluster.config.settings import Expect, Settings
from pytest_gpucluster.config.yaml_lines import read
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.inventory.detect import Detected
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.session import Session
from pytest_gpucluster.thresholds import file, layers, released, resolve, specs
from pytest_gpucluster.thresholds.lint import load
from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Callable

    Edit = Callable[[dict[Any, Any]], None]

DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
H200 = "NVIDIA H200"
PACKAGED = layers.packaged_path()
TEXT = released.released_text(released.packaged_files(PACKAGED))


def released_beside_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel carries the released limits beside the code."""
    path = folder / "wheel" / "packaged_limits.json"
    path.parent.mkdir()
    path.write_text(TEXT, encoding="utf-8")
    monkeypatch.setattr(released, "PATH", path)


@pytest.fixture(autouse=True)
def _of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released_beside_the_code(tmp_path, monkeypatch)


def edited(folder: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit) -> Path:
    """Edit the packaged file in place: a copy takes its path."""
    document: dict[Any, Any] = copy.deepcopy(read(PACKAGED, file="x").data)
    edit(document)
    path = folder / "thresholds.yaml"
    path.write_text(yaml.dump(document, Dumper=DUMPER), encoding="utf-8")
    monkeypatch.setattr(layers, "packaged_path", lambda: path)
    return path


def of_run(folder: Path, monkeypatch: pytest.MonkeyPatch, thresholds: Path | None = None) -> Session:
    """A run on a node of eight H200, which starts nothing."""
    monkeypatch.setattr(run_setup, "detect_gpus", lambda: Detected(names=(H200,) * 8))
    settings = Settings(
        thresholds=thresholds,
        profile=None,
        expect=Expect(nodes=None, gpus_per_node=None),
        level="standard",
        soak_s=None,
        results_dir=folder / "results",
        gate=False,
        inline=False,
    )
    return Session(run_setup.prepare(settings, None, start=folder), rootdir=folder)


def setting(key: str, **values: Any) -> Edit:
    """An edit of one entry; None removes a key."""

    def edit(document: dict[Any, Any]) -> None:
        entry = document["criteria"][key]
        for name, value in values.items():
            if value is None:
                entry.pop(name)
            elif isinstance(value, dict) and isinstance(entry.get(name), dict):
                entry[name].update(value)
            else:
                entry[name] = value

    return edit


def removing(document: dict[Any, Any]) -> None:
    """Remove an entry."""
    del document["criteria"]["gpu_memory"]


EDITS = {
    "bf16_tflops": (setting("bf16_tflops", above=400), ["above 400 instead of above 700"]),
    "gpu_memory": (removing, ["removed"]),
    "bf16_sustained": (setting("bf16_sustained", recipe={"seconds": 1}), ["recipe seconds"]),
    "ecc_enabled": (setting("ecc_enabled", severity="advisory"), ["severity"]),
    "mig_disabled": (setting("mig_disabled", level="soak"), ["level"]),
    "fp32_tflops": (setting("fp32_tflops", noise=0.5), ["noise"]),
    "fp16_tflops": (setting("fp16_tflops", needs=4), ["needs places"]),
    "fp64_tflops": (setting("fp64_tflops", needs_nodes=3), ["needs nodes"]),
    "tf32_tflops": (setting("tf32_tflops", needs={"nodes": 3}), ["needs nodes"]),
    "int8_tops": (setting("int8_tops", profiles={"h200-sxm": {"skip": "too slow"}}), ["skip"]),
    "fp8_tflops": (setting("fp8_tflops", above=None, min=1200), ["min 1200 instead of above 1200"]),
}
"""By criterion, so that one run shows them all: each names its own edit and no other."""


def every_edit(document: dict[Any, Any]) -> None:
    """All of them in one file."""
    for edit, _ in EDITS.values():
        edit(document)


@pytest.fixture(scope="module", params=["packaged", "below a site's overlay"])
def facts_of_edits(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What results.json says of a run by a packaged file with all of the edits; also by a site's file that extends it."""
    folder = tmp_path_factory.mktemp("edits")
    with pytest.MonkeyPatch.context() as patch:
        released_beside_the_code(folder, patch)
        edited(folder, patch, every_edit)
        site = folder / "site.yaml"
        site.write_text("schema: 1\nextends: packaged\n", encoding="utf-8")
        return of_run(folder, patch, site if request.param != "packaged" else None).state.facts()


@pytest.mark.parametrize("key", EDITS)
def test_an_edited_packaged_file_is_noticed(facts_of_edits: dict[str, Any], key: str) -> None:
    """By what it says, wherever it lies."""
    assert key in facts_of_edits["changed_limits"]
    assert facts_of_edits["changed_entries"][key] == EDITS[key][1]


def test_only_edited_entries_are_named(facts_of_edits: dict[str, Any]) -> None:
    """And each once."""
    assert sorted(facts_of_edits["changed_limits"]) == sorted(facts_of_edits["changed_entries"]) == sorted(EDITS)


def test_one_edited_entry_is_named_in_the_verdict_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its key."""
    edited(tmp_path, monkeypatch, EDITS["bf16_tflops"][0])
    run = of_run(tmp_path, monkeypatch)
    run.plan.set_outcome(Record(criterion="hbm_bandwidth", place="node0-gpu0", outcome="passed"))
    assert run.state.facts()["changed_limits"] == ["bf16_tflops"]
    assert "limits changed: bf16_tflops" in run.decide().line


def test_edited_terms_of_the_packaged_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A level, a fabric or a shape that the packaged profile no longer asks for."""

    def edit(document: dict[Any, Any]) -> None:
        document["profiles"]["h100-sxm"] |= {"accept_at": "quick", "fabric": "sockets"}

    edited(tmp_path, monkeypatch, edit)
    assert of_run(tmp_path, monkeypatch).state.facts()["changed_terms"] == [
        "accept_at quick instead of standard",
        "fabric sockets instead of infiniband",
    ]


def test_a_comment_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that change no outcome are not named."""
    edited(tmp_path, monkeypatch, setting("bf16_tflops", why="Another reason.", source="none", takes_s=3))
    facts = of_run(tmp_path, monkeypatch).state.facts()
    assert (facts["changed_limits"], facts["changed_entries"], facts["changed_terms"]) == ([], {}, [])


@pytest.mark.parametrize(
    ("changes", "others"),
    [({"memory_gib": 70.0}, {}), ({"names": ("another",)}, {"b200-sxm": {"names": (H200,)}})],
)
def test_edited_figures_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], others: dict[str, dict[str, Any]]
) -> None:
    """A limit that is a part of a figure follows the figure, and a GPU may be taken for another one: both are named."""
    found = {**specs.load_specs()}
    for name, update in {"h200-sxm": changes, **others}.items():
        found[name] = found[name].model_copy(update=update)
    limits = load(None)
    assert limits.changed_figures([H200, "a GPU of tomorrow"]) == []
    monkeypatch.setattr(resolve, "load_specs", lambda: found)
    monkeypatch.setattr(file, "load_specs", lambda: found)
    assert limits.changed_figures([H200, "a GPU of tomorrow"]) == [f"figures of {H200}"]
    if "memory_gib" in changes:
        limits = load(None)
        assert [*limits.changed_entries(limits.profiles["h200-sxm"])] == ["gpu_memory"]


def test_the_digest_is_that_of_the_limits() -> None:
    """Otherwise a limit changed: if that is meant, run ``python docs/generate_limits.py``."""
    assert released.DIGEST.read_text(encoding="ascii") == released.digest_of(TEXT) + "\n"
    limits = load(None)
    for profile in limits.profiles.values():
        assert limits.packaged.criteria(limits.packaged.profiles[profile.name]).keys() == limits.criteria(profile).keys()
        assert profile.name == "lab-2x2" or limits.changed_entries(profile) == {}


def test_prose_is_not_in_the_digest() -> None:
    """Another reason or source, or a comment, is no other limit; a number, and a figure of a GPU, is."""
    files = released.packaged_files(PACKAGED)
    words = files["thresholds.yaml"].replace(b"why: A GPU that fell off", b"why: One that fell off") + b"# a comment\n"
    assert released.released_text({**files, "thresholds.yaml": words}) == TEXT
    for name, old, new in (
        ("thresholds.yaml", b"above: 700", b"above: 699"),
        ("h200-sxm.yaml", b"power_w: 700", b"power_w: 699"),
    ):
        assert old in files[name]
        assert released.released_text({**files, name: files[name].replace(old, new, 1)}) != TEXT


@pytest.mark.parametrize("content", [TEXT[:-99], TEXT.replace("700", "400", 1), "", "\udcff"])
def test_a_released_copy_without_the_digest_is_refused(content: str) -> None:
    """Torn or edited: whoever edits both files is not believed, although the packaged file itself would have the digest."""
    released.PATH.write_text(content, encoding="utf-8", errors="surrogateescape")
    limits = load(None)
    with pytest.raises(ConfigurationError, match=r"packaged_limits.json is not what was released; install the package again"):
        limits.changed_entries(limits.profiles["h200-sxm"])


def lower_limit(monkeypatch: pytest.MonkeyPatch, folder: Path) -> dict[str, list[str]]:
    """What a run names where the packaged file has a lower limit, and no released copy lies beside the code."""
    released.PATH.unlink()
    edited(folder, monkeypatch, setting("bf16_tflops", above=400))
    limits = load(None)
    return limits.changed_entries(limits.profiles["h200-sxm"])


def test_a_checkout_is_compared_with_its_own_files() -> None:
    """Nothing was built there. While they have the digest, the packaged files are what was released."""
    released.PATH.unlink()
    limits = load(None)
    assert limits.changed_entries(limits.profiles["h200-sxm"]) == {}
    assert limits.changed_figures([H200]) == []


def commit(root: Path, message: str) -> None:
    """Commit all of a checkout."""
    git = ("git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", message], check=True)


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
@pytest.mark.parametrize("is_committed", [False, True])
def test_an_edited_checkout_is_compared_with_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_committed: bool
) -> None:
    """By the commit that wrote the digest, however often the file was edited and committed since then."""
    root, folder = tmp_path / "checkout", Path("pytest_gpucluster", "thresholds")
    shutil.copytree(REPOSITORY / folder / "specs", root / folder / "specs")
    for path in (Path("thresholds.yaml"), folder / "packaged_limits.sha256", folder / "known_versions.yaml"):
        shutil.copy(REPOSITORY / path, root / path)
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    commit(root, "release")
    monkeypatch.setattr(released, "__file__", str(root / folder / "released.py"))
    monkeypatch.setattr(released, "DIGEST", root / folder / "packaged_limits.sha256")
    (root / "other").touch()
    commit(root, "another file")
    found = lower_limit(monkeypatch, root)
    if is_committed:
        commit(root, "a lower limit")
    limits = load(None)
    assert limits.changed_entries(limits.profiles["h200-sxm"]) == found == {"bf16_tflops": ["above 400 instead of above 700"]}


@pytest.mark.parametrize("git", ["none", "no checkout"])
def test_without_anything_to_compare_with_a_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, git: str) -> None:
    """An edited file, and neither a released copy nor git: never a run without the comparison."""
    monkeypatch.setattr(released, "__file__", str(tmp_path / "pytest_gpucluster" / "thresholds" / "released.py"))
    if git == "none":
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"thresholds.yaml or the figures of a GPU were edited.*back from git"):
        lower_limit(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("edited", "expected"),
    [
        (lambda _folder: None, True),
        (lambda folder: (folder / "test_memory.py").write_text("def test_hbm_bandwidth(): pass\n"), False),
        (lambda folder: (folder / "conftest.py").write_text(""), False),
        (lambda folder: (folder / "conftest.py").unlink(), False),
        (lambda folder: (folder / "more" / "conftest.py").write_text(""), False),
        (lambda folder: (folder / "more" / "er" / "conftest.py").mkdir(), False),
        (lambda folder: (folder / "more" / "test_more.py").write_text(""), True),
    ],
    ids=["as released", "test", "conftest.py", "no conftest.py", "below", "folder", "test below"],
)
def test_a_copy_is_known_by_its_content(tmp_path: Path, edited: Callable[[Path], Any], *, expected: bool) -> None:
    """Test file and conftest.py both have to be released ones. One below may do to all tests what one beside them may."""
    (tmp_path / "more" / "er").mkdir(parents=True)
    for name in ("conftest.py", "test_memory.py"):
        shutil.copy(REPOSITORY / "tests_acceptance" / name, tmp_path / name)
    edited(tmp_path)
    assert released.is_released_test(tmp_path / "test_memory.py") is expected
