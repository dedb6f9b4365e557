"""How `muonsw COMMAND --help` shows options."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

try:
    from tyro.conf import arg
except ModuleNotFoundError:  # training needs no command line

    def arg(**_: Any) -> None: ...  # type: ignore[no-redef]


unset = partial(arg, help_behavior_hint="")  # hides tyro's note on the default, where the help explains it or need not
Flag = Annotated[bool, unset()]  # a switch that is off by default
