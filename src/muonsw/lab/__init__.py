"""The lab: experiments that check the paper with the library, and the reports they write.

It needs the `lab` extra (`pip install '.[lab]'` in the clone). The library never imports it. `compare_arms` compares
runs of a training loop of one's own.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from muonsw.lab.own_loop import compare_arms as compare_arms

__all__ = ["compare_arms"]


def __getattr__(name: str) -> Any:
    """Import `compare_arms` when it is asked for: it needs every package of the lab."""
    if name in __all__:
        from muonsw.lab import own_loop

        return getattr(own_loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
