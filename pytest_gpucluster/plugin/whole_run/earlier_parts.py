"""A run that goes on with an unfinished one: what stays as it was measured, what is judged again, what is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from pytest_gpucluster.errors import ConfigurationError, GpuclusterError
from pytest_gpucluster.plugin.pairing import as_usage_error
from pytest_gpucluster.plugin.stash_keys import PAIR
from pytest_gpucluster.plugin.whole_run import soak_reports
from pytest_gpucluster.plugin.whole_run.run_readings import Readings
from pytest_gpucluster.reporting.files import require_unused
from pytest_gpucluster.reporting.results import MEASURED, is_known, why_other_parts
from pytest_gpucluster.reporting.run_spans import with_latest_known, with_now
from pytest_gpucluster.reporting.unfinished_run import NothingUnfinishedError, UnfinishedRun, read_unfinished_run
from pytest_gpucluster.session import Session
from pytest_gpucluster.text import counted

AGAIN = ("over_run", "at_end", "health", "again")
"""Marks of tests that judge what may change: a run that goes on judges them again, whatever they said before."""
ADVICE = "begin another run in another results directory"


class EarlierParts:
    """The earlier parts of a run, if it goes on with an unfinished one."""

    def __init__(self, session: Session) -> None:
        """``session`` becomes the next part of the unfinished run, if there is one."""
        self._session = session
        self._must = session.setup.settings.resume == "always"
        self._has_looked = session.setup.settings.resume == "never"
        self._has_readings = False

    @property
    def is_ahead(self) -> bool:
        """Whether there is an unfinished run that this one has not gone on with yet, so that no file may be touched."""
        if self._has_looked:
            return False
        try:
            self._read()
        except ConfigurationError as error:
            return self._must or not isinstance(error, NothingUnfinishedError)
        return True

    def look(self, *, junit: Path | None) -> None:
        """Go on with the unfinished run in the results directory, if this is wanted and there is one.

        Raises:
            pytest.UsageError: it cannot be gone on with; nothing was touched.
        """
        if self._has_looked:
            return
        self._has_looked = True
        with as_usage_error(GpuclusterError):
            unfinished = self._find()
            if unfinished is not None:
                self._require_same(unfinished, junit=junit)

    def _find(self) -> UnfinishedRun | None:
        try:
            unfinished = self._read()
        except NothingUnfinishedError:
            if self._must:
                raise
            return None
        if not unfinished.kept and not self._must:
            return None
        require_unused(self._session.setup.settings.results_dir)
        return unfinished

    def _read(self) -> UnfinishedRun:
        return read_unfinished_run(self._session.setup.settings.results_dir, completes=self._must)

    def _require_same(self, unfinished: UnfinishedRun, *, junit: Path | None) -> None:
        """Check that this run asks for the same on the same parts, and become its next part.

        Raises:
            ConfigurationError, MeasurementError: it does not, or the parts cannot be asked.
        """
        where = f"the unfinished run in {unfinished.folder}"
        why = unfinished.why_other(self._session.state.started())
        if why is None and self._session.setup.settings.soak_s is not None and not unfinished.spans:
            why = "its journal has no reading from before its soak"
        if why is None:
            self._session.go_on_with(unfinished)
            now = self._session.meet_early(junit=junit).by_id
            why = why_other_parts(unfinished.state.places, now)
        if why is not None:
            raise ConfigurationError(f"{where} cannot go on: {why}; {ADVICE}")

    def leave_out_kept(self, items: list[pytest.Item]) -> list[pytest.Item]:
        """The tests among these whose outcome is kept.

        Raises:
            pytest.UsageError: the file of such a test is another one than before.
        """
        unfinished = self._session.unfinished
        if unfinished is None:
            return []
        kept, nodeids = unfinished.kept, unfinished.state.nodeids
        found = [item for item in items if item.stash[PAIR].key in kept and _lasts(item, nodeids)]
        for name, digest in digests_of(found).items():
            if unfinished.state.history.files.get(name, digest) != digest:
                raise pytest.UsageError(
                    f"the unfinished run in {unfinished.folder} cannot go on: {name} is not the file that it was; {ADVICE}"
                )
        return found

    def fill(self, given: Iterable[pytest.Item]) -> None:
        """Put into the plan what stays as it was, and what this run does not judge. Called before the set is completed.

        ``given``: every test of the given paths, selected or not. Only a test that is there says that nothing has to be judged
        again.
        """
        unfinished, plan = self._session.unfinished, self._session.plan
        if unfinished is None:
            return
        lasting = {item.stash[PAIR].key for item in given if PAIR in item.stash and _lasts(item, unfinished.state.nodeids)}
        kept = lasting & {*unfinished.kept}
        for key, record in unfinished.state.records.items():
            nodeid = unfinished.state.nodeids.get(key, key[0])
            if plan.record(*key) is not None:
                continue
            if key in kept:
                plan.keep(record, nodeid=nodeid)
            elif key[0] not in self._session.setup.criteria:
                plan.leave_out(key, why="not among the tests that were selected", nodeid=nodeid)

    @property
    def line(self) -> str | None:
        """What the terminal says of it; None where this run is a whole one."""
        unfinished = self._session.unfinished
        if unfinished is None:
            return None
        number = self._session.recorder.parts.number
        num_kept = sum(one.part < number and one.outcome in MEASURED for one in self._session.plan)
        kept = counted(num_kept, "outcome stays as it was", "outcomes stay as they were")
        return f"part {number} of the run in {unfinished.folder}: {kept} measured"

    def write_readings(self, readings: Readings) -> None:
        """Write what was read before the first test into the journal, once, with what earlier parts had read.

        A soak does this by itself, unless it is a part of a run that goes on.
        """
        unfinished, session = self._session.unfinished, self._session
        if self._has_readings or (unfinished is None and session.setup.settings.soak_s is not None):
            return
        self._has_readings = True
        if unfinished is None or not (unfinished.kept or unfinished.spans):  # all is measured in this part
            soak_reports.write_readings(session, readings, {})
            return
        before, now = unfinished.state.places, session.state.places()
        kept = frozenset(name for name in now if is_known(before.get(name)) or now[name].gpu is None)
        spans = with_now(with_latest_known(unfinished.spans), readings.firsts(), kept=kept, goes_on=True)
        soak_reports.write_readings(session, readings, spans)
        known = {place.node for place in before.values() if is_known(place)}
        readings.newcomers = frozenset(
            name for name, one in now.items() if (one.node not in known if one.gpu is None else not is_known(before.get(name)))
        )
        readings.goes_on = True

    def write_new_readings(self, readings: Readings) -> None:
        """Write into the journal what was read since the test before: now and then, and after the last measurement."""
        if self._has_readings and self._session.recorder.is_open:
            for facts in readings.facts({**readings.while_it_runs(), **readings.new_lasts()}):
                self._session.recorder.write("soak_reading", **facts)


def digests_of(items: Iterable[pytest.Item]) -> dict[str, str]:
    """The SHA-256 of each test file, by the name that node ids have for it; without files that cannot be read."""
    found: dict[str, str] = {}
    for path, name in {item.path: item.nodeid.partition("::")[0] for item in items}.items():
        try:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError:
            continue
    return found


def _lasts(item: pytest.Item, nodeids: Mapping[tuple[str, str | None], str]) -> bool:
    """Whether what this very test found stays. Another test of that name judges anew, and so does one with a mark for that."""
    return nodeids.get(item.stash[PAIR].key) == item.nodeid and not any(map(item.get_closest_marker, AGAIN))
