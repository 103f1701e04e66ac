"""What a report shows of a job's rollups."""

from __future__ import annotations

from dataclasses import dataclass

from commwatch_agent.analysis.summary import summarise
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.api_views import Row
from commwatch_agent.model.cells import Counted
from commwatch_agent.model.views import WaitView
from commwatch_agent.reference.efficiency import Yardstick, curve_of
from commwatch_agent.reference.references import Reference


@dataclass(frozen=True)
class Totals:
    """What a report shows of a job's rollups."""

    #: By the lists of dimensions.
    rows: list[list[Row]]
    #: How long each rank waited for late ranks, by slot with joined collectives.
    waits: list[WaitView]
    #: References by group label and op, best first, as of ``Yardstick``.
    references: dict[tuple[str, str], list[Reference]]

    @property
    def curves(self) -> dict[tuple[str, str], Curve]:
        """Return expected durations by group label and op: from a reference of the link, else from the job's own best."""
        every = {key: [curve_of(each, key[1]) for each in known] for key, known in self.references.items()}
        first = {key: next((curve for curve in curves if curve is not None), None) for key, curves in every.items()}
        return {key: curve for key, curve in first.items() if curve is not None}


class Waits:
    """Sums of the time that ranks waited for late ranks."""

    def __init__(self) -> None:
        self._ns: dict[tuple[int, int, int], int] = {}

    def note(self, begin_ns: int, length_ns: int, one: Counted) -> None:
        """Add a cell of a slot."""
        if one.cell.joined:
            at = begin_ns, length_ns, one.rank
            self._ns[at] = self._ns.get(at, 0) + one.cell.wait_ns

    def views(self) -> list[WaitView]:
        """Return the sums by rank and slot."""
        return [WaitView(rank, at / 1e9, length / 1e9, ns / 1e9) for (at, length, rank), ns in self._ns.items()]


def totals_of(cells: list[Counted], dimensions: list[list[str]], yardstick: Yardstick, waits: list[WaitView]) -> Totals:
    """Return what a report shows, with rows by each list of dimensions."""
    rows = [summarise(cells, by, yardstick.overall) for by in dimensions]
    references: dict[tuple[str, str], list[Reference]] = {}
    for one in cells:
        known = yardstick.references(one)
        if known:
            references.setdefault((one.group, one.op), known)
    return Totals(rows, waits, references)
