"""What the plugin keeps in the stashes of test items and of the session's configuration."""

from __future__ import annotations

import pytest

from pytest_gpucluster.fleet.simulation import Simulation
from pytest_gpucluster.judging.criterion import Criterion
from pytest_gpucluster.judging.plan import Rule
from pytest_gpucluster.judging.verdict import Record
from pytest_gpucluster.plugin.pairing import Pairing

PAIR = pytest.StashKey[Pairing]()
"""Of every collected test: the criterion and place that it stands for."""
CRITERION = pytest.StashKey[Criterion]()
"""Of a test that judges: its criterion, with the limit as it applies here."""
RULE = pytest.StashKey[Rule]()
"""Of a test that is skipped: the rule of the profile that excludes its criterion here."""
NO_LIMIT = pytest.StashKey[str]()
"""Of a test that cannot judge: why its limit cannot be computed."""
IN_BODY = pytest.StashKey[bool]()
"""Of a test: whether its body runs now, so that a report is of a block of ``subtests.test()``."""
RECORD = pytest.StashKey[Record]()
"""Of a test that has run: its outcome so far."""
FIRST_LOOK = pytest.StashKey[Record]()
"""Of a test that is measured again: the outcome of the first look."""
WAITS = pytest.StashKey[bool]()
"""Of a test: whether an undecided outcome waits for a second look."""
COMMAND = pytest.StashKey[tuple[str, ...]]()
"""Of the configuration: the words that a user typed where another command started pytest."""
SIMULATION = pytest.StashKey[Simulation]()
"""Of the configuration: the fleet that answers in place of GPUs; only ``plugin/fleet.py`` puts it there."""
