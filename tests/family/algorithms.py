"""Algorithms with factors of whole matrices: the options that choose them, with refreshes that fall into short runs."""

OPTIONS = {
    "soap": {"algorithm": "soap", "precondition_frequency": 2},
    "soap, one side": {"algorithm": "soap", "precondition_frequency": 2, "precondition_max_dim": 8},
    "shampoo": {"algorithm": "shampoo", "precondition_frequency": 2, "block_size": 4},
    "shampoo, no graft": {"algorithm": "shampoo", "precondition_frequency": 3, "grafting": None, "shampoo_beta": 1.0},
    "kl_shampoo": {"algorithm": "kl_shampoo"},
    "asgo": {"algorithm": "asgo"},
}
