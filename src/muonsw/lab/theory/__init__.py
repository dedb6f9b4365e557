"""The paper's theory: each file has the closed forms of some theorems, the runs that test them, and the claims.

Closed forms are pure functions. `lam` is the weight decay lambda and `q = lam / eta_max` the coefficient of scaled
decay. A hypothesis that does not hold raises `HypothesisError`, which names it. The experiments run
the library's optimizers; `studies/catalogue.py` lists them.
"""
