"""The runs of many nodes as one: their journals become one journal, with one verdict over all hosts.

Of a part that several runs measured the worse outcome counts, as the clock of a host may be wrong. The part is named, and the
verdict is then INCOMPLETE at best. A host that is expected and in no run is a gap, with its criteria missing. What needs more
nodes was measured by no run of one node: it is not selected, so that single nodes alone are never an acceptance of a cluster.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.cluster.binding import natural_sort_key
from pytest_gpucluster.config.run_files import JOURNAL, RESULTS
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.judging.promises import doubled_gpus
from pytest_gpucluster.judging.verdict import (
    ERROR,
    FAILED,
    MISSING,
    NOISY,
    NOT_SELECTED,
    PASSED,
    PENDING,
    SKIPPED,
    Record,
    Terms,
    Verdict,
    decide,
)
from pytest_gpucluster.places import Place
from pytest_gpucluster.records.reading import read_results, run_identity, zoned
from pytest_gpucluster.reporting.files import ResultsDirectory, require_no_links
from pytest_gpucluster.reporting.journal import Journal, record_facts
from pytest_gpucluster.reporting.rebuild import JournalState, read_journal, rebuild
from pytest_gpucluster.reporting.results import MEASURED, ReportedTest, bound_facts
from pytest_gpucluster.text import counted

Key = tuple[str, str | None]

ORDER = (NOT_SELECTED, SKIPPED, MISSING, PASSED, NOISY, ERROR, FAILED)
"""Of two outcomes of one criterion at one place, the later one here counts."""
TEXTS = ("reason", "remark", "headline", "cause", "teardown", "advice")
"""Fields of a record that may name places."""
ONE_NODE = "one node"
"""The cause of a criterion that is skipped because its run had one node alone."""
OF_ALL = "it is about all nodes together, and no run of all of them measured it"
ALIKE = {"profile": "profiles", "thresholds_sha256": "files of limits"}
_PLACE_ID = re.compile(r"\bnode\d+(?:-[a-z]+\d+)?\b")


@dataclass(slots=True, kw_only=True)
class OneRun:
    """One of the runs: its journal, its verdict, the new id of each of its places, and its places by new id."""

    folder: Path
    state: JournalState
    verdict: Verdict
    ids: dict[str, str] = field(default_factory=dict)
    moved: dict[str, Place] = field(default_factory=dict)

    @property
    def run_id(self) -> str | None:
        """The id of the run; None where its journal does not say it."""
        known: str | None = self.state.facts.get("run", {}).get("id")
        return known

    @property
    def nodes(self) -> list[Place]:
        """Its nodes."""
        return [place for place in self.state.places.values() if place.gpu is None]

    def host_of(self, node: Place) -> str:
        """By what a node is known in all runs."""
        return node.hostname or f"{node.id} of {self.folder}"

    def has_answered(self, node: Place) -> bool:
        """Whether anything on the node said hello."""
        return any(place.node == node.node and place.rank is not None for place in self.state.places.values())

    def renamed(self, value: Any) -> Any:
        """Text, and data with text in it, with the new ids of places."""
        if isinstance(value, str):
            return _PLACE_ID.sub(lambda found: self.ids.get(found[0], found[0]), value)
        if isinstance(value, dict):
            return {self.renamed(key): self.renamed(item) for key, item in value.items()}
        return [self.renamed(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(slots=True, kw_only=True)
class Merged:
    """What is merged so far, by new ids. ``gaps`` and ``doubles`` are sentences."""

    hosts: list[str]
    places: dict[str, Place] = field(default_factory=dict)
    cases: dict[Key, ReportedTest] = field(default_factory=dict)
    gaps: list[str] = field(default_factory=list)
    doubles: list[str] = field(default_factory=list)


def merge(folders: Sequence[Path], out: Path, *, hosts: Sequence[str] = ()) -> Verdict:
    """Write the results directory of all runs together.

    Args:
        folders: results directories, each with its journal.
        out: the new results directory.
        hosts: all hosts that are expected; empty: those that the runs themselves expected.

    Raises:
        ConfigurationError: a run cannot be read, the runs do not belong together, or ``out`` holds something already.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigurationError(f"{out} is there already and not empty: nothing was written")
    runs = sorted((read_run(folder) for folder in folders), key=lambda run: run.state.began_s)
    _require_alike(runs)
    merged = Merged(hosts=_hosts(runs, hosts))
    _add_places(merged, runs)
    _add_records(merged, runs)
    _add_gaps(merged, runs)
    merged.gaps += [f"{host} is in a run and was not expected" for host in merged.hosts if hosts and host not in hosts]
    directory = ResultsDirectory(out)
    try:
        _write_journal(merged, runs, out)
        return rebuild(out)
    finally:
        directory.close()


