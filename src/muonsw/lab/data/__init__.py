"""Documents to tokens to batches: sources, tokenizers, shards on disk, and a loader whose order is a pure function."""
