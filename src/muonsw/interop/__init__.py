"""Other optimizers and their states: loaded, driven by our decay rules, unwrapped."""
