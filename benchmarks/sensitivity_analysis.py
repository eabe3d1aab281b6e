"""Analysis of sensitivity.py's rounds: GPUs found, false alarms, the share of the rate that was lost. No torch."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.judging.siblings import shortfalls

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pytest_gpucluster.thresholds.resolve import Threshold

QUANTITIES = ("bf16_tflops", "fp32_tflops", "hbm_bandwidth", "bf16_sustained", "bf16_at_clock")
CANDIDATE, CANDIDATE_SPREAD, CANDIDATE_PERCENT = "bf16_per_cycle", 0.005, 2.5
"""No criterion yet, and what its comparison would be: spread floor and tolerance."""
ANY = "any criterion"
MIN_FOUND, MAX_FALSE_ALARMS = 0.95, 1 / 3000


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All GPUs measured once, one of them perhaps slowed. ``victim`` is None in a clean round.

    ``rates``: by quantity, one value a GPU; None where it has none. ``taken_ratio``: by measurement, the share of the
    victim's SM time that the spin kernels took. ``seen``: a GPU's clocks, power and temperature, for whoever reads the file.
    """

    victim: int | None
    slowdown_percent: float
    rates: dict[str, list[float | None]]
    taken_ratio: dict[str, float] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)


def judge(one: Round, criteria: Mapping[str, Threshold]) -> dict[str, set[int]]:
    """Which GPUs each criterion calls bad in this round, by the floors and comparisons of thresholds.yaml themselves."""
    called: dict[str, set[int]] = {}
    for quantity in QUANTITIES:
        rates = {gpu: rate for gpu, rate in enumerate(one.rates[quantity]) if rate is not None}
        floor = criteria[quantity].limit(gpus=1, cluster={})
        called[quantity] = {gpu for gpu, rate in rates.items() if not floor.holds(rate)}
        key = f"straggler[{quantity}]"
        most = criteria[key].limit(gpus=1, cluster={})
        short = shortfalls(rates, floor_spread=criteria[key].recipe["floor_spread"])
        called[key] = {gpu for gpu, found in short.items() if found.is_named(most.value)}
    rates = {gpu: rate for gpu, rate in enumerate(one.rates[CANDIDATE]) if rate is not None}
    short = shortfalls(rates, floor_spread=CANDIDATE_SPREAD)
    called[CANDIDATE] = {gpu for gpu, found in short.items() if found.is_named(CANDIDATE_PERCENT)}
    return called


def detection(rounds: Sequence[Round], criteria: Mapping[str, Threshold]) -> list[dict[str, Any]]:
    """By criterion: how often the victim was called, and alone, at each slowdown; and how often a healthy GPU was."""
    judged = [(one, judge(one, criteria)) for one in rounds]
    slowdowns = sorted({one.slowdown_percent for one in rounds if one.victim is not None})
    keys = [key for quantity in QUANTITIES for key in (quantity, f"straggler[{quantity}]")]
    rows = [_detection_of(key, (key,), judged, slowdowns) for key in keys]
    rows.append(_detection_of(ANY, keys, judged, slowdowns))
    return [*rows, _detection_of(CANDIDATE, (CANDIDATE,), judged, slowdowns)]


def _detection_of(
    name: str, keys: Sequence[str], judged: Sequence[tuple[Round, dict[str, set[int]]]], slowdowns: Sequence[float]
) -> dict[str, Any]:
    """Verdicts of one criterion, or of several: then each of them gives a verdict on each GPU."""
    by_slowdown = {}
    for slowdown in slowdowns:
        slowed = [(one, called) for one, called in judged if one.victim is not None and one.slowdown_percent == slowdown]
        together = [(one.victim, set().union(*(called[key] for key in keys))) for one, called in slowed]
        by_slowdown[f"{slowdown:g}"] = {
            "rounds": len(together),
            "found": sum(victim in called for victim, called in together),
            "alone": sum(called == {victim} for victim, called in together),
        }
    wrongly = [(one, sum(len(called[key] - {one.victim}) for key in keys)) for one, called in judged]
    clean, beside = ([pair for pair in wrongly if (pair[0].victim is None) is is_clean] for is_clean in (True, False))
    return {
        "criterion": name,
        "by_slowdown_percent": by_slowdown,
        "clean_verdicts": len(keys) * sum(_gpus(one) for one, _ in clean),
        "false_alarms": sum(alarms for _, alarms in clean),
        "verdicts_beside_a_slow_one": len(keys) * sum(_gpus(one) - 1 for one, _ in beside),
        "false_alarms_beside": sum(alarms for _, alarms in beside),
    }


