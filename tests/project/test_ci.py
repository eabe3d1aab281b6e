"""Our own workflows and the templates of deploy/ci: valid, pinned, without a finding, and as docs/how-to/ci.md has them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import REPOSITORY

CI = REPOSITORY / "deploy" / "ci"
CITATION = REPOSITORY / "CITATION.cff"
OWN = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted(CI.glob("github-*.yml"))
SCHEMAS = {
    "vendor.github-workflows": [*OWN, *TEMPLATES],
    "vendor.gitlab-ci": [CI / "gitlab.yml"],
    "vendor.buildkite": [CI / "buildkite.yml"],
    "vendor.dependabot": [REPOSITORY / ".github" / "dependabot.yml"],
    "vendor.citation-file-format": [CITATION],
}
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
OURS = "./.github/workflows/gpucluster-accept.yml # zizmor: ignore[self-repository]"
RECORDS = """#!/bin/bash
printf '%s ' "$(basename "$0")" "$@" >> "$CALLS"; echo >> "$CALLS"
for word in "$@"; do case $word in *.zip) echo zip > "$word";; --junitxml=*) echo run > "${word#*=}";; esac; done
if [ "$1" = compare ]; then echo "# compared with $3"; fi
exit "${CODE:-0}"
"""


def validated(schema: str, *files: Path) -> subprocess.CompletedProcess[str]:
    """What check-jsonschema says, by a schema that its package has."""
    if importlib.util.find_spec("check_jsonschema") is None:
        pytest.skip("check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, *map(str, files)]
    extra = ["--data-transform", "gitlab-ci"] if "gitlab" in schema else ["--default-filetype", "yaml"]
    return subprocess.run([*command, *extra], capture_output=True, text=True, check=False, timeout=120)


def audited(folder: Path) -> subprocess.CompletedProcess[str]:
    """What zizmor says of the workflows below a folder."""
    program = shutil.which("zizmor", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if program is None:
        pytest.skip("zizmor is not installed")
    return subprocess.run([program, "--offline", folder], capture_output=True, text=True, check=False, timeout=120)


def as_a_site_has_them(folder: Path) -> Path:
    """The workflows of deploy/ci in a repository that copied them as the page says."""
    workflows = folder / ".github" / "workflows"
    workflows.mkdir(parents=True)
    for template in TEMPLATES:
        shutil.copy(template, workflows / template.name)
    return folder


def unpinned(text: str) -> list[str]:
    """Uses of an action without a commit and the version it is of."""
    return [use for use in re.findall(r"uses: (.*)$", text, flags=re.MULTILINE) if use != OURS and not PINNED.fullmatch(use)]


def read(path: Path) -> dict[str, Any]:
    """A YAML file; ``on`` is a key there, and no boolean."""
    read: dict[str, Any] = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)  # noqa: S506 -- texts only
    return read


@pytest.mark.parametrize("schema", SCHEMAS)
def test_schemas(schema: str) -> None:
    """No key is misspelt, and none has a wrong type."""
    done = validated(schema, *SCHEMAS[schema])
    assert done.returncode == 0, done.stdout


PLANTED = [
    ("vendor.github-workflows", CI / "github-accept.yml", "runs-on:", "run-on:"),
    ("vendor.github-workflows", REPOSITORY / ".github" / "workflows" / "release.yml", "needs: build", "need: build"),
    ("vendor.gitlab-ci", CI / "gitlab.yml", "junit:", "junitxml:"),
    ("vendor.gitlab-ci", CI / "gitlab.yml", "when: always\n    expire", "when: ever\n    expire"),
    ("vendor.buildkite", CI / "buildkite.yml", "artifact_paths:", "artifacts_path:"),
    ("vendor.dependabot", REPOSITORY / ".github" / "dependabot.yml", "interval: weekly", "interval: often"),
    ("vendor.citation-file-format", CITATION, "license: Apache-2.0", "license: ours"),
]


@pytest.mark.parametrize(("schema", "path", "right", "wrong"), PLANTED)
def test_a_misspelt_key_is_seen(schema: str, path: Path, right: str, wrong: str, tmp_path: Path) -> None:
    """The check above finds it."""
    text = path.read_text(encoding="utf-8")
    assert right in text
    (tmp_path / path.name).write_text(text.replace(right, wrong, 1), encoding="utf-8")
    assert validated(schema, tmp_path / path.name).returncode == 1


def test_the_citation_is_of_the_newest_release() -> None:
    """And has the licence and the summary of the package."""
    cited, pyproject = read(CITATION), (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    released = re.findall(r"(?m)^## \[(\d[^]]*)\] - ", (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert cited["version"] == released[0]
    for key, value in {"license": cited["license"], "description": cited["abstract"]}.items():
        assert f'{key} = "{value}"' in pyproject


def test_zizmor_has_no_finding(tmp_path: Path) -> None:
    """Of ours, and of the templates where a site puts them."""
    for folder in (REPOSITORY / ".github", as_a_site_has_them(tmp_path)):
        done = audited(folder)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("right", "wrong", "finding"),
    [
        ('ci/accept.sh "$LEVEL"', 'ci/accept.sh "${{ inputs.level }}"', "template-injection"),
        ("@08c6903cd8c0fde910a37f88322edcfb5dd907a8 # v5.0.0", "@v5", "unpinned-uses"),
        ("persist-credentials: false", "fetch-depth: 1", "artipacked"),
    ],
)
def test_zizmor_finds(right: str, wrong: str, finding: str, tmp_path: Path) -> None:
    """What it is there for."""
    path = as_a_site_has_them(tmp_path) / ".github" / "workflows" / "github-accept.yml"
    text = path.read_text(encoding="utf-8")
    assert right in text
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    done = audited(tmp_path)
    assert done.returncode != 0
    assert finding in done.stdout


@pytest.mark.skipif(shutil.which("actionlint") is None, reason="actionlint is not installed; no registry here has it")
def test_actionlint() -> None:
    """No finding; it reads expressions and shell too."""
    done = subprocess.run(["actionlint", *OWN, *TEMPLATES], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout


def test_actions_are_pinned() -> None:
    """By commit, with its version beside it, one commit an action in all files."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*OWN, *TEMPLATES])
    assert unpinned(text) == []
    pins = set(PINNED.findall(text))
    assert len(pins) == len({pin.partition("@")[0] for pin in pins}), sorted(pins)


