"""Parameters that ranks share: sharded or replicated, with the same maths as on one rank.

An elementwise rule moves each rank's shard as if it were a parameter of its own. A rule that needs whole matrices gets
one more stage, the exchange: momentum on the shards, shards to the rank that owns the matrix, directions back to the
shards. How a parameter is laid out across ranks determines its exchange.
"""
