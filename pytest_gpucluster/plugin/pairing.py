"""Which test is ours, and which entry of thresholds.yaml it judges at which place: by name, checked both ways.

Every test of the paths that pytest was given, also those that an option, a hook or a conftest leaves out.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.config.schema_errors import did_you_mean
from pytest_gpucluster.errors import ConfigurationError, GpuclusterError
from pytest_gpucluster.places import Place

if TYPE_CHECKING:
    from _pytest.nodes import Node


TEST_ARGUMENTS = ("process_group", "rank", "world_size", "device")
FIXTURES = "pytest_gpucluster.plugin.fixtures"
OWN_FIXTURES = ("cluster", "criterion", "place", "node", "recipe", "soak")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """One test item: the criterion it judges (``judges``), or a plain test that counts by its outcome."""

    criterion: str
    place: Place | None
    judges: bool

    @property
    def key(self) -> tuple[str, str | None]:
        """(criterion, place id), as the plan has it."""
        return self.criterion, self.place.id if self.place is not None else None


def pairs_of(items: Iterable[pytest.Item], *, entries: Collection[str]) -> dict[pytest.Item, Pairing]:
    """What each test stands for. A plain test whose name an entry or another plain test has is named by its node id."""
    pairs = {item: _pair_of(item) for item in items}
    plain = Counter(key for key, _ in {(pair.key, item.nodeid) for item, pair in pairs.items() if not pair.judges})
    return {
        item: replace(pair, criterion=item.nodeid)
        if not pair.judges and (pair.criterion in entries or plain[pair.key] > 1)
        else pair
        for item, pair in pairs.items()
    }


def _pair_of(item: pytest.Item) -> Pairing:
    parameters = parameters_of(item)
    place = next((parameters[name] for name in ("place", "node") if isinstance(parameters.get(name), Place)), None)
    original = getattr(item, "originalname", None) or item.name
    judges = "criterion" in getattr(item, "fixturenames", ())
    return Pairing(criterion=criterion_key(item.name, original, place), place=place, judges=judges)


def parameters_of(item: pytest.Item) -> dict[str, Any]:
    """The values that parametrization gives a test, by argument."""
    return dict(item.callspec.params) if hasattr(item, "callspec") else {}


def criterion_key(name: str, original_name: str, place: Place | None) -> str:
    """The entry's key for an item: its name without ``test_``, its parameters kept, the place's left out.

    ``test_busbw[all_reduce-node0]`` at ``node0`` is ``busbw[all_reduce]``.
    """
    base = original_name.removeprefix("test_")
    parameters = name[len(original_name) :].removeprefix("[").removesuffix("]")
    if place is not None:
        before, found, after = f"-{parameters}-".rpartition(f"-{place.id}-")
        parameters = f"{before}-{after}"[1:-1] if found else parameters
    return f"{base}[{parameters}]" if parameters else base


def require_entry(key: str, known: Collection[str], *, nodeid: str, file: str) -> None:
    """A test that judges needs an entry to judge by.

    Raises:
        ConfigurationError: there is none; names the nearest ones.
    """
    if key in known:
        return
    hint = did_you_mean(key, list(known), most=3)
    raise ConfigurationError(
        f"{nodeid} judges the criterion {key!r}, which {file} does not have; add it under criteria:, or rename the test.{hint}"
    )


def require_place(key: str, per: str, place: Place | None, *, nodeid: str) -> None:
    """A criterion per GPU is judged with ``place``, one per node with ``node``, one per cluster with neither.

    Raises:
        ConfigurationError: the test asks for another fixture than the entry's ``per`` wants.
    """
    actual = "cluster" if place is None else "node" if place.gpu is None else "gpu"
    if actual == per:
        return
    fixture = {"gpu": "the place fixture", "node": "the node fixture", "cluster": "neither place nor node"}[per]
    raise ConfigurationError(f"{nodeid}: criterion {key!r} is per {per}, so its test takes {fixture}")


def require_argument(name: str, found: object, *, nodeid: str) -> None:
    """What a test judges, and where, is fixed before the first test runs.

    Raises:
        ConfigurationError: there is none for this test: it asked for the fixture while it ran.
    """
    if found is None:
        raise ConfigurationError(
            f"{nodeid}: take {name} as an argument of the test; request.getfixturevalue({name!r}) comes too late for the plan"
        )


def require_test_arguments(names: Collection[str], parameters: Collection[str], *, nodeid: str) -> None:
    """The body of a distributed test runs in the workers, where pytest's fixtures do not exist.

    Raises:
        ConfigurationError: it asks for a fixture that cannot cross, by name.
    """
    foreign = [name for name in names if name not in TEST_ARGUMENTS and name not in parameters]
    if foreign:
        raise ConfigurationError(
            f"{nodeid}: a distributed test runs in the workers and cannot have the fixture{'s' if len(foreign) > 1 else ''} "
            f"{', '.join(foreign)}; it may take {', '.join(TEST_ARGUMENTS)} and parametrize values"
        )


def uses_us(item: pytest.Item) -> bool:
    """Whether a test has our mark or one of our fixtures."""
    defined = _definitions(item)
    names = TEST_ARGUMENTS if is_distributed(item) else {*OWN_FIXTURES}.intersection(getattr(item, "fixturenames", ()))
    return any(is_own_fixture(defined.get(name)) for name in names)


def is_distributed(item: pytest.Item) -> bool:
    """Whether the body of a test runs on every rank, in the workers."""
    return item.get_closest_marker("distributed") is not None


def _definitions(item: pytest.Item) -> Mapping[str, Sequence[Any]]:
    """The definitions of each fixture that a test may use."""
    known: Mapping[str, Sequence[Any]] = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", {})
    return known


def is_own_fixture(found: Sequence[Any] | None) -> bool:
    """Whether a fixture's last definition is ours: a project's own comes last."""
    return found is not None and len(found) > 0 and found[-1].func.__module__ == FIXTURES


def has_replaced_fixture(item: pytest.Item) -> bool:
    """Whether somebody has put another fixture in the place of one of ours, for this test."""
    several = [found for found in _definitions(item).values() if len(found) > 1]
    return any(not is_own_fixture(found) and any(is_own_fixture([one]) for one in found) for found in several)


def register_part(config: pytest.Config, plugin: object, name: str) -> None:
    """Register a part of a run, of which none may be missing.

    Raises:
        pytest.UsageError: ``-p no:...`` leaves it out.
    """
    if config.pluginmanager.register(plugin, f"gpucluster-{name}") is None:
        raise pytest.UsageError(f"-p no:gpucluster-{name} leaves out a part of this run; remove that option")


def is_under_xdist(config: pytest.Config) -> bool:
    """Whether pytest-xdist distributes this session's tests (``-n``), or this is one of its workers."""
    return bool(getattr(config.option, "numprocesses", None)) or hasattr(config, "workerinput")


