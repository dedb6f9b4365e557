"""Features that attach to the step through torch's own hooks."""
