"""Rows of the fault list, planted in real launches: what a run survives, sees and places."""

from __future__ import annotations

from tests.support.launching import shared_starter, starter

__all__ = ["shared_starter", "starter"]
