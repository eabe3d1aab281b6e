"""Scripts of benchmarks/ as modules."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import REPOSITORY

if TYPE_CHECKING:
    from collections.abc import Iterator

BENCHMARKS = REPOSITORY / "benchmarks"


@contextlib.contextmanager
def benchmark_module(name: str) -> Iterator[Any]:
    """Import benchmarks/``name``.py; at the end every module of that folder is forgotten again."""
    path = list(sys.path)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path[:] = path
        for loaded, module in list(sys.modules.items()):
            if Path(getattr(module, "__file__", None) or "/").parent == BENCHMARKS:
                del sys.modules[loaded]
