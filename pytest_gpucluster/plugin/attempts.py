"""How a test's function runs: how often, whether to its end, and on every rank with ``@pytest.mark.distributed``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import unittest
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from pytest_gpucluster.errors import ConfigurationError, MeasurementError, RanksFailedError
from pytest_gpucluster.plugin.pairing import TEST_ARGUMENTS, is_distributed, parameters_of
from pytest_gpucluster.protocol.functions import RefusedError
from pytest_gpucluster.protocol.messages import Reply
from pytest_gpucluster.protocol.plain_data import NotPlainDataError
from pytest_gpucluster.protocol.rank import ranges
from pytest_gpucluster.session import Session

_COUNTS = pytest.StashKey[Counter[str]]()
_RAISED = pytest.StashKey["str | None"]()
PER = ("cluster", "domain", "node", "gpu")


def attempts_of(item: pytest.Item) -> int:
    """How often this test was run so far, by whatever was repeated most often: its protocol, its call or its function."""
    return max(_counts(item).values(), default=0)


def hidden_by_a_hook(item: pytest.Item) -> str | None:
    """Why a test that passed has shown nothing: its function raised, or was not called. None if it ran to its end.

    What the function of a coroutine, or of a test that is no Python function, did is not known: others run it.
    """
    raised = item.stash.get(_RAISED, None)
    if raised is not None:
        return f"raised {raised}, and a hook of another plugin or conftest.py hid it"
    if _counts(item)["runtest"] == 0 or (_counts(item)["obj"] == 0 and (_is_counted(item) or is_distributed(item))):
        return "was not called: a hook of another plugin or conftest.py answered in its place"
    return None


def count(item: pytest.Item, event: str) -> None:
    """Count one more ``event`` of this test: a hook or a function that is called once if nobody repeats the test."""
    _counts(item)[event] += 1


def forget(item: pytest.Item) -> None:
    """Count from 0 again: the run itself looks at this test a second time."""
    item.stash[_COUNTS] = Counter()
    item.stash[_RAISED] = None


@contextlib.contextmanager
def counted(item: pytest.Item, name: str) -> Iterator[None]:
    """Count every call of this method of a test, and remember what the last one raised.

    ``runtest``: pytest makes one call, a plugin that repeats tests makes more. ``obj``: the test's own function, if
    its calls are counted.
    """
    if name == "obj" and not _is_counted(item):
        yield
        return
    own = getattr(item, name)
    setattr(item, name, counting(own, item, name))
    try:
        yield
    finally:
        setattr(item, name, own)


def _counts(item: pytest.Item) -> Counter[str]:
    found = item.stash.get(_COUNTS, None)  # ten times a test: a default would be made each time
    if found is None:
        found = item.stash[_COUNTS] = Counter()
    return found


def _is_counted(item: pytest.Item) -> bool:
    """Whether the calls of the test's function are counted. pytest, or a plugin, looks at the kind of an asynchronous one."""
    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, unittest.TestCase):
        return False
    is_asynchronous = inspect.iscoroutinefunction(item.obj) or inspect.isasyncgenfunction(item.obj)
    return not (is_asynchronous or is_distributed(item))


def counting(function: Callable[..., Any], item: pytest.Item, event: str) -> Callable[..., Any]:
    """The function, which counts each call as this ``event`` of a test, and notes what it raised."""

    @functools.wraps(function)
    def call(*arguments: Any, **values: Any) -> Any:
        __tracebackhide__ = True
        count(item, event)
        item.stash[_RAISED] = None
        try:
            return function(*arguments, **values)
        except BaseException as error:
            item.stash[_RAISED] = type(error).__name__
            raise

    return call


def run_distributed_test(item: pytest.Function, session: Session) -> None:
    """Run a distributed test; the failures of its ranks become one error, the cause first.

    Raises:
        MeasurementError: a rank died, hung or is missing: an ERROR, as the test could not be carried out.
        ConfigurationError: the mark's arguments or a parameter cannot cross to the workers.
    """
    per, own_deadline_s = _read_mark(item)
    cluster = session.cluster
    deadline_s = cluster.deadline_s if own_deadline_s is None else own_deadline_s
    parameters = parameters_of(item)
    try:
        name = session.controller.name(item.function)
        known = [name for name in TEST_ARGUMENTS if name not in parameters]  # a parameter of that name stands for it
        arguments = [name for name in item._fixtureinfo.argnames if name in known]  # noqa: SLF001 -- no public way
        replies = cluster.run_test(name, per=per, arguments=arguments, parameters=parameters, deadline_s=deadline_s)
    except (RefusedError, NotPlainDataError) as refused:
        raise ConfigurationError(f"{item.nodeid}: {refused}") from None
    _conclude(replies, cluster.error_for, item)


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
    return per, mark.kwargs.get("deadline_s")


def _conclude(replies: Mapping[int, Reply], error_for: Callable[..., MeasurementError], item: pytest.Function) -> None:
    name, bad = item.name, {rank: reply for rank, reply in replies.items() if not reply.ok}
    kind = next((reply.value for reply in replies.values() if reply.ok and reply.value is not None), None)
    if kind and not bad:
        text = f"Test functions should return None, but {item.nodeid} returned {kind}.\n"
        item.warn(pytest.PytestReturnNotNoneWarning(f"{text}Did you mean to use `assert` instead of `return`?"))
    if not bad:
        return
    skipped = {rank: reply for rank, reply in bad.items() if reply.type == "Skipped"}
    if len(skipped) == len(replies):
        pytest.skip(next(iter(skipped.values())).error)
    if skipped and len(skipped) == len(bad):
        names = f"rank{'s' if len(skipped) > 1 else ''} {ranges(list(skipped))}"
        raise RanksFailedError(f"{name}: {names} skipped, the others did not")
    stopped = any(reply.kind in ("died", "lost", "hung", "refused") or reply.type == "NoGpuError" for reply in bad.values())
    error = error_for(replies, f"{name} could not run to its end" if stopped else f"{name} failed")
    if stopped:
        raise error
    is_known = len(bad) < len(replies) or error.blame.advice is not None
    raise RanksFailedError(str(error), culprits=error.culprits if is_known else (), blame=error.blame)
