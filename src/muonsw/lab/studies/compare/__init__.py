"""Arms that differ in one thing, trained on the same batches from the same weights, and what their losses say."""
