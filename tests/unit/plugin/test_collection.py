"""What collection does with the selected tests."""

from __future__ import annotations

from typing import Any

from pytest_gpucluster.plugin.collection import without


class Item:
    """A test that counts how often any of them is compared with another."""

    compared = 0
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Only the same is equal."""
        Item.compared += 1
        return self is other


def test_tests_are_left_out_at_once() -> None:
    """None of the left ones is compared with all that are left out."""
    items: list[Any] = [Item() for _ in range(300)]
    assert [id(item) for item in without(items, items[::3])] == [id(item) for number, item in enumerate(items) if number % 3]
    assert Item.compared <= 300
