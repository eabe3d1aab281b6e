"""The criteria: one short file per subject. Limits and recipes come from thresholds.yaml."""
