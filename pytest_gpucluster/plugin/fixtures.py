"""The fixtures: ``cluster``, ``criterion``, ``place``, ``node``, ``recipe``, ``budget``, ``soak``, readings; those of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.plugin.activation import REFUSAL, RUN, launch_or_usage_error, run_of
from pytest_gpucluster.plugin.pairing import is_own_fixture, require_argument

if TYPE_CHECKING:
    from pytest_gpucluster.cluster.calls import Cluster
    from pytest_gpucluster.cluster.soak import Soak
    from pytest_gpucluster.judging.criterion import Criterion
    from pytest_gpucluster.places import Place
    from pytest_gpucluster.plugin.run import Run
    from pytest_gpucluster.plugin.whole_run.run_readings import OverRun, Readings


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``place`` and ``node`` stand for every GPU and every node of the expected inventory."""
    mark = metafunc.definition.get_closest_marker("each_entry")
    if mark is not None:
        metafunc.parametrize(mark.args[0], _brackets(metafunc.config, metafunc.definition.originalname.removeprefix("test_")))
    for name in ("place", "node"):
        if is_own_fixture(metafunc._arg2fixturedefs.get(name)):  # noqa: SLF001 -- no public way
            try:
                inventory = run_of(metafunc.config).session.setup.inventory
            except (pytest.UsageError, pytest.exit.Exception) as error:
                metafunc.config.stash[REFUSAL] = error
                metafunc.parametrize(name, [None], ids=["refused"], indirect=True)
                continue
            places = inventory.places if name == "place" else inventory.nodes
            metafunc.parametrize(name, places, ids=[place.id for place in places], indirect=True)


def _brackets(config: pytest.Config, base: str) -> list[str]:
    """What stands in the brackets of the entries ``base[...]``, in their order.

    Never empty: a test without an entry is then reported as such.
    """
    try:
        criteria = run_of(config).session.setup.criteria
    except (pytest.UsageError, pytest.exit.Exception):  # kept by the plugin, which raises it later
        criteria = {}
    return [key.removeprefix(f"{base}[").removesuffix("]") for key in criteria if key.startswith(f"{base}[")] or ["none"]


def _run(config: pytest.Config) -> Run:
    """The run of this session. None can begin any more when a test asks for a fixture while it runs; torchrun's rank ends."""
    if RUN not in config.stash and not hasattr(config, "workerinput") and launch_or_usage_error() is None:
        pytest.fail("no run has begun: take the fixture as an argument of a test, or give --gpucluster", pytrace=False)
    return run_of(config)


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Cluster:
    """The whole cluster: ``run(function, per=...)``, ``places``, ``nodes``, ``world_size``, ``device``."""
    return _run(pytestconfig).session.cluster


def _of_test(request: pytest.FixtureRequest) -> Place:
    run, place = _run(request.config), cast("Place", getattr(request, "param", None))
    require_argument(str(request.fixturename), place, nodeid=request.node.nodeid)
    return run.session.cluster.require_present(place)


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """One expected GPU; an ERROR in set-up when nothing answers for it."""
    return _of_test(request)


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Place:
    """One expected node; an ERROR in set-up when nothing answers for it."""
    return _of_test(request)


@pytest.fixture
def criterion(pytestconfig: pytest.Config) -> Criterion:
    """The entry of thresholds.yaml with this test's name: ``criterion.require(value)``."""
    run = _run(pytestconfig)  # pytest makes ``request`` twice a test, each time with the signature of a function
    return run.criterion_of(run.phases.running)


@pytest.fixture(scope="session")
def recipe(pytestconfig: pytest.Config) -> Any:
    """``recipe(key)``: how the entry ``key`` wants its value measured, as keyword arguments for ``cluster.run``."""
    return _run(pytestconfig).recipe


@pytest.fixture(scope="session")
def budget(pytestconfig: pytest.Config) -> Any:
    """``budget(key, share=1.0)``: the seconds that the entry ``key`` may take, three times its ``takes_s``; None without one.

    For measurements that take ``budget_s``: they repeat less often, or leave out what is only shown, and say so.
    """
    return _run(pytestconfig).budget


@pytest.fixture(scope="session")
def possible(pytestconfig: pytest.Config) -> Any:
    """``possible(key, gpus=1)``: what the values of the entry ``key`` can be, for a test that compares or divides them.

    ``.error(value, where=...)`` is a MeasurementError for more than the hardware can, else None; ``.require`` raises it.
    """
    return _run(pytestconfig).possible


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> Soak:
    """Rounds of work for as long as ``--gpucluster-level soak:8h`` says: ``for turn in soak.rounds(works)``."""
    return _run(pytestconfig).phases.soak()


@pytest.fixture(scope="session")
def readings(pytestconfig: pytest.Config) -> Readings:
    """``readings.first(function, per=...)``: what a reader gave before the first test."""
    return _run(pytestconfig).readings


@pytest.fixture
def over_run(pytestconfig: pytest.Config) -> OverRun:
    """Of a test with the mark ``over_run(function, per=...)``: ``first, last = over_run[place]``, and ``over_run.seconds``."""
    run = _run(pytestconfig)
    found = run.readings.over_run(run.phases.running)
    run.phases.note_results(found.last)  # measured for the first of the tests; each has to read its place
    return found


class Entries:
    """The entries of the limits with one name: ``NAME[bracket]``."""

    def __init__(self, config: pytest.Config) -> None:
        """Of the run of this configuration."""
        self._config = config

    def brackets(self, name: str) -> list[str]:
        """What stands in the brackets of all of them."""
        return _brackets(self._config, name)

    def selected(self, name: str) -> list[str]:
        """The keys of those that a selected test judges and no rule excludes."""
        return [key for key in _run(self._config).collection.criteria() if key.partition("[")[0] == name]


@pytest.fixture(scope="session")
def entries(pytestconfig: pytest.Config) -> Entries:
    """The entries of the limits: ``entries.brackets(name)``, ``entries.selected(name)``."""
    return Entries(pytestconfig)


@pytest.fixture(scope="session")
def compared_places(pytestconfig: pytest.Config) -> tuple[Place, ...] | None:
    """All places if a selected test has the mark ``compares``, else None: for ``cluster.run(..., places=compared_places)``."""
    run = _run(pytestconfig)
    return run.session.cluster.places if run.collection.compares() else None


def _in_workers(what: str) -> Any:
    """A fixture of distributed tests, known by the name that it is given below."""

    def only(request: pytest.FixtureRequest) -> None:
        _run(request.config)
        if request.node.get_closest_marker("distributed") is None:
            raise ConfigurationError(f"the fixture {request.fixturename!r} exists in @pytest.mark.distributed tests only")

    only.__doc__ = f"In a distributed test: {what}."
    return pytest.fixture(only)


process_group = _in_workers("the default process group")
rank = _in_workers("the rank in the process group")
world_size = _in_workers("the size of the process group")
device = _in_workers("this rank's ``torch.device``")
