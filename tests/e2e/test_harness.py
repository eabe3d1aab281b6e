"""The harness itself notices a run that takes too long and one that leaves something behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import harness

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.e2e

SLEEPS = "import time\n\ndef test_sleeps():\n    print('zzz', flush=True)\n    time.sleep(300)\n"
LEAVES = "import subprocess\n\ndef test_leaves():\n    subprocess.Popen(['sleep', '300'], start_new_session=True)\n"


def test_too_long(tmp_path: Path) -> None:
    """A run beyond its time fails with what it had printed, and is ended."""
    (tmp_path / "test_sleeps.py").write_text(SLEEPS, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"(?s)took longer than 4 s.*zzz"):
        harness.launch(tmp_path, "-s", "test_sleeps.py", timeout_s=4)


def test_left_behind(tmp_path: Path) -> None:
    """A process that outlives its run fails the launch, in whatever session it hides."""
    (tmp_path / "test_leaves.py").write_text(LEAVES, encoding="utf-8")
    with pytest.raises(AssertionError, match=r"left processes behind: .*sleep"):
        harness.launch(tmp_path, "test_leaves.py")
