"""One run: its setup, the expected set, the ranks, the outcomes. Knows nothing of pytest."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_gpucluster.agent.worker_process import overridden_variables
from pytest_gpucluster.cluster.binding import Binding, bind
from pytest_gpucluster.cluster.calls import Caller, Cluster
from pytest_gpucluster.config.run_files import LOGS
from pytest_gpucluster.config.settings import Settings, requested
from pytest_gpucluster.controller.call import Observer
from pytest_gpucluster.controller.controller import Controller
from pytest_gpucluster.controller.inline import InlineController
from pytest_gpucluster.errors import GpuclusterError, MeasurementError
from pytest_gpucluster.fleet.agents import FleetController
from pytest_gpucluster.inventory.identity import read_variables, read_versions
from pytest_gpucluster.judging import plan as planning
from pytest_gpucluster.judging import promises
from pytest_gpucluster.judging.forecast import Forecast, Suite, forecast, selftest_s
from pytest_gpucluster.judging.verdict import MISSING, PENDING, SKIPPED, Record, Terms, Verdict, decide
from pytest_gpucluster.places import Place
from pytest_gpucluster.protocol.codec import Secret
from pytest_gpucluster.protocol.messages import ReportTarget
from pytest_gpucluster.records.reading import run_identity
from pytest_gpucluster.reporting.lines import names_of_absent
from pytest_gpucluster.reporting.recorder import Recorder, RunStatus
from pytest_gpucluster.reporting.results import JunitForm, bound_facts
from pytest_gpucluster.reporting.unfinished_run import UnfinishedRun, link_to
from pytest_gpucluster.run_setup import RunSetup
from pytest_gpucluster.thresholds.resolve import SEEN_PORTS

JOIN_S = 120.0
AGENTS_LOG = "agents.log"
UNSIGNED = "messages were not signed"


class RunState:
    """What is known of a run so far: all that its verdict and its reports need besides the outcomes.

    Attributes:
        binding: what answers at each place; None before the first use of :attr:`Session.cluster` has bound them.
        objections: what forbids an acceptance.
        changed_terms: terms of the run that differ from what was promised elsewhere.
        selftest: what the self-test found; None without one.
        own_tests_only: the given files are a user's own, and none of the packaged suite is among them.
        run: the id of the run, when it began, by which command, who, where.
    """

    def __init__(self, setup: RunSetup, controller: Controller | InlineController, plan: planning.Plan) -> None:
        """Nothing has answered yet."""
        self.setup = setup
        self.controller = controller
        self.binding: Binding | None = None
        self.objections = [*setup.objections]
        self.changed_terms = [*setup.changed_terms]
        self.selftest: dict[str, Any] | None = None
        self.own_tests_only = False
        self._plan = plan
        self._last_timings: dict[str, float] | None = None
        self.run = run_identity(secrets.token_hex(8))
        self.recorder = Recorder(plan, status=self._status)

    def places(self) -> Mapping[str, Place]:
        """Every expected place and node by id, bound as far as anything said hello."""
        return self.binding.by_id if self.binding is not None else self.setup.inventory.by_id

    @property
    def shape(self) -> str:
        """The cluster that the verdict is about: what answered of what was expected."""
        bound, inventory = self.binding, self.setup.inventory
        if bound is None:
            return promises.shape(inventory, None)
        answers = promises.shape(inventory, {name: one.gpu_name for name, one in bound.identities.items()})
        answering = {inventory.by_id[name].node for name in bound.identities}
        absent = names_of_absent([node for node in bound.nodes if node.node not in answering])
        return f"{answers} (absent: {absent})" if absent else answers

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the verdict line says of the setup and of the ranks. Several nodes on one host are one host."""
        hosts = {node.hostname for node in self.binding.nodes if node.hostname} if self.binding is not None else set()
        unsigned = (UNSIGNED,) if len(hosts) > 1 and not self.controller.is_signed else ()
        spec = self.setup.profile.spec
        untried = (f"its limits were never tried on {spec.title}",) if spec is not None and spec.is_untried else ()
        return (*untried, *unsigned, *(self.binding.remarks if self.binding is not None else ()))

    @property
    def terms(self) -> Terms:
        """What decides the verdict besides the outcomes."""
        return Terms(
            rehearsal=self.setup.rehearsal,
            simulated=self.setup.simulation is not None,
            own_tests_only=self.own_tests_only and not self.setup.settings.gate,
            level_reached=self.setup.level_reached,
            objections=tuple(self.objections),
            changed_limits=tuple(self.setup.changed_entries),
            changed_terms=tuple(self.changed_terms),
            shape=self.shape,
            remarks=(*self.remarks, *self.recorder.soak_remarks),
        )

    @property
    def cluster_facts(self) -> dict[str, float]:
        """What the bounds of this cluster are made of: its shape, and what its ports carry, as far as any node shows it."""
        seen = self.binding.nic_gb_s_per_gpu if self.binding is not None else None
        return {**self.setup.inventory.facts, **({SEEN_PORTS: seen} if seen is not None else {})}

    def facts(self) -> dict[str, Any]:
        """What the verdict is about, as results.json has it."""
        selftest = {"selftest": self.selftest} if self.selftest is not None else {}
        resumed = {"soak_resumed": self.recorder.resumed} if self.recorder.resumed is not None else {}
        parts = {"parts": found} if (found := self.recorder.parts.facts(self._plan)) else {}
        return {"run": self.run, **self.setup.facts, "changed_terms": [*self.changed_terms], **selftest, **resumed, **parts}

    def started(self) -> dict[str, Any]:
        """What a run is, before anything is planned, for the journal."""
        settings = self.setup.settings
        shown = {name: str(getattr(settings, name)) for name in settings.__slots__}
        variables = read_variables(os.environ)
        return {"versions": read_versions(), "settings": shown, "facts": self.facts(), "variables": variables}

    def end(self) -> None:
        """Stop the clocks: files, page and screen say the same seconds, those until the verdict is decided."""
        self._last_timings = self.timings()

    def timings(self) -> dict[str, float]:
        """Seconds: the whole session so far, starting the ranks, waiting for measurements, everything else.

        ``waited_s`` of them all ranks waited for the controller: after the first call no call was under way, or its replies
        were there and were read.
        """
        if self._last_timings is not None:
            return self._last_timings
        total_s = time.monotonic() - self.setup.started_s
        startup_s = self.binding.startup_s if self.binding is not None else 0.0
        measuring_s = self.controller.clock.measuring_s
        return {
            "total_s": round(total_s, 3),
            "startup_s": round(startup_s, 3),
            "measuring_s": round(measuring_s, 3),
            "other_s": round(max(0.0, total_s - startup_s - measuring_s), 3),
            "waited_s": round(self.controller.clock.waited_s, 3),
        }

    def _status(self) -> RunStatus:
        facts = {**self.facts(), "environment": self.environment(), "timings": self.timings()}
        settings = self.setup.settings
        junit = JunitForm(form=settings.junit, is_strict=settings.junit_strict)
        return RunStatus(terms=self.terms, places=self.places(), facts=facts, junit=junit)

    def environment(self) -> dict[str, Any]:
        """Versions, GPUs and variables of the run, as results.json has them."""
        identities = self.binding.identities if self.binding is not None else {}
        return {
            "versions": read_versions(),
            "gpus": sorted({one.gpu_name for one in identities.values() if one.gpu_name}),
            "launched_by": _launched_by(self.setup),
            "messages": "signed" if self.controller.is_signed else "unsigned",
            "variables": {name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "CUDA_"))},
            "overridden_variables": {} if self.setup.settings.inline else overridden_variables(),
        }


