"""results.json as a record: its parts, how they are read again, and how runs are compared. Pure but for reading files."""
