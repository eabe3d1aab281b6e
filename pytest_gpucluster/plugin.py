"""The pytest plugin: options, marks, fixtures, and who becomes an agent. Glue only; a run itself is plugin_run.py."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.errors import ConfigurationError
from pytest_gpucluster.launch import Launch, read_launch
from pytest_gpucluster.pairing import TEST_ARGUMENTS
from pytest_gpucluster.settings import Settings, parse_expect, parse_level

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from pytest_gpucluster.cluster import Place
    from pytest_gpucluster.criterion import Criterion
    from pytest_gpucluster.dispatch import Cluster
    from pytest_gpucluster.plugin_run import Run
    from pytest_gpucluster.soak import Soak

MARKS = {
    "distributed(per='cluster')": "the test's body runs on every rank, in a worker, with torch.distributed set up",
    "health": "GPU health, read through NVML",
    "compute": "matrix products",
    "memory": "GPU memory",
    "links": "links inside a node",
    "fabric": "links between nodes",
    "training": "real training",
    "platform": "host, scheduler, file system",
}
RUN = pytest.StashKey["Run"]()
ACTIVE = pytest.StashKey[bool]()
UNASKED = "under torchrun or pytest-xdist, fixtures of gpucluster need --gpucluster or the ini option gpucluster=true"
OWN_FIXTURES = ("cluster", "criterion", "place", "node", "recipe", "soak")


def pytest_addoption(parser: pytest.Parser) -> None:
    """The whole command line; a test freezes it."""
    group = parser.getgroup("gpucluster", "GPU cluster acceptance")
    group.addoption("--gpucluster", action="store_true", help="treat these tests as an acceptance run")
    group.addoption("--gpucluster-thresholds", metavar="FILE", type=Path, help="limits to judge by, instead of the packaged")
    group.addoption("--gpucluster-profile", metavar="NAME", help="profile of the thresholds file (default: by GPU name)")
    group.addoption("--gpucluster-expect", metavar="nodes=N,gpus_per_node=M", help="the inventory that was promised")
    group.addoption("--gpucluster-level", metavar="LEVEL", help="quick, standard (default), soak or soak:8h")
    group.addoption("--gpucluster-results", metavar="DIR", type=Path, help="results directory (default: gpucluster-results)")
    group.addoption("--gpucluster-gate", action="store_true", help="exit 0 only for the verdict ACCEPTED")
    group.addoption("--gpucluster-inline", action="store_true", help="run functions in this process, for one place (pdb)")
    group.addoption("--gpucluster-selftest", action="store_true", help="plant faults before the run, and say which it finds")
    parser.addini("gpucluster", "treat every run here as an acceptance run", type="bool", default=False)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> Generator[None, None, None]:
    """Under torchrun, every rank but 0 becomes an agent here, before any conftest or reporter acts."""
    early_config.stash[ACTIVE] = is_activated(early_config, args)  # args hold what addopts adds; later hooks lack that
    if early_config.stash[ACTIVE]:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        launch = launch_or_usage_error()
        if launch is not None and launch.rank > 0:
            become_agent(launch, roots=[early_config.rootpath, early_config.invocation_params.dir])
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, Any, Any]:
    """Where rank 0 leaves with 0 and never measured, nobody else tells the agents."""
    code = yield
    if int(code or 0) == 0:
        _say_goodbye(config)
    return code


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """``-n auto`` is one process for each GPU."""
    return run_of(config).session.inventory.gpus_per_node if config.stash.get(ACTIVE, False) else None


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks; start the run if this is one."""
    for mark, meaning in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: {meaning}")
    if config.stash.get(ACTIVE, False):
        run_of(config)


def is_activated(config: pytest.Config, args: Sequence[str]) -> bool:
    """Whether this run is ours: ``tests_acceptance`` named, the ini option set, or one of our options given."""
    options = vars(getattr(config, "known_args_namespace", config.option))
    if any(value for name, value in options.items() if name.startswith("gpucluster")):
        return True
    if any("tests_acceptance" in re.split(r"[/.\\]", str(arg).partition("::")[0]) for arg in args):
        return True
    return bool(config.getini("gpucluster"))


