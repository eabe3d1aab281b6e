"""Which GPUs spoil a collective in a node that missed its limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.localization.gpus import FEWEST_GPUS, slow_gpus, usual_pair_gb_s
from pytest_gpucluster.measurements.pair_matrix import pair_matrix
from pytest_gpucluster.text import first_line
from tests_acceptance.guilty_nodes import Guilty

if TYPE_CHECKING:
    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.results import Results
    from pytest_gpucluster.judging.criterion import Criterion
    from pytest_gpucluster.places import Place

PAIRS = {"size_bytes": 256 << 20, "small_bytes": 8, "iterations": 5, "warmup": 2}
"""As gpu_pairs measures them: each pair one way, disjoint pairs at once, some seconds for a node."""
DEADLINE_S = 60.0


class GuiltyGpus:
    """Looks for the GPU that is slow with every other one of its node. All nodes are measured, once, at the first failure."""

    def __init__(self, cluster: Cluster) -> None:
        """Measure nothing yet."""
        self._cluster = cluster
        self._measured: Results | None = None

    def of(self, criterion: Criterion, value: float, node: Place) -> Guilty:
        """Search in ``node``, unless the value is within the limit, there are too few GPUs, or nothing is measured (no GPU)."""
        gpus = [place for place in self._cluster.places if place.node == node.node]
        if criterion.limit.holds(value) or self._cluster.device == "cpu":
            return Guilty()
        if len(gpus) < FEWEST_GPUS:
            return Guilty(evidence={"guilty": f"not searched: it takes {FEWEST_GPUS} GPUs"})
        matrices = self._matrices()
        if node not in matrices:
            why = first_line(str(matrices.get("error", "no pair was measured")))
            return Guilty(evidence={"guilty": f"not searched: {why}"})
        known = {where: matrix for where, matrix in matrices.items() if where != "error"}
        found = slow_gpus([gpu.id for gpu in gpus], known[node], usual_pair_gb_s(known))
        places = tuple(gpu for gpu in gpus if gpu.id in found.gpus)
        return Guilty(evidence={"pairs": found.text}, parts=Parts(kind="gpu", places=places) if places else None)

    def _matrices(self) -> dict[Any, Any]:
        """The pairs of every node that could be measured; under ``error`` why the first of the others could not."""
        if self._measured is None:
            every = self._cluster.places
            self._measured = self._cluster.run(pair_matrix, per="node", places=every, deadline_s=DEADLINE_S, **PAIRS)
        found: dict[Any, Any] = {}
        for node in self._cluster.nodes:
            try:
                found[node] = self._measured[node]
            except MeasurementError as error:
                found.setdefault("error", error)
        return found
