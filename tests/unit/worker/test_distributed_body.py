"""The body of a distributed test: it ran to its end, or the test is not green."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist

from pytest_gpucluster.errors import MeasurementError, RanksFailedError
from pytest_gpucluster.plugin import attempts
from pytest_gpucluster.protocol.messages import Failure, Success
from pytest_gpucluster.worker.worker import bind_test

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator


async def is_asynchronous(rank: int) -> None:
    """Fail, where somebody waits for it."""
    assert rank < 0


async def is_asynchronous_generator(rank: int) -> AsyncIterator[int]:
    """Fail after its first value."""
    yield rank
    assert rank < 0


def is_generator(rank: int) -> Iterator[int]:
    """Fail after its first value, where pytest collects it at all."""
    yield rank
    assert rank < 0


def hides_a_coroutine(rank: int) -> Any:
    """Look like another function: nothing shows before the call that nothing will run."""
    return is_asynchronous(rank)


@pytest.fixture(autouse=True)
def _rank_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize("body", [is_asynchronous, is_asynchronous_generator, is_generator, hides_a_coroutine])
def test_a_body_that_never_ran_is_no_pass(body: Callable[..., Any]) -> None:
    """A call of an asynchronous function or of a generator runs nothing of it."""
    with pytest.raises(TypeError, match=r"gave a \w+, and its body has not run"):
        bind_test(body, ["rank"], "cpu")()


def test_a_plain_body_runs() -> None:
    """With its fixtures and parameters."""
    seen: list[Any] = []
    bind_test(lambda rank, size: seen.append((rank, size)), ["rank"], "cpu")(size=5)
    assert seen == [(3, 5)]


@pytest.mark.parametrize("value", [True, False, 0, "", (), [], 1.5, object()], ids=lambda value: type(value).__name__)
def test_a_body_that_returns_a_value_says_of_which_kind(value: object) -> None:
    """``return`` in the place of ``assert`` was silent; the value itself may be no plain data, and stays where it is."""
    assert bind_test(lambda: value, [], "cpu")() == repr(type(value))


class Warned:
    """A test that keeps its warnings."""

    nodeid = "test_spmd.py::test_sum"
    name = "test_sum"

    def __init__(self) -> None:
        """No warning yet."""
        self.warnings: list[Warning] = []

    def warn(self, warning: Warning) -> None:
        """Keep it."""
        self.warnings.append(warning)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([None, None], []),
        (["<class 'bool'>"] * 2, ["bool"]),
        ([None, "<class 'int'>"], ["int"]),
        (["<class 'str'>", "<class 'int'>", None], ["str"]),
    ],
)
def test_a_value_of_any_rank_is_one_warning(values: list[Any], said: list[str]) -> None:
    """In pytest's words, and of pytest's kind, so that ``-W`` means it too."""
    item: Any = Warned()
    attempts._conclude({rank: Success(value=value) for rank, value in enumerate(values)}, pytest.fail, item)
    assert [type(warning) for warning in item.warnings] == [pytest.PytestReturnNotNoneWarning] * len(said)
    words = "Test functions should return None, but test_spmd.py::test_sum returned <class '{}'>.\nDid you mean to use `assert`"
    for warning, name in zip(item.warnings, said, strict=True):
        assert str(warning).startswith(words.format(name))


@pytest.mark.parametrize(("raised", "made"), [("NoGpuError", MeasurementError), ("AssertionError", RanksFailedError)])
def test_a_rank_without_a_gpu_could_not_run_the_body(raised: str, made: type[Exception]) -> None:
    """That is an error, as nothing was tried. What the body raises is a failure."""
    replies = {0: Success(value=None), 1: Failure(kind="raised", type=raised, error="torch sees 0 GPUs")}
    item: Any = Warned()
    with pytest.raises(made):
        attempts._conclude(replies, lambda _replies, text: MeasurementError(text), item)
