"""Outcomes into files: the journal as things happen, results.json, and the last words on the terminal."""
