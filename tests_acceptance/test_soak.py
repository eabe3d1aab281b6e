"""The same work again and again, for hours: what one good round does not prove."""

import functools
import time
from collections import Counter

import pytest

from pytest_gpucluster import Finding, MeasurementError, NotAvailable, Results, SoakWork, agreement, health
from pytest_gpucluster.measurements.collectives import all_reduce
from pytest_gpucluster.measurements.dcgm import DcgmProgram, dcgm_diag, dcgm_program
from pytest_gpucluster.measurements.digest import digests
from pytest_gpucluster.measurements.hbm_pattern import hbm_pattern
from pytest_gpucluster.measurements.health import gpu_counters
from pytest_gpucluster.measurements.host import nic_state
from pytest_gpucluster.measurements.sustained import sustained
from tests_acceptance.conftest import sized, values_of


def rates(results):
    """The median of a round's last half, and its worst slice."""
    return {
        place: Finding(value=rate.tflops, evidence={"lowest slice TFLOPS": min(rate.slices_tflops), **rate.evidence})
        for place, rate in values_of(results).items()
    }


def differing_kinds(first, rounds, results):
    """Kinds of work whose digest differs in a round.

    ``first`` keeps each GPU's digests of its first round, and ``rounds`` counts the rounds of all calls by GPU.
    """
    found = values_of(results)
    rounds.update({place: one.rounds for place, one in found.items()})
    digests_of = {place: one.digests for place, one in found.items()}
    first.update({place: one for place, one in digests_of.items() if place not in first})
    models = {place: one.model for place, one in found.items()}
    unsteady = {place: one.unsteady for place, one in found.items()}
    suspected = agreement.suspicions_in_round(digests_of, models, first=first, unsteady=unsteady)
    sizes = Counter(models.values())
    remarks = {place: None if sizes[model] > 1 else agreement.only_itself(rounds[place]) for place, model in models.items()}
    return {place: Finding(value=len(kinds), evidence=kinds, remark=remarks[place]) for place, kinds in suspected.items()}


def wrong_words(results):
    """Words that were not what had been written."""
    found = values_of(results)
    first = {place: [error.text for error in one.first_errors[:1]] for place, one in found.items()}
    return {
        place: Finding(value=one.errors, evidence={**one.errors_by_kind, "first": first[place]}) for place, one in found.items()
    }


def in_nodes(results):
    """The bus bandwidth in each node; its sum was verified."""
    return {node: moved(timing) for node, timing in values_of(results).items()}


def between_nodes(results):
    """The one bus bandwidth over all nodes."""
    return {} if results.errors else {SoakWork.CLUSTER: moved(results.value)}


def moved(timing):
    """What a round of a collective shows."""
    evidence = {"p99 us": timing.p99_us, "slowest rank": timing.slowest_rank, **timing.evidence}
    return Finding(value=timing.busbw_gb_s, evidence=evidence)


def compared(judge, results):
    """What ``judge(first, last, seconds)`` finds at each place since the round before; ``first`` may be an error."""
    latest = [(results, time.monotonic())]

    def compare(results):  # noqa: ANN202 - as in all of this suite
        (before, at_s), now_s = latest.pop(), time.monotonic()
        latest.append((results, now_s))
        return {
            place: judge(before.errors.get(place) or before[place], last, now_s - at_s)
            for place, last in values_of(results).items()
        }

    return compare


def links_lost(fabric, first, last, seconds):
    """Links that a host's ports lost since the round before."""
    nics = NotAvailable(str(first)) if isinstance(first, MeasurementError) else first.nics
    both = health.NicReadings(first=nics, last=last.nics, seconds=seconds)
    return health.judge_flaps(both, fabric=fabric, limits=FLAPS)


def errors_counted(limits, has_peers, first, last, seconds):
    """What a GPU counted since the round before. One GPU has no NVLinks to others."""
    if isinstance(first, MeasurementError):
        return Finding(unknown={"": (str(first),)})
    return health.judge_gpu_counters(first, last, seconds=seconds, limits=limits, has_peers=has_peers)


def diagnosed(results):
    """What failed in the diagnostic of each host; nothing in a round without one."""
    found = values_of(results).items()
    return {node: Finding(value=0) if isinstance(one, DcgmProgram) else health.judge_whole_diag(one) for node, one in found}


def diagnose(turn, cluster, arguments, left_s):
    """The long diagnostics of the hosts: one in each of the first rounds, where the soak has the time."""
    level = health.level_of_round(turn.round, arguments.pop("takes_s"), left_s=left_s)
    if level is None:
        return cluster.run(dcgm_program, per="host", places=turn.places, deadline_s=60)
    uuids = [cluster.at_start[place].uuid for place in cluster.places if place not in cluster.at_start.errors]
    return cluster.run(dcgm_diag, per="host", places=turn.places, uuids=uuids, run=level, **arguments)


