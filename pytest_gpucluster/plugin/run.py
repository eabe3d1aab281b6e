"""One acceptance run inside a pytest session: its plugins, its start, and what its fixtures ask for.

Who has which hook of pytest::

    options.py     pytest_addoption, _load_initial_conftests, _configure, _collection_modifyitems: in every project
    exit_code.py   pytest_cmdline_main: around everything
    pairing.py     what was collected, ignored and left out
    run.py         pytest_sessionstart, _collection_modifyitems, _runtestloop, _runtest_setup: start, self-test, ready arguments
    collection.py  pytest_collection, _collectreport, _collection_modifyitems, _collection_finish: the expected set
    second_chance.py  pytest_runtest_protocol, _runtestloop, _runtest_setup: what is undecided is run once more at the end
    phases.py      pytest_runtest_*, _pyfunc_call, _fixture_setup: one test, from its begin to its outcome
    header.py      pytest_report_teststatus: no letters where a bar shows the progress
    end.py         pytest_keyboard_interrupt, _sessionfinish, _terminal_summary: verdict, reports, exit status
    xdist.py       what is different in the processes of pytest-xdist
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.cluster.binding import places_of_parts
from pytest_gpucluster.cluster.calls import look_again
from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.config.settings import Settings
from pytest_gpucluster.config.torchrun import Launch
from pytest_gpucluster.controller.call import Observer
from pytest_gpucluster.controller.controller import Controller
from pytest_gpucluster.errors import ConfigurationError, GpuclusterError
from pytest_gpucluster.judging import waivers as waiver_file
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.failure_text import Possible
from pytest_gpucluster.judging.forecast import REHEARSED_BUDGET_S, SELFTEST
from pytest_gpucluster.judging.selection import ONLY
from pytest_gpucluster.plugin import pairing
from pytest_gpucluster.plugin.collection import Collection
from pytest_gpucluster.plugin.end import End, Termination
from pytest_gpucluster.plugin.junit import keep_less, leave_out_junit
from pytest_gpucluster.plugin.pairing import ALL_TESTS, Pairing, as_usage_error, is_under_xdist, register_part, require_argument
from pytest_gpucluster.plugin.phases import Phases
from pytest_gpucluster.plugin.second_chance import SecondChance
from pytest_gpucluster.plugin.stash_keys import CRITERION, SIMULATION
from pytest_gpucluster.plugin.terminal import Terminal
from pytest_gpucluster.plugin.verdict_item import set_aside
from pytest_gpucluster.plugin.whole_run.run_readings import Readings
from pytest_gpucluster.protocol.codec import Secret
from pytest_gpucluster.reporting.files import require_apart, require_takeable, require_writable
from pytest_gpucluster.reporting.results import selftest_lines
from pytest_gpucluster.run_setup import prepare
from pytest_gpucluster.session import Session
from pytest_gpucluster.text import counted
from pytest_gpucluster.thresholds.resolve import BOUNDS_OF_FABRIC, BUDGET

RUNS_NO_TEST = ("collectonly", "showfixtures", "show_fixtures_per_test", "cacheshow", "setupplan")
"""Options of pytest under which no test runs."""


class Run:
    """A pytest plugin that starts the run, and has the other plugins of it."""

    def __init__(
        self, config: pytest.Config, settings: Settings, launch: Launch | None, *, controller: Controller | None = None
    ) -> None:
        """Check everything; start nothing. ``controller`` is used in place of one of the run's own.

        Raises:
            ConfigurationError: see :func:`prepare`.
        """
        self._config = config
        setup = prepare(settings, launch, start=config.invocation_params.dir, simulation=config.stash.get(SIMULATION, None))
        inputs = [setup.thresholds.path, *filter(None, (settings.thresholds, config.inipath))]
        waivers = {folder / waiver_file.NAME for folder in (config.invocation_params.dir, setup.thresholds.path.parent)}
        secret = Secret.of_run(launch)  # from here on no test, and no process that a test starts, finds it in its environment
        self.session = Session(setup, rootdir=config.rootpath, controller=controller, secret=secret)
        spare(config, self._junit, settings, [*inputs, *waivers])
        self.terminal = Terminal(config, self.session)
        self._termination = Termination(self.session)
        self.collection = Collection(self.session, self.terminal, config.stash[ALL_TESTS], self.begin, self.places_of_parts)
        self.readings = Readings(lambda: self.session.cluster, lambda: self.collection.tests)
        self.phases = Phases(self.session, self.terminal, self.collection, self._termination, self.readings)
        self.session.caller = self.phases
        self.end = End(config, self.session, self.terminal, self._termination, self.begin)
        self.second_chance = SecondChance(self.phases, self.terminal.live, self._termination, self._look_again)
        self._is_due = False
        self.shared_fixtures: dict[int, list[Any] | None] = {}
        """By test function, the fixtures that its places share; None where pytest sets up each. See ``pairing.hand_over``."""

    def register(self) -> None:
        """Register every plugin of this run.

        Raises:
            pytest.UsageError: ``-p no:NAME`` leaves one of them out.
        """
        plugins = {
            "run": self,
            "screen": self.terminal.screen,
            "collection": self.collection,
            "phases": self.phases,
            "second-chance": self.second_chance,
            "end": self.end,
        }
        for name, plugin in plugins.items():
            register_part(self._config, plugin, name)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Fill in the arguments of a test that stand ready, before pytest makes the others."""
        pairing.hand_over(self, item)

    def recipe(self, key: str) -> dict[str, Any]:
        """The recipe of an entry as keyword arguments for ``cluster.run``, its deadline included.

        Raises:
            ConfigurationError: there is no such entry.
        """
        if key not in self.session.setup.criteria:
            hint = did_you_mean(str(key), list(self.session.setup.criteria))
            raise ConfigurationError(f"recipe({key!r}): {self.session.setup.thresholds.path} has no such criterion.{hint}")
        threshold = self.session.setup.criteria[key]
        deadline = {} if threshold.deadline_s is None else {"deadline_s": threshold.deadline_s}
        return {**threshold.recipe, **deadline}

    def budget(self, key: str, *, share: float = 1.0) -> float | None:
        """The seconds that a measurement of an entry may take, or a share of them: by ``takes_s``; None without one."""
        setup = self.session.setup
        threshold = setup.criteria.get(key)
        if threshold is None or threshold.takes_s is None:
            return None
        return share * max(BUDGET * threshold.takes_s, REHEARSED_BUDGET_S if setup.profile.rehearsal else 0.0)

    def possible(self, key: str, *, gpus: int = 1) -> Possible:
        """What the values of an entry can be over so many GPUs; anything, where the file has no such entry or no bound."""
        threshold = self.session.setup.criteria.get(key)
        facts = self.session.state.cluster_facts
        bound = None if threshold is None else threshold.best_possible(gpus=gpus, cluster=facts)
        return Possible(key=key, bound=bound)

    def criterion_of(self, item: pytest.Item) -> Criterion:
        """The criterion that this test judges, at its place as it is bound now, with the bound of the ports that are there.

        Raises:
            ConfigurationError: the test does not take it as an argument.
        """
        require_argument("criterion", item.stash.get(CRITERION, None), nodeid=item.nodeid)
        found = item.stash[CRITERION]
        if found.threshold.bound in BOUNDS_OF_FABRIC:
            facts = self.session.state.cluster_facts
            most = found.threshold.best_possible(gpus=int(facts["world_size"]), cluster=facts)
            found.limit = replace(found.limit, bound=most)
        bound = self.session.state.places()  # with the rank, the UUID and the like of each
        found.expected = tuple(bound[one.id] for one in found.expected)
        if found.place is not None:
            found.place = bound[found.place.id]
        return found

    def _look_again(self) -> None:
        """Ask again who uses the GPUs that were not idle before this run; where nobody answers, what is known stays."""
        with contextlib.suppress(GpuclusterError):
            look_again(self.session.cluster)

    def pytest_sessionstart(self) -> None:
        """Prepare to measure, unless this command runs no test, or is not the one to do so. SIGTERM is handled from here on.

        No file is touched before the tests are collected and accepted.

        Raises:
            pytest.UsageError: the results directory cannot be taken; seen here, before tests are collected for seconds.
        """
        option = self._config.option
        if any(getattr(option, name, None) for name in RUNS_NO_TEST) or hasattr(self._config, "workerinput"):
            return  # of the workers of pytest-xdist, agents, results and reports belong to their controller
        with as_usage_error():
            require_takeable(self.session.setup.settings.results_dir)
        self._is_due = True
        keep_less(self._config, lambda: self.phases.properties)
        if not is_under_xdist(self._config):  # where tests of all places mix, pytest's dots are clearer
            self.terminal.screen.take_over()
        self._termination.install()

    def begin(self, test_files: Iterable[str] = ()) -> None:
        """Take the results directory and start the agents, once. Called when the tests were accepted, or at an early end.

        Raises:
            pytest.UsageError: the results directory or the JUnit file cannot be written, or a report would replace a test.
        """
        with as_usage_error():
            spare(self._config, self._junit, self.session.setup.settings, [self._config.rootpath / file for file in test_files])
        if not self._is_due or (self.collection.earlier.is_ahead and not is_under_xdist(self._config)):
            return
        self._is_due = False
        is_distributed, settings, live = is_under_xdist(self._config), self.session.setup.settings, self.terminal.live
        shown = live.output if self._config.getoption("capture", default="no") == "no" else None
        with as_usage_error():
            for file in filter(None, (settings.summary, settings.metrics)):
                require_writable(file)
            self.session.open(
                junit=self._junit,
                command=_command(self._config, self.session.setup.launch),
                observer=None if is_distributed else Observer(on_wait=live.tick, on_progress=live.progress, on_output=shown),
                makes_calls=not is_distributed,  # there, calls come from other threads
            )

    @property
    def _junit(self) -> Path | None:
        """The JUnit file that pytest will write; None without one."""
        junit = getattr(self._config.option, "xmlpath", None)
        return self._config.invocation_params.dir / junit if junit else None

    def pytest_collection_modifyitems(self) -> None:
        """Go on with the unfinished run in the results directory, if this is wanted and there is one.

        Called before the tests are paired: those whose outcome is kept are left out then.

        Raises:
            pytest.UsageError: it cannot be gone on with.
        """
        if self._is_due and not is_under_xdist(self._config):
            self.collection.earlier.look(junit=self._junit)

    def places_of_parts(self) -> frozenset[str]:
        """The ids of the places that ``--gpucluster-only`` names; the parts themselves are asked, before a file is touched.

        Raises:
            pytest.UsageError: no such part is there, or nothing can be asked.
        """
        if not self._is_due:
            raise pytest.UsageError(f"{ONLY} asks the parts who they are, and this command starts nothing; leave it out")
        with as_usage_error(GpuclusterError):
            binding = self.session.meet_early(junit=self._junit)
            return places_of_parts(self.session.setup.settings.only, binding.by_id.values())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Run the self-test before the first test. The verdict comes after all hooks of this loop: ``end.py`` runs it."""
        set_aside(session)
        if self.session.setup.settings.selftest and self.session.recorder.is_open and session.items:
            self._run_selftest()
        return (yield)

    def _run_selftest(self) -> None:
        """Run the self-test once, show it and record it."""
        from pytest_gpucluster.selftest.running import run_selftest  # noqa: PLC0415 -- loads torch

        live = self.terminal.live
        live.begin(Pairing(criterion=SELFTEST, place=None, judges=False))
        live.say(f"gpucluster: {SELFTEST}: planting a slow, a wrong, a dead and a hung rank in software")
        facts = run_selftest(self.session, lambda step, fraction: live.progress(0, step, fraction)).facts
        live.say(f"gpucluster: {SELFTEST}: {counted(facts['places'], 'place')}, {facts['seconds']:.1f} s")
        for line in selftest_lines(facts):
            live.say(f"gpucluster: {SELFTEST}: {line}", red=line in facts["objections"])
        self.session.take_selftest(facts)


def _command(config: pytest.Config, launch: Launch | None) -> dict[str, Any]:
    """How a run was started: pytest's arguments, the folder, and the nodes and ranks where torchrun did it."""
    torchrun = None if launch is None else {"nodes": launch.num_nodes, "ranks": launch.local_world_size}
    called = config.invocation_params
    return {"arguments": [*map(str, called.args)], "folder": str(called.dir), "torchrun": torchrun}


def spare(config: pytest.Config, junit: Path | None, settings: Settings, read: Iterable[Path]) -> None:
    """Check that no report replaces one of these files, or another report; a refused JUnit file is not written then.

    Raises:
        ConfigurationError: one would.
    """
    log = (config.option.log_file or config.getini("log_file")) if hasattr(config.option, "log_file") else None
    wanted = (junit, settings.summary, settings.metrics, settings.termination, Path(log) if log else None)
    emptied = config.invocation_params.dir / (getattr(config.option, "basetemp", None) or "/dev/null")
    try:
        require_apart(wanted, folder=settings.results_dir, read=read, emptied=emptied)
    except ConfigurationError:
        leave_out_junit(config)
        raise
