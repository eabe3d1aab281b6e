"""Puts the released limits into wheel and sdist, and the pages into the wheel.

It refuses to build where thresholds.yaml is not what its digest says.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class ReleasedLimits(BuildHookInterface[Any]):
    """Writes ``packaged_limits.json`` outside of the checkout. An editable install needs none: it has the files themselves."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file to what is built.

        Raises:
            ValueError: thresholds.yaml or the figures of a GPU changed, and the digest did not.
        """
        if version == "editable":
            return
        sys.path.insert(0, self.root)
        from pytest_gpucluster.thresholds import released

        text = released.released_text(released.packaged_files(Path(self.root, "thresholds.yaml")))
        if released.digest_of(text) != released.DIGEST.read_text(encoding="ascii").strip():
            raise ValueError(f"the limits changed and {released.DIGEST.name} did not: run `python docs/generate_limits.py`")
        self._folder = tempfile.TemporaryDirectory(prefix="gpucluster-")
        made = Path(self._folder.name, released.PATH.name)
        made.write_text(text, encoding="utf-8")
        build_data["force_include"][str(made)] = f"pytest_gpucluster/thresholds/{made.name}"
        if self.target_name == "wheel":
            build_data["force_include"] |= pages(Path(self.root, "docs"))

    def finalize(self, version: str, _build_data: dict[str, Any], _artifact_path: str) -> None:
        """Remove what was written."""
        if version != "editable":
            self._folder.cleanup()


def pages(folder: Path) -> dict[str, str]:
    """The Markdown pages for `gpucluster docs`, each with its place in the wheel; what runs showed stays in the repository."""
    files = {file: file.relative_to(folder) for file in sorted(folder.rglob("*.md"))}
    return {str(file): f"pytest_gpucluster/docs/{name}" for file, name in files.items() if name.parts[0] != "results"}
