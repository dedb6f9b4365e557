"""Features that a step does not know: each reaches it through torch's own hooks."""
