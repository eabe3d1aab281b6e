"""Tests of pytest_gpucluster/plugin."""
