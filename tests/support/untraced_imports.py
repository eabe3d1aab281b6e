"""A plugin of coverage: no tracer while a large foreign package is imported, which doubles the CPU time of that.

Every agent and every worker of these tests imports torch. Named in ``[tool.coverage.run]``, so each measured process has it.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

FOREIGN = ("torch", "transformers", "peft")
"""Packages that take a second to import and import nothing of ours."""


class UntracedImports:
    """Finds these packages, as the next finder does, and imports them without a tracer."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Leave every other module to the next finder."""
        spec = PathFinder.find_spec(name, path, target) if name.partition(".")[0] in FOREIGN else None
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def without_tracer(module: ModuleType) -> None:
            """Pause the tracer of this thread: ``start`` of the same one goes on in the frames that it knows."""
            tracer: Any = sys.gettrace()
            if not (hasattr(tracer, "start") and hasattr(tracer, "stop")):  # none, or that of a debugger
                execute(module)
                return
            tracer.stop()
            try:
                execute(module)
            finally:
                tracer.start()

        spec.loader.exec_module = without_tracer  # type: ignore[method-assign]
        return spec


def coverage_init(_registry: object, _options: object) -> None:
    """Called by coverage in each process that it measures."""
    sys.meta_path.insert(0, UntracedImports())
