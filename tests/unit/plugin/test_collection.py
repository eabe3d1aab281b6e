"""What collection does with the selected tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging.forecast import Suite, forecast
from pytest_gpucluster.plugin.collection import without
from tests.support.launching import ACCEPTANCE
from tests.support.runs import run_pytest
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from pathlib import Path


class Item:
    """A test that counts how often any of them is compared with another."""

    compared = 0
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Only the same is equal."""
        Item.compared += 1
        return self is other


def test_tests_are_left_out_at_once() -> None:
    """None of the left ones is compared with all that are left out."""
    items: list[Any] = [Item() for _ in range(300)]
    assert [id(item) for item in without(items, items[::3])] == [id(item) for number, item in enumerate(items) if number % 3]
    assert Item.compared <= 300


WRITE_FIXTURES = """
import json
from pathlib import Path
from pytest_gpucluster.plugin.collection import fixtures_of
from pytest_gpucluster.thresholds.load import load

def pytest_collection_finish(session):
    found = fixtures_of(session.items, load(None).content.criteria)
    Path("fixtures.json").write_text(json.dumps({key: sorted(names) for key, names in found.items()}))
"""


def test_every_packaged_entry_has_an_estimate(tmp_path: Path) -> None:
    """Else the plan's time would be a part of the truth: its own, that of its fixtures, or that of the entry that it names."""
    (tmp_path / "write_fixtures.py").write_text(WRITE_FIXTURES, encoding="utf-8")
    options = ("--collect-only", "-q", "-p", "write_fixtures", "--gpucluster-level=soak")
    ran = run_pytest(tmp_path, ACCEPTANCE, *options, variables={"PYTHONPATH": str(tmp_path)})
    assert ran.returncode == 0, ran.stdout
    found = json.loads((tmp_path / "fixtures.json").read_text(encoding="utf-8"))
    suite = Suite(subjects={}, fixtures={key: frozenset(names) for key, names in found.items()})
    criteria = packaged().criteria(packaged().profiles["h200-sxm"])

    def takes_s(key: str) -> float | None:
        return forecast({key: 1}, criteria, suite, gpus_per_node=8, soak_s=None).steps[0].takes_s

    assert found.keys() == criteria.keys()
    assert [key for key in criteria if takes_s(key) is None] == []
    gpu, node = (criteria[f"training_throughput_{name}"].takes_s or 0.0 for name in ("gpu", "ddp_node"))
    assert takes_s("training_scaling_node") == gpu + node
    assert takes_s("straggler[bf16_at_clock]") == criteria["bf16_sustained"].takes_s
    assert takes_s("ecc_enabled") == criteria["gpu_count"].takes_s
