"""The hooks of the site (mkdocs.yml): its navigation, the pages from outside of docs/, and the links that leave docs/.

A new page needs no edit: what no section names is found by its folder, else it comes last.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT = Path(__file__).resolve().parents[1]
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("README", "tutorial", "handover", "quick-reference"),
    "How-to": ("how-to/*", "writing-a-criterion", "thresholds", "report", "records", "resume", "dcgm", "finetune/manual"),
    "Reference": ("limits", "commands", "criteria", "readings*", "reports", "info", "watch", "compatibility", "glossary"),
    "Explanation": ("how-it-works", "measuring", "localization", "selftest", "security", "scaling", "finetune/*"),
    "Troubleshooting": ("troubleshooting*",),
    "Results": ("results/README", "results/*", "results/*/*", "results/*/*/*"),
    "The code": ("contributing", "architecture/*", "decisions/*", "changelog"),
}
"""Pages by section, as patterns of their names without ``.md``. A page is in the first one that names it."""
OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's top that the site has too."""
LINK = re.compile(r"(?P<is_image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
FENCED = re.compile(r"(?ms)^```.*?^```[ ]*$")


def navigation(names: Iterable[str]) -> list[dict[str, list[str]]]:
    """The sections, each with its pages; what none of them names is under ``More``."""
    left, found = sorted(names), []
    for title, patterns in SECTIONS.items():
        pages = [name for pattern in patterns for name in left if PurePosixPath(name).match(pattern) and _depth(name, pattern)]
        pages = list(dict.fromkeys(pages))
        left = [name for name in left if name not in pages]
        found += [{title: [f"{name}.md" for name in pages]}] if pages else []
    return [*found, {"More": [f"{name}.md" for name in left]}] if left else found


def _depth(name: str, pattern: str) -> bool:
    return name.count("/") == pattern.count("/")


def linked(text: str, page: PurePosixPath) -> str:
    """A page's text for the site: a link that leaves docs/ leads to the site's copy, or becomes its words."""

    def replaced(match: re.Match[str]) -> str:
        target, _, anchor = match["target"].partition("#")
        if "://" in target or not target or match["is_image"]:
            return match[0]
        parts: list[str] = []
        for part in ("docs", *page.parent.parts, *target.split("/")):
            if part == "..":
                parts.pop()
            elif part not in ("", "."):
                parts.append(part)
        if parts[:1] == ["docs"] and Path(ROOT, *parts).suffix == ".md":
            return match[0]
        if "/".join(parts) in OUTSIDE:
            up = "../" * len(page.parent.parts)
            return f"[{match['text']}]({up}{OUTSIDE['/'.join(parts)]}{'#' * bool(anchor)}{anchor})"
        return match["text"] if parts[:1] != ["docs"] or Path(ROOT, *parts).suffix in ("", ".py") else match[0]

    return "".join(part if part.startswith("```") else LINK.sub(replaced, part) for part in _parts(text))


def _parts(text: str) -> Iterator[str]:
    """The text in pieces: fenced blocks, and what stands between them."""
    end = 0
    for block in FENCED.finditer(text):
        yield text[end : block.start()]
        yield block[0]
        end = block.end()
    yield text[end:]


def moved(text: str) -> str:
    """A page of the repository's top with its links as they are from docs/."""

    def replaced(link: re.Match[str]) -> str:
        if "://" in link["target"]:
            return link[0]
        return link[0].replace("](docs/", "](") if "](docs/" in link[0] else link[0].replace("](", "](../")

    return LINK.sub(replaced, text)


# --- What mkdocs calls ---


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages from the top, and the navigation."""
    from mkdocs.structure.files import File  # noqa: PLC0415 -- only the site has it

    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, content=moved((ROOT / source).read_text(encoding="utf-8"))))
    config["nav"] = navigation(file.src_uri.removesuffix(".md") for file in files.documentation_pages())
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links."""
    return linked(markdown, PurePosixPath(page.file.src_uri))
