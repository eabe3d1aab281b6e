"""How well culprits are found by group tests: simulated clusters, noisy tests, known culprits.

    python benchmarks/localization.py [--nodes 232 1024] [--culprits 0 5 20] [--others gpu leaf] [--other-parts 232 2048]
                                      [--trials 100] [--seeds development|held-out] [--noise 0.02] [--out DIR]

A simulated test of a group fails where a culprit is in it; with the noise's probability its outcome is the opposite. The
localisation is given outcomes only. A place that is named and is no culprit lowers the precision; a culprit that is not named
lowers the recall. Beside bad nodes there are bad leaf switches, their uplinks, single connections between two nodes or two
leaves, adapters below nodes and rails, and GPUs below nodes.

Seeds of both kinds never meet: development has 0 to 1,999,999, held-out has 3,000,000 and more. The code was written with the
first ones alone; the table in the documentation is of the others. Those from 2,000,000 on showed how well an earlier version
did, and are used no more.

Prints a table; with ``--out`` also writes results.json, table.md and plot.svg there.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # works in a checkout that is not installed

from pytest_gpucluster.localization import search as group_search
from pytest_gpucluster.localization.parts import ErrorRates, Result, SearchPart, Suspect

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pytest_gpucluster.localization.parts import MemberGroup, SearchReport

NODES = (16, 64, 232, 1024, 4096, 10_000)
CULPRITS = (0, 1, 5, 20)
LEAF = 32
"""Nodes at a leaf switch."""
RAILS = 8
GPUS = 8
"""Of a node."""
FIRST_SEED = {"development": 0, "held-out": 3_000_000}
LEAST_NOISE = 1e-3
"""What the localisation is told where the simulated noise is less: it needs a share above 0."""
NOT_NODES = ("leaf", "uplink", "node-node", "leaf-leaf", "adapter", "rail", "gpu", "host")
OTHER_PARTS = (232, 2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Parts, and what of them is bad.

    Attributes:
        value_gb_s: what a healthy group measures.
    """

    parts: tuple[SearchPart, ...]
    bad: frozenset[Suspect]
    noise: float
    value_gb_s: float = 380.0

    def measure(self, groups: Iterable[MemberGroup], chance: random.Random) -> list[Result]:
        """Test groups."""
        within = {part.name: part.within for part in self.parts}
        found = []
        for group in groups:
            passed = not any(is_in(culprit, group.parts, within) for culprit in self.bad)
            if chance.random() < self.noise:
                passed = not passed
            found.append(Result(passed=passed, value=self.value_gb_s * chance.uniform(0.99, 1.01) * (1 if passed else 0.8)))
        return found


def is_in(culprit: Suspect, names: Sequence[str], within: Mapping[str, Sequence[str]]) -> bool:
    """Whether traffic of a group meets a culprit."""
    touched = [{name, *within[name]} for name in names]
    first = culprit.names[0]
    if culprit.kind == "between":
        return all(any(name in one for one in touched) for name in culprit.names)
    has_it = [first in one for one in touched]
    return any(has_it) and (culprit.kind != "edge" or not all(has_it))


