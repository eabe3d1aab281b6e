"""What lies under ``folders`` is what users write: material for launched runs, not tests of this project."""

collect_ignore = ["folders", "plants"]
