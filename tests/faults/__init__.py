"""Faults planted in real launches."""
