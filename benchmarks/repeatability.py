"""How far healthy values move from round to round, and how far the repeats of one value lie apart: the noise allowances.

    python3 benchmarks/repeatability.py --json repeatability.json [--rounds 20] [--only CRITERION ...] [--profile h200-sxm]

Measures on one GPU, by the package's own functions and the recipes of thresholds.yaml, what the level quick judges by rate
(BF16, memory, host link) and the products of the other dtypes. By entry: median, least and most of the rounds; sigma of the
rounds; the widest spread (10th to 90th percentile over the median) of one value's repeats, which is what an entry's `noise`
allows; and how many rounds would have been measured again for it. Writes the JSON file and a table (.md) beside it.
About 13 s a round on an H200. `--profile rehearsal` runs on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

from pytest_gpucluster.judging.noise import Repeats, doubt, spread_of
from pytest_gpucluster.measurements import timing
from pytest_gpucluster.measurements.gemm import gemm
from pytest_gpucluster.measurements.hbm import hbm_bandwidth
from pytest_gpucluster.measurements.host_link import host_link
from pytest_gpucluster.thresholds.lint import load

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pytest_gpucluster.thresholds.resolve import Threshold

FOR_THE_CALL = ("at_once", "together")
"""Keys of a recipe that say which GPUs measure at the same time, not what is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where an entry's value comes from: the recipe's entry, what it calls, and the fields of value and repeats."""

    recipe_of: str
    measure: Callable[..., Any]
    arguments: Mapping[str, Any]
    value: str
    repeats: str


def _product(key: str, dtype: str) -> Source:
    return Source(recipe_of=key, measure=gemm, arguments={"dtype": dtype}, value="tflops", repeats="bursts_tflops")


SOURCES = {
    "bf16_tflops": _product("bf16_tflops", "bfloat16"),
    "fp16_tflops": _product("fp16_tflops", "float16"),
    "fp8_tflops": _product("fp8_tflops", "float8_e4m3fn"),
    "tf32_tflops": _product("tf32_tflops", "tf32"),
    "fp32_tflops": _product("fp32_tflops", "float32"),
    "fp64_tflops": _product("fp64_tflops", "float64"),
    "int8_tops": _product("int8_tops", "int8"),
    "hbm_bandwidth": Source(
        recipe_of="hbm_bandwidth", measure=hbm_bandwidth, arguments={}, value="tb_s", repeats="repeats_tb_s"
    ),
    "host_to_device": Source(
        recipe_of="host_to_device", measure=host_link, arguments={}, value="h2d_gb_s", repeats="repeats_h2d_gb_s"
    ),
    "device_to_host": Source(
        recipe_of="host_to_device", measure=host_link, arguments={}, value="d2h_gb_s", repeats="repeats_d2h_gb_s"
    ),
}


def one_round(criteria: Mapping[str, Threshold], keys: Sequence[str]) -> dict[str, Repeats]:
    """The value and the repeats of these entries; a measurement that several share is made once."""
    measured: dict[str, Any] = {}
    found = {}
    for key in keys:
        if criteria[key].skip is not None:
            continue
        source = SOURCES[key]
        if source.recipe_of not in measured:
            recipe = {name: value for name, value in criteria[source.recipe_of].recipe.items() if name not in FOR_THE_CALL}
            measured[source.recipe_of] = source.measure(**source.arguments, **recipe)
        outcome = measured[source.recipe_of]
        found[key] = Repeats(value=getattr(outcome, source.value), samples=tuple(getattr(outcome, source.repeats)))
    return found


def spread_over(rounds: Sequence[Mapping[str, Repeats]], criteria: Mapping[str, Threshold]) -> list[dict[str, Any]]:
    """The rounds of each entry in brief; spreads and sigma in per cent."""
    rows = []
    for key in rounds[0]:
        values = [one[key].value for one in rounds]
        limit = criteria[key].limit(gpus=1, cluster={})
        allowed = criteria[key].noise
        widest = max(spread_of(one[key].samples).relative for one in rounds)
        rows.append(
            {
                "criterion": key,
                "unit": limit.unit,
                "rounds": len(values),
                "median": statistics.median(values),
                "least": min(values),
                "most": max(values),
                "sigma_percent": 100 * statistics.stdev(values) / statistics.fmean(values) if len(values) > 1 else None,
                "widest_repeats_percent": 100 * widest,
                "allowed_percent": None if allowed is None else 100 * allowed,
                "measured_again": sum(doubt(one[key], limit=limit, allowed=allowed) is not None for one in rounds),
            }
        )
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table."""
    head = ("criterion", "median", "least to most", "sigma of rounds, %", "widest repeats, %", "allowed, %", "measured again")
    lines = [_line(head), _line(["---"] * len(head))]
    for row in rows:
        values = [f"{row[name]:.5g}" for name in ("least", "most")]
        sigma, allowed = (("-" if row[name] is None else f"{row[name]:.2f}") for name in ("sigma_percent", "allowed_percent"))
        again = f"{row['measured_again']} of {row['rounds']}"
        cells = [
            f"{row['median']:.5g} {row['unit']}",
            " to ".join(values),
            sigma,
            f"{row['widest_repeats_percent']:.2f}",
            allowed,
        ]
        lines.append(_line([f"`{row['criterion']}`", *cells, again]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    """Measure, conclude, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="the file to write; the table goes into the same folder")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=SOURCES, default=list(SOURCES), metavar="CRITERION")
    parser.add_argument("--limit-s", type=float, default=600.0, help="seconds after which no round is begun")
    parser.add_argument("--profile", default="h200-sxm", help="the profile of thresholds.yaml with the recipes and limits")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("at least 1 round")
    file = load(None)
    criteria = file.criteria(file.profiles[arguments.profile])
    rounds = []
    began_s = time.monotonic()
    for number in range(arguments.rounds):
        start_s = time.monotonic()
        if start_s - began_s > arguments.limit_s:
            break
        rounds.append(one_round(criteria, arguments.only))
        print(f"round {number + 1} of {arguments.rounds}: {time.monotonic() - start_s:.1f} s", file=sys.stderr, flush=True)
    rows = spread_over(rounds, criteria)
    raw = [{key: {"value": one.value, "repeats": list(one.samples)} for key, one in found.items()} for found in rounds]
    content = {"device": timing.device_name(), "profile": arguments.profile, "criteria": rows, "rounds": raw}
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    arguments.json.with_suffix(".md").write_text(markdown(rows), encoding="utf-8")
    print(markdown(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
