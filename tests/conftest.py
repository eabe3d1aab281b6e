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
    from collections.abc import Generator, Iterator

LONGEST_FIRST = (
    "launch/test_launch_shared_paths.py",
    "e2e/test_simulated_fleet.py",
    "faults/test_faults_fleet.py",
    "e2e/test_soak_in_parts.py",
    "finetune/test_ranks.py",
    "e2e/test_fails_by_value.py",
    "launch/test_launch_resume.py",
    "e2e/test_screens.py",
    "unit/commands/test_run.py",
    "faults/test_faults_stopped.py",
    "e2e/test_soak.py",
    "e2e/test_gate_exit_code.py",
    "launch/test_launch_nodes.py",
    "e2e/test_rehearsal.py",
    "e2e/test_nics.py",
    "e2e/test_measured_again.py",
    "e2e/test_left_out.py",
    "e2e/test_foreign_text.py",
    "e2e/test_visited.py",
    "finetune/test_faults_three_ranks.py",
    "e2e/test_xids.py",
    "e2e/test_training_scaling.py",
    "e2e/test_fleet_shapes.py",
    "faults/test_faults_joining.py",
    "e2e/test_identity.py",
    "launch/test_launch_xdist.py",
    "faults/test_faults_files.py",
    "e2e/test_large_fleet.py",
    "e2e/test_watch.py",
    "e2e/test_gpu_state.py",
    "e2e/test_selftest.py",
    "e2e/test_errors.py",
    "faults/test_faults_ends.py",
    "e2e/test_repeated.py",
    "launch/test_launch_debugger.py",
    "e2e/test_gpus_that_nvml_refuses.py",
    "e2e/test_stragglers.py",
    "launch/test_launch_usage.py",
    "e2e/test_sxids.py",
    "e2e/test_unread.py",
    # of `slurm`
    "e2e/test_deploy_slurm_faults.py",
    "e2e/test_deploy_slurm_sweep.py",
    "e2e/test_resume_slurm.py",
    "e2e/test_deploy_slurm.py",
    "e2e/test_real_slurm.py",
    # of `tests`
    "unit/health/test_nics.py",
    "unit/thresholds/test_lint.py",
    "unit/agent/test_call_runner.py",
    "unit/evidence/test_verification.py",
    "unit/inventory/test_nvml.py",
    "unit/inventory/test_kubernetes.py",
    "e2e/test_second_chance.py",
    "unit/commands/test_info.py",
    "unit/plugin/test_verdict_item.py",
    "unit/judging/test_promises.py",
    "unit/commands/test_lint.py",
    "e2e/test_outcomes.py",
    "benchmarks/test_too_close_to_call.py",
    "unit/controller/test_command_link.py",
    "finetune/test_stopping.py",
    "unit/inventory/test_unreadable_gpus.py",
    "unit/fleet/test_hardware.py",
    "unit/commands/test_launch.py",
    "unit/judging/test_siblings_disagreement.py",
    "unit/reporting/test_merge.py",
    "unit/commands/test_resume.py",
    "unit/commands/test_healthcheck.py",
    "e2e/test_usage_errors.py",
    "unit/reporting/test_bad_parts.py",
    "finetune/test_band.py",
    "unit/worker/test_gpu_watch.py",
    "unit/thresholds/test_no_effect.py",
    "unit/inventory/test_telemetry.py",
    "unit/thresholds/test_shapes.py",
    "unit/reporting/test_writer.py",
    "unit/thresholds/test_versions.py",
    "unit/evidence/test_bundle.py",
    "unit/judging/test_siblings.py",
    "unit/measurements/test_shared_paths.py",
    "finetune/test_score_adapter.py",
    "unit/thresholds/test_load.py",
    "unit/page/test_summary.py",
    "unit/reporting/test_table.py",
    "unit/thresholds/test_specs.py",
    "unit/test_run_setup.py",
    "project/test_new_gpu.py",
    "finetune/test_steps.py",
    "finetune/test_rates.py",
    "unit/test_cost_of_a_call.py",
    "unit/test_session.py",
    "unit/reporting/test_damaged_journal.py",
)
"""Files that take 45 s and more, of `tests` 15 s, the longest first: one alone at the end leaves other cores idle.

Of the others the order does not matter. Seen: the times of two whole runs of 2026-11-28, of three processes on two cores.
"""
RANKS = {file: rank for rank, file in enumerate(LONGEST_FIRST)}
TESTS = Path(__file__).parent
GARBAGE = (100_000, 20, 20)
"""After so many new objects garbage is collected, in a test process: with Python's 700 that took 5 to 20 % of its CPU."""

# The same examples in each run, so that chance fails no merge; `nightly` looks for new ones: HYPOTHESIS_PROFILE=night.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("night", settings.get_profile("busy"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "busy"))


@pytest.fixture(scope="session", autouse=True)
def programs_start_fast() -> Iterator[None]:
    """In this process nothing runs between fork and exec of a program, else each start copies the pages of a loaded torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pytest_gpucluster.inventory.program.die_with_parent", None)
        yield


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
