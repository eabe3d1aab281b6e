"""Tests of pytest_gpucluster/commands."""
