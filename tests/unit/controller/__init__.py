"""Tests of pytest_gpucluster/controller."""
