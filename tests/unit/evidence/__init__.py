"""Tests of evidence: bundles and their verification."""
