"""What a report shows of a job's rollups."""

from __future__ import annotations

from dataclasses import dataclass

from commwatch_agent.analysis.summary import summarise
from commwatch_agent.model.alpha_beta import Curve
from commwatch_agent.model.api_views import Row
from commwatch_agent.model.cells import Counted
from commwatch_agent.model.views import WaitView
from commwatch_agent.reference.efficiency import Yardstick, curve_of


@dataclass(frozen=True)
class Totals:
    """What a report shows of a job's rollups."""

    #: By the lists of dimensions.
    rows: list[list[Row]]
    #: How long each rank waited for late ranks, by slot with joined collectives.
    waits: list[WaitView]
    #: Expected durations by group label and op: from a reference of the link, else from the job's own best.
    curves: dict[tuple[str, str], Curve]


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
    return Totals(rows, waits, _curves(cells, yardstick))


def _curves(cells: list[Counted], yardstick: Yardstick) -> dict[tuple[str, str], Curve]:
    found: dict[tuple[str, str], Curve] = {}
    for one in cells:
        curves = (curve_of(reference, one.op) for reference in yardstick.references(one))
        curve = next((curve for curve in curves if curve is not None), None)
        if curve is not None:
            found.setdefault((one.group, one.op), curve)
    return found
