"""A typing mistake: the entry is called ``first``."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations


def test_frist(criterion):
    criterion.require(1)
