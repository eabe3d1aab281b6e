"""The same work again and again, for hours: what one good round does not prove."""

from __future__ import annotations

import functools
import time
from collections import Counter

import pytest

from pytest_gpucluster import MeasurementError, Results
from pytest_gpucluster.cluster.soak import CLUSTER, Seen, Work
from pytest_gpucluster.health.growth import Growth, gpu_growth, nvlink_growth, together
from pytest_gpucluster.health.nic_growth import Readings, compare, read_limits
from pytest_gpucluster.inventory.reading import NotAvailable
from pytest_gpucluster.judging.agreement import only_itself, suspicions_in_round
from pytest_gpucluster.judging.criterion import Parts
from pytest_gpucluster.measurements.collectives import all_reduce
from pytest_gpucluster.measurements.digest import digests
from pytest_gpucluster.measurements.hbm_pattern import hbm_pattern
from pytest_gpucluster.measurements.health import gpu_counters
from pytest_gpucluster.measurements.host import nic_state
from pytest_gpucluster.measurements.sustained import sustained
from tests_acceptance.conftest import Snapshot, sized, snapshot


def rates(results):
    """The median of a round's last half, and its worst slice."""
    return {
        place: Seen(value=rate.tflops, evidence={"lowest slice TFLOPS": min(rate.slices_tflops), **rate.evidence})
        for place, rate in measured(results).items()
    }


def measured(results):
    """The values of those that have one."""
    return {place: results[place] for place in results if place not in results.errors}


def differing_kinds(first, rounds, results):
    """Kinds of work whose digest differs in a round.

    ``first`` keeps each GPU's digests of its first round, and ``rounds`` counts the rounds of all calls by GPU.
    """
    found = measured(results)
    rounds.update({place: one.rounds for place, one in found.items()})
    digests_of = {place: one.digests for place, one in found.items()}
    first.update({place: one for place, one in digests_of.items() if place not in first})
    models = {place: one.model for place, one in found.items()}
    unsteady = {place: one.unsteady for place, one in found.items()}
    suspected = suspicions_in_round(digests_of, models, first=first, unsteady=unsteady)
    sizes = Counter(models.values())
    return {
        place: Seen(
            value=len(kinds),
            evidence=kinds,
            remark=None if sizes[models[place]] > 1 else only_itself(rounds[place]),
        )
        for place, kinds in suspected.items()
    }


def wrong_words(results):
    """Words that were not what had been written."""
    return {
        place: Seen(
            value=found.errors,
            evidence={**found.errors_by_kind, "first": [error.text for error in found.first_errors[:1]]},
        )
        for place, found in measured(results).items()
    }


def in_nodes(results):
    """The bus bandwidth in each node; its sum was verified."""
    return {node: moved(timing) for node, timing in measured(results).items()}


def between_nodes(results):
    """The one bus bandwidth over all nodes."""
    return {} if results.errors else {CLUSTER: moved(results.value)}


def moved(timing):
    """What a round of a collective shows."""
    evidence = {"p99 us": timing.p99_us, "slowest rank": timing.slowest_rank, **timing.evidence}
    return Seen(value=timing.busbw_gb_s, evidence=evidence)


def links_lost(taken, compared, results):
    """Links that each host's ports lost since the snapshot before. ``taken`` keeps the latest snapshot alone."""
    before, now = taken.pop(), Snapshot(results, time.monotonic())
    taken.append(now)
    seen = {}
    for node, state in measured(results).items():
        lost = before.results.errors.get(node)
        first = before.results[node].nics if lost is None else NotAvailable(str(lost))
        growth = compared(Readings(first=first, last=state.nics, seconds=now.at_s - before.at_s))
        seen[node] = Seen(
            value=growth.lost or min(growth.over, 1),
            evidence={"ports": growth.facts},
            unknown="; ".join(growth.unknown) or None,
            parts=Parts(kind="nic", names=growth.names),
        )
    return seen


def errors_counted(taken, limits, has_peers, results):
    """What each GPU counted since the snapshot before. ``taken`` keeps the latest one alone, ``limits`` are the recipe's."""
    before, now = taken.pop(), Snapshot(results, time.monotonic())
    taken.append(now)
    seen = {}
    for place, last in measured(results).items():
        first = before.results.errors.get(place) or before.results[place]
        growth = counted_between(first, last, now.at_s - before.at_s, limits, has_peers)
        evidence = {"counted": growth.facts, "within": growth.within}
        seen[place] = Seen(value=growth.over, evidence=evidence, unknown="; ".join(growth.unknown) or None)
    return seen


