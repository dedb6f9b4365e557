"""The paper's theory: each file has the closed forms of some theorems, the runs that test them, and the claims.

Closed forms are pure functions; a violated hypothesis raises `HypothesisError`, which names it. `lam` is the weight
decay lambda and `q = lam / eta_max` the coefficient of scaled decay. The experiments in `studies/catalogue.py` run the
library's optimizers.
"""
