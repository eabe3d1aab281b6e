"""The setup of a run: settings, thresholds, expected inventory. Everything that can be checked before any GPU work."""

from __future__ import annotations

import datetime as dt
import functools
import importlib.util
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.host_list import expected_hosts, is_same_host
from pytest_gpucluster.config.process import require_open_files
from pytest_gpucluster.config.settings import DEADLINES_S, Expect, Settings, reaches
from pytest_gpucluster.config.torchrun import Launch
from pytest_gpucluster.controller.inline import OBJECTION
from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.fleet.simulation import Simulation, require_model
from pytest_gpucluster.inventory.detect import Detected, detect_gpus
from pytest_gpucluster.judging import waivers
from pytest_gpucluster.judging.promises import PromisedShape, changed_terms, short_soak
from pytest_gpucluster.judging.waivers import Waivers
from pytest_gpucluster.places import GpuLinks, Inventory
from pytest_gpucluster.protocol.channel import most_connections
from pytest_gpucluster.protocol.rank import own_hostname
from pytest_gpucluster.records.reading import limits_used
from pytest_gpucluster.reporting.lines import remembered_hosts
from pytest_gpucluster.reporting.unfinished_run import read_unfinished_run
from pytest_gpucluster.text import counted
from pytest_gpucluster.thresholds import no_effect
from pytest_gpucluster.thresholds.file import ThresholdsFile
from pytest_gpucluster.thresholds.lint import load
from pytest_gpucluster.thresholds.resolve import RING, Profile, Threshold, rates_of
from pytest_gpucluster.thresholds.specs import NOT_AMD, GpuSpec

OLDEST_TORCH = (2, 7)
REHEARSAL_RANKS = 2
TO_REHEARSE = "To rehearse on the CPU all the same, say --gpucluster-profile rehearsal"
AUDIT = "AUDIT: looked only, no part was put under load"
"""Why an audit accepts nothing, in the verdict line and all reports."""


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """What a run is to do, checked.

    Attributes:
        launch: how torchrun started this process; None without torchrun.
        criteria: the entries of the profile, by criterion.
        detected: the GPUs of this machine; none in a rehearsal.
        objections: what forbids an acceptance and is known before anything has run.
        started_s: when the checks began, by the monotonic clock.
        simulation: the fleet that answers in place of GPUs; None in a real run.
    """

    settings: Settings
    launch: Launch | None
    thresholds: ThresholdsFile
    profile: Profile
    criteria: Mapping[str, Threshold]
    inventory: Inventory
    detected: Detected
    waivers: Waivers
    objections: tuple[str, ...]
    started_s: float
    simulation: Simulation | None = None

    @property
    def rehearsal(self) -> bool:
        """Whether this can be no acceptance: no GPU, or a profile meant for rehearsal."""
        return self.profile.rehearsal

    @property
    def deadline_s(self) -> float:
        """How long a call may take whose recipe has no deadline. A soak is many calls, none of them longer than others."""
        return DEADLINES_S[self.settings.level]

    @property
    def level_reached(self) -> bool:
        """Whether the run's level is enough for an acceptance."""
        return reaches(self.settings.level, self.profile.accept_at)

    @property
    def num_local(self) -> int:
        """How many ranks run on this machine."""
        if self.launch is not None:
            return self.launch.local_world_size
        return self.inventory.gpus_per_node if self.rehearsal else self.detected.num_gpus

    @functools.cached_property
    def changed_entries(self) -> dict[str, list[str]]:
        """The criteria whose limits differ from the packaged ones, each with what differs, in words."""
        return self.thresholds.changed_entries(self.profile)

    @functools.cached_property
    def changed_terms(self) -> list[str]:
        """Terms of the run that differ from what was promised elsewhere."""
        standard = self.thresholds.standard(self.profile)
        promises: dict[str, PromisedShape] = {"the cluster section": self.thresholds.cluster, "the profile": self.profile}
        if standard is not None:
            promises["the packaged profile"] = standard
        changed = changed_terms(self.profile, standard, self.inventory, promises)
        if not self.rehearsal:
            changed += self.thresholds.changed_figures(self.detected.names)
        hidden, shown = self.detected.num_hidden, self.detected.num_gpus
        if hidden and not self.rehearsal:
            return [*changed, f"CUDA_VISIBLE_DEVICES hides {hidden} of {hidden + shown} GPUs here"]
        return changed

    @functools.cached_property
    def remarks(self) -> list[str]:
        """What the thresholds file says without effect on this run, with file and line. The verdict does not depend on it."""
        return [str(one) for one in no_effect.remarks_of_run(self.thresholds, self.profile)]

    @property
    def facts(self) -> dict[str, Any]:
        """What the verdict is about, as results.json has it: level, profile, expected inventory, which limits."""
        facts = self.inventory.facts
        return {
            "level": self.settings.level,
            "profile": self.profile.name,
            "cluster": self.thresholds.content.cluster.name,
            "expected": {"nodes": facts["nodes"], "gpus_per_node": facts["gpus_per_node"]},
            "thresholds_sha256": self.thresholds.sha256,
            "changed_limits": list(self.changed_entries),
            "changed_entries": self.changed_entries,
            "changed_terms": self.changed_terms,
            "remarks": self.remarks,
            "simulated": self.simulation.facts if self.simulation is not None else None,
            "soak_s": self.settings.soak_s,
            "waivers": self.waivers.facts,
            "limits": self.limits,
        }

    @functools.cached_property
    def limits(self) -> dict[str, dict[str, Any]]:
        """What each criterion of the profile asks and why, as results.json has it."""
        return limits_used(self.criteria.values())


