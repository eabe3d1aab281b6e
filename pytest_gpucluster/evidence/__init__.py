"""Evidence: a signed bundle of a run, and what checks it. Neither torch nor pytest is needed."""