class Session:
    """One run. It starts processes only in :meth:`open`."""

    def __init__(
        self, setup: RunSetup, *, rootdir: Path, controller: Controller | None = None, secret: Secret | None = None
    ) -> None:
        """Start nothing.

        Args:
            setup: what the run is to do, checked.
            rootdir: pytest's root folder; workers import test files relative to it.
            controller: makes the calls in place of a controller of this run's own.
            secret: signs the messages between ranks.
        """
        self.setup = setup
        self.plan = planning.Plan()
        self.controller = controller or _controller(setup, rootdir, secret)
        self.state = RunState(setup, self.controller, self.plan)
        self.recorder = self.state.recorder
        self.caller: Caller | None = None
        """Says which places the tests need at the moment, and is given the results of every measurement."""
        self._cluster: Cluster | None = None
        self._bind_error: Exception | None = None
        self._is_planned = False
        self._early: tempfile.TemporaryDirectory[str] | None = None
        self.unfinished: UnfinishedRun | None = None
        self.removed_runs: tuple[str, ...] = ()

    def go_on_with(self, unfinished: UnfinishedRun) -> None:
        """Be the next part of an unfinished run. Called before anything is started."""
        self.unfinished = unfinished
        self.state.run = unfinished.state.facts["run"]

    @property
    def has_started(self) -> bool:
        """Whether agents were started, so that they have to be ended."""
        return self.recorder.is_open or self._early is not None

    def meet_early(self, *, junit: Path | None = None) -> Binding:
        """Start the agents and bind the places before :meth:`open`, so that a usage error can still touch no file.

        Raises:
            MeasurementError: the ranks cannot be reached at all.
        """
        if self._early is None:
            self._early = tempfile.TemporaryDirectory(prefix="gpucluster-")
            self._start(Path(self._early.name), junit=junit, observer=Observer())
        if self.state.binding is None:
            self.state.binding = self._bind()
        return self.state.binding

    def _start(self, logs: Path, *, junit: Path | None, observer: Observer) -> None:
        folder, file = str(self.setup.settings.results_dir.absolute()), str(junit.absolute()) if junit is not None else None
        target = ReportTarget(folder=folder, junit=file, run=self.state.run["id"])
        self.controller.start(log=logs / AGENTS_LOG, target=target, observer=observer)

    def open(
        self,
        *,
        junit: Path | None = None,
        observer: Observer | None = None,
        makes_calls: bool = True,
        command: Mapping[str, Any] | None = None,
    ) -> None:
        """Take the results directory and start the agents; returns before they are ready.

        Args:
            junit: the JUnit file that pytest will write. An agent writes it if this process dies.
            observer: gets what ranks do and print; its ``on_work`` is the session's own.
            makes_calls: the thread of this session makes the calls, and writes the reports while the ranks work.
            command: how this run was started, as plain data, so that it can be started again.

        Raises:
            ConfigurationError: the results directory or the JUnit file cannot be written.
        """
        results, replicate = self.setup.settings.results_dir, self.controller.replicate
        self.removed_runs = self.recorder.open(results, junit=junit, replicate=replicate, unfinished=self.unfinished)
        if self.setup.settings.soak_s is not None:
            self.recorder.look_for_cut_soak(self.state.facts(), read_versions())
        if self.unfinished is None:
            link = link_to(self.recorder.cut_soak)
            self.recorder.write("started", run=self.state.run["id"], command=command, **link, **self.state.started())
        logs = self.setup.settings.results_dir.absolute() / LOGS
        self.recorder.calls_are_elsewhere = not makes_calls
        observer = replace(observer or Observer(), on_work=self.recorder.catch_up if makes_calls else None)
        if self._early is None:
            self._start(logs, junit=junit, observer=observer)
        else:
            self.controller.observe(observer, logs=logs)

    @property
    def cluster(self) -> Cluster:
        """The cluster, all places bound; the first use waits for every rank's hello.

        Raises:
            MeasurementError: the ranks cannot be reached at all.
        """
        if self._cluster is None:
            state = self.state
            if state.binding is None:
                state.binding = self._bind()
            binding = state.binding
            limits: dict[str, Any] = {"deadline_s": self.setup.deadline_s, "reads_only": self.setup.settings.audit}
            self._cluster = Cluster(self.controller, binding, caller=self.caller, **limits)
            self._object_to_gpus(binding)
            state.changed_terms += [*_terms_of_nodes(binding), *_other_options(self.controller, self.setup.settings)]
            places, nodes = ([bound_facts(place) for place in some] for some in (binding.places, binding.nodes))
            found = {
                "unheard": binding.unidentified,
                "changed_terms": state.changed_terms,
                "remarks": state.remarks,
                "shape": state.shape,
                "environment": state.environment(),
            }
            self.recorder.write("bound", places=places, nodes=nodes, **found)
        return self._cluster

    def _bind(self) -> Binding:
        """Bind the places; where that failed once, raise the same error again."""
        if self._bind_error is not None:
            raise self._bind_error.with_traceback(None)  # of an earlier test
        try:
            return bind(self.controller, self.setup.inventory, within_s=JOIN_S)
        except GpuclusterError as error:
            self._bind_error = error
            raise
        except Exception as error:
            self._bind_error = MeasurementError(f"no rank can be reached: {error}", kind="lost")
            raise self._bind_error from error

    def _object_to_gpus(self, binding: Binding) -> None:
        """Object to GPUs that nobody expected, to GPUs that look the same, and to waivers that name two parts."""
        objections = self.state.objections
        more = binding.unexpected or promises.unexpected_gpus(binding.identities.values(), self.setup.inventory)
        if more and not self.setup.settings.inline:
            objections.append(f"more GPUs than expected: {', '.join(more)}")
        doubled = promises.doubled_gpus(binding.places)
        if doubled:
            others = f" and {len(doubled) - 1} more" if len(doubled) > 1 else ""
            objections.append(f"one GPU in two places: {doubled[0]}{others}")
        objections += [*promises.doubled_serials(binding.places), *self.setup.waivers.bind([*binding.places, *binding.nodes])]

    def fix_plan(self) -> None:
        """Add the criteria of the profile that no test was selected for, and record the whole expected set."""
        self._is_planned = True
        accept_at = self.setup.profile.accept_at
        level = self.setup.settings.level
        planning.complete(self.plan, self.setup.criteria, self.setup.inventory, level=level, accept_at=accept_at)
        self.recorder.record_plan()

    def forecast(self, suite: Suite) -> Forecast:
        """About how long the selected tests take, by their entries and by what is known of the tests."""
        criteria, inventory, soak_s = self.setup.criteria, self.setup.inventory, self.setup.settings.soak_s
        cut = self.recorder.cut_soak
        due = [one.criterion for one in self.plan if one.outcome == PENDING]
        rules = {key: planning.rule_against(criteria[key], inventory) for key in {*due} & {*criteria}}
        programs = {key: one.needs.program for key, one in criteria.items() if one.needs.program is not None}
        absent = frozenset(key for key, program in programs.items() if shutil.which(program) is None)
        planned = forecast(
            Counter(key for key in due if rules.get(key) is None),
            criteria,
            replace(suite, absent=absent),
            gpus_per_node=inventory.gpus_per_node,
            soak_s=soak_s - cut.elapsed_s if soak_s is not None and cut is not None and cut.why_not is None else soak_s,
        )
        left_out, is_rehearsal = sum(rule is not None for rule in rules.values()), self.setup.profile.rehearsal
        whole_s = selftest_s(places=len(inventory.places), is_rehearsal=is_rehearsal)
        return replace(planned, left_out=left_out, selftest_s=whole_s if self.setup.settings.selftest else 0.0)

    def record_unplanned(self, *, why: str) -> list[Record]:
        """Record all that the profile expects as missing, if the run ended before collection; returns those records."""
        if self._is_planned:
            return []
        self.fix_plan()
        unseen = [replace(record, outcome=MISSING, reason=why) for record in self.plan]
        for record in unseen:
            self.recorder.record_outcome(record)
        return unseen

    def skip_pending_by_rule(self) -> None:
        """Record as skipped what has no outcome and does not apply here: nothing of it is missing."""
        for record in self.plan.pending():
            threshold = self.setup.criteria.get(record.criterion)
            rule = planning.rule_against(threshold, self.setup.inventory) if threshold is not None else None
            if rule is not None:
                self.recorder.record_outcome(replace(record, outcome=SKIPPED, reason=rule.text, cause=rule.cause))

    def take_selftest(self, facts: dict[str, Any]) -> None:
        """Record what the self-test found. A fault that it missed forbids an acceptance."""
        self.state.selftest = facts
        self.state.objections += facts["objections"]
        self.recorder.record_selftest(facts)

    def decide(self) -> Verdict:
        """The verdict over what is on record."""
        return decide(self.plan, self.state.terms)

    def waive(self, record: Record) -> Record:
        """The record, waived if somebody answers for this failure at this part."""
        return self.setup.waivers.apply(record, self.state.places().get(record.place or ""))

    def close(self, code: int, *, last_lines: str = "") -> None:
        """End the agents, which show ``last_lines`` on their nodes, and free the results directory."""
        self.controller.quit(code, last_lines=last_lines)
        if self._early is not None:
            self._keep_early_log(Path(self._early.name) / AGENTS_LOG)
            self._early.cleanup()
        self.recorder.close()

    def _keep_early_log(self, log: Path) -> None:
        """Put what agents printed where the log of any other run is."""
        with contextlib.suppress(OSError):  # a full disk: the verdict is on record
            if self.recorder.is_open:
                shutil.copyfile(log, self.setup.settings.results_dir / LOGS / AGENTS_LOG)


