"""Tables of the parts of a model, as trainers write them: the order in which a pass communicates its parts. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from commwatch.wire import events as ev
from commwatch_agent.model.cells import OTHER_ID, count_of

#: Most parts of a table, most characters of a part's name, and most collectives of a pass.
MOST_PARTS, MOST_NAME, _MOST_ORDER = 2048, 300, 16_384


class Kind(NamedTuple):
    """A kind of collective: number of the group in the ring, code of the operation, and its elements."""

    group: int
    op: int
    elements: int


class PartTable(NamedTuple):
    """The parts that the collectives of a pass carry."""

    #: When it became valid, on the trainer's monotonic clock.
    since_ns: int
    names: tuple[str, ...]
    #: For each kind of collective the places in ``names`` of the parts that it carries, in the order of a pass.
    order: Mapping[Kind, tuple[int, ...]]


def table_of(entry: Mapping[str, Any]) -> PartTable:
    """Return the table of an entry of the names file; raise ``KeyError``, ``OverflowError``, ``TypeError`` or ``ValueError`` if damaged."""
    names = tuple(str(name)[:MOST_NAME] for name in entry["names"][:MOST_PARTS])
    order = {
        Kind(count_of(group), ev.OP_CODE[op], _elements(elements)): tuple(map(count_of, parts))
        for group, op, elements, parts in entry["order"]
    }
    since_ns = int(entry["since"])
    if not 0 <= since_ns < ev.MAX_PLAUSIBLE or any(kind.group >= OTHER_ID for kind in order):
        raise ValueError("a number is out of range")
    if sum(map(len, order.values())) > _MOST_ORDER or not all(order.values()):
        raise ValueError("too many collectives, or none")
    if any(part >= len(names) for parts in order.values() for part in parts):
        raise ValueError("a part without a name")
    return PartTable(since_ns, names, order)


def _elements(value: Any) -> int:
    if isinstance(value, int) and 0 < value < ev.MAX_PLAUSIBLE:
        return value
    raise ValueError(f"{value!r} elements")


def text_of(table: PartTable) -> str:
    """Return a table as the text from which ``table_from`` reads it."""
    order = [[kind.group, ev.OPS[kind.op - 1], kind.elements, parts] for kind, parts in table.order.items()]
    return json.dumps({"since": table.since_ns, "names": table.names, "order": order})


def table_from(text: str) -> PartTable:
    """Return a table of the history."""
    return table_of(json.loads(text))
