"""Studies: runs of experiments and of trainings that end in claims which can fail."""