def cluster_of(scene: str, nodes: int, culprits: int, noise: float, chance: random.Random) -> Cluster:
    """A cluster with bad parts. ``scene``: ``nodes``, or one of :data:`NOT_NODES`, beside so many bad nodes."""
    if scene in ("adapter", "rail"):
        parts = tuple(
            SearchPart(name=f"node{node}/nic{rail}", within=(f"rail{rail}", f"node{node}"))
            for rail in range(RAILS)
            for node in range(nodes // RAILS)
        )
    elif scene in ("gpu", "host"):
        parts = tuple(
            SearchPart(name=f"node{gpu // GPUS}/gpu{gpu % GPUS}", within=(f"node{gpu // GPUS}",)) for gpu in range(nodes)
        )
    else:
        parts = tuple(SearchPart(name=f"node{node}", within=(f"leaf{node // LEAF}",)) for node in range(nodes))
    one, other = chance.sample(parts, 2)
    while one.within[0] == other.within[0] and scene != "nodes":
        one, other = chance.sample(parts, 2)
    planted = {
        "leaf": Suspect("whole", one.within[:1]),
        "uplink": Suspect("edge", one.within[:1]),
        "node-node": Suspect("between", tuple(sorted((one.name, other.name)))),
        "leaf-leaf": Suspect("between", tuple(sorted((one.within[0], other.within[0])))),
        "rail": Suspect("whole", one.within[:1]),
        "host": Suspect("whole", one.within[:1]),
    }
    containers = {part.within[0] for part in parts}
    if len(containers) == 2:  # what leaves one of them is what is between both
        planted["uplink"] = planted["leaf-leaf"]
    bad = {planted[scene]} if scene in planted else set()
    near = {name for culprit in bad for name in culprit.names}  # nothing shows a bad node at a bad switch
    healthy = [part for part in parts if near.isdisjoint((part.name, *part.within))]
    bad |= {Suspect("part", (part.name,)) for part in chance.sample(healthy, min(culprits, len(healthy)))}
    return Cluster(parts=parts, bad=frozenset(bad), noise=noise)


def search(cluster: Cluster, chance: random.Random) -> SearchReport:
    """Let the culprits of a cluster be found."""
    told = max(cluster.noise, LEAST_NOISE)
    rates = ErrorRates(false_failure=told, missed=told)
    return group_search.search(cluster.parts, lambda groups: cluster.measure(groups, chance), rates=rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All trials of one kind.

    Attributes:
        named: places that were named; ``right`` of them are culprits, of ``planted`` ones.
        rounds: of each trial; ``tests`` likewise.
    """

    scene: str
    nodes: int
    culprits: int
    planted: int
    named: int
    right: int
    rounds: tuple[int, ...]
    tests: tuple[int, ...]

    @property
    def recall(self) -> float | None:
        """Share of the culprits that were named; None where there are none."""
        return self.right / self.planted if self.planted else None

    @property
    def precision(self) -> float | None:
        """Share of the named that are culprits; None where nobody was named."""
        return self.right / self.named if self.named else None


def run(scene: str, nodes: int, culprits: int, *, seeds: Sequence[int], noise: float) -> Row:
    """Some trials, each with a seed of its own."""
    planted = named = right = 0
    rounds, tests = [], []
    for seed in seeds:
        chance = random.Random(f"{scene} {nodes} {culprits} {seed}")
        cluster = cluster_of(scene, nodes, culprits, noise, chance)
        report = search(cluster, chance)
        found = {finding.suspect for finding in report.culprits}
        planted, named, right = planted + len(cluster.bad), named + len(found), right + len(found & cluster.bad)
        rounds.append(report.rounds)
        tests.append(len(report.tests))
    return Row(
        scene=scene, nodes=nodes, culprits=culprits, planted=planted, named=named, right=right,
        rounds=tuple(rounds), tests=tuple(tests),
    )  # fmt: skip


def line(row: Row) -> str:
    """A row of the table."""
    shares = ["-" if share is None else f"{share:.4f}" for share in (row.recall, row.precision)]
    highest = sorted(row.rounds)[math.ceil(0.95 * len(row.rounds)) - 1]
    cells = [row.scene, row.nodes, row.culprits, len(row.rounds), statistics.median(row.rounds), highest, max(row.rounds)]
    wrong = [row.planted - row.right, row.named - row.right]
    return "| " + " | ".join(map(str, [*cells, f"{statistics.median(row.tests):g}", *shares, *wrong])) + " |"


HEAD = (
    "| bad | parts | bad parts | trials | rounds | 95 % | most | tests | recall | precision | missed | wrong |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|---|"
)
"""Rounds and tests: the median of all trials; the rounds also below which 95 % of the trials are, and the most."""


# The plot: an SVG of 720 x 660 with four panels, the lower axis logarithmic; a panel is 260 x 240, its origin at (left, 290) of
# its row.

COLOURS = ("#1f77b4", "#2ca02c", "#ff7f0e", "#d62728", "#9467bd")


def draw(rows: Sequence[Row]) -> str:
    """Rounds, tests, recall and precision by the number of nodes, one line for each number of bad nodes."""
    nodes = [row for row in rows if row.scene == "nodes"]
    rounds = {(row.nodes, row.culprits): statistics.median(row.rounds) for row in nodes}
    tests = {(row.nodes, row.culprits): math.log10(statistics.median(row.tests)) for row in nodes}
    recall = {(row.nodes, row.culprits): row.recall for row in nodes if row.recall is not None}
    precision = {(row.nodes, row.culprits): row.precision for row in nodes if row.precision is not None}
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 660" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="720" height="660" fill="white"/>')
    highest = math.ceil(max(rounds.values()) + 0.5)
    parts += panel(60, "rounds, median", marks=range(highest + 1), values=rounds)
    parts += panel(420, "tests, median (powers of 10)", marks=range(math.ceil(max(tests.values())) + 1), values=tests)
    parts.append('<g transform="translate(0 330)">')
    shares = [1 - at / 1000 for at in range(20, -1, -5)]
    parts += panel(60, "recall (an axis from 0.98)", marks=shares, values=recall)
    parts += panel(420, "precision (an axis from 0.98)", marks=shares, values=precision)
    parts.append("</g>")
    numbers = enumerate(sorted({row.culprits for row in nodes}))
    parts += [f'<text x="330" y="{70 + 18 * at}" fill="{COLOURS[at % 5]}">{bad} bad</text>' for at, bad in numbers]
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(left: float, title: str, *, marks: Sequence[float], values: Mapping[tuple[int, int], float]) -> list[str]:
    """One panel. ``values``: by nodes and culprits. ``marks``: of its y-axis, the ends of which are the first and the last."""
    sizes = sorted({nodes for nodes, _ in values})
    span = math.log(sizes[-1] / sizes[0]) or 1.0

    def x(nodes: int) -> float:
        return left + 15 + 230 * math.log(nodes / sizes[0]) / span

    def y(value: float) -> float:
        return 290 - 240 * (max(value, marks[0]) - marks[0]) / (marks[-1] - marks[0])

    parts = [f'<text x="{left}" y="30">{title}</text>']
    parts.append(f'<path d="M{left} 50V290H{left + 260}" fill="none" stroke="black"/>')
    parts += [f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>' for value in marks]
    numbers = sorted({culprits for _, culprits in values})
    for culprits in numbers:
        mine = [(nodes, values[nodes, culprits]) for nodes in sizes if (nodes, culprits) in values]
        points = " ".join(f"{x(nodes):.1f},{y(value):.1f}" for nodes, value in mine)
        at = numbers.index(culprits) + (0 not in numbers)  # without a culprit there is no recall, and the colours stay
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[at % len(COLOURS)]}" stroke-width="2"/>')
    parts += [f'<text x="{x(nodes):.1f}" y="306" text-anchor="middle">{nodes}</text>' for nodes in sizes]
    return [*parts, f'<text x="{left + 130}" y="324" text-anchor="middle">nodes</text>']


def main() -> int:
    """Simulate, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES))
    parser.add_argument("--culprits", nargs="+", type=int, default=list(CULPRITS))
    parser.add_argument(
        "--trials", type=int, default=100, help="of each kind; fewer above 1024 nodes or 232 others, in proportion"
    )
    parser.add_argument("--seeds", choices=list(FIRST_SEED), default="development")
    parser.add_argument("--noise", type=float, default=0.02, help="share of the tests with the wrong outcome")
    parser.add_argument("--others", nargs="*", choices=NOT_NODES, default=list(NOT_NODES), help="beside 1 bad part")
    parser.add_argument("--other-parts", nargs="+", type=int, default=list(OTHER_PARTS))
    parser.add_argument("--out", type=Path, help="folder for results.json, table.md and plot.svg")
    chosen = parser.parse_args()
    kinds = [("nodes", nodes, bad, 1024) for nodes in chosen.nodes for bad in chosen.culprits if 3 * bad <= nodes]
    kinds += [(scene, parts, 1, 232) for parts in chosen.other_parts for scene in chosen.others]
    rows = []
    print(HEAD)
    for scene, nodes, bad, many in kinds:
        first = FIRST_SEED[chosen.seeds]
        trials = max(1, chosen.trials * many // max(nodes, many))
        rows.append(run(scene, nodes, bad, seeds=range(first, first + trials), noise=chosen.noise))
        print(line(rows[-1]), flush=True)
    if chosen.out is not None:
        chosen.out.mkdir(parents=True, exist_ok=True)
        table = "\n".join([HEAD, *map(line, rows)]) + "\n"
        content = {"seeds": chosen.seeds, "noise": chosen.noise, "rows": [asdict(row) for row in rows]}
        (chosen.out / "results.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        (chosen.out / "table.md").write_text(table, encoding="utf-8")
        (chosen.out / "plot.svg").write_text(draw(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
