"""The packaged limits as they were released, whatever became of thresholds.yaml since then. Imports PyYAML and nothing else.

``packaged_limits.sha256`` beside this file is the digest of all that can change an outcome: thresholds.yaml without its prose,
the figures of every GPU, and what is known of versions. What has this digest was released, wherever it lies: the wheel and the
sdist carry it as ``packaged_limits.json``, which the build makes; a checkout has it in its own files, and where these were
edited, in git.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.yaml_lines import parse
from pytest_gpucluster.errors import ConfigurationError

PATH = Path(__file__).with_name("packaged_limits.json")
DIGEST = Path(__file__).with_name("packaged_limits.sha256")
TESTS = Path(__file__).with_name("packaged_tests.sha256")
"""The digests of the packaged test files and of their conftest.py, one a line."""
PROSE = ("criterion", "why", "source", "bound_waived")
"""Keys whose text changes no outcome."""


def read_released(thresholds: Path) -> dict[str | int, Any]:
    """The released limits in the shape of a thresholds file with all ``versions``, and ``specs``: the figures of GPUs by id.

    ``thresholds`` is the packaged file as it lies here; its content counts only if it has the digest.

    Raises:
        ConfigurationError: nothing with the digest is there.
    """
    digest = DIGEST.read_text(encoding="ascii").strip() if DIGEST.is_file() else None
    for text in _candidates(thresholds):
        if digest_of(text) == digest:
            return json.loads(text, object_hook=_with_sizes)  # type: ignore[no-any-return]
    if PATH.exists():
        raise ConfigurationError(f"{PATH} is not what was released; install the package again")
    raise ConfigurationError(
        f"{thresholds} or the figures of a GPU were edited, and what was released is not here to compare with: bring it back "
        "from git, or install the package again. Limits are changed in a file of your own (extends: packaged)"
    )


def _candidates(thresholds: Path) -> Iterator[str]:
    """Texts that may be the released one. The later ones are looked for only if the earlier ones are not."""
    if PATH.exists():  # made by the build, and nothing else counts beside it
        yield PATH.read_text(encoding="utf-8", errors="replace")
        return
    yield released_text(packaged_files(thresholds))
    yield from _committed()


def _committed() -> Iterator[str]:
    """The text by the commit that wrote the digest; nothing where this is no checkout, or has no git."""
    try:
        commit = _git("log", "-1", "--format=%H", "--", str(DIGEST)).decode().strip()
        archive = _git("archive", commit, "thresholds.yaml", "pytest_gpucluster/thresholds")
    except (OSError, subprocess.SubprocessError):
        return
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        opened = {Path(name).name: files.extractfile(name) for name in files.getnames() if name.endswith(".yaml")}
        yield released_text({name: file.read() for name, file in opened.items() if file is not None})


def _git(*words: str) -> bytes:
    """What git prints in this checkout, whoever owns it: nothing that it says counts without the digest."""
    command = ["git", "-c", "safe.directory=*", "-C", str(Path(__file__).resolve().parents[2]), *words]
    return subprocess.run(command, capture_output=True, check=True, timeout=20).stdout  # noqa: S603 -- words of this file


def packaged_files(thresholds: Path) -> dict[str, bytes]:
    """The packaged files by name, as they lie here: ``thresholds``, known versions, and the specs of GPUs."""
    folder = Path(__file__).parent
    found = (thresholds, *folder.glob("known_versions.yaml"), *sorted((folder / "specs").glob("*.yaml")))
    return {file.name: file.read_bytes() for file in found}


def released_text(files: Mapping[str, bytes]) -> str:
    """What ``packaged_limits.json`` holds for the packaged files by name."""
    return _text_of(tuple(files.items()))


@lru_cache(maxsize=2)
def _text_of(files: tuple[tuple[str, bytes], ...]) -> str:
    read = {Path(name).stem: _without_prose(parse(content, file=name).data) for name, content in files}
    own = {**read.pop("thresholds"), "versions": read.pop("known_versions", {})}
    return json.dumps({**own, "specs": read}, indent=1) + "\n"


@lru_cache
def is_released_test(file: Path) -> bool:
    """Whether a test file, the conftest.py beside it, and each one below, are packaged ones that nobody edited."""
    known, beside = TESTS.read_text(encoding="ascii").split(), file.with_name("conftest.py")
    files = {file, beside, *file.parent.rglob(beside.name)}
    return all(one.is_file() and hashlib.sha256(one.read_bytes()).hexdigest() in known for one in files)


def digest_of(text: str) -> str:
    """The digest of a released text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _with_sizes(mapping: dict[str, Any]) -> dict[str | int, Any]:
    """A mapping as YAML has it: JSON makes text of the sizes in a table of limits."""
    return {int(key) if key.isdecimal() else key: value for key, value in mapping.items()}


def _without_prose(data: Any) -> Any:
    if not isinstance(data, dict):
        return data
    return {key: "-" if key in PROSE else _without_prose(value) for key, value in data.items()}
