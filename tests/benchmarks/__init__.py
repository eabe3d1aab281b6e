"""The scripts of benchmarks/."""
