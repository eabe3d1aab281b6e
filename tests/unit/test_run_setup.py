"""Which versions of torch a run accepts."""

from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster import run_setup, session
from pytest_gpucluster.cluster.calls import _allowed
from pytest_gpucluster.config.settings import settings_from
from pytest_gpucluster.config.torchrun import read_launch
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.fleet.agents import FleetController
from pytest_gpucluster.fleet.simulation import parse_simulation
from pytest_gpucluster.measurements.gemm import gemm
from pytest_gpucluster.measurements.health import clocks_under_load, gpu_state
from pytest_gpucluster.session import Session
from tests.support import REPOSITORY
from tests.unit.reporting.test_earlier_hosts import journal

if TYPE_CHECKING:
    from pathlib import Path

    from pytest_gpucluster.config.settings import Settings


@pytest.mark.parametrize("version", ["2.7.0", "2.13.0+cu130", "3.0a1", "10.0"])
def test_torch_new_enough(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Compared as numbers: 2.13 is after 2.7."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    run_setup.require_torch()


@pytest.mark.parametrize("version", ["2.6.0", "1.13.0+cu117", "2.0"])
def test_torch_too_old(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Refused with the version that is there and the one that is needed."""
    monkeypatch.setattr(metadata, "version", lambda name: version)
    with pytest.raises(ConfigurationError, match=rf"torch {version.replace('+', '.')} is too old: at least 2\.7"):
        run_setup.require_torch()


def test_oldest_torch_is_the_one_that_is_installed_at_least() -> None:
    """Said twice, because an older one may come in past pip; both must say the same."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"torch>={".".join(map(str, run_setup.OLDEST_TORCH))}",' in text


@pytest.mark.parametrize("hip", ["6.4.43482", None])
def test_a_torch_of_rocm_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hip: str | None) -> None:
    """Loaded or only installed: read without an import of torch."""
    import torch.version  # noqa: PLC0415 -- what is asked where it is loaded

    monkeypatch.setattr(torch.version, "hip", hip)
    assert run_setup.read_hip() == hip
    monkeypatch.delitem(sys.modules, "torch.version")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "version.py").write_text(f"cuda: Optional[str] = None\nhip: Optional[str] = {hip!r}\n")
    origin = Namespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(run_setup.importlib.util, "find_spec", lambda _name: origin)
    assert run_setup.read_hip() == hip
    (tmp_path / "torch" / "version.py").unlink()
    assert run_setup.read_hip() is None


def test_a_torch_of_rocm_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before any GPU is looked for, with the suite to take instead; a rehearsal by name is allowed."""
    monkeypatch.setattr(run_setup, "read_hip", lambda: "6.4")
    monkeypatch.setattr(run_setup, "detect_gpus", lambda: pytest.fail("GPUs were looked for"))
    with pytest.raises(ConfigurationError, match=r"torch\.version\.hip is 6\.4.*ROCm CVS.*--gpucluster-profile rehearsal"):
        run_setup.prepare(settings(tmp_path), None, start=tmp_path)
    assert run_setup.prepare(settings(tmp_path, profile="rehearsal", inline=True), None, start=tmp_path).rehearsal


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not installed is said as such."""

    def absent(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ConfigurationError, match="torch is not installed"):
        run_setup.require_torch()


def simulated(folder: Path, launch: Any = None, **given: Any) -> run_setup.RunSetup:
    """The setup of a run on a simulated fleet, with these options of pytest."""
    fleet = parse_simulation("4x8", faults=[])
    return run_setup.prepare(settings(folder, **given), launch, start=folder, simulation=fleet)


def settings(folder: Path, **given: Any) -> Settings:
    """What these options of pytest ask for."""
    options = dict.fromkeys(("thresholds", "profile", "expect", "level", "results", "only"), None)
    switches = dict.fromkeys(("gate", "inline", "selftest", "audit"), False)
    all_given = {f"gpucluster_{name}": value for name, value in {**options, **switches, **given}.items()}
    return settings_from(Namespace(**all_given), start=folder)


