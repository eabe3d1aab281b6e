"""Tests of pytest_gpucluster/agent."""
