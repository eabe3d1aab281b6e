"""Two tests of one criterion: the second would overwrite what the first said."""

# ruff: noqa: ANN001, ANN201, D102, D103 -- written as users write

from __future__ import annotations


def test_first(criterion):
    criterion.require(1)


class TestAgain:
    """The same name once more."""

    def test_first(self, criterion):
        criterion.require(1)
