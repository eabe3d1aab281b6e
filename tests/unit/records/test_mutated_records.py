"""Records in which one field is another one: a reader shows them or says a sentence, and none calls a rejected run good."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.commands import main
from tests.support.kept_runs import KeptCluster, keep
from tests.support.mutations import mutations
from tests.support.result_files import RUN

if TYPE_CHECKING:
    from pathlib import Path

BAD, GOOD = "node0-gpu1", "node0-gpu0"
UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")
USED = {
    **dict.fromkeys(("title", "why", "source"), "text"),
    "per": "gpu",
    "level": "quick",
    "unit": "TFLOPS",
    "kind": "above",
    "operator": ">",
    "numbers": {"1": 700},
    "advisory": False,
    "noise": 0.03,
    "where": "t.yaml:1",
    "ids": ["A1"],
    "recipe": {"sizes": [1]},
}


def record(*, rejected: bool) -> Any:
    """results.json of two GPUs, small, with something in each member that a reader reads."""
    cluster = KeptCluster(nodes=1, gpus=2)
    outcome = {"outcome": "failed", "reason": "r", "culprits": (BAD,), "blames": "gpu", "remark": "m"} if rejected else {}
    good, bad = cluster.records({BAD: 500.0 if rejected else 750.0}, evidence={"SM clock MHz": 1980.0, "who": "a"})
    rows = [good, replace(bad, **outcome), replace(good, criterion="temperature", limit=None, value=40.0)]
    waiver = {"criterion": "x", "place": None, "until": "2027-01-01", "who": "J. Doe", "why": "known", "state": "unused"}
    more = {"waivers": [waiver], "expected": {"nodes": 1, "gpus_per_node": 2}, "changed_limits": ["x"], "changed_terms": ["t"]}
    return cluster.document(rows, run=RUN, limits={"bf16_tflops": USED}, limits_sha256="a" * 64, **more)


READERS = {
    "show": ["show", "b"],
    "show a criterion": ["show", "b", "bf16_tflops"],
    "csv": ["show", "b", "--csv"],
    "compare": ["compare", "a", "b", "--markdown"],
    "compare with it": ["compare", "b", "a", "--html", "c.html"],
    "history": ["history", ".", "bf16_tflops", "--part", "host0"],
    "page": ["report", "b/results.json", "-o", "p.html"],
}


@pytest.mark.parametrize("step", [19, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("reader", READERS)
def test_any_other_field(
    reader: str, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No traceback, nothing unprintable, a sentence where it is refused, no good news. Each takes every 19th field."""
    monkeypatch.chdir(tmp_path)
    keep(tmp_path / "a", record(rejected=False))
    wrong = []
    for where, what, data in islice(mutations(record(rejected=True)), [*READERS].index(reader), None, step):
        (keep(tmp_path / "b", None) / "results.json").write_text(json.dumps(data), encoding="utf-8")
        try:
            code = main.main(READERS[reader])
        except Exception as error:  # noqa: BLE001 -- each is a fault, and all are shown
            wrong.append(f"{where} {what}: {error!r}")
            continue
        said = capsys.readouterr()
        is_refused = code == 4 and said.err.count("\n") == 1
        is_good_news = reader in ("compare", "page") and code == 0
        if UNFIT.search(said.out + said.err) or is_good_news or not (code in (0, 1) or is_refused):
            wrong.append(f"{where} {what}: exit code {code}, {said.out[:200]!r} {said.err[:200]!r}")
    assert wrong == []
