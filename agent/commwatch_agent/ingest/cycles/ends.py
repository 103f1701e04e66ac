"""The end of an iteration, as the accounting of steps takes it. Pure, and without numpy: an agent without trainers has this module, too."""

from __future__ import annotations

from typing import NamedTuple


class End(NamedTuple):
    """The end of an iteration: after which of the operations that were passed it is known; number and end of its last operation."""

    place: int
    seq: int
    end_ns: int
    #: The first end of a cycle: the iteration before it is not known.
    first: bool
    #: Time since the end before it in operations in which ranks wait for a root (``events.FROM_ROOT``).
    of_root_ns: int = 0
