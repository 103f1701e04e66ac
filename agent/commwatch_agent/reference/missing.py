"""Says how to get a reference where a job's bandwidth cannot be judged. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from commwatch_agent.model.api_views import Row
from commwatch_agent.reference.references import MEASURED

#: In one line of a terminal.
SHORT = "eff –: no reference for the link; measure one: commwatch bench -- LAUNCHER"


def lack_reference(rows: Collection[Row]) -> bool:
    """Return whether some operations have a bus bandwidth that no reference of any kind judges, nor others of their group: measure these.

    Where there are measurements of a group, only the sizes of its other operations were not measured.
    """
    measured = {row.by.get("group") for row in rows if row.efficiency is not None and row.reference in MEASURED}
    return any(row.busbw is not None and row.efficiency is None and row.by.get("group") not in measured for row in rows)


def is_own_best(row: Row) -> bool:
    """Return whether operations are only compared with the job's own fastest ones."""
    return row.efficiency is not None and row.reference == "own_best"


def how_to_judge(rows: Iterable[Row], ranks_per_host: int, *, has_links: bool = True) -> str:
    """Return why it is not known whether some bandwidths are good, and what to run; empty: it is known for all.

    Args:
        has_links: False: all ranks communicate through the CPU of one node, so there is no link to name.
    """
    rows = list(rows)
    which = [
        text for text, wanted in (("–", lack_reference(rows)), ("of own best", any(map(is_own_best, rows)))) if wanted
    ]
    if not which:
        return ""
    measure = f"Measure one with `commwatch bench -- torchrun --nproc-per-node {ranks_per_host}` (your launcher, without the script)"
    efficiency = f"Efficiency {' or '.join(which)}: no reference says how fast"
    unknown = "so it is not known whether busbw is good."
    if not has_links:
        return f"{efficiency} these operations can be, {unknown} {measure}."
    return (
        f"{efficiency} these links can be, {unknown} {measure}, or name "
        'the link of a group in commwatch.toml: under [links], "*" = "eth-25g" for all groups (docs/hardware.md lists the links). '
        "Groups of all GPUs of a node have the rated link by default if commwatch knows it (docs/references.md)."
    )
