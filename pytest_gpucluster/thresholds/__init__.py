"""thresholds.yaml: read, checked, and resolved for one profile."""