MEASURE = {
    "bf16_soak": (sustained, "gpu"),
    "silent_corruption_soak": (digests, "gpu"),
    "hbm_pattern_soak": (hbm_pattern, "gpu"),
    "busbw_soak": (all_reduce, "node"),
    "inter_node_busbw_soak": (all_reduce, "cluster"),
    "nic_flaps_soak": (nic_state, "host"),
    "gpu_errors_soak": (gpu_counters, "gpu"),
}
"""What is measured, and who shares a process group."""
JUDGED_BY = ("gpu_errors_soak",)
"""Whose recipe judges; the measurement takes none."""
FLAPS = health.read_limits({"link_downed": {"total": 0}, "carrier_changes": {"total": 0}})


@pytest.fixture(scope="session")
def no_diagnostic(cluster, recipe, soak):
    """Why the soak has no long diagnostic: no host has dcgmi, or there is no time for its shortest one; None if it has."""
    if not soak.is_wanted("dcgm_diag_soak"):
        return "in a soak whose limits do not ask for it"
    least_s = min(recipe("dcgm_diag_soak")["takes_s"].values())
    if soak.duration_s < least_s:
        return f"in a soak of {soak.duration_s:.0f} s: it takes {least_s:.0f} s"
    programs = cluster.run(dcgm_program, per="host", places=cluster.places, deadline_s=60)
    has_one = any(one.path is not None for one in values_of(programs).values())
    return None if has_one or programs.errors else "on any host: dcgmi is not installed"


@pytest.fixture(scope="session")
def soaked(cluster, recipe, soak, no_diagnostic):
    """Every kind of work in turn, round after round, until the time is over; each begins in the heat of the one before."""
    works = {
        "bf16_soak": SoakWork(read=rates, keep="lowest"),
        "silent_corruption_soak": SoakWork(read=functools.partial(differing_kinds, {}, Counter()), keep="total", compares=True),
        "hbm_pattern_soak": SoakWork(read=wrong_words, keep="total"),
        "busbw_soak": SoakWork(read=in_nodes, keep="lowest"),
        "inter_node_busbw_soak": SoakWork(read=between_nodes, keep="lowest"),
    }
    if soak.is_wanted("nic_flaps_soak"):
        ports = cluster.run(nic_state, per="host", places=cluster.places)
        judge = functools.partial(links_lost, cluster.promised.fabric)
        works["nic_flaps_soak"] = SoakWork(read=compared(judge, ports), keep="total")
    if soak.is_wanted("gpu_errors_soak"):
        counters = cluster.run(gpu_counters, per="gpu", deadline_s=60)
        limits = health.read_limits(recipe("gpu_errors_soak")["limits"])
        judge = functools.partial(errors_counted, limits, cluster.promised.gpus_per_node > 1)
        works["gpu_errors_soak"] = SoakWork(read=compared(judge, counters), keep="total")
    if no_diagnostic is None:
        works = {"dcgm_diag_soak": SoakWork(read=diagnosed, keep="total"), **works}
    for turn in soak.rounds(works):
        is_long, left_s = turn.criterion == "dcgm_diag_soak", soak.duration_s - soak.elapsed_s
        turn.keep(diagnose(turn, cluster, recipe(turn.criterion), left_s) if is_long else measure(turn, cluster, recipe))
    return soak


def measure(turn, cluster, recipe):
    """One kind of work in one round."""
    arguments = {} if turn.criterion in JUDGED_BY else sized(recipe(turn.criterion), cluster)
    if turn.criterion == "hbm_pattern_soak":
        arguments["first_pass"] = turn.round
    function, per = MEASURE[turn.criterion]
    results = cluster.run(function, per=per, places=None if per == "cluster" else turn.places, **arguments)
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
    soaked["inter_node_busbw_soak", SoakWork.CLUSTER].judge(criterion)


@pytest.mark.health
def test_gpu_errors_soak(soaked, place, criterion):
    """The GPU counts no error in any round that a healthy one does not count."""
    soaked["gpu_errors_soak", place].judge(criterion)


@pytest.mark.health
def test_dcgm_diag_soak(soaked, no_diagnostic, node, criterion):
    """The long diagnostics find nothing."""
    if no_diagnostic is not None:
        criterion.does_not_apply(no_diagnostic)
    soaked["dcgm_diag_soak", node].judge(criterion)


@pytest.mark.fabric
def test_nic_flaps_soak(soaked, node, criterion):
    """No port loses its link more often than the limit gives the whole soak."""
    soaked["nic_flaps_soak", node].judge(criterion)
