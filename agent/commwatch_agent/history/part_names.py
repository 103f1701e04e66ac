"""The parts of a model that single operations of the history carry."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from commwatch.wire import events as ev
from commwatch.wire.ring import number_of
from commwatch_agent.history.history import History
from commwatch_agent.history.rows import RingRow
from commwatch_agent.model.model_parts.joining import parts_of
from commwatch_agent.model.model_parts.repeats import Repeat, repeats_of
from commwatch_agent.model.model_parts.tables import PartTable, table_from

#: Records that are joined at a time, and those before and after them that are read for it.
_BLOCK, _BESIDE = 4096, 1024
#: A record may be newer than what was known of its ring by so many.
_NEWER = 1 << 31


class _OfRing(NamedTuple):
    """The tables of a ring, its groups and operations that may have a name, and the names of its dtypes."""

    tables: list[PartTable]
    kinds: set[tuple[int, int]]
    dtypes: dict[int, str]


class PartNames:
    """Reads the history around an operation where that may have a name; built once per query.

    Args:
        dtypes: names of dtypes by ring and code.
    """

    def __init__(self, history: History, rings: Mapping[int, RingRow], dtypes: Mapping[tuple[int, int], str]) -> None:
        self._history, self._dtypes = history, dtypes
        #: Tables of the rings that have any, as they are stored; and those of rings that were asked for.
        self._texts: dict[int, list[str]] = {}
        for (ring, _), text in sorted(history.names("parts", list(rings)).items()):
            self._texts.setdefault(ring, []).append(text)
        self._known: dict[int, _OfRing] = {}
        self._blocks: dict[tuple[int, int], dict[int, str]] = {}

    def of(self, ring: RingRow, record: ev.Record) -> str | None:
        """Return the name of what an operation carries; ``None``: not known, or not certain."""
        if ring.id not in self._texts or (record.group, record.op) not in self._of_ring(ring.id).kinds:
            return None
        place = ring.id, number_of(record.stamp, ring.next_n + _NEWER) // _BLOCK
        found = self._blocks.pop(place, None)
        if found is None:
            found = self._joined(*place)
        self._blocks[place] = found  # the latest used is the last
        if len(self._blocks) > len(self._known) + 1:
            del self._blocks[next(iter(self._blocks))]
        return found.get(record.stamp)

    def repeats(self, ring: RingRow) -> dict[tuple[int, int], Repeat]:
        """Return what the latest steps of a ring communicate more than once, by group and operation."""
        if ring.id not in self._texts:
            return {}
        known = self._of_ring(ring.id)
        records = self._history.stretch(ring.id, ring.next_n - _BLOCK, ring.next_n + _NEWER)
        return repeats_of(map(ev.Record._make, ev.RECORD.iter_unpack(records)), known.tables, known.dtypes)

    def _of_ring(self, ring: int) -> _OfRing:
        known = self._known.get(ring)
        if known is None:
            tables = list(map(table_from, self._texts[ring]))
            kinds = {(kind.group, kind.op) for table in tables for kind in table.order}
            dtypes = {code: name for (of, code), name in self._dtypes.items() if of == ring}
            known = self._known[ring] = _OfRing(tables, kinds, dtypes)
        return known

    def _joined(self, ring: int, block: int) -> dict[int, str]:
        known, from_n, until_n = self._of_ring(ring), block * _BLOCK, (block + 1) * _BLOCK
        records = self._history.stretch(ring, from_n - _BESIDE, until_n + _BESIDE)
        found = map(ev.Record._make, ev.RECORD.iter_unpack(records))
        return parts_of(found, known.tables, known.dtypes, whole=from_n < _BESIDE)
