"""Checkpoints: written, read back by any number of ranks, and the adapter exported."""
