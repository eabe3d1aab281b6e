"""How slow a GPU has to be to be found: one GPU of a node is slowed by a known amount, and our own criteria judge all.

    python3 benchmarks/sensitivity.py --json sensitivity.json [--repeats 10] [--slowdowns 3 5 10 30] [--profile h200-sxm]
    python3 benchmarks/sensitivity.py --json dry.json --dry-run        (no GPU: simulated rates, the same analysis)

One process per GPU, all measuring at the same time, so the siblings are real. In a slowed round a thread of the victim's
process starts spin kernels on a stream of high priority. Each takes every thread slot of every SM for a moment, so that no
block of the measured kernels runs beside it, and they are started so often that they take the asked share of the time. What
they really took is counted by the GPU's own timer. Clean rounds and each slowdown, each time with another victim, take
turns, so that drift is no slowdown.

Measured in each round, by the package's own functions: `gemm` in bursts (8192 only, 3 bursts of 10, else the recipe of
bf16_tflops) and in FP32, `hbm_bandwidth` (its recipe) and `sustained` for 1.5 s instead of 20 (so some of the boost is left
in its rate, and its clock is a mean of some 7 samples). Judged by the limits of thresholds.yaml, `shortfalls` and nothing
else. A rate over the clock that the SMs themselves counted (bf16_per_cycle) is measured beside them and is no criterion yet.

Writes the JSON file, and beside it a table (.md) and a plot (.svg). 50 rounds take about 200 s on 4 GPUs; no round is begun
that would not end before --limit-s. The exit code is 1 if rounds are missing, 2 where this torch cannot compile a kernel or
there are fewer than 3 GPUs.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # also where this file is loaded and not run
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

from sensitivity_analysis import CANDIDATE, Round, analyse, draw, markdown

from pytest_gpucluster.judging.siblings import FEWEST_SIBLINGS
from pytest_gpucluster.thresholds.lint import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pytest_gpucluster.thresholds.resolve import Threshold

LIMIT_S = 240.0
SUSTAINED_S, SLICE_S = 1.5, 0.25
NO_SPIN = "no GPU can be slowed by a known amount; torch.cuda._sleep, which takes one SM, is no substitute"


def plan(repeats: int, slowdowns: Sequence[float], gpus: int) -> Iterator[tuple[int | None, float]]:
    """Victim and slowdown of each round: clean ones and all slowdowns in turn, each time with another victim."""
    for repeat in range(repeats):
        yield None, 0.0
        for index, slowdown in enumerate(slowdowns):
            yield (repeat + index) % gpus, slowdown


def write(path: Path, content: Mapping[str, Any]) -> None:
    """The JSON file, the table and the plot beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(markdown(content), encoding="utf-8")
    path.with_suffix(".svg").write_text(draw(content), encoding="utf-8")


# --- A dry run: rates drawn from the spreads that docs/decisions/0011 holds ---

SIMULATED = {  # typical rate, sigma among GPUs, sigma of repeats
    "bf16_tflops": (790.0, 0.012, 0.001),
    "fp32_tflops": (51.1, 0.001, 0.001),
    "hbm_bandwidth": (4.38, 0.0003, 0.0003),
    "bf16_sustained": (668.0, 0.008, 0.003),
    "bf16_at_clock": (0.913, 0.005, 0.004),
    CANDIDATE: (0.835, 0.003, 0.001),
}


def simulate(rounds: Iterator[tuple[int | None, float]], *, gpus: int, seed: int) -> list[Round]:
    """Rounds as if measured, every quantity slowed by just the nominal share."""
    draw_from = random.Random(seed)
    own = {name: [rate * (1 + draw_from.gauss(0, among)) for _ in range(gpus)] for name, (rate, among, _) in SIMULATED.items()}

    def rate(name: str, gpu: int, share: float) -> float:
        return own[name][gpu] * (1 + draw_from.gauss(0, SIMULATED[name][2])) * (1 - share)

    done = []
    for victim, slowdown in rounds:
        share = [slowdown / 100 if gpu == victim else 0.0 for gpu in range(gpus)]
        rates: dict[str, list[float | None]] = {
            name: [rate(name, gpu, share[gpu]) for gpu in range(gpus)] for name in SIMULATED
        }
        done.append(Round(victim=victim, slowdown_percent=slowdown, rates=rates))
    return done


def recipes_of(criteria: Mapping[str, Threshold]) -> dict[str, Any]:
    """The recipes of thresholds.yaml, cut to what fits; the module's docstring says where."""
    burst = {name: value for name, value in criteria["bf16_tflops"].recipe.items() if name != "at_once"}
    return {
        "bf16_tflops": {**burst, "sizes": [8192], "iterations": 30, "bursts": 3},
        "fp32_tflops": {**criteria["fp32_tflops"].recipe, "rest_s": 0.02},
        "hbm_bandwidth": dict(criteria["hbm_bandwidth"].recipe),
        "bf16_sustained": {**criteria["bf16_sustained"].recipe, "seconds": SUSTAINED_S, "slice_s": SLICE_S},
    }


def gpus_or_exit() -> int:
    """How many GPUs there are; ends the script where a study is impossible."""
    import torch  # noqa: PLC0415 -- as in Thief

    if not hasattr(torch.cuda, "_compile_kernel"):
        print(f"torch {torch.__version__} has no torch.cuda._compile_kernel (2.9 and later do): {NO_SPIN}", file=sys.stderr)
        raise SystemExit(2)
    if torch.cuda.device_count() <= FEWEST_SIBLINGS:
        print(f"{torch.cuda.device_count()} GPUs: it takes {FEWEST_SIBLINGS + 1} to compare; see --dry-run", file=sys.stderr)
        raise SystemExit(2)
    return int(torch.cuda.device_count())


def main() -> int:
    """Measure or simulate, analyse, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="the file to write; .md and .svg go into the same folder")
    parser.add_argument("--repeats", type=int, default=10, help="clean rounds, and rounds of each slowdown")
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[3, 5, 10, 30], help="per cent")
    parser.add_argument("--profile", default="h200-sxm", help="the profile of thresholds.yaml with the limits")
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds after which no round is begun")
    parser.add_argument("--dry-run", action="store_true", help="simulated rates of 4 GPUs; no GPU is touched")
    parser.add_argument("--seed", type=int, default=1, help="of the simulation")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or not all(0 < slowdown < 100 for slowdown in arguments.slowdowns):
        parser.error("at least 1 repeat, and slowdowns between 0 and 100 per cent")
    file = load(None)
    criteria = file.criteria(file.profiles[arguments.profile])
    gpus = 4 if arguments.dry_run else gpus_or_exit()
    wanted = list(plan(arguments.repeats, arguments.slowdowns, gpus))
    if arguments.dry_run:
        rounds, devices = simulate(iter(wanted), gpus=gpus, seed=arguments.seed), [{"name": "simulated"}] * gpus
    else:
        from sensitivity_gpus import run  # noqa: PLC0415 -- a dry run needs no torch

        rounds, devices = run(wanted, gpus=gpus, recipes=recipes_of(criteria), limit_s=arguments.limit_s)
    facts = {"dry_run": arguments.dry_run, "profile": arguments.profile, "devices": devices, "rounds_wanted": len(wanted)}
    content = {**facts, "recipes": recipes_of(criteria), **analyse(rounds, criteria), "rounds": [asdict(one) for one in rounds]}
    write(arguments.json, content)
    print(markdown(content))
    return 0 if len(rounds) == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
