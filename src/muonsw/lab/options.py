"""How `muonsw COMMAND --help` shows options."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from tyro.conf import arg

unset = partial(arg, help_behavior_hint="")  # an option whose default is explained in words, or needs no words
Flag = Annotated[bool, unset()]  # a switch that is off by default