@pytest.mark.parametrize("use", ["a/b@v5", "a/b@main", f"a/b@{'0' * 40}", f"a/b@{'0' * 39} # v1.2.3", f"a/b@{'0' * 40} # v1"])
def test_an_action_that_is_not_pinned(use: str) -> None:
    """The check above sees a tag, a branch, a short hash, and a hash without its version."""
    assert unpinned(f"      - uses: {use}\n") == [use]


def test_no_workflow_has_rights_by_default() -> None:
    """Each job names its own."""
    for path in [*OWN, *TEMPLATES]:
        workflow = read(path)
        assert workflow["permissions"] == {}, path.name
        assert all(isinstance(job["permissions"], dict) for job in workflow["jobs"].values()), path.name


def test_our_matrix_is_what_we_claim() -> None:
    """Each Python of the classifiers, with both pytests."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    claimed = re.findall(r"Python :: (3\.\d+)", text)
    jobs = read(REPOSITORY / ".github" / "workflows" / "ci.yml")["jobs"]
    for job in ("tests", "pytest8"):
        assert jobs[job]["strategy"]["matrix"]["python"] == claimed
        assert jobs[job]["steps"][-1]["run"] == f"python3 noxfile.py -s {job}"


def test_a_release_trusts_and_attests() -> None:
    """No password; the checked build is what is published, from a tag that is the version."""
    workflow = read(REPOSITORY / ".github" / "workflows" / "release.yml")
    assert workflow["on"] == {"push": {"tags": ["v*"]}}
    jobs = workflow["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write", "attestations": "write"}
    assert jobs["publish"]["environment"] == "release"
    assert (jobs["publish"]["needs"], jobs["release"]["needs"]) == ("build", "publish")
    assert "secrets." not in str(workflow)
    published = jobs["publish"]["steps"][-1]
    assert published["uses"].startswith("pypa/gh-action-pypi-publish@")
    assert published["with"] == {"attestations": "true"}
    ran = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert "python3 noxfile.py -s build" in ran
    assert sum("GITHUB_REF_NAME" in one for one in ran) == 1


def test_the_container_is_tested_before_it_is_pushed() -> None:
    """And has the tags of the documents: latest, sha-..., v..."""
    steps = read(REPOSITORY / ".github" / "workflows" / "container.yml")["jobs"]["image"]["steps"]
    names = [step.get("name", step.get("uses")) for step in steps]
    assert names.index("Build") < names.index("Test the image") < names.index("Push what was tested")
    (meta,) = [step["with"]["tags"] for step in steps if step.get("id") == "meta"]
    expected = ("value=latest,enable={{is_default_branch}}", "type=sha,prefix=sha-", "type=ref,event=tag")
    assert [tag for tag in expected if tag not in meta] == []
    built = [step["with"]["build-args"] for step in steps if "build-args" in step.get("with", {})]
    assert len(built) == 2
    assert built[0] == built[1], "what is pushed is what was tested"
    assert "WHEEL_SHA256=${{ steps.wheel.outputs.sha256 }}" in built[0]
    pushes = [step for step in steps if step.get("with", {}).get("push") == "true"]
    assert [step["if"] for step in pushes] == ["github.event_name != 'pull_request'"]


def test_when_the_templates_run() -> None:
    """Quick at a driver or a firmware, standard nightly; reports are kept whatever comes out, and one run at a time."""
    on = read(CI / "github-triggers.yml")["on"]
    assert on["repository_dispatch"]["types"] == ["driver-changed", "firmware-changed"]
    assert on["push"]["paths"] == ["drivers/**", "firmware/**"]
    assert len(on["schedule"]) == 1
    job = read(CI / "github-accept.yml")["jobs"]["accept"]
    kept = job["steps"][-1]
    assert (kept["if"], kept["with"]["retention-days"]) == ("always()", "90")
    assert job["concurrency"]["cancel-in-progress"] == "false"
    gitlab = read(CI / "gitlab.yml")
    assert gitlab[".gpucluster"]["artifacts"]["when"] == "always"
    assert gitlab["gpucluster-standard"]["rules"] == [{"if": '$CI_PIPELINE_SOURCE == "schedule"'}]
    assert all(step["concurrency"] == "1" and step["artifact_paths"] for step in read(CI / "buildkite.yml")["steps"])


def test_every_template_runs_the_one_script() -> None:
    """None has logic of its own."""
    by_variable = ['ci/accept.sh "$LEVEL"']
    started = {"github-accept.yml": by_variable, "gitlab.yml": by_variable}
    for name, commands in {**started, "buildkite.yml": ["ci/accept.sh quick", "ci/accept.sh standard"]}.items():
        text = (CI / name).read_text(encoding="utf-8")
        assert re.findall(r"(?m)^ *(?:run:|command:|script:\n *-) (.*)$", text) == commands


class Site:
    """A site whose pytest and gpucluster only write down how they were called."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, folder / "calls"
        binaries = folder / "venv" / "bin"
        binaries.mkdir(parents=True)
        (binaries / "activate").write_text(f"PATH={binaries}:$PATH\n", encoding="utf-8")
        for program in ("pytest", "gpucluster"):
            (binaries / program).write_text(RECORDS, encoding="utf-8")
            (binaries / program).chmod(0o755)

    def run(self, level: str, code: int = 0, **variables: str) -> tuple[int, list[str]]:
        """One run of the script: its exit code, and what it started."""
        self.calls.write_text("", encoding="utf-8")
        given = {"VENV": str(self.folder / "venv"), "RUNS": str(self.folder / "runs"), "CALLS": str(self.calls)}
        kept = {"PATH": os.environ["PATH"], "CODE": str(code)}
        started = {**kept, **given, **variables}
        command = [CI / "accept.sh", level]
        done = subprocess.run(command, env=started, cwd=self.folder, capture_output=True, check=False, timeout=60)
        return done.returncode, self.calls.read_text(encoding="utf-8").splitlines()

    def accepted(self, level: str) -> Path:
        """The last accepted run of a level."""
        return (self.folder / "runs" / f"accepted-{level}").resolve()


