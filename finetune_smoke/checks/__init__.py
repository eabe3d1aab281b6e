"""The exact checks of a training, and the faults that are planted to see them fail."""