def _gpus(one: Round) -> int:
    return len(one.rates[QUANTITIES[0]])


def losses(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """By quantity and slowdown: what the victim lost against its own clean rounds, in per cent, median of the rounds."""
    rows = []
    for quantity in (*QUANTITIES, CANDIDATE):
        usual = _usual(rounds, quantity)
        lost: dict[float, list[float]] = {}
        for one in rounds:
            if one.victim is not None and (rate := one.rates[quantity][one.victim]) is not None and one.victim in usual:
                lost.setdefault(one.slowdown_percent, []).append(100 * (1 - rate / usual[one.victim]))
        rows.append({"quantity": quantity, "lost_percent": {f"{key:g}": statistics.median(lost[key]) for key in sorted(lost)}})
    return rows


def spreads(rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """By quantity, of the clean rounds: sigma among healthy GPUs, and of one GPU's repeats, in per cent; None if unknown."""
    rows = []
    for quantity in (*QUANTITIES, CANDIDATE):
        usual = _usual(rounds, quantity)
        clean = [one for one in rounds if one.victim is None]
        errors = [rate / usual[gpu] - 1 for one in clean for gpu, rate in enumerate(one.rates[quantity]) if rate is not None]
        among = 100 * statistics.stdev(usual.values()) / statistics.fmean(usual.values()) if len(usual) > 1 else None
        repeats = 100 * math.sqrt(statistics.fmean(error**2 for error in errors)) if errors else None
        rows.append({"quantity": quantity, "among_gpus_percent": among, "of_repeats_percent": repeats})
    return rows


def _usual(rounds: Sequence[Round], quantity: str) -> dict[int, float]:
    """Each GPU's median over the clean rounds."""
    found: dict[int, list[float]] = {}
    for one in rounds:
        for gpu, rate in enumerate(one.rates[quantity]) if one.victim is None else ():
            if rate is not None:
                found.setdefault(gpu, []).append(rate)
    return {gpu: statistics.median(rates) for gpu, rates in found.items()}


def taken(rounds: Sequence[Round]) -> dict[str, dict[str, float]]:
    """By nominal slowdown and measurement: the share of SM time that the spin kernels really took, median, in per cent."""
    found: dict[float, dict[str, list[float]]] = {}
    for one in rounds:
        for name, ratio in one.taken_ratio.items():
            found.setdefault(one.slowdown_percent, {}).setdefault(name, []).append(100 * ratio)
    return {f"{key:g}": {name: statistics.median(all_of) for name, all_of in found[key].items()} for key in sorted(found)}


def aims(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A GPU 5 % slow is found in 95 of 100 runs by some criterion; at most one false alarm in 3000 verdicts on healthy GPUs.

    A few hundred verdicts do not prove the second: with none wrong of N, the true rate lies below 3 / N (95 % confidence).
    """
    row = next(one for one in found if one["criterion"] == ANY)
    rows = []
    if at_five := row["by_slowdown_percent"].get("5"):
        rate = at_five["found"] / at_five["rounds"]
        rows.append({"what": "5 % slow: found", "value": rate, "aim": f">= {MIN_FOUND:g}", "reached": rate >= MIN_FOUND})
    verdicts = row["clean_verdicts"] + row["verdicts_beside_a_slow_one"]
    rate = (row["false_alarms"] + row["false_alarms_beside"]) / verdicts
    what = f"false alarms of {verdicts} verdicts on healthy GPUs"
    rows.append({"what": what, "value": rate, "aim": "<= 1/3000", "reached": rate <= MAX_FALSE_ALARMS})
    return rows


def analyse(rounds: Sequence[Round], criteria: Mapping[str, Threshold]) -> dict[str, Any]:
    """Everything that is concluded from the rounds."""
    found = detection(rounds, criteria)
    conclusions = {"detection": found, "losses": losses(rounds), "taken_percent": taken(rounds)}
    return {**conclusions, "spreads": spreads(rounds), "aims": aims(found)}


# --- What comes out ---


def markdown(content: Mapping[str, Any]) -> str:
    """Three tables: GPUs found, the share of the rate really lost, how healthy GPUs differ."""
    slowdowns = list(content["detection"][0]["by_slowdown_percent"])
    head = [*(f"{slowdown} % slow" for slowdown in slowdowns), "false alarms, clean", "false alarms, beside a slow one"]
    lines = [_row(["found (alone) by", *head]), _row(["---"] * (len(head) + 1))]
    for row in content["detection"]:
        cells = [f"{at['found']} ({at['alone']}) of {at['rounds']}" for at in row["by_slowdown_percent"].values()]
        cells += [f"{row['false_alarms']} of {row['clean_verdicts']}"]
        cells += [f"{row['false_alarms_beside']} of {row['verdicts_beside_a_slow_one']}"]
        lines.append(_row([f"`{row['criterion']}`" + (" (no criterion yet)" if row["criterion"] == CANDIDATE else ""), *cells]))
    lines += ["", _row(["rate lost, % (median)", *(f"{slowdown} % slow" for slowdown in slowdowns)])]
    lines.append(_row(["---"] * (len(slowdowns) + 1)))
    for row in content["losses"]:
        lines.append(_row([f"`{row['quantity']}`", *(_shown(row["lost_percent"].get(one)) for one in slowdowns)]))
    for name in dict.fromkeys(name for at in content["taken_percent"].values() for name in at):
        cells = [_shown(content["taken_percent"].get(one, {}).get(name)) for one in slowdowns]
        lines.append(_row([f"SM time really taken during {name}", *cells]))
    lines += ["", _row(["clean, sigma in %", "among GPUs", "of repeats"]), _row(["---"] * 3)]
    for row in content["spreads"]:
        lines.append(_row([f"`{row['quantity']}`", _shown(row["among_gpus_percent"]), _shown(row["of_repeats_percent"])]))
    lines += ["", *(f"{row['what']}: {row['value']:.4f}, aim {row['aim']}: {_word(row)}" for row in content["aims"])]
    return "\n".join(lines) + "\n"


def _shown(percent: float | None) -> str:
    return "-" if percent is None else f"{percent:.3f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _word(aim: Mapping[str, Any]) -> str:
    return "reached" if aim["reached"] else "missed"


COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#111111", "#7f7f7f")


def draw(content: Mapping[str, Any]) -> str:
    """The share of rounds in which the victim was found, by slowdown: an SVG of 720 x 360, axes from y = 300 up to 40."""
    slowdowns = list(content["detection"][0]["by_slowdown_percent"])
    shown = [row for row in content["detection"] if "[" in row["criterion"] or row["criterion"] in (ANY, CANDIDATE)]
    across = {slowdown: 90 + 360 * index / max(1, len(slowdowns) - 1) for index, slowdown in enumerate(slowdowns)}
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 360" font-family="sans-serif" font-size="12">',
        '<rect width="720" height="360" fill="white"/>',
        '<text x="60" y="22">rounds in which the slowed GPU was called bad, %</text>',
        '<text x="270" y="345" text-anchor="middle">SM time taken from it, % (nominal)</text>',
    ]
    for percent in (0, 50, 95, 100):
        y = 300 - 2.5 * percent
        dashes = 'stroke-dasharray="4 3"' if percent == 95 else ""
        parts.append(f'<line x1="70" y1="{y}" x2="470" y2="{y}" stroke="{"#d62728" if dashes else "#ddd"}" {dashes}/>')
        parts.append(f'<text x="64" y="{y + 4}" text-anchor="end">{percent}</text>')
    parts += [f'<text x="{x:.1f}" y="320" text-anchor="middle">{slowdown}</text>' for slowdown, x in across.items()]
    for index, (row, colour) in enumerate(zip(shown, COLOURS, strict=False)):
        rates = [100 * at["found"] / at["rounds"] for at in row["by_slowdown_percent"].values()]
        points = [(x + 2 * index, 300 - 2.5 * rate) for x, rate in zip(across.values(), rates, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        parts.append(f'<text x="490" y="{60 + 20 * index}" fill="{colour}">{row["criterion"]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
