"""Real launches: a folder, a clean environment and a plugin found by its entry point, for each test."""

from __future__ import annotations

from tests.support.launching import shared_starter, starter

__all__ = ["shared_starter", "starter"]
