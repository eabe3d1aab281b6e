"""Tests of results.json as a record."""
