"""Experiments as data: what they assume, what they run, what they claim, and what came out."""
