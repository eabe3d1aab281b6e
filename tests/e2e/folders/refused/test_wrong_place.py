"""The entry is judged once for the cluster, the test once for each GPU."""

# ruff: noqa: ANN001, ANN201, D103 -- written as users write

from __future__ import annotations


def test_first(place, criterion):
    criterion.require(1)
