"""What a run's telemetry says: theory beside observation, fits, figures, and findings in plain words."""

from muonsw.lab.diagnose.diagnosis import Diagnosis, diagnose
from muonsw.lab.diagnose.fits import fit_alignment, late_fits
from muonsw.lab.diagnose.history import History, open_history
from muonsw.lab.diagnose.rules import RULES, Severity, examine

__all__ = ["RULES", "Diagnosis", "History", "Severity"]
__all__ += ["diagnose", "examine", "fit_alignment", "late_fits", "open_history"]
