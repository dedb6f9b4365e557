"""Thin parts for frameworks that train: what each needs beyond a plain optimizer.

Each module here imports its own framework and is imported by name, so that `import muonsw` needs torch alone.
"""
