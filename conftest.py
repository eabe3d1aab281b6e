"""For the project's own tests under tests/; an acceptance run from this folder loads this file and is not touched."""

from __future__ import annotations

from pathlib import Path

import pytest

OWN_TESTS = Path(__file__).parent / "tests"
LAUNCHES = (OWN_TESTS / "launch", OWN_TESTS / "faults")  # real torchruns by the dozen: every file of them is `long`

# A warning in our own tests is an error. Not in pyproject.toml: a warning of torch must not reject a cluster.
# The last one listed is looked at first.
WARNINGS = (
    "error",
    "ignore::DeprecationWarning:torch.*",  # torch calls what it deprecated itself
    "ignore::FutureWarning:torch.*",  # as above
    "ignore::DeprecationWarning:transformers.*",  # as above
    "ignore::FutureWarning:transformers.*",  # as above
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Make warnings errors in the tests under tests/ only, and mark the launches among them."""
    for item in items:
        if OWN_TESTS in item.path.parents:
            # In front, so that a test's own mark wins.
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS), append=False)
        if item.path.parent in LAUNCHES:
            item.add_marker(pytest.mark.long)
