"""The image of deploy/container, built by buildah on a base of Debian with torch for the CPU, and its self-test run inside.

No registry is asked: mmdebstrap makes the base, and torch is that of this Python. Needs root, buildah, mmdebstrap, and a
Python of the same version as Debian's; skips elsewhere. Six minutes, 10 GB of disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import REPOSITORY

pytestmark = [pytest.mark.slow, pytest.mark.long]
DEBIAN, PYTHON = "bookworm", (3, 11)
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
IMAGE, BASE = "localhost/gpucluster:test", "localhost/gpucluster-base"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def checked(*words: object, cwd: Path | None = None, within_s: float = 900) -> str:
    """What a command prints; its errors in the failure."""
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, capture_output=True, text=True, check=False, timeout=within_s, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel() -> Path:
    """The wheel that was built and tested last, by ``noxfile.py -s build``; without one, one that is built now."""
    found = sorted((REPOSITORY / "dist").glob("*.whl"))
    if not found:
        checked(sys.executable, "-m", "hatchling", "build", "-t", "wheel", cwd=REPOSITORY)
        found = sorted((REPOSITORY / "dist").glob("*.whl"))
    return found[-1]


@pytest.fixture(scope="module")
def buildah() -> Iterator[list[str]]:
    """The beginning of a command line of buildah, whose images end with this module."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("buildah", "mmdebstrap"))):
        pytest.skip("needs root, buildah and mmdebstrap (apt-get install buildah mmdebstrap)")
    if sys.version_info[:2] != PYTHON:
        pytest.skip(f"the base is Debian {DEBIAN}, whose Python is {PYTHON}: torch of this Python does not fit")
    folder = Path(tempfile.mkdtemp(prefix="gpucluster-"))
    try:
        yield ["buildah", "--root", f"{folder}/images", "--runroot", f"{folder}/run", "--storage-driver", "vfs"]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def image(buildah: list[str], wheel: Path) -> str:
    """The image, by the Containerfile as it stands."""
    folder = Path(buildah[2]).parent
    checked("mmdebstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", DEBIAN, folder / "root.tar")
    limits = ("--constraint", REPOSITORY / "constraints.txt", "--target", folder / "torch")
    checked(sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", *limits, "torch")
    base = checked(*buildah, "from", "scratch").strip()
    checked(*buildah, "add", base, folder / "root.tar", "/")
    checked(*buildah, "add", base, folder / "torch", "/usr/lib/python3/dist-packages")
    checked(*buildah, "commit", "--rm", base, BASE)
    context = folder / "context"
    shutil.copytree(REPOSITORY / "deploy" / "container", context / "deploy" / "container")
    (context / "dist").mkdir()
    shutil.copy(wheel, context / "dist")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    known = {"BASE": BASE, "LOCKS": "requirements.txt", "WHEEL_SHA256": digest, "REVISION": "of-the-test"}
    known |= {"SSL_CERT_FILE": CERTIFICATES, "PIP_CERT": CERTIFICATES}
    arguments = [word for name, value in known.items() for word in ("--build-arg", f"{name}={value}")]
    certificates = ("--volume", "/etc/ssl/certs:/etc/ssl/certs:ro") if Path(CERTIFICATES).exists() else ()
    file = ("--file", "deploy/container/Containerfile", "--tag", IMAGE)
    checked(*buildah, "bud", "--isolation", "chroot", "--pull-never", *certificates, *arguments, *file, ".", cwd=context)
    return IMAGE


@pytest.fixture(scope="module")
def inside(buildah: list[str], image: str) -> Run:
    """Runs a command in a container of the image, as its own user."""
    container = checked(*buildah, "from", "--pull-never", image).strip()

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*buildah, "run", "--isolation", "chroot", container, "--", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900, stdin=subprocess.DEVNULL)

    return run


def test_what_is_inside(inside: Run, buildah: list[str], wheel: Path) -> None:
    """Our command, not as root; the tested wheel; labels; and an SBOM that names what is installed."""
    assert inside("id", "-u").stdout.strip() == "10001"
    assert inside("gpucluster", "--version").stdout.startswith("pytest-gpucluster ")
    assert inside("gpucluster", "kubernetes-condition").returncode == 2
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    config = json.loads(checked(*buildah, "inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    assert config["Entrypoint"] == ["gpucluster"]
    assert config["Labels"]["io.gpucluster.wheel.sha256"] == digest
    assert config["Labels"]["org.opencontainers.image.revision"] == "of-the-test"
    bill = json.loads(inside("cat", config["Labels"]["io.gpucluster.sbom"]).stdout)
    assert bill["bomFormat"] == "CycloneDX"
    named = {one["name"]: one["version"] for one in bill["components"]}
    assert {"pytest-gpucluster", "torch", "pytest", "nvidia-ml-py"} <= set(named)
    assert not {"uv", "cyclonedx-bom"} & set(named)
    assert inside("sh", "-c", "command -v uv").returncode != 0


def test_the_selftest_inside(inside: Run) -> None:
    """Planted faults are found, as outside; the termination message is written."""
    options = ("--gpucluster-selftest", "--gpucluster-level=quick", "--gpucluster-profile=rehearsal")
    message = "--gpucluster-termination-message=/results/message"
    ran = inside("pytest", "--pyargs", "tests_acceptance", "-p", "no:cacheprovider", "-k", "bf16 or busbw", *options, message)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-2000:]
    report = json.loads(inside("cat", "/results/gpucluster-results/results.json").stdout)
    assert report["selftest"]["objections"] == []
    assert inside("cat", "/results/message").stdout.startswith("INCOMPLETE: ")


def test_a_wheel_with_another_hash_is_refused(buildah: list[str], image: str) -> None:
    """The hash of the tested wheel is what counts: another one, or none, ends the build."""
    context = Path(buildah[2]).parent / "context"
    for given, words in (("0" * 64, "ash"), ("", "WHEEL_SHA256")):
        arguments = [f"BASE={BASE}", "LOCKS=", f"WHEEL_SHA256={given}"]
        arguments += [f"SSL_CERT_FILE={CERTIFICATES}", f"PIP_CERT={CERTIFICATES}"]
        words_of = [word for one in arguments for word in ("--build-arg", one)]
        options = ("--isolation", "chroot", "--pull-never", "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro", "--target", "build")
        command = [*buildah, "bud", *options, *words_of, "--file", "deploy/container/Containerfile", "."]
        ended = subprocess.run(
            command, cwd=context, capture_output=True, text=True, check=False, timeout=900, stdin=subprocess.DEVNULL
        )
        assert ended.returncode != 0
        assert words in ended.stderr
