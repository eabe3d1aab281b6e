"""The page as one file: what it shows, and the results that it holds."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pytest_gpucluster.page.criteria_view import CriterionView, host_of, views_of
from pytest_gpucluster.page.document import RunDocument, html
from pytest_gpucluster.page.figures import figures_of
from pytest_gpucluster.page.overview import Banner, Gap, Headline, banner_of, gaps_of, headlines_of
from pytest_gpucluster.page.parts_view import MOST_PARTS, PartView, parts_of
from pytest_gpucluster.places import Place

MOST_EMBEDDED = 2_000_000
"""Characters of compressed results in the page, so that a page of 1,024 GPUs stays below 3 MB."""
EMBEDDED = re.compile(r'<script type="application/octet-stream" id="results"[^>]*>([A-Za-z0-9+/=]*)</script>')


@dataclass(frozen=True, slots=True, kw_only=True)
class PageModel:
    """Everything that the template shows, section by section. ``embedded`` is empty where the results are too large."""

    banner: Banner
    gaps: tuple[Gap, ...]
    headlines: tuple[Headline, ...]
    parts: tuple[PartView, ...]
    figures: Mapping[str, object]
    criteria: tuple[CriterionView, ...]
    requirements: tuple[tuple[str, CriterionView], ...]
    versions: tuple[tuple[str, str], ...]
    ranks: tuple[tuple[Place, str], ...]
    waivers: tuple[tuple[str, ...], ...]
    embedded: str
    digest: str


def model_of(run: RunDocument) -> PageModel:
    """The view of a run."""
    views = views_of(run)
    packed = base64.b64encode(gzip.compress(run.content, 7, mtime=0)).decode("ascii")
    return PageModel(
        banner=banner_of(run),
        gaps=gaps_of(run),
        headlines=headlines_of(run, views),
        parts=parts_of(run),
        figures=figures_of(run),
        criteria=views,
        requirements=tuple((name, view) for view in views for name in view.ids),
        versions=_versions(run),
        ranks=tuple((place, host_of(place)) for place in run.places.values()),
        waivers=tuple(
            tuple(str(one.get(key) or "") for key in ("criterion", "place", "until", "who", "why", "state", "where"))
            for one in run.facts.get("waivers") or ()
        ),
        embedded=packed if len(packed) <= MOST_EMBEDDED else "",
        digest=run.digest,
    )


def _versions(run: RunDocument) -> tuple[tuple[str, str], ...]:
    environment = run.facts.get("environment") or {}
    found = {f"{name}": str(version) for name, version in (environment.get("versions") or {}).items()}
    found |= {name.replace("_", " "): str(environment[name]) for name in ("launched_by", "messages") if name in environment}
    found |= {f"{name} (variable)": str(value) for name, value in (environment.get("variables") or {}).items()}
    found |= {f"{name} (set by the run)": str(value) for name, value in (environment.get("overridden_variables") or {}).items()}
    found |= {f"time: {_in_words(name)}": f"{value} s" for name, value in (run.facts.get("timings") or {}).items()}
    return tuple(found.items())


def _in_words(name: str) -> str:
    """``startup`` of ``startup_s``."""
    return name.removesuffix("_s").replace("_", " ")


def page_from(model: PageModel) -> str:
    """The page: HTML with all that it needs inside."""
    return html("report.html.j2", script="page.js", model=model, most_parts=MOST_PARTS)


def embedded_results(page: str) -> bytes | None:
    """The bytes of the results.json that a page holds; None where it holds none.

    Raises:
        OSError, ValueError: what it holds is damaged.
    """
    found = EMBEDDED.search(page)
    return gzip.decompress(base64.b64decode(found[1], validate=True)) if found is not None and found[1] else None
