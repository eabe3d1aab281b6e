"""Judges of hardware and hosts: readings in, a ``Finding`` out. Pure: no torch, no NVML, no pytest.

What stands here is public: ``from pytest_gpucluster import health``, then ``criterion.judge(health.judge_nvlinks(...))``.
"""

from __future__ import annotations

from pytest_gpucluster.health.dcgm import judge_diag
from pytest_gpucluster.health.drift import (
    DriftRules,
    compare_facts,
    facts_of_gpus,
    facts_of_hosts,
    facts_of_nics,
    judge_drift,
    summary,
)
from pytest_gpucluster.health.driver_errors import judge_sxids, judge_xids
from pytest_gpucluster.health.gpu import judge_clocks, judge_pcie_width, judge_recovery, judge_repair
from pytest_gpucluster.health.growth import (
    judge_counters,
    judge_gpu_counters,
    judge_memory_errors,
    judge_nvlink_counters,
    judge_replays,
    read_limits,
    state_changes,
    throttled_s,
)
from pytest_gpucluster.health.hosts import (
    ClockReading,
    HostMinimum,
    judge_clock,
    judge_limits,
    judge_settings,
    judge_variables,
    skews,
)
from pytest_gpucluster.health.nic_growth import NicReadings, judge_flaps, judge_nic_counters
from pytest_gpucluster.health.nics import (
    NodeTraffic,
    PortPromise,
    judge_pcie_links,
    judge_ports,
    judge_transport,
    nearest_gpus,
    own_ports,
)
from pytest_gpucluster.health.nvlink import judge_ber, judge_domain, judge_fabric, judge_nvlinks
from pytest_gpucluster.health.shared_paths import PathObservations, PathRequirements, judge_path
from pytest_gpucluster.health.slurm import at_start_and_end, judge_job, judge_node
from pytest_gpucluster.judging.finding import merge

__all__ = [
    "ClockReading",
    "DriftRules",
    "HostMinimum",
    "NicReadings",
    "NodeTraffic",
    "PathObservations",
    "PathRequirements",
    "PortPromise",
    "at_start_and_end",
    "compare_facts",
    "facts_of_gpus",
    "facts_of_hosts",
    "facts_of_nics",
    "judge_ber",
    "judge_clock",
    "judge_clocks",
    "judge_counters",
    "judge_diag",
    "judge_domain",
    "judge_drift",
    "judge_fabric",
    "judge_flaps",
    "judge_gpu_counters",
    "judge_job",
    "judge_limits",
    "judge_memory_errors",
    "judge_nic_counters",
    "judge_node",
    "judge_nvlink_counters",
    "judge_nvlinks",
    "judge_path",
    "judge_pcie_links",
    "judge_pcie_width",
    "judge_ports",
    "judge_recovery",
    "judge_repair",
    "judge_replays",
    "judge_settings",
    "judge_sxids",
    "judge_transport",
    "judge_variables",
    "judge_xids",
    "merge",
    "nearest_gpus",
    "own_ports",
    "read_limits",
    "skews",
    "state_changes",
    "summary",
    "throttled_s",
]
