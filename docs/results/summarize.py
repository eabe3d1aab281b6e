"""Write ``summary.json`` beside each given ``results.json``: the values by criterion and place, a few kB.

Run it as ``python docs/results/summarize.py docs/results/RUN/results.json ...``; the summary stays when the raw files go.
"""  # noqa: INP001 -- a script

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

RUN_FIELDS = ("verdict_line", "level", "profile", "expected", "changed_limits", "changed_terms", "timings")
DIGITS = 6


def summary(results: dict[str, Any]) -> dict[str, Any]:
    """Facts of the run, and for each criterion its limit, outcomes and values by place; those left out by rule by name."""
    run = {field: results[field] for field in RUN_FIELDS if field in results}
    environment = results["environment"]
    run |= {"versions": environment["versions"], "gpus": environment["gpus"]}
    criteria: dict[str, dict[str, Any]] = {}
    left_out: dict[str, list[str]] = {"skipped": [], "not_selected": []}
    for row in results["criteria"]:
        if row["outcome"] in left_out:
            left_out[row["outcome"]].append(row["criterion"])
            continue
        place = row["place"]["id"] if row["place"] else "cluster"
        entry = criteria.setdefault(row["criterion"], {"unit": row["unit"], "limit": row["limit"], "values": {}})
        entry["values"][place] = _rounded(row["value"])
        if row["outcome"] != "passed":
            entry.setdefault("outcomes", {})[place] = row["outcome"]
    names = {outcome: list(dict.fromkeys(criteria_of)) for outcome, criteria_of in left_out.items()}
    return {**run, **names, "criteria": criteria}


def _rounded(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.{DIGITS}g}")


def text(content: dict[str, Any]) -> str:
    """The summary as JSON, one field a line and one criterion a line."""
    criteria = content["criteria"]
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in content.items() if key != "criteria"]
    rows = [f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in criteria.items()]
    return "\n".join(["{", *lines, '  "criteria": {', ",\n".join(rows), "  }", "}"]) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Summarize each file named; 2 for wrong usage."""
    if not arguments or any(Path(name).name != "results.json" for name in arguments):
        sys.stderr.write("usage: python docs/results/summarize.py FOLDER/results.json ...\n")
        return 2
    for name in arguments:
        results = json.loads(Path(name).read_text(encoding="utf-8"))
        Path(name).with_name("summary.json").write_text(text(summary(results)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
