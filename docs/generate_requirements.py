"""Write docs/requirements.md: what published lists ask for, and whether it is judged, shown or refused."""  # noqa: INP001 -- a script

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pytest_gpucluster.thresholds.lint import load  # noqa: E402 -- from this checkout, installed or not

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCE, TARGET = ROOT / "docs" / "requirements.yaml", ROOT / "docs" / "requirements.md"
COMMAND = "python docs/generate_requirements.py"
ANSWERS = ("judged", "shown", "refused")
HEAD = f"""\
<!-- Generated from thresholds.yaml and docs/requirements.yaml by `{COMMAND}`, and not kept in git. -->
# What published lists ask for

Each requirement is judged by criteria, shown, or refused with a reason. A contract's own ids stand
under `ids:` of a criterion ([thresholds.md](thresholds.md)); JUnit and page repeat them.
"""


def answers(content: Mapping[str, Any], criteria: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """By requirement, the kind of its answer and the words.

    Args:
        content: of docs/requirements.yaml.
        criteria: the entries of thresholds.yaml by name, each with its ``ids``.

    Raises:
        ValueError: a requirement has no answer or two of them, or an id or a criterion is not known.
    """
    by_id: dict[str, list[str]] = {}
    for name, entry in criteria.items():
        for one in entry.ids:
            by_id.setdefault(one, []).append(name)
    unlisted = [one for one in by_id if one not in content["requirements"]]
    if unlisted:
        raise ValueError(f"thresholds.yaml has the ids {', '.join(unlisted)}, which docs/requirements.yaml does not list")
    found = {}
    for name, one in content["requirements"].items():
        given = {kind: one[kind] for kind in ANSWERS if one.get(kind)}
        given |= {"judged": [*given.get("judged", ()), *by_id[name]]} if name in by_id else {}
        if foreign := one.keys() - {"list", "asks", *ANSWERS}:
            raise ValueError(f"{name} has {', '.join(sorted(foreign))}, which is no key: quote a text that has a comma")
        if type(one["asks"]) is not str:
            raise ValueError(f"{name} asks for {one['asks']}, which YAML takes for no text: quote it")
        if len(given) != 1:
            raise ValueError(f"{name} has {len(given)} answers, and needs one of: {', '.join(ANSWERS)}")
        ((kind, words),) = given.items()
        unknown = [key for key in words if key not in criteria] if kind == "judged" else []
        if unknown:
            raise ValueError(f"{name} names {', '.join(unknown)}, and there is no such criterion")
        found[name] = (kind, ", ".join(f"`{key}`" for key in words) if kind == "judged" else words)
    return found


def page(content: Mapping[str, Any], criteria: Mapping[str, Any]) -> str:
    """The whole page as Markdown, a table for each list."""
    found, lines = answers(content, criteria), [HEAD]
    for name, one in content["lists"].items():
        listed = [key for key, asked in content["requirements"].items() if asked["list"] == name]
        counts = Counter(found[key][0] for key in listed)
        of_all = f" It has {one['numbered']} in all." if one["numbered"] else ""
        said = ", ".join(f"{counts[kind]} {kind}" for kind in ANSWERS)
        lines += [f"## {one['title']}\n", f"{len(listed)} listed: {said}.{of_all}", f"{one['known']}\n"]
        lines += ["| requirement | asks | answer | by, where or why |", "|---|---|---|---|"]
        lines += [f"| {key} | {content['requirements'][key]['asks']} | {found[key][0]} | {found[key][1]} |" for key in listed]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def read() -> dict[str, Any]:
    """What docs/requirements.yaml says."""
    found: dict[str, Any] = yaml.safe_load(SOURCE.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    TARGET.write_text(page(read(), load(None).criteria(None)), encoding="utf-8")