def test_the_script_without_its_environment(tmp_path: Path) -> None:
    """A wrong VENV ends it: what else is on the PATH may be of another version."""
    site = Site(tmp_path)
    path = f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}"
    assert site.run("quick", VENV=str(tmp_path / "absent"), PATH=path) == (2, [])
    assert not (tmp_path / "runs").exists()


def test_the_script(tmp_path: Path) -> None:
    """Its exit code is the gate; a run is compared with the last accepted one of its level; reports are kept always."""
    site = Site(tmp_path)
    code, calls = site.run("quick", EXPECT="nodes=2,gpus_per_node=8", START="pytest --pyargs tests_acceptance")
    assert (code, len(calls)) == (0, 2)
    expected = ("--gpucluster-gate", "--gpucluster-level=quick", "--gpucluster-expect=nodes=2,gpus_per_node=8", "--junitxml=")
    assert [part for part in ("pytest --pyargs tests_acceptance ", *expected) if part not in calls[0]] == []
    assert calls[1].startswith("gpucluster bundle ")
    assert "--key" not in calls[1]
    first = site.accepted("quick")
    assert first.is_dir()
    summary = tmp_path / "summary"
    code, calls = site.run("quick", 1, KEY="/a key", GITHUB_STEP_SUMMARY=str(summary))
    assert (code, len(calls)) == (1, 3)
    assert calls[1].startswith(f"gpucluster compare --markdown {site.folder}/runs/accepted-quick {site.folder}/runs/")
    assert "--key=/a key" in calls[2]
    assert summary.read_text(encoding="utf-8").startswith("# compared with ")
    assert site.accepted("quick") == first, "only an acceptance is what later runs are compared with"
    kept = {path.name for path in (tmp_path / "gpucluster-results").iterdir()}
    assert {"junit.xml", "compare.md", "bundle.zip"} <= kept
    code, calls = site.run("standard")
    assert (code, len(calls)) == (0, 2), "a quick run is not compared with a standard one"
    assert len(list((tmp_path / "runs").glob("*Z-*[0-9]"))) == 3


