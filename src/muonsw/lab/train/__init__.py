"""Training: settings, the optimizer of a model, the loop, checkpoints, and export."""
