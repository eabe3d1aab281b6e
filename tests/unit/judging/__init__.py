"""Tests of pytest_gpucluster/judging."""
