"""The page of a run and what belongs to it."""
