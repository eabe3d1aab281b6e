"""``@pytest.mark.distributed``: the body of the test runs on every rank; the replies of the ranks become one outcome."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_gpucluster.errors import ConfigurationError, MeasurementError, RanksFailedError
from pytest_gpucluster.plugin.pairing import TEST_ARGUMENTS
from pytest_gpucluster.protocol.functions import RefusedError
from pytest_gpucluster.protocol.plain_data import NotPlainDataError
from pytest_gpucluster.protocol.rank import ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpucluster.protocol.messages import Reply
    from pytest_gpucluster.session import Session

PER = ("cluster", "domain", "node", "gpu")


def run_distributed_test(item: pytest.Function, session: Session) -> None:
    """Run a distributed test; the failures of its ranks become one error, the cause first.

    Raises:
        MeasurementError: a rank died, hung or is missing: an ERROR, as the test could not be carried out.
        ConfigurationError: the mark's arguments or a parameter cannot cross to the workers.
    """
    per, own_deadline_s = _read_mark(item)
    cluster = session.cluster
    deadline_s = own_deadline_s or cluster.deadline_s
    parameters = dict(item.callspec.params) if hasattr(item, "callspec") else {}
    try:
        name = session.controller.name(item.function)
        arguments = [name for name in item._fixtureinfo.argnames if name in TEST_ARGUMENTS]  # noqa: SLF001 -- no public way
        replies = cluster.run_test(name, per=per, arguments=arguments, parameters=parameters, deadline_s=deadline_s)
    except (RefusedError, NotPlainDataError) as refused:
        raise ConfigurationError(f"{item.nodeid}: {refused}") from None
    _conclude(replies, cluster.error_for, item.name)


def _read_mark(item: pytest.Function) -> tuple[str, float | None]:
    mark = item.get_closest_marker("distributed")
    assert mark is not None
    unknown = set(mark.kwargs) - {"per", "deadline_s"}
    per = mark.kwargs.get("per", "cluster")
    if mark.args or unknown or per not in PER:
        raise ConfigurationError(
            f"{item.nodeid}: @pytest.mark.distributed takes per='cluster', 'domain', 'node' or 'gpu' and deadline_s, "
            f"not {', '.join(map(repr, (*mark.args, *unknown, *({per} - set(PER)))))}"
        )
    deadline_s = mark.kwargs.get("deadline_s")
    return per, None if deadline_s is None else float(deadline_s)


def _conclude(replies: Mapping[int, Reply], error_for: Callable[..., MeasurementError], name: str) -> None:
    bad = {rank: reply for rank, reply in replies.items() if not reply.ok}
    if not bad:
        return
    skipped = {rank: reply for rank, reply in bad.items() if reply.type == "Skipped"}
    if len(skipped) == len(replies):
        pytest.skip(next(iter(skipped.values())).error)
    if skipped and len(skipped) == len(bad):
        names = f"rank{'s' if len(skipped) > 1 else ''} {ranges(list(skipped))}"
        raise RanksFailedError(f"{name}: {names} skipped, the others did not")
    stopped = any(reply.kind in ("died", "lost", "hung", "refused") for reply in bad.values())
    error = error_for(replies, f"{name} could not run to its end" if stopped else f"{name} failed")
    if stopped:
        raise error
    is_known = len(bad) < len(replies) or error.blame.advice is not None
    raise RanksFailedError(str(error), culprits=error.culprits if is_known else (), blame=error.blame)
