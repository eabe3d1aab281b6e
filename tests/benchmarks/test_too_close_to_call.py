"""Error rates of the rule for repeats, in a small simulation; and that the script prints its table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support import REPOSITORY
from tests.support.scripts import benchmark_module
from tests.support.thresholds_files import packaged

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """The benchmark as a module."""
    with benchmark_module("too_close_to_call") as module:
        yield module


def test_a_busy_host_leaves_no_healthy_link_open(script: Any) -> None:
    """The rule before left half of them open; a slow link is accepted by neither."""
    model = script.MODELS["host_to_device, busy host"]
    terms = {"count": 20, "allowed": 0.08, "seed": 7}
    before, _ = script.outcomes(script.judged_before, model, model.healthy, runs=200, **terms)
    now, rounds = script.outcomes(script.judged_now, model, model.healthy, runs=500, **terms)
    slow, _ = script.outcomes(script.judged_now, model, script.SLOW, runs=200, **terms)
    assert before["open"] > 50
    assert now == {"passed": 500}
    assert rounds < 3
    assert slow["passed"] == 0


def test_a_second_look_accepts_no_slow_link(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a host of 8 GPUs leaves links open, both looks together leave fewer, and accept no link 5 % below its limit."""
    model = script.MODELS["host_to_device, busy host of 8 GPUs"]
    terms = {"count": 20, "allowed": 0.08, "seed": 7}
    once, _ = script.outcomes(script.judged_now, model, model.healthy, runs=1000, **terms)
    twice, _ = script.outcomes(script.judged_twice, model, model.healthy, runs=1000, **terms)
    slow, _ = script.outcomes(script.judged_twice, model, script.SLOW, runs=200, **terms)
    assert twice["open"] < once["open"] < 10
    assert slow["passed"] == 0
    script.main(["--healthy", "5", "--slow", "5", "--second-look", "--only", "hbm_bandwidth"])
    assert capsys.readouterr().out.splitlines()[-1].startswith("| `hbm_bandwidth` | 0 | 0 | 0 | 0 |")


def test_the_same_seed_gives_the_same_table(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Word for word."""
    arguments = ["--healthy", "5", "--slow", "5", "--only", "hbm_bandwidth", "host_to_device"]
    tables = [(script.main(arguments), capsys.readouterr().out) for _ in range(2)]
    assert tables[0] == tables[1]
    assert "| `hbm_bandwidth` | 20 | 3 | 0 | 0 | 0 | 0 | 0 | 0 | 1.00 | 0.00 to " in tables[0][1]


def test_every_entry_with_noise_and_a_limit_has_a_model(script: Any) -> None:
    """Two nodes of 8 H100, and one of 4 H200: some rates of one node have a limit for 4 GPUs alone."""
    file, judged = packaged(), set()
    for profile, nodes, gpus in (("h100-sxm", 2, 8), ("h200-sxm", 1, 4)):
        shape = {"nodes": nodes, "gpus_per_node": gpus, "world_size": nodes * gpus}
        entries = [one for one in file.criteria(file.profiles[profile]).values() if one.noise is not None and one.skip is None]
        some = [one for one in entries if nodes > 1 or ("node" not in one.key and "domain" not in one.key)]
        judged |= {one.key for one in some if not one.limit(gpus=gpus, cluster=shape).is_none}
    assert "busbw[send_recv]" in judged
    assert judged == {name.split(",")[0] for name in script.MODELS}


def test_the_table_of_the_docs_has_every_entry_and_meets_the_aims(script: Any) -> None:
    """With the repeats and the noise of today's limits; the first aim by the upper end of the interval, of whole runs."""
    page = (REPOSITORY / "docs/measuring.md").read_text(encoding="utf-8").split("## Too close to call")[1]
    rows = {cells[0].strip("`"): cells[1:] for line in page.splitlines() if len(cells := line.strip("| ").split(" | ")) == 11}
    assert rows.keys() - {"entry"} == {*script.MODELS}
    for name in script.MODELS:
        count, noise = script.repeats_of(name.split(",")[0])
        assert rows[name][:2] == [str(count), f"{100 * noise:g}"], name
        healthy_open, healthy_failed, slow_accepted = (int(rows[name][at]) for at in (3, 5, 7))
        assert (healthy_failed, slow_accepted) == (0, 0), name
        assert rows[name][9] == script.of_10_000_runs(healthy_open, 10_000), name
        assert float(rows[name][9].split(" to ")[1]) < 10, f"{name}: 1 in 1,000 runs"


@pytest.mark.parametrize(
    ("number", "of", "low", "high"),
    [(0, 10_000, 0, 3.69e-4), (3, 30, 0.0211, 0.2653), (237, 10_000, 0.0208, 0.0269), (9, 9, 0.6637, 1)],
)
def test_an_interval_of_a_share(script: Any, number: int, of: int, low: float, high: float) -> None:
    """By the formula of Clopper and Pearson: of 0 in n the upper end is 1 - 0.025^(1/n)."""
    assert script.share_of(number, of) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))


def test_four_rounds_were_too_few_for_sixteen_links(script: Any) -> None:
    """What the page says of the budget before: more than one run in 1,000 by the lower end."""
    assert script.of_10_000_runs(237, 10_000) == "69.28 to 115.55"
