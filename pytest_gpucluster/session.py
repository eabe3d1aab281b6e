"""One run: settings, thresholds, inventory, the expected set, the controller, the outcomes. Knows nothing of pytest."""

from __future__ import annotations

import datetime as dt
import functools
import os
import secrets
import time
from collections import Counter
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.agent.fallback_report import Estate
from pytest_gpucluster.cluster.binding import Binding, bind
from pytest_gpucluster.cluster.calls import Cluster, WantedPlaces, every_place
from pytest_gpucluster.config.settings import DEADLINES_S, Expect, Settings, reaches
from pytest_gpucluster.controller.controller import Controller
from pytest_gpucluster.controller.inline import OBJECTION, InlineController
from pytest_gpucluster.errors import ConfigurationError, GpuclusterError, MeasurementError
from pytest_gpucluster.inventory.detect import Detected, detect_gpus
from pytest_gpucluster.inventory.identity import read_versions
from pytest_gpucluster.judging import plan as planning
from pytest_gpucluster.judging import waivers
from pytest_gpucluster.judging.forecast import Forecast, forecast
from pytest_gpucluster.judging.promises import changed_terms, doubled_gpus, short_soak, unexpected_gpus
from pytest_gpucluster.judging.verdict import MISSING, PENDING, Record, Terms, Verdict, decide
from pytest_gpucluster.judging.waivers import Waivers
from pytest_gpucluster.places import Inventory, Place
from pytest_gpucluster.reporting.recorder import Recorder, RunStatus
from pytest_gpucluster.reporting.results import place_facts
from pytest_gpucluster.thresholds.load import load

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from pytest_gpucluster.config.torchrun import Launch
    from pytest_gpucluster.judging.promises import Promise
    from pytest_gpucluster.thresholds.resolve import Profile

OLDEST_TORCH = (2, 7)
REHEARSAL_RANKS = 2
JOIN_S = 120.0


