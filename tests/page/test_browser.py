"""The page of 1,024 GPUs in a real browser: it opens, filters, searches, stays silent, and prints whole."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.page.document import document_of, read_document
from pytest_gpucluster.page.render import model_of, page_from
from tests.support import REPOSITORY
from tests.support.result_files import document, large_run, of_version_2, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SWITCHES = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0")
DEADLINE_S = 300.0
OPENS_S = 2.0
"""From the navigation to the end of loading, by the browser's own clock."""
PROBE = """
addEventListener("load", function () { setTimeout(function () {
  var query = document.getElementById("q");
  query.value = "c17"; query.dispatchEvent(new Event("input", { bubbles: true }));
  var shown = document.querySelectorAll(".criterion:not([hidden])").length;
  query.value = ""; document.querySelector("input[value=bad]").click();
  var bad = document.querySelectorAll(".criterion:not([hidden])").length;
  var entry = performance.getEntriesByType("navigation")[0];
  var requests = performance.getEntriesByType("resource").length;
  document.title = JSON.stringify({ shown: shown, bad: bad, ms: entry.loadEventStart, requests: requests });
}, 0); });
"""

AXE = """
addEventListener("load", function () {
  for (var one of document.querySelectorAll("details")) { one.open = true; }
  axe.run(document, { resultTypes: ["violations"] }).then(function (found) {
    var told = found.violations.map(function (one) {
      return { rule: one.id, impact: one.impact, at: one.nodes.slice(0, 3).map(function (node) { return node.target; }) };
    });
    var text = JSON.stringify({ passes: found.passes.length, violations: told });
    document.title = "AXE" + btoa(unescape(encodeURIComponent(text)));
  });
});
"""
SCHEMES = {"light": "1", "dark": "0"}
"""Of ``--blink-settings=preferredColorScheme``."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def html() -> str:
    """The page of 128 x 8 with five bad parts."""
    records, places = large_run()
    return page_from(model_of(document_of(text_of(of_version_2(document(records, places), records, places)))))


def browse(page: Path, *switches: str) -> subprocess.CompletedProcess[str]:
    """Open a page and do what the switches say."""
    assert CHROMIUM is not None
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [CHROMIUM, *SWITCHES, profile, *switches, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=DEADLINE_S)


def with_probe(html: str, *scripts: str) -> str:
    """The page with scripts of the test's own, whose digests its policy has too."""
    for script in scripts or (PROBE,):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        html = html.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
        before, end, after = html.rpartition("</body>")
        html = f"{before}<script>{script}</script>{end}{after}"
    return html


def violations(folder: Path, html: str, scheme: str) -> list[dict[str, Any]]:
    """What axe-core finds serious or critical on the page with all of it unfolded, in a colour scheme."""
    package = importlib.util.find_spec("axe_playwright_python")
    if package is None or not package.submodule_search_locations:
        pytest.skip("axe-core is not here: python3 noxfile.py -s page installs it")
    axe = (Path(package.submodule_search_locations[0]) / "axe.min.js").read_text(encoding="utf-8")
    page = folder / "report.html"
    page.write_text(with_probe(html, axe, AXE), encoding="utf-8")
    wide = ("--window-size=1280,2000", f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}")
    done = browse(page, "--dump-dom", "--virtual-time-budget=120000", *wide)
    told = re.search(r"<title>AXE([^<]+)</title>", done.stdout)
    assert told is not None, done.stderr[-3000:]
    found = json.loads(base64.b64decode(told[1]))
    assert found["passes"] > 10
    return [one for one in found["violations"] if one["impact"] in ("serious", "critical")]


def test_it_opens_filters_and_searches(tmp_path: Path, html: str) -> None:
    """At most 3 MB and two seconds; nothing is asked for, no policy is broken, no error is logged."""
    assert len(html.encode()) <= 3_000_000
    page = tmp_path / "report.html"
    page.write_text(with_probe(html), encoding="utf-8")
    fastest = 1e9
    for _ in range(4):  # others use these cores too: the best of four
        done = browse(page, "--dump-dom")
        found = re.search(r'<title>\{"shown":(\d+),"bad":(\d+),"ms":([\d.]+),"requests":(\d+)\}', done.stdout)
        assert found is not None, done.stderr
        assert (found[1], found[2], found[4]) == ("1", "4", "0")
        assert "CONSOLE" not in done.stderr
        fastest = min(fastest, float(found[3]) / 1000)
        if fastest <= OPENS_S:
            break
        time.sleep(1)
    assert fastest <= OPENS_S