def launch_or_usage_error() -> Launch | None:
    """How this process was started; half of torchrun's environment is a usage error."""
    try:
        return read_launch()
    except ConfigurationError as error:
        raise pytest.UsageError(str(error)) from None


def become_agent(launch: Launch, *, roots: list[Path]) -> None:
    """Replace this process by its agent: same pid for torchrun, and nothing of pytest left."""
    from pytest_gpucluster import agent_main
    from pytest_gpucluster.controller import address_of, rank_of

    command = agent_main.command([rank_of(launch)], address_of(launch), roots=roots)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], command)  # noqa: S606 -- this very interpreter


def run_of(config: pytest.Config) -> Run:
    """The run, made at the first use."""
    if RUN not in config.stash:
        from pytest_gpucluster.plugin_last_words import LastWords
        from pytest_gpucluster.plugin_run import Run

        launch = launch_or_usage_error()
        if hasattr(config, "workerinput") and not config.stash.get(ACTIVE, False):
            pytest.fail(UNASKED, pytrace=False)  # a usage error would only crash this worker of pytest-xdist
        if launch is not None and not config.stash.get(ACTIVE, False):
            raise pytest.UsageError(UNASKED)
        refuse_mixed_starts(config, launch)
        try:
            config.stash[RUN] = Run(config, read_settings(config), launch)
        except ConfigurationError as error:
            raise pytest.UsageError(str(error)) from None
        config.pluginmanager.register(config.stash[RUN], "gpucluster-run")
        config.pluginmanager.register(LastWords(config.stash[RUN]), "gpucluster-last-words")
        if is_under_xdist(config):
            from pytest_gpucluster import plugin_xdist

            plugin_xdist.join(config, config.stash[RUN], uses_us)
    return config.stash[RUN]


def is_under_xdist(config: pytest.Config) -> bool:
    """Whether pytest-xdist distributes this session's tests (``-n``), or this is one of its workers."""
    return bool(getattr(config.option, "numprocesses", None)) or hasattr(config, "workerinput")


def refuse_mixed_starts(config: pytest.Config, launch: Launch | None) -> None:
    """pytest-xdist (``-n``) works on one node alone, with its own processes; a self-test needs workers that may die."""
    if config.option.gpucluster_selftest and config.option.gpucluster_inline:
        raise pytest.UsageError("--gpucluster-selftest kills workers, and --gpucluster-inline has none; leave one of them out")
    if is_under_xdist(config):
        if launch is not None:
            raise pytest.UsageError(
                "pytest-xdist (-n) cannot be used under torchrun: each rank has its GPU already; leave -n out"
            )
        if config.option.gpucluster_inline:
            raise pytest.UsageError("--gpucluster-inline runs in one process; leave -n out")
        if (config.option.gpucluster_level or "").startswith("soak"):
            raise pytest.UsageError("a soak measures all GPUs in turns of its own; leave -n out")
        if config.option.gpucluster_selftest:
            raise pytest.UsageError("--gpucluster-selftest needs all GPUs at once; leave -n out")
    elif getattr(config.option, "tx", None) and config.option.dist != "no":
        raise pytest.UsageError("pytest-xdist's --tx cannot be used here: one process for each GPU of this machine is -n auto")


def read_settings(config: pytest.Config) -> Settings:
    """The options as one frozen object.

    Raises:
        ConfigurationError: an option's value is not understood.
    """
    level, soak_s = parse_level(config.option.gpucluster_level or "standard")
    return Settings(
        thresholds=config.option.gpucluster_thresholds,
        profile=config.option.gpucluster_profile,
        expect=parse_expect(config.option.gpucluster_expect),
        level=level,
        soak_s=soak_s,
        results_dir=(config.invocation_params.dir / (config.option.gpucluster_results or "gpucluster-results")),
        gate=config.option.gpucluster_gate,
        inline=config.option.gpucluster_inline,
        selftest=config.option.gpucluster_selftest,
    )