class Session:
    """What a run knows. Made once, at configuration time; starts processes only when asked."""

    def __init__(
        self,
        settings: Settings,
        launch: Launch | None,
        *,
        rootdir: Path,
        start: Path,
        wanted: WantedPlaces = every_place,
    ) -> None:
        """Check everything that can be checked before any GPU work.

        ``start`` is the folder the run was started in; ``wanted`` returns the places that the tests need, None for all.

        Raises:
            ConfigurationError: torch too old, thresholds wrong, no profile for these GPUs, more ranks than GPUs, ...
        """
        self.started_s = time.monotonic()
        self.settings = settings
        self.launch = launch
        require_torch()
        if launch is not None and launch.restart_count > 0:
            raise ConfigurationError(
                f"this is restart {launch.restart_count} of torchrun: a second attempt would be mixed with the first one's "
                "results. Run without --max-restarts"
            )
        self.thresholds = load(settings.thresholds)
        detected = self._detect()
        self.profile: Profile = self.thresholds.profile_for(name=settings.profile, gpu_names=detected.names)
        self.criteria = self.thresholds.criteria(self.profile)
        self.inventory = self._expected(detected)
        self._require_gpus(detected)
        self._detected = detected
        self.waivers = self._read_waivers(start)
        self.plan = planning.Plan()
        self.objections: list[str] = [*self._objections_at_once(detected)]
        self.selftest: dict[str, Any] | None = None
        self.terminated: str | None = None
        num_local = launch.local_world_size if launch is not None else self._num_local(detected)
        self.controller: Controller | InlineController = Controller(
            launch, num_local=num_local, device=self.inventory.device, rootdir=rootdir
        )
        if settings.inline:
            self._go_inline(rootdir)
        self._wanted = wanted
        self._cluster: Cluster | None = None
        self._binding: Binding | None = None
        self._bind_error: Exception | None = None
        self._is_planned = False
        self.recorder = Recorder(self.plan, status=self._status)

    def _go_inline(self, rootdir: Path) -> None:
        """One place, in this process, for a debugger."""
        if self.launch is not None and self.launch.world_size > 1:
            raise ConfigurationError("--gpucluster-inline runs one place in one process; start it without torchrun")
        self.inventory = replace(self.inventory, num_nodes=1, gpus_per_node=1)
        self.controller = InlineController(device=self.inventory.device, rootdir=rootdir)
        self.objections.append(OBJECTION)

    def _detect(self) -> Detected:
        named = self.thresholds.profiles.get(self.settings.profile or "")
        return Detected(names=()) if named is not None and named.rehearsal else detect_gpus()

    def _read_waivers(self, start: Path) -> Waivers:
        """None in a rehearsal: there is no part that somebody could answer for."""
        file = waivers.find(self.settings.thresholds, start)
        found = waivers.load(file, criteria=self.criteria) if file is not None else []
        today = dt.datetime.now(tz=dt.timezone.utc).date()
        return Waivers([] if self.rehearsal else found, today=today)

    def waive(self, record: Record) -> Record:
        """The record, waived if somebody answers for this failure at this part."""
        return self.waivers.apply(record, self.places().get(record.place or ""))

    @property
    def deadline_s(self) -> float:
        """What a call may take whose recipe does not say: by level. A soak is many calls, none of them longer than others."""
        return DEADLINES_S[self.settings.level]

    @property
    def rehearsal(self) -> bool:
        """Whether this can be no acceptance: no GPU, or a profile meant for rehearsal."""
        return self.profile.rehearsal

    def _expected(self, detected: Detected) -> Inventory:
        """What was promised: the option, else the file, else the profile, else what torchrun or the machine shows."""
        shown = Expect(
            nodes=self.launch.num_nodes if self.launch is not None else 1,
            gpus_per_node=self.launch.local_world_size if self.launch is not None else detected.num_gpus or REHEARSAL_RANKS,
        )
        sources = (self.settings.expect, self.thresholds.cluster, self.profile, shown)
        nodes = next(source.nodes for source in sources if source.nodes is not None)
        gpus = next(source.gpus_per_node for source in sources if source.gpus_per_node is not None)
        return Inventory(
            num_nodes=nodes,
            gpus_per_node=gpus,
            device="cpu" if self.rehearsal else "cuda",
            fabric=self.profile.fabric,
            gpu_names=tuple(self.profile.spec.names) if self.profile.spec is not None else (),
        )

    def _objections_at_once(self, detected: Detected) -> Iterator[str]:
        """What forbids an acceptance and is known before anything has run."""
        short = short_soak(self.profile, level=self.settings.level, soak_s=self.settings.soak_s)
        if short is not None:
            yield short
        due = self.inventory.gpus_per_node
        if self.launch is not None and not self.rehearsal and detected.num_gpus > max(due, self.launch.local_world_size):
            yield f"more GPUs than expected: this node has {detected.num_gpus}, {due} expected"

    def _num_local(self, detected: Detected) -> int:
        return self.inventory.gpus_per_node if self.rehearsal else detected.num_gpus

    def _require_gpus(self, detected: Detected) -> None:
        if self.launch is None or self.rehearsal or self.launch.local_world_size <= detected.num_gpus:
            return
        raise ConfigurationError(
            f"torchrun started {self.launch.local_world_size} ranks on this node, which has {detected.num_gpus} visible GPUs; "
            f"say --nproc-per-node={detected.num_gpus}. If a GPU is missing, say so with --gpucluster-expect instead"
        )

    # Running.

    def open(self, *, junit: Path | None) -> None:
        """Take the results directory and start the agents; returns before they are ready.

        ``junit``: the JUnit file that pytest will write, which a deputy writes should this process die.
        """
        self.recorder.open(self.settings.results_dir, junit=junit, replicate=self.controller.keep_copy)
        run = secrets.token_hex(8)
        self.recorder.write("started", run=run, **self.started())
        folder = self.settings.results_dir.absolute()
        estate = Estate(folder=str(folder), junit=str(junit.absolute()) if junit is not None else None, run=run)
        self.controller.on_call = self.recorder.catch_up  # something long may begin now
        self.controller.start(log=folder / "logs" / "agents.log", estate=estate)

    @property
    def cluster(self) -> Cluster:
        """The cluster, all places bound; the first use waits for every rank's hello.

        Raises:
            MeasurementError: the ranks cannot be reached at all.
        """
        if self._cluster is None:
            if self._bind_error is not None:
                raise self._bind_error
            try:
                binding = bind(self.controller, self.inventory, within_s=JOIN_S)
            except GpuclusterError as error:
                self._bind_error = error
                raise
            except Exception as error:
                self._bind_error = MeasurementError(f"no rank can be reached: {error}", kind="lost")
                raise self._bind_error from error
            self._binding = binding
            self._cluster = Cluster(self.controller, binding, wanted=self._wanted, deadline_s=self.deadline_s)
            self._note_unexpected(binding)
            places, nodes = ([place_facts(place) for place in some] for some in (binding.places, binding.nodes))
            self.recorder.write("bound", places=places, nodes=nodes, unheard=binding.unidentified)
        return self._cluster

    def _note_unexpected(self, binding: Binding) -> None:
        more = binding.unexpected or unexpected_gpus(binding.identities.values(), self.inventory)
        if more and not self.settings.inline:
            self.objections.append(f"more GPUs than expected: {', '.join(more)}")
        doubled = doubled_gpus(binding.places)
        if doubled:
            more_told = f" and {len(doubled) - 1} more" if len(doubled) > 1 else ""
            self.objections.append(f"one GPU in two places: {doubled[0]}{more_told}")

    def fix_plan(self) -> None:
        """Add what the profile expects and nobody selected, and put the whole expected set on record."""
        self._is_planned = True
        accept_at = self.profile.accept_at
        planning.complete(self.plan, self.criteria, self.inventory, level=self.settings.level, accept_at=accept_at)
        self.recorder.record_plan()

    def forecast(self, subjects: Mapping[str, str]) -> Forecast:
        """How long what is selected and applies here takes, about; ``subjects``: the mark of each criterion's test."""
        due = [one.criterion for one in self.plan if one.outcome == PENDING]
        rules = {key: planning.rule_against(self.criteria[key], self.inventory) for key in {*due} & {*self.criteria}}
        return forecast(
            Counter(key for key in due if rules.get(key) is None),
            self.criteria,
            subjects=subjects,
            gpus_per_node=self.inventory.gpus_per_node,
            soak_s=self.settings.soak_s,
        )

    def started(self) -> dict[str, Any]:
        """What a run is, before anything is planned, for the journal."""
        return {"versions": read_versions(), "settings": _shown(self.settings), "facts": self.facts()}

    def plan_unseen(self, *, why: str) -> list[Record]:
        """The run ended before its tests were known: all that the profile expects is missing; returns those records."""
        if self._is_planned:
            return []
        self.fix_plan()
        unseen = [replace(record, outcome=MISSING, reason=why) for record in self.plan]
        for record in unseen:
            self.recorder.record_outcome(record)
        return unseen

    def take_selftest(self, facts: dict[str, Any]) -> None:
        """Take what the self-test found; what it missed forbids an acceptance."""
        self.selftest = facts
        self.objections += facts["objections"]
        self.recorder.record_selftest(facts)

    # The end.

    def decide(self) -> Verdict:
        """The verdict over what is on record."""
        return decide(self.plan, self.terms)

    @functools.cached_property
    def changed_limits(self) -> list[str]:
        """Criteria that are judged otherwise than by the packaged file."""
        return self.thresholds.changed_limits(self.profile)

    @functools.cached_property
    def changed_terms(self) -> list[str]:
        """What is asked of the run otherwise than was promised elsewhere."""
        standard = self.thresholds.standard(self.profile)
        promises: dict[str, Promise] = {"the cluster section": self.thresholds.cluster, "the profile": self.profile}
        if standard is not None:
            promises["the packaged profile"] = standard
        found = changed_terms(self.profile, standard, self.inventory, promises)
        hidden, shown = self._detected.num_hidden, self._detected.num_gpus
        told = f"CUDA_VISIBLE_DEVICES hides {hidden} of {hidden + shown} GPUs here"
        return [*found, told] if hidden and not self.rehearsal else found

    @property
    def terms(self) -> Terms:
        """What beside the outcomes decides."""
        return Terms(
            rehearsal=self.rehearsal,
            level_reached=reaches(self.settings.level, self.profile.accept_at),
            objections=tuple(self.objections),
            changed_limits=tuple(self.changed_limits),
            changed_terms=tuple(self.changed_terms),
        )

    def places(self) -> Mapping[str, Place]:
        """Every expected place and node by id, bound as far as anything said hello."""
        known = self._binding if self._binding is not None else self.inventory
        return {place.id: place for place in (*known.places, *known.nodes)}

    def close(self, code: int) -> None:
        """Send the agents home and free the results directory."""
        self.controller.quit(code)
        self.recorder.close()

    def _status(self) -> RunStatus:
        facts = {**self.facts(), "environment": self._environment(), "timings": self.timings()}
        return RunStatus(terms=self.terms, places=self.places(), facts=facts)

    def facts(self) -> dict[str, Any]:
        """What the verdict is about: level, profile, expected inventory, which limits."""
        facts = self.inventory.facts
        return {
            "level": self.settings.level,
            "profile": self.profile.name,
            "expected": {"nodes": facts["nodes"], "gpus_per_node": facts["gpus_per_node"]},
            "thresholds_sha256": self.thresholds.sha256,
            "changed_limits": self.changed_limits,
            "changed_terms": self.changed_terms,
            "soak_s": self.settings.soak_s,
            "waivers": self.waivers.facts,
            **({"selftest": self.selftest} if self.selftest is not None else {}),
        }

    def timings(self) -> dict[str, float]:
        """Seconds: the whole session so far, starting the ranks, waiting for measurements, everything else."""
        total_s = time.monotonic() - self.started_s
        startup_s = self._binding.startup_s if self._binding is not None else 0.0
        measuring_s = self.controller.measuring_s
        return {
            "total_s": round(total_s, 3),
            "startup_s": round(startup_s, 3),
            "measuring_s": round(measuring_s, 3),
            "other_s": round(max(0.0, total_s - startup_s - measuring_s), 3),
        }

    def _environment(self) -> dict[str, Any]:
        identities = self._binding.identities if self._binding is not None else {}
        return {
            "versions": read_versions(),
            "gpus": sorted({who.gpu_name for who in identities.values() if who.gpu_name}),
            "launched_by": "torchrun" if self.launch is not None else "pytest",
            "messages": "signed" if self.controller.is_signed else "unsigned",
            "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "CUDA_"))},
        }


def require_torch() -> None:
    """Check the version of torch without importing it.

    Raises:
        ConfigurationError: not installed, or older than the oldest that can work.
    """
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise ConfigurationError("torch is not installed; pip install torch") from None
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if found < OLDEST_TORCH:
        wanted = ".".join(map(str, OLDEST_TORCH))
        raise ConfigurationError(f"torch {version} is too old: at least {wanted} is needed (2.11 and 2.13 were run)")


def _shown(settings: Settings) -> dict[str, Any]:
    return {name: str(getattr(settings, name)) for name in settings.__slots__}
