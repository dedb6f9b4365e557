"""Sources of text, tokenizers, token shards on disk, and batches of them."""
