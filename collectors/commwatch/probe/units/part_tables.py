"""What a table of the parts of a model consists of."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Carried(NamedTuple):
    """One collective of a pass through the model."""

    group: weakref.ref[Any]
    op: str
    #: Of the operation's size S, as the records have it.
    elements: int
    #: The part of the model that it carries: the place of its name in the table.
    part: int


#: Writes a table: since when it is valid, in ns; the names of the parts; and the collectives of a pass in their order.
Announce = Callable[[int, Sequence[str], Sequence[Carried]], None]
#: Calls a function, and handles its errors.
Guarded = Callable[..., None]
