"""A user's criteria that try, by accident or on purpose, to be greener than they are."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import contextlib
import os

import pytest


def no_gpu_answers():
    """A measurement that cannot be made on rank 1."""
    if os.environ["RANK"] == "1":
        raise OSError("the probe does not answer")
    return 1.0


@pytest.fixture(scope="session")
def partly_broken(cluster):
    return cluster.run(no_gpu_answers, per="gpu", deadline_s=30)


@pytest.fixture
def read_in_fixture(partly_broken, place):
    return partly_broken[place]


@pytest.fixture
def breaks_afterwards():
    yield
    raise OSError("the probe could not be put away")


def test_good(criterion):
    criterion.require(1)


def test_never_judged(criterion):
    assert criterion


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("-inf"), None, True, "2", {}, [2.0]],
    ids=["nan", "inf", "none", "bool", "text", "empty", "list"],
)
def test_no_number(criterion, value):
    criterion.require(value)


@pytest.mark.xfail(reason="known to be low")
def test_xfail_mark(criterion):
    criterion.require(0)


@pytest.mark.xfail(reason="thought to be low", strict=True)
def test_xfail_mark_on_good(criterion):
    criterion.require(1)


@pytest.mark.xfail(reason="the probe never answers")
def test_xfail_mark_on_error(criterion):
    criterion.require(None)


def test_swallowed(criterion):
    with contextlib.suppress(Exception):
        criterion.require(0)


def test_swallowed_nan(criterion):
    with contextlib.suppress(Exception):
        criterion.require(float("nan"))
    criterion.require(1)


def test_some_places(cluster, criterion):
    criterion.require({cluster.places[0]: 1})


@pytest.mark.xfail(reason="the probe cannot be put away")
def test_xfail_mark_bad_teardown(breaks_afterwards, criterion):
    criterion.require(1)


def test_second_value(criterion):
    with contextlib.suppress(Exception):
        criterion.require(0)
    criterion.require(1)


def test_skips_afterwards(criterion):
    with contextlib.suppress(Exception):
        criterion.require(0)
    pytest.skip("let us not talk about it")


def test_xfails_afterwards(criterion):
    with contextlib.suppress(Exception):
        criterion.require(0)
    pytest.xfail("let us not talk about it")


def test_skips_itself(criterion):
    pytest.skip("not today")


@pytest.mark.skip(reason="never")
def test_skip_mark(criterion):
    criterion.require(1)


def test_asserts(criterion):
    criterion.require(1)
    assert 2 + 2 == 5


def test_crashes(criterion):
    criterion.require(1 / 0)


def test_read_in_call(partly_broken, place, criterion):
    criterion.require(partly_broken[place])


def test_read_in_setup(read_in_fixture, place, criterion):
    criterion.require(read_in_fixture)


def test_bad_teardown(breaks_afterwards, criterion):
    criterion.require(1)


def test_failed_and_bad_teardown(breaks_afterwards, criterion):
    criterion.require(0)


def test_advisory(criterion):
    criterion.require(0)


def test_plain_failure():
    counted = "a test without a criterion"
    assert counted == "counts too"


def test_plain_skip():
    pytest.skip("nothing to see")
