"""Reads a page: its elements, numbers, colours."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "input", "br", "img", "hr"}


@dataclass(slots=True)
class Element:
    """One start tag, with all text inside it. ``path``: the names of the elements around it."""

    name: str
    attributes: dict[str, str]
    path: tuple[str, ...]
    text: str = ""


@dataclass(slots=True)
class Page(HTMLParser):
    """The elements of a page in their order. What stands in a script or a style is no text."""

    elements: list[Element] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    open: list[Element] = field(default_factory=list)

    def __init__(self, html: str) -> None:
        """Read all of it."""
        HTMLParser.__init__(self, convert_charrefs=True)
        self.elements, self.comments, self.open = [], [], []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A new element."""
        for closed in {"td": ("td", "th"), "th": ("td", "th"), "tr": ("td", "th", "tr")}.get(tag, ()):
            while self.open and self.open[-1].name == closed:
                self.open.pop()
        element = Element(tag, {key: value or "" for key, value in attrs}, tuple(one.name for one in self.open))
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        """The end of the last element of that name."""
        names = [one.name for one in self.open]
        if tag in names:
            del self.open[len(names) - 1 - names[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        """Text belongs to all elements around it."""
        if not any(one.name in ("script", "style") for one in self.open):
            for one in self.open:
                one.text += data

    def handle_comment(self, data: str) -> None:
        """A comment."""
        self.comments.append(data)

    def all(self, name: str, **attributes: str) -> list[Element]:
        """Every element of this name with these attributes; ``class_`` is one of its classes."""
        wanted = attributes.pop("class_", None)
        return [
            one
            for one in self.elements
            if one.name == name
            and all(one.attributes.get(key) == value for key, value in attributes.items())
            and (wanted is None or wanted in one.attributes.get("class", "").split())
        ]

    @property
    def text(self) -> str:
        """All that is shown."""
        return "\n".join(one.text for one in self.all("body"))

    @property
    def exact(self) -> list[float]:
        """Every number that carries its exact value."""
        return [float(one.attributes["value"]) for one in self.all("data")]


def colours_of(css: str) -> list[dict[str, str]]:
    """The custom properties of each theme: light, dark, print."""
    return [dict(re.findall(r"--([\w-]+):\s*(#[0-9a-fA-F]{6})", block)) for block in re.findall(r":root\s*{([^}]*)}", css)]


def contrast(one: str, other: str) -> float:
    """The contrast of two colours by WCAG 2."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
