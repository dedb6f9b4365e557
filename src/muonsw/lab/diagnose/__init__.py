"""What a run's telemetry says: theory beside observation, fits, figures, and findings in plain words.

`live` and `plot` need torch alone, so nothing is imported here.
"""
