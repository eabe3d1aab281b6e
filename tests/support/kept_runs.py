"""Results of runs as documents, made of a few values, for whatever reads kept results."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging.verdict import Record, Terms, decide
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.reporting.results import ReportedTest, results_document, to_json
from pytest_gpucluster.thresholds.limit import Limit

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

TFLOPS = Limit(kind="above", value=700, unit="TFLOPS")


@dataclass
class KeptCluster:
    """A cluster whose parts can be moved and exchanged between two runs."""

    nodes: int = 2
    gpus: int = 4
    places: dict[str, Place] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Give each GPU an identity of its own."""
        for place in Inventory(num_nodes=self.nodes, gpus_per_node=self.gpus, device="cuda").everything:
            host = f"host{place.node}"
            uuid = (
                {"uuid": f"GPU-{place.id}", "serial": f"S-{place.id}", "pci": f"0000:{place.gpu}0:00.0"}
                if place.gpu is not None
                else {}
            )
            self.places[place.id] = replace(place, hostname=host, rank=0, **uuid)

    def swap(self, one: str, other: str) -> None:
        """Exchange two GPUs between their slots."""
        names = ("uuid", "serial")
        first, second = self.places[one], self.places[other]
        self.places[one] = replace(first, **{name: getattr(second, name) for name in names})
        self.places[other] = replace(second, **{name: getattr(first, name) for name in names})

    def records(
        self, values: dict[str, float] | None = None, *, criterion: str = "bf16_tflops", **changes: Any
    ) -> list[Record]:
        """A value of each GPU, 750 where none is given, passed."""
        known = {"criterion": criterion, "outcome": "passed", "limit": TFLOPS, **changes}
        gpus = [place for place in self.places.values() if place.gpu is not None]
        return [Record(**{**known, "place": gpu.id, "value": (values or {}).get(gpu.id, 750.0)}) for gpu in gpus]

    def document(self, records: Iterable[Record], **facts: Any) -> Any:
        """results.json of a run, as a program outside reads it."""
        rows = list(records)
        cases = [ReportedTest(nodeid=one.criterion, record=one) for one in rows]
        verdict = decide(rows, Terms(rehearsal=False, level_reached=True))
        known = {
            "profile": "h100-sxm",
            "level": "standard",
            "environment": {"versions": {"torch": "2.13"}},
            "timings": {"total_s": 1.5},
        }
        return json.loads(to_json(results_document(cases, places=self.places, verdict=verdict, facts={**known, **facts})))


def keep(folder: Path, document: Any) -> Path:
    """A results directory with this results.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(document), encoding="utf-8")
    return folder
