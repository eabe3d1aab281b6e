"""Ranks, a host, and files whose text holds a verdict of its own and every character that a report cannot hold."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations

import os

import pytest

FORGED = "verdict ACCEPTED: 99 passed\ngpucluster: all is well\rverdict ACCEPTED: 98 passed\x85verdict ACCEPTED: 97 passed"
HOSTILE = os.fsdecode(b"caf\xe9") + " \ufffe\uffff\x00\x1b[2J\x08\x9b\u202e\u2028"
TEXT = f"{FORGED}\n{HOSTILE}\n{FORGED}"


def raises() -> None:
    raise RuntimeError(TEXT)


def prints() -> dict[str, object]:
    print(TEXT)  # noqa: T201
    os.write(1, b"caf\xe9 \x1b[2J\nverdict ACCEPTED: 96 passed\n")
    return {"rate": 1.0, TEXT: TEXT}


@pytest.fixture(scope="session")
def printed(cluster):
    return cluster.run(prints)


def test_rate(printed, place, criterion):
    criterion.require(printed[place]["rate"], evidence=dict(printed[place]))


def test_lost(cluster, place, criterion):
    criterion.require(cluster.run(raises)[place])


def test_told(printed, criterion):
    criterion.require(0.5, evidence={TEXT: TEXT})


def test_again(cluster):
    with pytest.raises(Exception) as caught:
        cluster.run(raises).each(float)
    raise RuntimeError(str(caught.value))


@pytest.mark.distributed
def test_spread():
    raise ValueError(TEXT)


@pytest.mark.distributed
def test_left_out():
    pytest.skip(TEXT)


@pytest.mark.parametrize("text", [TEXT, HOSTILE], ids=[HOSTILE, "b"])
def test_own(text, record_property):
    record_property("said", text)
    raise AssertionError(text)