@contextlib.contextmanager
def as_usage_error(kind: type[GpuclusterError] = ConfigurationError) -> Iterator[None]:
    """Say what is wrong as pytest says that a command cannot run: in one line, with its own exit code."""
    try:
        yield
    except kind as error:
        raise pytest.UsageError(str(error)) from None


ALL_TESTS = pytest.StashKey["AllTests"]()
"""Of a session's ``config``: what was collected."""
PACKAGED = "tests_acceptance"
VIRTUAL_ENVIRONMENT = ("pyvenv.cfg", "conda-meta")


class AllTests:
    """A pytest plugin that remembers what pytest collects and ignores; it changes nothing."""

    def __init__(self, config: pytest.Config) -> None:
        """``config`` has the root folder and the patterns of test files."""
        self._config = config
        self._session: pytest.Session | None = None
        self._children: dict[Node, list[Node]] = {}
        self._items: dict[pytest.Item, None] = {}
        self._ignored: list[Path] = []
        self._unread: list[str] = []

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Remember the session, which knows the given paths."""
        self._session = session

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        """Remember what a file or class holds. The innermost hook: others remove tests after it."""
        report = yield
        if not isinstance(collector, (pytest.Session, pytest.Directory)):
            is_emptied = report.outcome == "passed" and not report.result  # --lf does not look into a file
            self._children[collector] = self._collect(collector) if is_emptied else list(report.result or ())
        return report

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Remember a test that a hook may have made."""
        self._items[item] = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> Generator[None, bool | None, bool | None]:
        """Remember what is ignored."""
        is_ignored = yield
        if is_ignored:
            self._ignored.append(collection_path)
        return is_ignored

    def tests(self) -> list[pytest.Item]:
        """Every test of the given files, in the order of collection."""
        found = dict(self._items)
        for collector in list(self._children):
            found.update(dict.fromkeys(self._items_of(collector)))
        return list(found)

    def are_packaged(self) -> bool:
        """Whether the packaged suite is among what was given. A controller of pytest-xdist collects nothing itself."""
        named = (PACKAGED in re.split(r"[/.\\]", str(arg).partition("::")[0]) for arg in self._config.args)
        return any(named) or any(PACKAGED in item.path.parts for item in self.tests())

    def unread_files(self) -> list[str]:
        """Files of the given paths whose tests are not known, by node id: an option, a hook or a conftest ignored them."""
        files = (file for path in self._ignored if self._is_given(path) for file in self._files(path))
        root = self._config.rootpath
        ignored = (file.relative_to(root).as_posix() if file.is_relative_to(root) else str(file) for file in files)
        return list(dict.fromkeys([*ignored, *self._unread]))

    def _collect(self, collector: pytest.Collector) -> list[Node]:
        """What a collector holds that pytest did not collect, because an option of its own left it out."""
        try:
            return list(collector.collect())
        except (Exception, pytest.skip.Exception, pytest.fail.Exception):  # noqa: BLE001 -- a module may raise anything
            self._unread.append(collector.nodeid)
            return []

    def _items_of(self, node: Node) -> Iterator[pytest.Item]:
        if isinstance(node, pytest.Item):
            yield node
        elif isinstance(node, pytest.Collector):
            if node not in self._children:
                self._children[node] = self._collect(node)
            for child in self._children[node]:
                yield from self._items_of(child)

    def _is_given(self, path: Path) -> bool:
        return self._session is not None and any(self._session.isinitpath(one) for one in (path, *path.parents))

    def _files(self, path: Path) -> Iterator[Path]:
        assert self._session is not None
        if path.is_file():
            is_test_file = any(map(path.match, self._config.getini("python_files")))
            if path.suffix == ".py" and (self._session.isinitpath(path) or is_test_file):
                yield path
        elif path.is_dir() and not self._is_never_collected(path):
            for below in sorted(path.iterdir()):
                yield from self._files(below)

    def _is_never_collected(self, folder: Path) -> bool:
        """Whether pytest passes over a folder in every project: a cache, a virtual environment, a hidden folder."""
        patterns = ("__pycache__", *self._config.getini("norecursedirs"))
        return any(fnmatch(folder.name, one) for one in patterns) or any((folder / one).exists() for one in VIRTUAL_ENVIRONMENT)