def test_a_simulated_fleet_takes_the_place_of_all_gpus(tmp_path: Path) -> None:
    """Its profile is that of real GPUs, so the limits are; the terms of the verdict say that nothing is real."""
    setup = simulated(tmp_path, profile="h100-sxm")
    assert (setup.profile.name, setup.inventory.facts["world_size"], setup.rehearsal) == ("h100-sxm", 32, False)
    assert setup.simulation is not None
    assert setup.simulation.gpu == "h100-sxm"
    session = Session(setup, rootdir=tmp_path)
    assert isinstance(session.controller, FleetController)
    assert session.state.terms.simulated
    assert session.state.facts()["simulated"]["gpu"] == "h100-sxm"


def test_more_can_be_expected_than_is_simulated(tmp_path: Path) -> None:
    """A node that nobody started is missing, as in a real run."""
    setup = simulated(tmp_path, expect="nodes=5")
    assert (setup.inventory.num_nodes, setup.inventory.gpus_per_node) == (5, 8)


@pytest.mark.parametrize("given", [{"inline": True}, {"selftest": True}, {"profile": "rehearsal"}, {"profile": "no-such"}])
def test_what_cannot_be_simulated_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    """A simulation has no worker to debug or to kill, and is of a GPU."""
    with pytest.raises(ConfigurationError, match="a simulated fleet"):
        simulated(tmp_path, **given)


def test_no_fleet_is_simulated_under_torchrun(tmp_path: Path) -> None:
    """There are real ranks."""
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ConfigurationError, match="a simulated fleet runs neither under torchrun"):
        simulated(tmp_path, read_launch(ranks))


def test_shared_paths_are_promised(tmp_path: Path) -> None:
    """Each path of the cluster section once, in the file's order."""
    limits = tmp_path / "site.yaml"
    limits.write_text("schema: 1\nextends: packaged\ncluster: {shared_paths: [/mnt/b, /mnt/a, /mnt/b]}\n", encoding="utf-8")
    assert simulated(tmp_path, thresholds=limits).inventory.shared_paths == ("/mnt/b", "/mnt/a")
    assert simulated(tmp_path).inventory.shared_paths == ()


@pytest.mark.parametrize(("word", "asks"), [("measured", True), ("skipped", False)])
def test_rails_are_asked_for(tmp_path: Path, word: str, asks: bool) -> None:  # noqa: FBT001 -- a parameter
    """Only where the limits say so."""
    limits = tmp_path / "site.yaml"
    limits.write_text(f"schema: 1\nextends: packaged\ncluster: {{rails: {word}}}\n", encoding="utf-8")
    assert simulated(tmp_path, thresholds=limits).inventory.measures_rails is asks
    assert simulated(tmp_path).inventory.measures_rails is False


@pytest.mark.parametrize(("word", "is_required"), [("required", True), ("optional", False)])
def test_the_kernel_log_is_required(tmp_path: Path, word: str, is_required: bool) -> None:  # noqa: FBT001 -- a parameter
    """Only where the limits say so."""
    limits = tmp_path / "site.yaml"
    limits.write_text(f"schema: 1\nextends: packaged\ncluster: {{kernel_log: {word}}}\n", encoding="utf-8")
    assert simulated(tmp_path, thresholds=limits).inventory.requires_kernel_log is is_required
    assert simulated(tmp_path).inventory.requires_kernel_log is False


