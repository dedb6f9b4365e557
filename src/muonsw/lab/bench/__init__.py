"""Timing on the user's own machine: an optimizer's step beside other optimizers', and the trainer's updates."""
