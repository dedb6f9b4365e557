"""Studies that train: what each runs, claims and draws, as data in `catalogue`."""