def _say_goodbye(config: pytest.Config) -> None:
    """Help, markers, fixtures and collection end with 0, so torchrun waits for the other ranks: send them home.

    A usage error needs no word: torchrun ends the other ranks of this node, and its end closes the store. Not at exit:
    a connection made while the interpreter shuts down aborts the process.
    """
    run = config.stash.get(RUN, None)
    if run is not None and run.session.launch is not None and not run.session.is_open:
        run.session.controller.quit(0)
        return
    launch = read_launch() if run is None and config.stash.get(ACTIVE, False) else None
    if launch is not None:  # pytest 8 answers --version here, before anything is configured
        from pytest_gpucluster.controller import Controller

        Controller(launch, num_local=1, device="cpu", rootdir=config.rootpath).quit(0)


# Fixtures.


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``place`` and ``node`` stand for every GPU and every node of the expected inventory."""
    for name in ("place", "node"):
        if _is_defined_here(metafunc._arg2fixturedefs.get(name)):  # noqa: SLF001 -- no public way
            inventory = run_of(metafunc.config).session.inventory
            places = inventory.places if name == "place" else inventory.nodes
            metafunc.parametrize(name, places, ids=[place.id for place in places], indirect=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A run begins at the latest when a test asks for one of our fixtures."""
    if hasattr(config, "workerinput"):
        return  # its controller would have to begin it: the fixtures tell
    if RUN not in config.stash and any(uses_us(item) for item in items):
        run_of(config).start_late()


def uses_us(item: pytest.Item) -> bool:
    """Whether a test has our mark or one of our fixtures."""
    if item.get_closest_marker("distributed") is not None:
        return any(_is_ours(item, name) for name in TEST_ARGUMENTS)
    return any(_is_ours(item, name) for name in OWN_FIXTURES if name in getattr(item, "fixturenames", ()))


def _is_ours(item: pytest.Item, name: str) -> bool:
    definitions: Any = getattr(item, "_fixtureinfo", None)
    found = definitions.name2fixturedefs.get(name) if definitions is not None else None
    return _is_defined_here(found)


def _is_defined_here(found: Sequence[Any] | None) -> bool:
    return found is not None and len(found) > 0 and found[-1].func.__module__ == __name__  # a project's own comes last


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Cluster:
    """Everything we run on: ``run(function, per=...)``, ``places``, ``nodes``, ``world_size``, ``device``."""
    return run_of(pytestconfig).session.cluster


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Place:
    """One expected GPU; an ERROR in set-up when nothing answers for it."""
    found: Place = run_of(request.config).session.cluster.require_present(request.param)
    return found


@pytest.fixture
def node(request: pytest.FixtureRequest) -> Place:
    """One expected node; an ERROR in set-up when nothing answers for it."""
    found: Place = run_of(request.config).session.cluster.require_present(request.param)
    return found


@pytest.fixture
def criterion(request: pytest.FixtureRequest) -> Criterion:
    """The entry of thresholds.yaml with this test's name: ``criterion.require(value)``."""
    return run_of(request.config).criterion_of(request.node)


@pytest.fixture(scope="session")
def recipe(pytestconfig: pytest.Config) -> Any:
    """``recipe(key)``: how the entry ``key`` wants its value measured, as keyword arguments for ``cluster.run``."""
    return run_of(pytestconfig).recipe


@pytest.fixture(scope="session")
def soak(pytestconfig: pytest.Config) -> Soak:
    """Rounds of work for as long as ``--gpucluster-level soak:8h`` says: ``for turn in soak.rounds(works)``."""
    return run_of(pytestconfig).soak


def _only_in_workers(request: pytest.FixtureRequest) -> None:
    run_of(request.config)
    if request.node.get_closest_marker("distributed") is None:
        pytest.fail(f"the fixture {request.fixturename!r} exists in @pytest.mark.distributed tests only", pytrace=False)


@pytest.fixture
def process_group(request: pytest.FixtureRequest) -> None:
    """In a distributed test: the default process group."""
    _only_in_workers(request)


@pytest.fixture
def rank(request: pytest.FixtureRequest) -> None:
    """In a distributed test: the rank in the process group."""
    _only_in_workers(request)


@pytest.fixture
def world_size(request: pytest.FixtureRequest) -> None:
    """In a distributed test: the size of the process group."""
    _only_in_workers(request)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> None:
    """In a distributed test: this rank's ``torch.device``."""
    _only_in_workers(request)
