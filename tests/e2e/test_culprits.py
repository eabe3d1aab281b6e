"""Who is blamed for what: by kind, once for each cause, and never a GPU for a typo."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.launching import ACCEPTANCE
from tests.support.runs import run_pytest, user_folder
from tests.support.thresholds_files import entry, write_limits

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Any

    from tests.support.runs import FinishedRun

pytestmark = [pytest.mark.e2e, pytest.mark.fault, pytest.mark.long]

LIMITS = {
    "low": entry(per="gpu", min=90, unit="GB/s"),
    "hint": entry(per="gpu", min=90, unit="GB/s", severity="advisory"),
}
RANKS = tuple(f"node0-cpu{rank}" for rank in range(3))
DEAD = [f"dead[{part}]" for part in range(4)]


def run(folder: Any, **variables: str) -> FinishedRun:
    """folders/culprits with three ranks."""
    folder = user_folder("culprits", folder / "culprits")
    limits = write_limits(folder / "limits.yaml", LIMITS, extends=False)
    expected = "--gpucluster-expect=gpus_per_node=3"
    return run_pytest(folder, "--gpucluster", "test_culprits.py", limits, expected, variables=variables)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Every fault."""
    return run(tmp_path_factory.mktemp("faulty"))


def blaming(ran: FinishedRun, criterion: str) -> dict[str, Any]:
    """The one culprit that a criterion points at."""
    (found,) = (one for one in ran.results["culprits"] if criterion in one["criteria"])
    return dict(found)


@pytest.mark.parametrize(
    ("criterion", "kind", "place"),
    [
        ("raised[typo]", "software", None),
        ("raised[unset]", "settings", None),
        ("address", "unknown", RANKS[0]),
        ("ecc", "gpu", RANKS[2]),
        ("dead[0]", "unknown", RANKS[1]),
        ("low", "unknown", None),
    ],
)
def test_kind(faulty: FinishedRun, criterion: str, kind: str, place: str | None) -> None:
    """Decided by what happened; nothing here was confirmed, so nothing is to be replaced."""
    found = blaming(faulty, criterion)
    assert (found["kind"], found["place"] and found["place"]["id"], found["confidence"]) == (kind, place, "medium")
    assert "replace" not in found["action"]
    assert "out of service" not in found["action"]
    if place is None:
        assert found["places"] == list(RANKS)


def test_most_below_one_limit(faulty: FinishedRun) -> None:
    """It asks for a wrong limit, before anybody replaces three of them."""
    assert "3 of 3 ranks below the limit: not the ranks" in blaming(faulty, "low")["evidence"][0]


def test_one_death_is_one_block(faulty: FinishedRun) -> None:
    """In results.json, on the terminal, and in the messages of the JUnit file; the terminal says it at once too."""
    assert blaming(faulty, "dead[0]")["criteria"] == DEAD
    text = "killed was not measured: rank 1 (node0-cpu1, "
    blocks = faulty.stdout.partition("BAD PARTS")[2]
    assert len([line for line in blocks.splitlines() if "dead[0]" in line and "-k" not in line]) == 1
    assert faulty.stdout.count(text) <= 2  # as it happened, and among the bad parts
    assert "short test summary" not in faulty.stdout
    named = [line.strip() for line in faulty.stdout.splitlines() if "test_dead" in line]
    command = f"-k '{' or '.join(f'test_{name}' for name in DEAD)}'"
    assert [line for line in named if not line.endswith(command)] == []  # named by the command alone
    assert len(named) == 1
    first, *others = (faulty.case(f"test_{name}") for name in DEAD)
    assert first.message.startswith(text)
    assert "waited in barrier" in first.body
    for case in others:
        assert case.message == f"{first.message} (first seen in dead[0])"
        assert "waited in barrier" not in case.body


def test_advisory_misses_are_seen(faulty: FinishedRun) -> None:
    """In the verdict line, in the table, and at their testcases, which passed."""
    assert "3 advisory misses" in faulty.verdict_line
    assert "3 advisory misses" in [line for line in faulty.stdout.splitlines() if line.startswith("hint ")][-1]
    case = faulty.case(f"test_hint[{RANKS[0]}]")
    assert case.outcome == "passed"
    assert " cpu 0 (node0-cpu0): 50 GB/s, below 90 GB/s" in case.properties["advisory"]
    assert case.properties["remark"] == "compared with nothing"
    assert faulty.row("hint", RANKS[0])["remark"] == "compared with nothing"


def test_verbose_keeps_pytests_sections(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every error with its whole text, as pytest shows it."""
    folder = user_folder("culprits", tmp_path_factory.mktemp("verbose") / "culprits")
    limits = write_limits(folder / "limits.yaml", LIMITS, extends=False)
    chosen = ("--gpucluster", "test_culprits.py", limits, "--gpucluster-expect=gpus_per_node=3", "-k", "dead", "-v")
    ran = run_pytest(folder, *chosen)
    assert ran.stdout.count("ERROR at setup of test_dead") == len(DEAD)


def test_healthy(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing planted: nobody is blamed, and no cause is shown."""
    ran = run(tmp_path_factory.mktemp("healthy"), HEALTHY="1")
    assert (ran.results["culprits"], ran.results["verdict"]) == ([], "REHEARSED")
    assert "BAD PARTS" not in ran.stdout
    assert "advisory miss" not in ran.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_without_siblings_is_compared_with_itself(tmp_path: Path, ranks: int) -> None:
    """It passes, and says in every report what that does not show; two that agree need no such remark."""
    expected = f"--gpucluster-expect=gpus_per_node={ranks}"
    ran = run_pytest(tmp_path, ACCEPTANCE, "-k", "silent_corruption", expected)
    row, case = ran.row("silent_corruption", RANKS[0]), ran.case(f"test_silent_corruption[{RANKS[0]}]")
    assert (row["outcome"], case.outcome) == ("passed", "passed")
    rounds = row["evidence"]["rounds"]
    remark = f"compared with itself over {rounds:.0f} rounds; no other GPU to compare with" if ranks == 1 else None
    assert (row["remark"], case.properties.get("remark"), row["evidence"].get("compared")) == (remark, remark, remark)
    assert ("no other GPU to compare with" in " ".join(ran.stdout.split())) == (ranks == 1)  # long lines are wrapped
