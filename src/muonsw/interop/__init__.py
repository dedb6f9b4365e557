"""Other optimizers and their states: loaded, adopted in mid-run, driven by our decay rules, unwrapped."""
