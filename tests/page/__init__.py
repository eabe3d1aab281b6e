"""The page in a browser. `nox -s page` runs these; they skip where no Chromium is."""
