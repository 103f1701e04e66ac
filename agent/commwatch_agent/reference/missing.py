"""Says how to get a reference where a job's bandwidth cannot be judged. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from commwatch_agent.model.api_views import Row

#: In one line of a terminal.
SHORT = "eff –: no reference for the link; measure one: commwatch bench -- LAUNCHER"


def lacks_reference(row: Row) -> bool:
    """Return whether operations have a bus bandwidth that no reference of any kind judges."""
    return row.busbw is not None and row.efficiency is None


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
        text
        for text, wanted in (("–", lacks_reference), ("of own best", is_own_best))
        if any(wanted(row) for row in rows)
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
