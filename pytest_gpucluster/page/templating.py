"""Templates of this folder: HTML that allows nothing but its own style and script, and Markdown in which text stays text."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path

import jinja2

from pytest_gpucluster.judging.failure_text import unit_beside
from pytest_gpucluster.text import one_line, shortlist, visible

TEMPLATES = Path(__file__).with_name("templates")
LONGEST = 12_000
"""Characters of one text on the page. The whole of a longer one is in results.json."""
MOST_CHARACTERS = 500
"""Of one text in a summary."""
IN_MARKDOWN = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "|": "\\|", "`": "\\`", "[": "\\[", "@": "@&#8203;"})


def html(template: str, *, script: str | None = None, **view: object) -> str:
    """A page with the one style, and with a script of this folder or none."""
    js = {"js": _asset(script)} if script is not None else {}
    return _template(template).render(**view, **js, css=_asset("style.css"), csp=_policy(script))


def markdown(template: str, **view: object) -> str:
    """A text in Markdown. The filter ``cell`` makes foreign text fit, and ``short`` cuts it too."""
    return _template(template).render(**view)


def cell(text: str) -> str:
    """The text in one line that stays text in Markdown: neither HTML nor a column, link or mention."""
    return one_line(text).translate(IN_MARKDOWN)


def _short(text: str) -> str:
    shown = cell(text)
    return shown if len(shown) <= MOST_CHARACTERS else f"{shown[:MOST_CHARACTERS]}..."


@cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(("html.j2",)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_fit if name.endswith(".html.j2") else None,
    )
    environment.filters.update(cell=cell, short=_short, shortlist=shortlist)
    environment.globals["beside"] = lambda unit, number: unit_beside(unit, number.text.rpartition(" ")[2])
    return environment.get_template(name)


def _fit(value: object) -> object:
    """Foreign text as a reader sees it: no control characters, none that change the direction of writing, no endless text."""
    if type(value) is not str:
        return value
    if len(value) > LONGEST:
        value = f"{value[: LONGEST // 2]}\n[{len(value) - LONGEST} characters left out]\n{value[-LONGEST // 2 :]}"
    return visible(value)


@cache
def _asset(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8").strip()


def _policy(script: str | None) -> str:
    """The content security policy: nothing from anywhere, and of what is inside only our style and our script, if any."""
    allowed = [f"style-src '{_digest('style.css')}'", *([f"script-src '{_digest(script)}'"] if script is not None else [])]
    return "; ".join(("default-src 'none'", *allowed, "base-uri 'none'", "form-action 'none'"))


def _digest(asset: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(_asset(asset).encode()).digest()).decode()}"