def _terms_of_nodes(binding: Binding) -> list[str]:
    """What other nodes hide or set: before, only the controller's node was seen."""
    ranks = [binding.identities[place.id] for place in binding.places if place.id in binding.identities]
    own = next((binding.identities[place.id] for place in binding.places if place.rank == 0), None)
    hidden = promises.hidden_gpus(one for one in ranks if own is None or one.group_rank != own.group_rank)
    return [*hidden, *promises.other_variables(sorted(ranks, key=lambda one: own is None or one.group_rank != own.group_rank))]


def _other_options(controller: Controller | InlineController, settings: Settings) -> list[str]:
    """What the options of other nodes ask for: each one's pytest read the options of its own command line."""
    hellos = {rank: controller.hello_of(rank) for rank in range(controller.world_size)}
    own = hellos.get(0)
    if own is None:
        return []
    theirs = {(one.group_rank, one.hostname): one.requested for one in hellos.values() if one and one.requested is not None}
    theirs.pop((own.group_rank, own.hostname), None)
    others = [(hostname, options) for (_, hostname), options in theirs.items()]
    return promises.other_options([(own.hostname, requested(settings)), *others])


def _launched_by(setup: RunSetup) -> str:
    if setup.simulation is not None:
        return "a simulation"
    return "torchrun" if setup.launch is not None else "pytest"


def _controller(setup: RunSetup, rootdir: Path, secret: Secret | None) -> Controller | InlineController:
    device = "cpu" if setup.settings.audit else setup.inventory.device
    if setup.simulation is not None:
        return FleetController(setup.simulation, rootdir=rootdir, secret=secret)
    if setup.settings.inline:
        return InlineController(device=device, rootdir=rootdir)
    return Controller(setup.launch, num_local=setup.num_local, device=device, rootdir=rootdir, secret=secret)
