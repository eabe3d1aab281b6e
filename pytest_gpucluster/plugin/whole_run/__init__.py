"""What is judged over the whole time of a run: a soak and its reports, the parts of a run that went on, its readings."""