def prepare(settings: Settings, launch: Launch | None, *, start: Path, simulation: Simulation | None = None) -> RunSetup:
    """Check everything that can be checked before any GPU work; ``start`` is the folder the run was started in.

    With a ``simulation`` its fleet takes the place of all GPUs, and the verdict can be no acceptance.

    Raises:
        ConfigurationError: torch too old, thresholds wrong, no profile for these GPUs, more ranks than GPUs, ...
    """
    started_s = time.monotonic()
    require_torch()
    if launch is not None and launch.restart_count > 0:
        raise ConfigurationError(
            f"this is restart {launch.restart_count} of torchrun: a second attempt would be mixed with the first one's "
            "results. Run without --max-restarts"
        )
    thresholds = load(settings.thresholds)
    if simulation is not None:
        profile, detected, simulation = _of_simulation(settings, launch, thresholds, simulation)
        shown = Expect(nodes=simulation.nodes, gpus_per_node=simulation.gpus_per_node)
        inventory = replace(_expected(settings, thresholds, profile, shown), hosts=simulation.hosts)
    else:
        profile, detected = _of_this_node(settings, thresholds)
        inventory = _expected(settings, thresholds, profile, _shown(launch, detected))
        inventory = replace(_with_hosts(inventory, settings), slurm_job=_slurm_job(os.environ))
        _require_gpus(profile, launch, detected)
    criteria = thresholds.criteria(profile)
    file = waivers.find(settings.thresholds, start) if simulation is None else None  # nobody answers for a simulated part
    setup = RunSetup(
        settings=settings,
        launch=launch,
        thresholds=thresholds,
        profile=profile,
        criteria=criteria,
        inventory=inventory,
        detected=detected,
        waivers=_read_waivers(profile, criteria, file),
        objections=tuple(_objections(settings, launch, profile, inventory, detected)),
        started_s=started_s,
        simulation=simulation,
    )
    if settings.inline:
        return _inline(setup)
    if simulation is None:
        _require_open_files(launch, setup.num_local)
    return setup


def _of_this_node(settings: Settings, thresholds: ThresholdsFile) -> tuple[Profile, Detected]:
    """The profile by name, else of the GPUs here; and those GPUs, none for a rehearsal."""
    named = thresholds.profiles.get(settings.profile or "")
    is_rehearsal = named is not None and named.rehearsal
    if not is_rehearsal and (hip := read_hip()):
        raise ConfigurationError(f"this torch is built for ROCm (torch.version.hip is {hip}). {NOT_AMD} {TO_REHEARSE}")
    detected = Detected(names=()) if is_rehearsal else detect_gpus()
    return thresholds.profile_for(name=settings.profile, gpu_names=detected.names), detected