def read_run(folder: Path) -> OneRun:
    """One of the runs, with the verdict that its journal gives.

    Raises:
        ConfigurationError: there is no run, it cannot be read, or nothing was planned in it.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"there is no results directory {folder}")
    require_no_links(folder)
    if (folder / RESULTS).is_file():
        read_results(folder)  # which refuses what a newer version wrote
    state = read_journal(folder / JOURNAL)
    verdict = state.close()
    if not state.records:
        raise ConfigurationError(f"the journal in {folder} has no outcomes: nothing was planned in that run")
    return OneRun(folder=folder, state=state, verdict=verdict)


def _require_alike(runs: Sequence[OneRun]) -> None:
    """Check that the runs were judged alike, and that simulated and real values are not mixed."""
    first = runs[0]
    for run in runs[1:]:
        for name, words in ALIKE.items():
            if run.state.facts.get(name) != first.state.facts.get(name):
                raise ConfigurationError(f"{first.folder} and {run.folder} used different {words}: they are no one run")
        own, firsts = ((one.state.terms.simulated, one.state.terms.rehearsal) for one in (run, first))
        if own != firsts:
            both = f"{first.folder} and {run.folder}"
            raise ConfigurationError(f"one of {both} is simulated or a rehearsal, and the other is not")


def _hosts(runs: Sequence[OneRun], expected: Sequence[str]) -> list[str]:
    """All hosts in their order: as they were expected, or as people count them."""
    found = {run.host_of(node) for run in runs for node in run.nodes}
    return list(dict.fromkeys((*expected, *sorted(found, key=natural_sort_key))))


def _add_places(merged: Merged, runs: Iterable[OneRun]) -> None:
    """Number the nodes anew; of a host in several runs, one that answered says which GPUs it has, and others are named."""
    number = {host: at for at, host in enumerate(merged.hosts)}
    seen: dict[str, dict[str, None]] = {}
    for run in runs:
        for node in run.nodes:
            new = number[run.host_of(node)]
            for place in run.state.places.values():
                if place.node == node.node:
                    run.ids[place.id] = f"node{new}{place.id[len(node.id) :]}"
                    moved = run.moved[run.ids[place.id]] = replace(place, id=run.ids[place.id], node=new)
                    if place.rank is not None or node.id == place.id or moved.id not in merged.places:
                        merged.places[moved.id] = moved
                    if place.gpu is not None and run.has_answered(node):
                        seen.setdefault(moved.id, {})["no GPU" if place.rank is None else str(place.uuid)] = None
    for place_id, uuids in seen.items():
        if len(uuids) > 1:
            merged.doubles.append(f"{merged.places[place_id].hostname} {place_id} had {' and '.join(uuids)} in several runs")


def _add_records(merged: Merged, runs: Sequence[OneRun]) -> None:
    doubles: Counter[str] = Counter()
    for run in runs:
        for key, record in run.state.records.items():
            if record.place is None and len(run.nodes) < len(merged.hosts):
                whole = Record(criterion=record.criterion, place=None, outcome=NOT_SELECTED, reason=OF_ALL)
                merged.cases.setdefault((record.criterion, None), ReportedTest(record.criterion, whole))
            new = _moved(record, run, num_hosts=len(merged.hosts))
            known = merged.cases.get((new.criterion, new.place))
            if known is not None and known.record.outcome in MEASURED and new.outcome in MEASURED:
                host = merged.hosts[merged.places[new.place].node] if new.place in merged.places else "the cluster"
                doubles[host] += 1
            if known is None or _weight(new) >= _weight(known.record):
                nodeid = run.renamed(run.state.nodeids.get(key, key[0]))
                merged.cases[new.criterion, new.place] = ReportedTest(nodeid, new)
                if new.outcome == FAILED and new.place in run.moved:
                    merged.places[new.place] = run.moved[new.place]  # another GPU may be there by now
    for host, number in doubles.items():
        values = counted(number, "value was", "values were")
        merged.doubles.append(f"{host} is in several runs, {values} measured twice: the worse one counts")
    merged.doubles += [f"one GPU in two places: {text}" for text in doubled_gpus(tuple(merged.places.values()))]


def _weight(record: Record) -> tuple[int, bool]:
    return ORDER.index(record.outcome), record.waiver is None


def _moved(record: Record, run: OneRun, *, num_hosts: int) -> Record:
    """The record under the new ids. What a run of one node says of its cluster is about that node; of some, of no others."""
    is_single = len(run.nodes) == 1 and num_hosts > 1
    place = run.ids.get(record.place, record.place) if record.place is not None else None
    if record.outcome == SKIPPED and record.cause == ONE_NODE and is_single:
        reason = f"{record.reason}; no run of several nodes measured it"
        return replace(record, place=place, outcome=NOT_SELECTED, reason=reason)
    if place is None and not is_single and len(run.nodes) < num_hosts and record.outcome in (PASSED, SKIPPED):
        return Record(criterion=record.criterion, place=None, outcome=NOT_SELECTED, reason=OF_ALL)
    if place is None and is_single:
        place = run.ids[run.nodes[0].id]
    moved: dict[str, Any] = {name: run.renamed(getattr(record, name)) for name in TEXTS}
    moved |= {name: tuple(run.ids.get(one, one) for one in getattr(record, name)) for name in ("culprits", "among")}
    return replace(record, place=place, evidence=run.renamed(dict(record.evidence)), **moved)


def _add_gaps(merged: Merged, runs: Sequence[OneRun]) -> None:
    """Name the hosts of which no run has a GPU, and give their criteria the outcome ``missing``."""
    answered = {run.host_of(node): node for run in runs for node in run.nodes if run.has_answered(node)}
    known = [host for host in merged.hosts if host in answered]
    if not known:
        return
    model = merged.hosts.index(known[0])
    for number, host in enumerate(merged.hosts):
        if host in answered:
            continue
        merged.gaps.append(f"{host} is expected and in no run")
        for place in [place for place in merged.places.values() if place.node == model]:
            new = f"node{number}{place.id[len(f'node{model}') :]}"
            merged.places.setdefault(new, Place(id=new, node=number, gpu=place.gpu, hostname=host))
        for (criterion, place_id), case in list(merged.cases.items()):
            is_of_model = place_id in merged.places and merged.places[place_id].node == model
            if is_of_model and case.record.outcome not in (SKIPPED, NOT_SELECTED):
                new = f"node{number}{str(place_id)[len(f'node{model}') :]}"
                missing = Record(criterion=criterion, place=new, outcome=MISSING, reason=f"not run: {merged.gaps[-1]}")
                merged.cases.setdefault((criterion, new), ReportedTest(f"{criterion}[{new}]", missing))


def _write_journal(merged: Merged, runs: Sequence[OneRun], out: Path) -> None:
    terms = _terms(merged, runs)
    journal = Journal(out / JOURNAL)
    identity = run_identity("+".join(str(run.run_id or "unknown")[:8] for run in runs)[:64])
    facts = _facts(merged, runs, {**identity, "started": zoned(runs[0].state.began_s)})
    journal.write("started", run=identity["id"], versions=runs[-1].state.versions, settings={}, facts=facts)
    expected = [
        {"nodeid": case.nodeid, "criterion": criterion, "place": place, "outcome": PENDING, "reason": None}
        for (criterion, place), case in merged.cases.items()
    ]
    journal.write("planned", expected=expected, terms=asdict(terms))
    ordered = sorted(merged.places.values(), key=lambda place: (place.node, place.gpu or 0))
    places, nodes = ([bound_facts(place) for place in ordered if (place.gpu is None) is is_node] for is_node in (False, True))
    shown = {"changed_terms": list(terms.changed_terms), "remarks": list(terms.remarks), "shape": terms.shape}
    journal.write("bound", places=places, nodes=nodes, unheard=[], **shown)
    for case in merged.cases.values():
        journal.write("outcome", record=record_facts(case.record))
    verdict = decide((case.record for case in merged.cases.values()), terms)
    ended_s = max(run.state.ended_s for run in runs)
    journal.write("verdict", verdict=verdict.word, line=verdict.line, objections=list(terms.objections), ended_s=ended_s)
    journal.close()
    if journal.failed:
        raise ConfigurationError(f"the results directory {out} cannot be written: {journal.failed}")


def _terms(merged: Merged, runs: Sequence[OneRun]) -> Terms:
    terms = [run.state.terms for run in runs]
    objections = [f"{run.folder.name}: {text}" for run in runs for text in run.state.terms.objections]
    kinds = {one.shape.partition(" x ")[2] for one in terms if " x " in one.shape}
    number = counted(len(merged.hosts), "node")
    return Terms(
        rehearsal=any(one.rehearsal for one in terms),
        simulated=any(one.simulated for one in terms),
        level_reached=all(one.level_reached for one in terms),
        objections=(*objections, *merged.gaps, *merged.doubles),
        changed_limits=_united(one.changed_limits for one in terms),
        changed_terms=_united(one.changed_terms for one in terms),
        remarks=(*_united(one.remarks for one in terms), f"merged from {counted(len(runs), 'run')}"),
        shape=f"{number} x {kinds.pop()}" if len(kinds) == 1 else number,
        own_tests_only=all(one.own_tests_only for one in terms),
    )


def _united(lists: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for some in lists for text in some))


def _facts(merged: Merged, runs: Sequence[OneRun], identity: Mapping[str, Any]) -> dict[str, Any]:
    first = {name: value for name, value in runs[0].state.facts.items() if name != "soak_resumed"}
    gpus = Counter(place.node for place in merged.places.values() if place.gpu is not None)
    return {
        **first,
        "run": dict(identity),
        "expected": {"nodes": len(merged.hosts), "gpus_per_node": max(gpus.values(), default=1)},
        "changed_limits": list(_united(run.state.facts.get("changed_limits", ()) for run in runs)),
        "waivers": [waiver for run in runs for waiver in run.state.facts.get("waivers", ())],
        "merged": {"runs": list(_runs(runs)), "gaps": merged.gaps, "doubles": merged.doubles},
    }


def _runs(runs: Iterable[OneRun]) -> Iterator[dict[str, Any]]:
    for run in runs:
        hosts = [run.host_of(node) for node in run.nodes]
        facts = {"id": run.run_id, "folder": str(run.folder), "started": zoned(run.state.began_s)}
        yield {**facts, "verdict": run.verdict.word, "hosts": hosts}
