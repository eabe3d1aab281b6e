"""The repository itself: packaging, docs, noxfile, public names."""
