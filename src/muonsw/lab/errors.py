"""What can go wrong, as exceptions that the command line turns into a message and an exit code."""

from __future__ import annotations


class UsageError(Exception):
    """Something the user asked for cannot be done; the message says what to do instead."""
