"""GPU health, by NVML, before and under load."""

from __future__ import annotations

import pytest

from pytest_gpucluster import MeasurementError
from pytest_gpucluster.errors import Blame
from pytest_gpucluster.inventory.reading import NotAvailable, or_none
from pytest_gpucluster.measurements.health import clocks_under_load

pytestmark = pytest.mark.health


@pytest.fixture(scope="session")
def loaded_clocks(cluster, recipe):
    """Clocks event reasons of every GPU while a matrix product keeps it busy."""
    return cluster.run(clocks_under_load, per="gpu", **recipe("clocks_under_load"))


def read(states, place, name):
    """One reading of NVML; a GPU that does not give the value was not measured."""
    state = states[place]
    value = NotAvailable(state.error or "no NVML") if state.gpu is None else getattr(state.gpu, name)
    return available(value, name, place, part="gpu" if state.lost else "unknown")


def available(value, name, place, *, part="unknown"):
    """The value of a reading; one that is not available was not measured."""
    if isinstance(value, NotAvailable):
        blame = Blame(part=part, cause=value.why)
        raise MeasurementError(f"{place.label}: {name} could not be read: {value.why}", culprits=(place,), blame=blame)
    return value


def test_no_foreign_process(cluster, place, criterion):
    """No foreign process was on the GPU before this run. Measuring on a GPU that was not idle is an error, not a failure."""
    found = cluster.at_start[place]
    criterion.require(found.holders, evidence={"GiB in use": found.memory_used_gib, "% busy": found.utilization_percent})


def test_gpu_count(gpu_states, node, criterion):
    """NVML shows every expected GPU."""
    state = gpu_states.first_of(node)
    if state.nvml_device_count is None:
        raise MeasurementError(f"{node.label}: there is no NVML to count GPUs with")
    criterion.require(state.nvml_device_count, evidence={"NVIDIA GPUs on the PCI bus": or_none(state.pci_device_count)})


def test_torch_sees_gpus(gpu_states, node, criterion):
    """PyTorch can use every expected GPU."""
    criterion.require(gpu_states.first_of(node).torch_device_count)


def test_gpu_model(gpu_states, cluster, place, criterion):
    """The GPU is the promised one."""
    name = read(gpu_states, place, "name")
    criterion.require(0 if name in cluster.promised.gpu_names else 1, evidence={"found": name})


def test_gpu_memory(gpu_states, place, criterion):
    """The whole memory is there."""
    criterion.require(read(gpu_states, place, "memory_gib"))


def test_ecc_enabled(gpu_states, place, criterion):
    """The memory is protected: with ECC off, no error would be counted."""
    criterion.require(0 if read(gpu_states, place, "ecc_enabled") else 1)


def test_mig_disabled(gpu_states, place, criterion):
    """The GPU is whole, not cut into instances."""
    criterion.require(1 if read(gpu_states, place, "mig") else 0)


def test_ecc_uncorrected(gpu_states, place, criterion):
    """No uncorrected memory error since the driver was loaded."""
    errors = read(gpu_states, place, "ecc_uncorrected_volatile")
    criterion.require(errors, evidence={"over its life": or_none(gpu_states[place].gpu.ecc_uncorrected_aggregate)})


def test_remapped_rows(gpu_states, place, criterion):
    """No memory row waits for a remap, and none failed."""
    pending, failed = (read(gpu_states, place, name) for name in ("remapped_rows_pending", "remapped_rows_failed"))
    criterion.require(int(pending) + int(failed), evidence={"pending": pending, "failed": failed})


def test_clocks_under_load(loaded_clocks, place, criterion):
    """No thermal, hardware or power-brake slowdown under load; the power cap is normal."""
    clocks = loaded_clocks[place]
    seen = NotAvailable(clocks.nvml_error or "no NVML") if clocks.telemetry is None else clocks.telemetry.fault_reasons
    criterion.require(len(available(seen, "clocks event reasons", place)), evidence=clocks.evidence)
