"""States of other optimizers, and what frameworks wrap around ours."""
