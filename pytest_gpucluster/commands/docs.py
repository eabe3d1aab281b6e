"""``gpucluster docs``: the pages of the documentation, which a wheel has with it, as text. Nothing is fetched."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.text import counted

UNLISTED = ("decisions/", "results/")
"""Folders whose pages are found by name, and are too many for the list."""
INDEX = "README"


def main(chosen: argparse.Namespace) -> int:
    """Print a page, or the list of pages.

    Raises:
        ConfigurationError: there is no such page, or there are none here.
    """
    found = pages(docs_folder())
    if chosen.page is None:
        sys.stdout.write(listed(found))
    else:
        sys.stdout.write(page_of(chosen.page, found).read_text(encoding="utf-8"))
    return 0


def docs_folder() -> Path:
    """The folder of the pages: inside the package in a wheel, beside it in a checkout.

    Raises:
        ConfigurationError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "docs", package.parent / "docs"):
        if (folder / f"{INDEX}.md").is_file():
            return folder
    raise ConfigurationError("this installation has no documentation with it; a wheel has")


def pages(folder: Path) -> dict[str, Path]:
    """Each page by its name, ``how-to/slurm``, those of the top first."""
    files = sorted(folder.rglob("*.md"), key=lambda file: (len(file.relative_to(folder).parts), file))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def page_of(text: str, found: Mapping[str, Path]) -> Path:
    """The page that a text names: ``handover``, ``slurm``, ``docs/decisions/0012``, ``how-to/slurm.md``.

    Raises:
        ConfigurationError: there is no such page, or there are several.
    """
    wanted = text.removeprefix("docs/").partition("#")[0].removesuffix(".md").strip("/")
    ends = [name for name in found if name == wanted or name.endswith(f"/{wanted}")]
    begun = [name for name in found if wanted and (name.startswith(wanted) or name.rpartition("/")[2].startswith(wanted))]
    matches = [wanted] if wanted in found else ends or begun
    if len(matches) == 1:
        return found[matches[0]]
    if matches:
        raise ConfigurationError(f"{text!r} may be {', '.join(matches)}")
    hint = did_you_mean(wanted, [*found, *(name.rpartition("/")[2] for name in found)])
    raise ConfigurationError(f"there is no page {text!r}; gpucluster docs lists them.{hint}")


def listed(found: Mapping[str, Path]) -> str:
    """A line for each page, its name and its title; decisions and results are counted."""
    shown = {name: _title(file) for name, file in found.items() if not name.startswith(UNLISTED) and name != INDEX}
    width = max(map(len, shown), default=0)
    lines = [f"{name:<{width}}  {title}" for name, title in shown.items()]
    counts = {folder: sum(name.startswith(folder) for name in found) for folder in UNLISTED}
    more = [f"{folder}...: {counted(count, 'more page')}" for folder, count in counts.items() if count]
    return "\n".join([*lines, *more, "gpucluster docs NAME prints a page"]) + "\n"


def _title(file: Path) -> str:
    lines = file.read_text(encoding="utf-8").splitlines()
    return next((line.removeprefix("# ") for line in lines if line.startswith("# ")), file.stem)