@pytest.mark.parametrize("code", [2, 4, 5, 137])
def test_the_script_passes_on_every_exit_code(code: int, tmp_path: Path) -> None:
    """A usage error, a run without tests, a kill: the job fails, and nothing counts as accepted."""
    site = Site(tmp_path)
    assert site.run("standard", code)[0] == code
    assert not site.accepted("standard").exists()


SESSIONS = """#!/bin/bash
echo "began $*"
case " $* " in *" tests "*) echo "=== 7 passed in 1.0s ===";; esac
case " $* " in *" $BAD "*) exit 3;; esac
"""


@pytest.mark.parametrize("bad", ["none", "lint", "prepare", "tests", "types", "build", "coverage", "launches", "netlab"])
def test_our_runner_fails_with_the_session_that_fails(bad: str, tmp_path: Path) -> None:
    """Also with one that runs beside another. Later sessions do not begin; the last line is that of the tests."""
    (tmp_path / ".ci").mkdir()
    runner = shutil.copy(REPOSITORY / ".ci" / "run", tmp_path / ".ci")
    (tmp_path / "python").write_text(SESSIONS, encoding="utf-8")
    (tmp_path / "python").chmod(0o755)
    given = {**os.environ, "PYTHON": str(tmp_path / "python"), "BAD": bad}
    done = subprocess.run([runner], env=given, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == (0 if bad == "none" else 3), done
    began = [name for line in done.stdout.splitlines() if line.startswith("began") for name in line.split(" -s ")[1].split()]
    groups = ["lint imports prepare docs", "tests types site deploy build", "launches coverage netlab slurm"]
    last = next((number for number, group in enumerate(groups) if bad in group.split()), len(groups) - 1)
    assert began == " ".join(groups[: last + 1]).split()
    assert done.stdout.endswith("=== 7 passed in 1.0s ===\n") or bad in groups[0].split()
