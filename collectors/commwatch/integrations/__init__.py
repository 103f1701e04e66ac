"""commwatch in the loggers of training frameworks: one module for each, which imports the framework (docs/python.md)."""

from __future__ import annotations


def checked(every_n_steps: int) -> int:
    """Return ``every_n_steps``.

    Raises:
        ValueError: it is less than 1.
    """
    if every_n_steps < 1:
        raise ValueError(f"every_n_steps is {every_n_steps}; it must be 1 or more")
    return every_n_steps
