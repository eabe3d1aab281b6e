"""Tests of pytest_gpucluster/cluster."""
