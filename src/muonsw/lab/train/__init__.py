"""Training the lab's models: settings, the optimizer for a model, the loop, and what it leaves on disk."""
