"""Three criteria, the second of which fails."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations


def test_first(criterion):
    criterion.require(1)


def test_second(criterion):
    criterion.require(0)


def test_third(criterion):
    criterion.require(1)
