"""For all tests: hypothesis judges what is found, never how long a busy machine takes; what was collected is no garbage."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.support.tracing import Tracing, tracer_here

if TYPE_CHECKING:
    from collections.abc import Generator

LONGEST_FIRST = (
    "faults/test_faults_stopped.py",
    "e2e/test_soak.py",
    "e2e/test_identity.py",
    "finetune/test_faults_three_ranks.py",
    "faults/test_faults_ends.py",
    "e2e/test_simulated_fleet.py",
    "e2e/test_fails_by_value.py",
    "finetune/test_ranks.py",
    "faults/test_faults_ranks.py",
    "e2e/test_soak_in_parts.py",
    "finetune/test_reading.py",
    "e2e/test_visited.py",
    "e2e/test_rehearsal.py",
    "launch/test_launch_resume.py",
    "e2e/test_gate_exit_code.py",
    "e2e/test_training_scaling.py",
    "faults/test_faults_workers.py",
    "faults/test_faults_inputs.py",
    "faults/test_faults_fleet.py",
    "launch/test_launch_xdist.py",
    "launch/test_launch_shared_paths.py",
    "launch/test_launch_nodes.py",
    "e2e/test_deploy_slurm.py",
    "e2e/test_deploy_slurm_faults.py",
    "e2e/test_real_slurm.py",
    "e2e/test_deploy_slurm_sweep.py",
    "unit/commands/test_run.py",
    "e2e/test_unread.py",
    "benchmarks/test_reference_collectives.py",
    # of `tests`
    "unit/thresholds/test_load.py",
    "unit/commands/test_healthcheck.py",
    "e2e/test_usage_errors.py",
    "unit/evidence/test_verification.py",
    "e2e/test_outcomes.py",
    "unit/commands/test_info.py",
    "unit/judging/test_promises.py",
    "unit/commands/test_lint.py",
    "unit/thresholds/test_lint.py",
    "benchmarks/test_too_close_to_call.py",
    "unit/evidence/test_bundle.py",
    "unit/commands/test_launch.py",
    "unit/reporting/test_reporting.py",
    "unit/commands/test_torchrun.py",
    "unit/inventory/test_nvml.py",
    "finetune/test_stopping.py",
    "unit/health/test_nics.py",
    "e2e/test_second_chance.py",
    "unit/commands/test_criteria.py",
    "unit/thresholds/test_no_effect.py",
    "unit/plugin/test_verdict_item.py",
    "unit/worker/test_gpu_watch.py",
    "unit/inventory/test_telemetry.py",
    "unit/controller/test_command_link.py",
    "unit/agent/test_call_runner.py",
    "project/test_docs.py",
    "unit/test_run_setup.py",
    "unit/thresholds/test_released.py",
    "unit/judging/test_siblings_disagreement.py",
    "unit/judging/test_siblings.py",
    "e2e/test_no_effect.py",
    "unit/commands/test_sweep.py",
    "unit/reporting/test_table.py",
    "project/test_house.py",
    "unit/localization/test_search_errors.py",
    "unit/reporting/test_bad_parts.py",
    "finetune/test_band.py",
    "unit/page/test_page.py",
    "finetune/test_hub.py",
    "unit/fleet/test_hardware.py",
)
"""Files that take 10 s and more, of `tests` 6 CPU seconds, the longest first: one alone at the end leaves other cores idle.

Of the others the order does not matter. Seen: ``--durations`` of 2026-11-26 and 27.
"""
RANKS = {file: rank for rank, file in enumerate(LONGEST_FIRST)}
TESTS = Path(__file__).parent
GARBAGE = (100_000, 20, 20)
"""After so many new objects garbage is collected, in a test process: with Python's 700 that took 5 to 20 % of its CPU."""

# The same examples in each run, so that chance fails no merge; `nightly` looks for new ones: HYPOTHESIS_PROFILE=night.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("night", settings.get_profile("busy"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "busy"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what was collected, torch and 12,000 tests, out of each garbage collection: a pytest inside a test makes five.

    Seen: 44 such tests took 35 CPU seconds before, 4 after.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GARBAGE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort by :data:`LONGEST_FIRST` for pytest-xdist, which hands out files in this order (``--no-loadscope-reorder``)."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: RANKS.get(item.path.as_posix().removeprefix(f"{TESTS}/"), len(RANKS)))


def pytest_configure(config: pytest.Config) -> None:
    """Let coverage's tracer rest where it adds nothing."""
    if (tracer := tracer_here()) is not None:
        tracer.stop()
        config.pluginmanager.register(Tracing(tests=TESTS, tracer=tracer))
