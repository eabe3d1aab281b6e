"""A value that no hardware can give is compared with nothing: the others are judged among themselves, and it is an error."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pytest_gpucluster import Results, localization, siblings
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judging.failure_text import TOO_MUCH, Possible
from pytest_gpucluster.localization import RailRate
from pytest_gpucluster.localization.gpus import GpuPair
from pytest_gpucluster.places import Place
from tests.support.thresholds_files import packaged
from tests_acceptance import test_pairs, test_rails, test_stragglers
from tests_acceptance.conftest import require_possible

PLACES = tuple(Place(id=f"node0-gpu{gpu}", node=0, gpu=gpu, rank=gpu) for gpu in range(4))


def can_be(key: str, *, gpus: int = 1) -> Possible:
    """As the fixture gives it on H200."""
    file = packaged()
    threshold = file.criteria(file.profiles["h200-sxm"])[key]
    return Possible(key=key, bound=threshold.best_possible(gpus=gpus, cluster={"nodes": 2, "gpus_per_node": 8}))


@pytest.mark.parametrize(("kind", "culprits"), [("not_idle", (PLACES[1],)), ("raised", ())])
def test_a_busy_sibling_is_the_reason_that_nothing_is_compared(kind: Any, culprits: tuple[Place, ...]) -> None:
    """Of two GPUs one is used by another program: the other one is measured again with it, and its error names that one."""
    one, busy = PLACES[:2]
    error = MeasurementError("GPU not idle: pid 4711 on gpu 1", culprits=(busy,), kind=kind)
    found = Results({one: SimpleNamespace(device="H200", tflops=780.0, evidence={})}, {busy: error})
    compared = test_stragglers.Comparison(rates={one: 780.0}, wrong={}, compared={})
    judge: Any = SimpleNamespace(limit=SimpleNamespace(value=5.0))
    with pytest.raises(MeasurementError, match=r"of its siblings \(H200\) 0 could be measured") as raised:
        test_stragglers.test_straggler("bf16_tflops", found, one, compared, judge)
    assert (raised.value.kind, raised.value.culprits) == (kind, culprits)
    assert ("pid 4711" in str(raised.value)) is (kind == "not_idle")


@pytest.mark.parametrize("wrong", [1, 2, 3])
@pytest.mark.parametrize(
    ("key", "field", "usual"),
    [("bf16_tflops", "tflops", 780.0), ("hbm_bandwidth", "tb_s", 4.3), ("host_to_device", "h2d_gb_s", 55.0)],
)
def test_a_sibling_that_is_too_fast_accuses_nobody(key: str, field: str, usual: float, wrong: int) -> None:
    """However many are: the others are compared with each other, or with nobody."""
    rates = {place: usual * (10 if place.gpu < wrong else 1 + place.gpu / 1000) for place in PLACES}  # type: ignore[operator]
    found = Results({place: SimpleNamespace(device="H200", **{field: rate}) for place, rate in rates.items()}, {})
    healthy = siblings.Healthy(floor_spread=0.01)
    compared = test_stragglers.compare_all(found, field, healthy, SimpleNamespace(value=5.0), can_be(key).error)
    assert set(compared.rates) == set(PLACES[wrong:])
    assert set(compared.compared) == (set(PLACES[wrong:]) if wrong < 3 else set())
    assert all(one.doubt is None and not one.shortfall.is_named(5.0) for one in compared.compared.values())


def pair(source: int, target: int, **changes: Any) -> GpuPair:
    """Two GPUs over NVLink."""
    ends = {"source": f"node0-gpu{source}", "target": f"node0-gpu{target}"}
    usual = GpuPair(**ends, way="NV18", gb_s=395.0, latency_us=4.2, path="P2P/CUMEM", peer_access=True)
    return replace(usual, **changes)


@pytest.mark.parametrize("changes", [{"gb_s": 3950.0}, {"latency_us": 0.0}])
@pytest.mark.parametrize("quantity", ["bandwidth", "latency"])
def test_pairs_that_are_too_good(changes: dict[str, float], quantity: Any) -> None:
    """Most of a node's pairs: the few right ones would be ten times slower than their median."""
    pairs = [pair(one, other, **(changes if one < 3 else {})) for one in range(4) for other in range(4) if one != other]
    kept, errors = test_pairs.only_possible(pairs, can_be("busbw[send_recv]", gpus=2), can_be("latency[all_reduce]", gpus=2))
    assert {one.source for one in kept} == {"node0-gpu3"}
    assert len(errors) == 9
    assert all(lag.percent < 1 for lag in localization.pair_lags(kept, quantity).values())


def test_adapters_that_carry_more_than_their_port() -> None:
    """An error at its node; the other adapters of that node are compared."""
    usual = RailRate(node="node0", rail="mlx5_0:1", gb_s=46.5, latency_us=9.0, gbit_s=400.0, partners=("node1",))
    rates = [usual, replace(usual, rail="mlx5_1:1", gb_s=465.0), replace(usual, rail="mlx5_2:1", gbit_s=None)]
    found = test_rails.only_possible(test_rails.RailsMeasured(rates, {}), can_be("rail_bandwidth"))
    assert [one.rail for one in found.rates] == ["mlx5_0:1", "mlx5_2:1"]
    (error,) = found.errors["node0"]
    assert f"rail_bandwidth at node0 mlx5_1:1: 9.3 ratio is {TOO_MUCH}" in str(error)


@pytest.mark.parametrize(("tokens", "is_possible"), [(18900.0, True), (33000.0, True), (40000.0, False), (189000.0, False)])
def test_trainings_that_no_gpu_can_make(tokens: float, is_possible: bool) -> None:  # noqa: FBT001 -- a parameter
    """By the products that its tokens take: 29 GFLOP each, and 1071 TFLOPS are possible."""
    trained = SimpleNamespace(tokens_per_s_per_gpu=tokens, product_tflops=tokens * 29.33e9 / 1e12)
    unknown = SimpleNamespace(tokens_per_s_per_gpu=tokens, product_tflops=None)
    require_possible({"node0": unknown}, can_be)
    if is_possible:
        require_possible({"node0": trained}, can_be)
        return
    with pytest.raises(MeasurementError, match=rf"bf16_tflops at node0, {tokens:.0f} tokens/s: .*{TOO_MUCH}"):
        require_possible({"node0": trained}, can_be)