# What stands ready is handed to a test of the packaged suite. For a fixture that was made long ago pytest takes nearly the same
# steps as for a new one: a request, finalizers, calls of hooks. That was a fifth of the controller's time.


def hand_over(run: Any, item: pytest.Item) -> None:
    """Fill in the arguments of a packaged test where all is there that several tests share; pytest sets up what is left.

    Raises:
        MeasurementError: nothing answers at its place.
    """
    if type(item) is not pytest.Function or PACKAGED not in item.path.parts or run.session.state.binding is None:
        return
    defined: Any = item._fixtureinfo.name2fixturedefs  # noqa: SLF001 -- no public way; all places of a test share it
    if id(defined) not in run.shared_fixtures:
        run.shared_fixtures[id(defined)] = _shared_by(item, defined)
    shared = run.shared_fixtures[id(defined)]
    if shared is None or any(one.cached_result is None or one.cached_result[2] is not None for one in shared):
        return
    ready = {one.argname: one.cached_result[0] for one in shared}
    for name, value in parameters_of(item).items():
        if name in ("place", "node") and is_own_fixture(defined.get(name)):
            ready[name] = run.session.cluster.require_present(value)
    if is_own_fixture(defined.get("criterion")):
        ready["criterion"] = run.criterion_of(item)
    item.funcargs.update(ready, request=item._request)  # noqa: SLF001 -- as pytest fills it in


def _shared_by(item: pytest.Function, defined: Mapping[str, Sequence[Any]]) -> list[Any] | None:
    """The fixtures of a test that are kept for the session; None where some are kept for less, or differ between tests.

    None also where somebody sees which fixtures are set up: an option of pytest, or another plugin. That of anyio does not.
    """
    hook = item.config.hook
    hooks = [*hook.pytest_fixture_setup.get_hookimpls(), *hook.pytest_fixture_post_finalizer.get_hookimpls()]
    others = {one.function.__module__.partition(".")[0] for one in hooks} - {"_pytest", "anyio", "pytest_gpucluster"}
    shared = [defined[name] for name in item.fixturenames if name in defined and defined[name][-1].scope != "function"]
    kept = [known[0] for known in shared if len(known) == 1 and known[0].scope == "session" and known[0].params is None]
    differ = len(kept) < len(shared) or not {*parameters_of(item)}.isdisjoint(one.argname for one in kept)
    return None if differ or others or shows_fixtures(item.config) else kept


def shows_fixtures(config: pytest.Config) -> bool:
    """Whether ``--setup-show`` or ``--setup-only`` was given. A plugin of pytest that was switched off has no options."""
    return bool(config.getoption("setupshow", default=False) or config.getoption("setuponly", default=False))
