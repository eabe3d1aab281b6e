"""What a function raised, as a failure."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.controller.diagnosis import diagnose, is_consequence
from pytest_gpucluster.protocol.functions import RefusedError
from pytest_gpucluster.protocol.messages import Failure, Success
from pytest_gpucluster.worker.raised import failure_of


def refuse(*_: Any) -> NoReturn:
    """Raise something that `except Exception` does not catch."""
    raise KeyboardInterrupt("odd")


def odd(base: type[BaseException], **members: Any) -> type[BaseException]:
    """An exception class with these members."""
    return type("Odd", (base,), members)


class OddMeta(type):
    """Its classes have no name that can be read."""

    @property
    def __name__(cls) -> str:  # type: ignore[override]
        """Raise."""
        refuse()


class OddText(str):
    """Text that cannot be cut."""

    __slots__ = ()
    __getitem__ = __len__ = __str__ = __iter__ = refuse  # type: ignore[assignment]


class NamelessError(ValueError, metaclass=OddMeta):
    """An exception of a class without a readable name."""


ODD = {
    "str": odd(ValueError, __str__=refuse)("x"),
    "repr": odd(ValueError, __repr__=refuse)("x"),
    "both": odd(ValueError, __str__=refuse, __repr__=refuse)("x"),
    "str that is none": odd(ValueError, __str__=lambda _: 3)("x"),
    "str of an odd class": odd(ValueError, __str__=lambda _: OddText("x"))("x"),
    "args": odd(ValueError, args=property(refuse))(),
    "args that cannot be printed": ValueError(odd(ValueError, __repr__=refuse, __str__=refuse)()),
    "class": odd(ValueError, __class__=property(refuse))("x"),
    "every attribute": odd(ValueError, __getattribute__=refuse)("x"),
    "cause": odd(ValueError, __cause__=property(refuse), __context__=property(refuse))("x"),
    "traceback": odd(ValueError, __traceback__=property(refuse))("x"),
    "notes": odd(ValueError, __notes__=property(refuse))("x"),
    "comparison": odd(ValueError, __eq__=refuse, __hash__=refuse, __bool__=refuse)("x"),
    "a syntax error": odd(SyntaxError, text=property(refuse), lineno=property(refuse))("x"),
    "base exception": odd(BaseException, __str__=refuse)("x"),
    "system exit": odd(SystemExit, __str__=refuse)("x"),
}


@pytest.mark.parametrize("case", ODD)
def test_odd_exceptions_are_named(case: str) -> None:
    """Whatever the class does when it is read, the failure names it, and nothing escapes."""
    try:
        fail_deep(ODD[case], 0)
    except BaseException as error:  # noqa: BLE001 -- that is what is tested
        failure = failure_of(error)
    assert (failure.kind, failure.type) == ("raised", "Odd" if "args that" not in case else "ValueError")
    assert Failure.read(failure.to_json()) == failure
    assert failure.type in failure.traceback
    assert f"rank 0: {failure.type}" in text_of(failure)
    outer = RuntimeError("outer")
    outer.__cause__ = ODD[case]
    assert failure_of(outer).cause.startswith(failure.type)


def test_a_class_without_a_readable_name() -> None:
    """The name is what it was given when it was made."""
    assert failure_of(NamelessError("x")).type == "NamelessError"


@pytest.mark.parametrize("name", ["Odd\n\x1b[31m", "x" * 10_000, "", "ä"])
def test_odd_names(name: str) -> None:
    """They cross to the controller, at a bounded length."""
    failure = failure_of(type(name, (ValueError,), {})("x"))
    assert failure.type == name[:200]
    assert Failure.read(failure.to_json()) == failure


@pytest.mark.parametrize("error", [ValueError("plain"), KeyboardInterrupt(), SystemExit(3), GeneratorExit()])
def test_ordinary_exceptions(error: BaseException) -> None:
    """The healthy twins: type and text as Python has them."""
    failure = failure_of(error)
    assert (failure.type, failure.error, failure.cause) == (type(error).__name__, str(error), "")
    assert failure_of(RefusedError("no")).kind == "refused"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
def test_groups_show_their_members() -> None:
    """Type and message of each."""
    group = ExceptionGroup("several", [ValueError("first"), OSError("second")])  # noqa: F821 -- Python 3.11
    failure = failure_of(group)
    assert failure.type == "ExceptionGroup"
    for part in ("several (2 sub-exceptions)", "ValueError: first", "OSError: second"):
        assert part in failure.traceback


# Chains.


def fail_deep(error: BaseException, depth: int) -> NoReturn:
    """Raise it from deep below."""
    if depth:
        fail_deep(error, depth - 1)
    raise error


def chained(length: int, *, explicit: bool, depth: int = 0) -> BaseException:
    """An exception at the end of a chain of this length; the first is ``LookupError: the cause``."""
    try:
        fail_deep(LookupError("the cause"), depth)
    except LookupError as first:
        error: BaseException = first
    for number in range(1, length):
        try:
            try:
                fail_deep(error, 0)
            except BaseException as before:
                wrapped = RuntimeError(f"step {number} failed")
                if explicit:
                    raise wrapped from before
                fail_deep(wrapped, depth)
        except RuntimeError as after:
            error = after
    return error


def text_of(failure: Failure) -> str:
    """What a user reads."""
    return diagnose({0: failure, 1: Success()}, name="rank {}".format, what="f was not measured").text


@given(st.integers(2, 40), st.booleans(), st.integers(0, 60))
def test_the_first_cause_is_kept(length: int, explicit: bool, depth: int) -> None:  # noqa: FBT001 -- drawn
    """Its type, message and last frames come first in what a user reads, however long the chain; the last exception follows."""
    failure = failure_of(chained(length, explicit=explicit, depth=depth))
    assert (failure.type, failure.error) == ("RuntimeError", f"step {length - 1} failed")
    assert failure.cause == "LookupError: the cause"
    text = text_of(failure)
    first, below = text.splitlines()[0], text.partition("\n")[2]
    assert first.endswith(f"RuntimeError: step {length - 1} failed; first cause: LookupError: the cause")
    assert 0 < below.index("in fail_deep") < below.index("LookupError: the cause") < below.index(f"step {length - 1} failed")
    assert len(below.splitlines()) <= 61


def test_without_a_cause() -> None:
    """``from None`` means it: there is no first cause. A circle of causes ends."""
    error = chained(2, explicit=True)
    error.__cause__, error.__suppress_context__ = None, True
    assert failure_of(error).cause == ""
    assert "first cause" not in text_of(failure_of(error))
    circle = ValueError("a")
    circle.__cause__ = OSError("b")
    circle.__cause__.__cause__ = circle
    assert failure_of(circle).cause == "OSError: b"


def test_a_long_message_hides_no_frame() -> None:
    """Of each exception the frames and the first lines of its message are shown, and how much is left out."""
    first = LookupError("\n".join(f"line {number}" for number in range(500)))
    try:
        try:
            fail_deep(first, 50)
        except LookupError as cause:
            raise RuntimeError("x" * 100_000) from cause
    except RuntimeError as error:
        failure = failure_of(error)
    below = text_of(failure).partition("\n")[2]
    for part in (
        "in fail_deep",
        "LookupError: line 0",
        "more lines",
        "in test_a_long_message_hides_no_frame",
        "RuntimeError: xxx",
    ):
        assert part in below
    assert max(map(len, below.splitlines())) < 500


def test_the_cause_decides_who_only_suffers() -> None:
    """A rank that wraps the error of a closed connection suffers; one that wraps an error of its own does not."""

    def wrapped(cause: Exception) -> Failure:
        error = RuntimeError("step 3 failed")
        error.__cause__ = cause
        return failure_of(error)

    assert is_consequence(wrapped(RuntimeError("Connection closed by peer")))
    assert not is_consequence(wrapped(ArithmeticError("own")))
    assert is_consequence(failure_of(RuntimeError("Connection closed by peer")))