def counted_between(first, last, seconds, limits, has_peers):
    """What one GPU counted; nothing is known where the first reading is an error. One GPU has no NVLinks to others."""
    if isinstance(first, MeasurementError):
        return Growth(unknown=(str(first),))
    growth = gpu_growth(first, last, seconds=seconds, replays_per_min=limits["replays_per_min"])
    links = nvlink_growth(first, last, seconds=seconds, crc_per_s=limits["crc_per_s"]) if has_peers else Growth()
    return together([growth, links])


MEASURE = {
    "bf16_soak": sustained,
    "silent_corruption_soak": digests,
    "hbm_pattern_soak": hbm_pattern,
    "busbw_soak": all_reduce,
    "inter_node_busbw_soak": all_reduce,
    "nic_flaps_soak": nic_state,
    "gpu_errors_soak": gpu_counters,
}
PER = {"busbw_soak": "node", "inter_node_busbw_soak": "cluster", "nic_flaps_soak": "host"}
"""Who shares a process group where that is not each GPU for itself."""
JUDGED_BY = ("gpu_errors_soak",)
"""Whose recipe judges; the measurement takes none."""
FLAPS = read_limits({"link_downed": {"total": 0}, "carrier_changes": {"total": 0}})


@pytest.fixture(scope="session")
def soaked(cluster, recipe, soak):
    """Every kind of work in turn, round after round, until the time is over; each begins in the heat of the one before."""
    works = {
        "bf16_soak": Work(read=rates, keep="lowest"),
        "silent_corruption_soak": Work(read=functools.partial(differing_kinds, {}, Counter()), keep="total", compares=True),
        "hbm_pattern_soak": Work(read=wrong_words, keep="total"),
        "busbw_soak": Work(read=in_nodes, keep="lowest"),
        "inter_node_busbw_soak": Work(read=between_nodes, keep="lowest"),
    }
    if soak.is_wanted("nic_flaps_soak"):
        taken = [snapshot(cluster, nic_state, per="host", places=cluster.places)]
        compared = functools.partial(compare, fabric=cluster.promised.fabric, limits=FLAPS)
        works["nic_flaps_soak"] = Work(read=functools.partial(links_lost, taken, compared), keep="total")
    if soak.is_wanted("gpu_errors_soak"):
        read = [snapshot(cluster, gpu_counters, per="gpu", deadline_s=60)]
        judged = functools.partial(errors_counted, read, recipe("gpu_errors_soak"), cluster.promised.gpus_per_node > 1)
        works["gpu_errors_soak"] = Work(read=judged, keep="total")
    for turn in soak.rounds(works):
        turn.keep(measure(turn, cluster, recipe))
    return soak


def measure(turn, cluster, recipe):
    """One kind of work in one round."""
    arguments = {} if turn.criterion in JUDGED_BY else sized(recipe(turn.criterion), cluster)
    if turn.criterion == "hbm_pattern_soak":
        arguments["first_pass"] = turn.round
    per = PER.get(turn.criterion, "gpu")
    places = None if per == "cluster" else turn.places
    results = cluster.run(MEASURE[turn.criterion], per=per, places=places, **arguments)
    return each_node(results, turn.places) if per == "node" else results


def each_node(results, nodes):
    """The value of each node, or the error that is the cause of those of its GPUs."""
    values, errors = {}, {}
    for node in nodes:
        try:
            values[node] = results[node]
        except MeasurementError as error:
            errors[node] = error
    return Results(values, errors)


@pytest.mark.compute
def test_bf16_soak(soaked, place, criterion):
    """The GPU holds its rate in the worst round."""
    soaked["bf16_soak", place].judge(criterion)


@pytest.mark.compute
def test_silent_corruption_soak(soaked, place, criterion):
    """The same bits in all rounds."""
    soaked["silent_corruption_soak", place].judge(criterion)


@pytest.mark.memory
def test_hbm_pattern_soak(soaked, place, criterion):
    """Not one wrong word in any round."""
    soaked["hbm_pattern_soak", place].judge(criterion)


@pytest.mark.links
def test_busbw_soak(soaked, node, criterion):
    """The GPUs of the node keep their bus bandwidth in the worst round."""
    soaked["busbw_soak", node].judge(criterion)


@pytest.mark.fabric
def test_inter_node_busbw_soak(soaked, criterion):
    """All nodes keep their bus bandwidth in the worst round."""
    soaked["inter_node_busbw_soak", CLUSTER].judge(criterion)


@pytest.mark.health
def test_gpu_errors_soak(soaked, place, criterion):
    """The GPU counts no error in any round that a healthy one does not count."""
    soaked["gpu_errors_soak", place].judge(criterion)


@pytest.mark.fabric
def test_nic_flaps_soak(soaked, node, criterion):
    """No port loses its link more often than the limit gives the whole soak."""
    soaked["nic_flaps_soak", node].judge(criterion)
