"""What the parts of the probe need that write to its names file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from commwatch.probe.torch_groups import Group

_T = TypeVar("_T")


class NamingProbe(Protocol):
    """A probe (``torch_probe.Probe``), as far as its names file is concerned."""

    off: bool

    @property
    def place(self) -> tuple[str, int]:
        """The job and the rank of this process."""

    @property
    def ring(self) -> object | None:
        """Where it records; ``None``: it does not."""

    def say(self, text: str, about: str) -> None:
        """Print one line to standard error, once per topic ``about``."""

    def with_probe_locks(self, do: Callable[[], _T]) -> _T:
        """Call, from the trainer's thread, what takes locks of the probe."""

    def group_of(self, pg: Any) -> Group:
        """Return the group with its number in the ring."""

    def intern(self, kind: str, code: int, entry: dict[str, Any], otherwise: int) -> int:
        """Write ``entry`` with number ``code`` to the names file, return the number; ``otherwise`` without space."""
