"""Tests of pytest_gpucluster/fleet."""
