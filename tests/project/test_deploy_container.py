"""The Containerfile and its lock files: what is inside is pinned by hash, is what the project asks for, and is explained."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import REPOSITORY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONTAINER = REPOSITORY / "deploy" / "container"
CONTAINERFILE = CONTAINER / "Containerfile"
LOCKS = sorted(CONTAINER.glob("requirements*.txt"))
PINNED = re.compile(r"([\w.-]+)==([\w.+!-]+)(?: ; ([^\\]+))? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n?)+")
BEGIN, END = "# --- a site edits these", "# --------------------------"


def unpinned(text: str) -> list[str]:
    """What of a lock file is neither a comment nor a version with its hashes."""
    return [line for line in PINNED.sub("", text).splitlines() if line.strip() and not line.startswith("#")]


def pins(*paths: Path) -> dict[str, set[str]]:
    """The versions of each name in some lock files."""
    found: dict[str, set[str]] = {}
    for path in paths:
        for one in PINNED.finditer(path.read_text(encoding="utf-8")):
            found.setdefault(canonicalize_name(one[1]), set()).add(one[2])
    return found


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_every_line_has_its_hash(path: Path) -> None:
    """And no line names an index, a folder or an address."""
    text = path.read_text(encoding="utf-8")
    assert unpinned(text) == []
    assert "://" not in text
    assert pins(path)


@pytest.mark.parametrize(
    "line", ["torch==2.13.0", "torch>=2", "-r other.txt", "--index-url x", "a @ file:///b", "a==1 --hash=md5:00"]
)
def test_a_line_without_a_hash_is_seen(line: str) -> None:
    """The check itself."""
    assert unpinned(LOCKS[0].read_text(encoding="utf-8") + line + "\n") == [line]


def test_the_locks_are_what_the_project_asks_for() -> None:
    """Each dependency, in a version that fits; torch in that of the tests, and in a file of its own."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rest, torch = pins(CONTAINER / "requirements.txt"), pins(CONTAINER / "requirements-torch.txt")
    assert not set(rest) & set(torch)
    for text in project["dependencies"]:
        wanted = Requirement(text)
        versions = (rest | torch)[canonicalize_name(wanted.name)]
        assert all(version in wanted.specifier for version in versions), text
    (version,) = torch["torch"]
    assert f"torch=={version}" in (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert {name for name in rest if name.startswith("nvidia-") and name != "nvidia-ml-py"} == set()


def stages(text: str) -> list[str]:
    """The text of each stage, without comments."""
    plain = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return re.split(r"(?m)^FROM .*$", plain)


def faults(text: str) -> list[str]:
    """What the image would have that it should not, and the other way round."""
    _, build, final = stages(text)
    found = [] if re.search(r"(?m)^USER (?!0|root)\S+", final) else ["runs as root"]
    found += [] if '"gpucluster"' in final.partition("ENTRYPOINT")[2] else ["has another entry point"]
    commands = re.split(r"\n|&&", build.replace("\\\n", " "))
    installs = [line for line in commands if " pip install" in line or "/pip install" in line]
    found += ["installs without hashes"] if not installs or any("--require-hashes" not in line for line in installs) else []
    found += ["installs in the last stage"] if "pip" in final else []
    is_cached = "rm -rf /var/lib/apt/lists" not in final or any("--no-cache" not in one for one in installs)
    found += ["keeps a cache"] if is_cached else []
    labels = ("title", "licenses", "version", "revision", "description")
    found += [f"has no label {name}" for name in labels if f"org.opencontainers.image.{name}=" not in final]
    found += ["has no SBOM"] if "cyclonedx-py environment" not in build or "sbom" not in final.partition("COPY")[2] else []
    return found


def test_the_image() -> None:
    """Not root, our command, hashes, no cache, labels, an SBOM; and a head that a site edits."""
    text = CONTAINERFILE.read_text(encoding="utf-8")
    assert faults(text) == []
    lines = text.splitlines()
    assert lines[0].startswith("# Never run on a machine with GPUs.")
    head = lines[next(at for at, line in enumerate(lines) if line.startswith(BEGIN)) : lines.index(END)]
    assert [line.split("=")[0] for line in head if not line.startswith("#")] == ["ARG BASE", "ARG LOCKS"]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("USER 10001", "USER root", "runs as root"),
        ("USER 10001", "", "runs as root"),
        ('ENTRYPOINT ["gpucluster"]', 'ENTRYPOINT ["bash"]', "has another entry point"),
        ("--require-hashes --requirement wheel.txt", "--requirement wheel.txt", "installs without hashes"),
        ("--no-cache-dir ", "", "keeps a cache"),
        ("rm -rf /var/lib/apt/lists/*", "true", "keeps a cache"),
        ("org.opencontainers.image.licenses=", "licenses=", "has no label licenses"),
        ("cyclonedx-py environment", "true", "has no SBOM"),
    ],
)
def test_a_fault_of_the_image_is_seen(old: str, new: str, fault: str) -> None:
    """The check itself."""
    text = CONTAINERFILE.read_text(encoding="utf-8")
    assert old in text
    assert fault in faults(text.replace(old, new))


def hadolint(path: Path) -> str:
    """Its findings."""
    program = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if program is None:
        pytest.skip("hadolint is not installed")
    return subprocess.run([program, path], capture_output=True, text=True, check=False, timeout=60).stdout


def test_hadolint() -> None:
    """No finding."""
    assert hadolint(CONTAINERFILE) == ""


def test_hadolint_sees_a_fault(tmp_path: Path) -> None:
    """The check itself."""
    path = tmp_path / "Containerfile"
    path.write_text(CONTAINERFILE.read_text(encoding="utf-8").replace("# hadolint ignore=DL3008\n", ""), encoding="utf-8")
    assert "DL3008" in hadolint(path)


def test_the_page_explains_the_run_lines() -> None:
    """Every option of each run line, and every argument of the build."""
    page = (REPOSITORY / "docs" / "how-to" / "container.md").read_text(encoding="utf-8")
    for option in ("--gpus all", "--network host", "--shm-size", "--ulimit memlock=-1"):
        assert f"| `{option}" in page, option
    for program in ("docker run", "podman run", "enroot start"):
        assert program in page
    arguments = re.findall(r"(?m)^ARG (\w+)", CONTAINERFILE.read_text(encoding="utf-8"))
    assert [name for name in dict.fromkeys(arguments) if f"`{name}`" not in page] == []
