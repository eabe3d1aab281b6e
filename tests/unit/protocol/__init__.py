"""Tests of pytest_gpucluster/protocol."""
