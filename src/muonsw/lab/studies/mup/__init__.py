"""The check that muP does what it is for: sizes that do not depend on the width."""

from muonsw.lab.studies.mup.coordinates import EXPERIMENTS as EXPERIMENTS