def test_a_broken_policy_is_seen(tmp_path: Path, html: str) -> None:
    """The check above sees a script that the policy does not know."""
    page = tmp_path / "report.html"
    page.write_text(html.replace("</body>", "<script>document.title = 'evil'</script></body>"), encoding="utf-8")
    done = browse(page, "--dump-dom")
    assert "Content Security Policy" in done.stderr
    assert "<title>evil" not in done.stdout


def rejected() -> str:
    """The page of 4 x 8 with a bad GPU: axe-core looks at each element, so it is a small one."""
    records, places = large_run(criteria=12, rates=6, nodes=4)
    return page_from(model_of(document_of(text_of(document(records, places)))))


def accepted() -> str:
    """The page of the newest kept run of two real GPUs, with every section that such a run has."""
    newest = max((REPOSITORY / "docs/results").glob("*-h100x2-*/results.json"))
    return page_from(model_of(read_document(newest)))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("page", [rejected, accepted])
def test_axe_finds_nothing_serious(tmp_path: Path, page: Callable[[], str], scheme: str) -> None:
    """Contrast, names of controls and pictures, order of headings, tables: by axe-core."""
    assert violations(tmp_path, page(), scheme) == []


@pytest.mark.parametrize(
    ("planted", "rule"),
    [("<img src='data:,'>", "image-alt"), ("<p><font color='#dddddd'>faint</font></p>", "color-contrast"),
     ("<button></button>", "button-name")],
)  # fmt: skip
def test_what_axe_finds_is_seen(tmp_path: Path, planted: str, rule: str) -> None:
    """A picture without words, faint text and a button without a name fail the check above."""
    html = rejected().replace("</main>", f"{planted}</main>", 1)
    assert planted in html
    assert rule in {one["rule"] for one in violations(tmp_path, html, "light")}


MOST_PAGES = 60
with_pdf = pytest.mark.skipif(shutil.which("pdftotext") is None, reason="pdftotext is not here (apt-get install poppler-utils)")


def printed(folder: Path, html: str) -> list[str]:
    """The text of each page of the PDF."""
    page, pdf = folder / "report.html", folder / "report.pdf"
    page.write_text(html, encoding="utf-8")
    browse(page, f"--print-to-pdf={pdf}", "--no-pdf-header-footer")
    text = subprocess.run(["pdftotext", "-layout", pdf, "-"], capture_output=True, text=True, check=True, timeout=60).stdout
    return text.removesuffix("\f").split("\f")


@with_pdf
def test_it_prints_every_number_on_few_pages(tmp_path: Path, html: str) -> None:
    """At 128 x 8: each value of each healthy GPU is read back from the PDF, of 347 pages once."""
    records, _ = large_run()
    pages = printed(tmp_path, html)
    assert len(pages) <= MOST_PAGES
    found = set(re.findall(r"\d+\.\d+|\d+", "\n".join(pages)))
    rates = {f"{one.value:.1f}" for one in records if one.value and one.limit is not None and one.limit.unit == "TFLOPS"}
    assert rates - found == set()


@with_pdf
def test_it_prints_whole(tmp_path: Path) -> None:
    """Every criterion, every host and the fields for signatures are in the PDF, though all of it was folded."""
    records, places = large_run(criteria=12, rates=6)
    text = "".join(printed(tmp_path, page_from(model_of(document_of(text_of(document(records, places)))))))
    for words in ("REJECTED", "543.2", "For the customer", *(f"c{index}" for index in range(1, 12)), "gpu-node-127"):
        assert words in text
    value = next(one.value for one in records if one.criterion == "c5" and one.place == "node126-gpu7")
    assert f"{value:.1f}" in text
