"""What can be trained: the paper's decoder on tokens, or a model, batches and a loss of the user's own."""