def _of_simulation(
    settings: Settings, launch: Launch | None, thresholds: ThresholdsFile, simulation: Simulation
) -> tuple[Profile, Detected, Simulation]:
    """The profile of a simulated fleet, the GPUs of one node, and the fleet with the fabric of that profile."""
    if launch is not None or settings.inline or settings.selftest:
        raise ConfigurationError("a simulated fleet runs neither under torchrun nor with --gpucluster-inline or -selftest")
    profile = thresholds.profiles.get(settings.profile or simulation.gpu)
    if profile is None or profile.spec is None:
        raise ConfigurationError(f"a simulated fleet needs the profile of a GPU, and {settings.profile!r} is none")
    require_model(profile.spec.id)
    domain, names = profile.nodes_per_domain, profile.spec.names[:1] * simulation.gpus_per_node
    fleet = replace(simulation, gpu=profile.spec.id, fabric=profile.fabric, nodes_per_domain=domain)
    return profile, Detected(names=names), fleet


def _shown(launch: Launch | None, detected: Detected) -> Expect:
    """The inventory that torchrun started, else the one of this machine."""
    if launch is not None:
        return Expect(nodes=launch.num_nodes, gpus_per_node=launch.local_world_size)
    return Expect(nodes=1, gpus_per_node=detected.num_gpus or REHEARSAL_RANKS)


def _shape(*sources: PromisedShape) -> tuple[int, int]:
    """Nodes and GPUs per node, each from the first source that has it."""
    nodes = next(source.nodes for source in sources if source.nodes is not None)
    return nodes, next(source.gpus_per_node for source in sources if source.gpus_per_node is not None)


def _expected(settings: Settings, thresholds: ThresholdsFile, profile: Profile, shown: Expect) -> Inventory:
    stated: tuple[PromisedShape, ...] = (settings.expect, thresholds.cluster, profile)
    shape, rates = _shape(*stated, shown), rates_of(profile)
    return Inventory(
        num_nodes=shape[0],
        gpus_per_node=shape[1],
        device="cpu" if profile.rehearsal else "cuda",
        fabric=profile.fabric,
        gpu_names=tuple(profile.spec.names) if profile.spec is not None else (),
        gpu_links=_links_of(profile.spec) if profile.spec is not None else None,
        node_gb_s=None if profile.nic_gb_s_per_gpu is None else profile.nic_gb_s_per_gpu * shape[1],
        ring_gb_s=rates.bound_gb_s(RING, nodes=shape[0], gpus_per_node=shape[1]) if rates is not None else None,
        shared_paths=tuple(dict.fromkeys(thresholds.content.cluster.shared_paths)),
        gpus_are_stated=any(source.gpus_per_node is not None for source in stated),
        requires_kernel_log=thresholds.content.cluster.kernel_log == "required",
        measures_rails=thresholds.content.cluster.rails == "measured",
        nodes_per_domain=profile.nodes_per_domain,
        versions=thresholds.versions,
    )


def _with_hosts(inventory: Inventory, settings: Settings) -> Inventory:
    """The inventory with the expected hosts: of the launcher's list, of Slurm's, else of an earlier run with these results.

    A run that goes on keeps its numbers: the same hosts in another order are in that of the earlier run.
    """
    own, nodes = own_hostname(), inventory.num_nodes
    hosts = expected_hosts(os.environ, num_nodes=nodes, own=own)
    if nodes == 1 or (hosts and settings.resume == "never"):
        return replace(inventory, hosts=hosts)
    remembered = remembered_hosts(settings.results_dir, num_nodes=nodes, own=own)
    if not hosts:
        return replace(inventory, hosts=remembered, hosts_are_remembered=bool(remembered))
    in_order = tuple(host for before in remembered for host in hosts if is_same_host(host, before))
    is_reordered = in_order != hosts and sorted(in_order) == sorted(hosts)
    return replace(inventory, hosts=in_order if is_reordered and _goes_on(settings.results_dir) else hosts)