@pytest.mark.parametrize(
    ("variables", "hosts"),
    [
        ({"GPUCLUSTER_HOSTS": "b,a"}, ("b", "a")),
        ({"SLURM_JOB_NODELIST": "n[1-2]"}, ("n1", "n2")),
        ({"SLURM_JOB_NODELIST": "n[1-3]"}, ()),
        ({}, ()),
    ],
)
def test_the_expected_hosts_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], hosts: tuple[str, ...]
) -> None:
    """Of the launcher's list, else of Slurm's where it can name these nodes; a simulated fleet has its own."""
    for name in ("GPUCLUSTER_HOSTS", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"):
        monkeypatch.setenv(name, variables.get(name, ""))
    monkeypatch.setattr("socket.gethostname", lambda: "n1")
    two = settings(tmp_path, profile="rehearsal", expect="nodes=2,gpus_per_node=2")
    assert run_setup.prepare(two, None, start=tmp_path).inventory.hosts == hosts
    assert simulated(tmp_path).inventory.hosts[0] == "gpu-node-0"


def test_the_hosts_of_an_earlier_run_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no list is given: those of the results that this run will replace. A given list comes first."""
    for name in ("GPUCLUSTER_HOSTS", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("socket.gethostname", lambda: "n2")
    journal(tmp_path / "gpucluster-results", ["n1", "n2"])
    two = settings(tmp_path, profile="rehearsal", expect="nodes=2,gpus_per_node=2")
    remembered = run_setup.prepare(two, None, start=tmp_path).inventory
    assert (remembered.hosts, remembered.hosts_are_remembered) == (("n1", "n2"), True)
    monkeypatch.setenv("GPUCLUSTER_HOSTS", "n2,n3")
    given = run_setup.prepare(two, None, start=tmp_path).inventory
    assert (given.hosts, given.hosts_are_remembered) == (("n2", "n3"), False)
    one = settings(tmp_path, profile="rehearsal", expect="nodes=1,gpus_per_node=2")
    monkeypatch.delenv("GPUCLUSTER_HOSTS")
    assert run_setup.prepare(one, None, start=tmp_path).inventory.hosts == ()


@pytest.mark.parametrize(
    ("given", "resume", "hosts"),
    [
        ("n2,n1", "always", ("n1", "n2")),
        ("n2,n1", "unfinished", ("n1", "n2")),
        ("n2.site,n1.site", "always", ("n1.site", "n2.site")),
        ("n2,n1", "never", ("n2", "n1")),
        ("n2,n3", "always", ("n2", "n3")),
        ("n2", "always", ("n2",)),
    ],
)
def test_a_run_that_goes_on_keeps_its_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, resume: Any, hosts: tuple[str, ...]
) -> None:
    """A launcher lists hosts in the order of its ranks; torchrun by hand, which began the run, had numbered them otherwise."""
    monkeypatch.setattr("socket.gethostname", lambda: "n2")
    monkeypatch.setenv("GPUCLUSTER_HOSTS", given)
    journal(tmp_path / "gpucluster-results", ["n1", "n2"])
    two = replace(settings(tmp_path, profile="rehearsal", expect="nodes=2,gpus_per_node=2"), resume=resume)
    ended = run_setup.prepare(two, None, start=tmp_path).inventory
    assert ended.hosts == tuple(given.split(",")), "of a run that is not gone on with, nothing is kept"
    monkeypatch.setattr(run_setup, "read_unfinished_run", lambda *_, **__: "an unfinished run")
    found = run_setup.prepare(two, None, start=tmp_path).inventory
    assert (found.hosts, found.hosts_are_remembered) == (hosts, False)


def test_an_audit_accepts_nothing_and_opens_no_gpu(tmp_path: Path) -> None:
    """Its objection stands before anything runs, its workers are CPU workers, and what may use a GPU is refused by name."""
    setup = run_setup.prepare(settings(tmp_path, profile="rehearsal", inline=True, audit=True), None, start=tmp_path)
    assert run_setup.AUDIT in setup.objections
    on_gpus = replace(setup, inventory=replace(setup.inventory, device="cuda"))
    controller: Any = session._controller(on_gpus, tmp_path, None)
    assert controller.device == "cpu"
    assert _allowed(gpu_state, reads_only=True) is gpu_state
    for function in (gemm, clocks_under_load):
        with pytest.raises(ConfigurationError, match=f"an audit only reads, and {function.__name__} may use a GPU"):
            _allowed(function, reads_only=True)
