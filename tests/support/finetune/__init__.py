"""Small trainings, ranks of a test's own, and stand-ins for what only a GPU has."""