def _goes_on(results_dir: Path) -> bool:
    try:
        read_unfinished_run(results_dir, completes=True)
    except ConfigurationError:  # of a run that has ended nothing is kept, its numbers neither
        return False
    return True


def _slurm_job(variables: Mapping[str, str]) -> str | None:
    """The number of Slurm's job in which this process runs; None in none, and where a container hides Slurm's commands."""
    job = variables.get("SLURM_JOB_ID", "")
    has_scontrol = shutil.which("scontrol", path=variables.get("PATH")) is not None
    return job if has_scontrol and job.isascii() and job.isdecimal() else None


def _links_of(spec: GpuSpec) -> GpuLinks:
    return GpuLinks(nvlink_gb_s=spec.peer_gb_s / (spec.nvlink_links or 1), pcie_gen=spec.pcie_gen, pcie_width=spec.pcie_width)


def _require_gpus(profile: Profile, launch: Launch | None, detected: Detected) -> None:
    num_gpus = detected.num_gpus
    if launch is None or profile.rehearsal or launch.local_world_size <= num_gpus:
        return
    raise ConfigurationError(
        f"torchrun started {counted(launch.local_world_size, 'rank')} on this node, "
        f"which has {counted(num_gpus, 'visible GPU')}; "
        f"say --nproc-per-node={num_gpus}. If a GPU is missing, say so with --gpucluster-expect instead"
    )


def _require_open_files(launch: Launch | None, num_local: int) -> None:
    """Check that whoever hosts the store may have so many connections: torchrun, or this process."""
    world_size, num_nodes = (launch.world_size, launch.num_nodes) if launch is not None else (num_local, 1)
    is_hosted = launch is not None and launch.agent_hosts_store
    num_connections = most_connections(world_size=world_size, num_nodes=num_nodes)
    require_open_files(num_connections, num_ranks=world_size, pid=os.getppid() if is_hosted else 0)


def _read_waivers(profile: Profile, criteria: Mapping[str, Threshold], file: Path | None) -> Waivers:
    """The waivers of this run, checked; a rehearsal applies none, as it has no part that somebody could answer for."""
    found = waivers.load(file, criteria=criteria) if file is not None else []
    return Waivers([] if profile.rehearsal else found, today=dt.datetime.now(tz=dt.timezone.utc).date())


def _objections(
    settings: Settings, launch: Launch | None, profile: Profile, inventory: Inventory, detected: Detected
) -> Iterator[str]:
    if settings.audit:
        yield AUDIT
    short = short_soak(profile, level=settings.level, soak_s=settings.soak_s)
    if short is not None:
        yield short
    due, num_gpus = inventory.gpus_per_node, detected.num_gpus
    if launch is not None and not profile.rehearsal and num_gpus > max(due, launch.local_world_size):
        yield f"more GPUs than expected: this node has {num_gpus}, {due} expected"


def _inline(setup: RunSetup) -> RunSetup:
    """One place, in this process, for a debugger; never an acceptance."""
    if setup.launch is not None and setup.launch.world_size > 1:
        raise ConfigurationError("--gpucluster-inline runs one place in one process; start it without torchrun")
    inventory = replace(setup.inventory, num_nodes=1, gpus_per_node=1)
    return replace(setup, inventory=inventory, objections=(*setup.objections, OBJECTION))


def read_hip() -> str | None:
    """``torch.version.hip``, without importing torch; None where torch is not built for ROCm."""
    loaded = sys.modules.get("torch.version")
    if loaded is not None:
        return getattr(loaded, "hip", None)
    found = importlib.util.find_spec("torch")
    try:
        text = Path(str(found and found.origin)).with_name("version.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    hip = re.search(r"(?m)^hip\b[^=\n]*=\s*['\"]([^'\"]+)", text)
    return hip[1] if hip else None


def require_torch() -> None:
    """Check the version of torch without importing it.

    Raises:
        ConfigurationError: not installed, or older than the oldest that can work.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise ConfigurationError(
            "torch is not installed: pip install torch, on a GPU node the build for its CUDA driver (see nvidia-smi)"
        ) from None
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if found < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise ConfigurationError(f"torch {version} is too old: at least {wanted} is needed (2.11 and 2.13 were run)")
