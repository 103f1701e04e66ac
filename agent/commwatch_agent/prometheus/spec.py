"""The definition of one metric."""

from __future__ import annotations

from typing import NamedTuple


class Spec(NamedTuple):
    """Name, type, help text and label names of one metric."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
