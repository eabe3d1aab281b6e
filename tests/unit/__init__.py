"""One folder for each folder of the package."""
