"""The parts of a model that single operations of the history carry."""

from __future__ import annotations

from collections.abc import Mapping

from commwatch.wire import events as ev
from commwatch.wire.ring import number_of
from commwatch_agent.core.model_parts.joining import parts_of
from commwatch_agent.core.model_parts.tables import PartTable, table_from
from commwatch_agent.history.history import History
from commwatch_agent.history.rows import RingRow

#: Records that are joined at a time, and those before and after them that are read for it.
_BLOCK, _BESIDE = 4096, 1024
#: A record may be newer than what was known of its ring by so many.
_NEWER = 1 << 31


class PartNames:
    """Reads the history around an operation where that may have a name; built once per query.

    Args:
        dtypes: names of dtypes by ring and code.
    """

    def __init__(self, history: History, rings: Mapping[int, RingRow], dtypes: Mapping[tuple[int, int], str]) -> None:
        self._history = history
        self._tables: dict[int, list[PartTable]] = {}
        for (ring, _), text in sorted(history.names("parts", list(rings)).items()):
            self._tables.setdefault(ring, []).append(table_from(text))
        self._dtypes: dict[int, dict[int, str]] = {ring: {} for ring in self._tables}
        for (ring, code), name in dtypes.items():
            if ring in self._dtypes:
                self._dtypes[ring][code] = name
        self._kinds = {
            ring: {(kind.group, kind.op) for table in tables for kind in table.order}
            for ring, tables in self._tables.items()
        }
        self._blocks: dict[tuple[int, int], dict[int, str]] = {}

    def of(self, ring: RingRow, record: ev.Record) -> str | None:
        """Return the name of what an operation carries; ``None``: not known, or not certain."""
        if (record.group, record.op) not in self._kinds.get(ring.id, ()):
            return None
        place = ring.id, number_of(record.stamp, ring.next_n + _NEWER) // _BLOCK
        found = self._blocks.pop(place, None)
        if found is None:
            found = self._joined(*place)
        self._blocks[place] = found  # the latest used is the last
        if len(self._blocks) > len(self._tables) + 1:
            del self._blocks[next(iter(self._blocks))]
        return found.get(record.stamp)

    def _joined(self, ring: int, block: int) -> dict[int, str]:
        from_n, until_n = block * _BLOCK, (block + 1) * _BLOCK
        records = self._history.stretch(ring, from_n - _BESIDE, until_n + _BESIDE)
        found = map(ev.Record._make, ev.RECORD.iter_unpack(records))
        return parts_of(found, self._tables[ring], self._dtypes[ring], whole=from_n < _BESIDE)
