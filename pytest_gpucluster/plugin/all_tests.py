"""Every test of the paths that pytest was given, also those that an option, a hook or a conftest leaves out."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from _pytest.nodes import Node

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
            if path.suffix == ".py" and (self._session.isinitpath(path) or self._is_test_file(path)):
                yield path
        elif path.is_dir() and not self._is_never_collected(path):
            for below in sorted(path.iterdir()):
                yield from self._files(below)

    def _is_test_file(self, path: Path) -> bool:
        return any(path.match(pattern) for pattern in self._config.getini("python_files"))

    def _is_never_collected(self, folder: Path) -> bool:
        """Whether pytest passes over a folder in every project: a cache, a virtual environment, a hidden folder."""
        patterns = ("__pycache__", *self._config.getini("norecursedirs"))
        return any(fnmatch(folder.name, one) for one in patterns) or any((folder / one).exists() for one in VIRTUAL_ENVIRONMENT)
