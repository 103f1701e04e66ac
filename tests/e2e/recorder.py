"""What PyTorch's Flight Recorder saw in a rank, and whether the probe recorded the same.

What the recorder leaves out or names otherwise on Gloo, and the probe sees:

- ``send`` and ``recv`` are not recorded;
- ``monitored_barrier`` is not recorded;
- a ``reduce_scatter`` is recorded as the all_reduces it is made of: one for ``reduce_scatter_tensor``, one a rank for the
  list form, one a tensor for the coalesced form.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from commwatch.wire import events as ev
from tests.e2e.torchjob import RankRecords

DTYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Byte": ("uint8", 1),
    "Int": ("int32", 4),
}
#: (op, dtype, S in bytes)
Seen = tuple[str, str | None, int]


def recorded(entries: list[dict[str, Any]], sizes: dict[str, int]) -> dict[str, list[Seen]]:
    """What the recorder saw, by group name, with S as nccl-tests counts it; ``sizes`` are the groups' sizes."""
    seen: dict[str, list[Seen]] = defaultdict(list)
    for entry in entries:
        op, group = entry["profiling_name"].removeprefix("gloo:"), entry["process_group"][0]
        dtypes = entry["input_dtypes"] or entry["output_dtypes"]
        dtype, itemsize = DTYPES[dtypes[0]] if dtypes else (None, 0)
        given, got = (
            sum(math.prod(shape) for shape in entry[f"{side}_sizes"]) * itemsize for side in ("input", "output")
        )
        n = sizes[group]
        size = {"all_gather": given * n, "gather": given * n, "scatter": got * n, "all_to_all": max(given, got)}.get(
            op, given
        )
        seen[group].append((op, dtype, size))
    return seen


def probed(rank: RankRecords) -> dict[str, list[Seen]]:
    """What the probe saw of it, by group name, in order of sequence number."""
    seen: dict[str, list[Seen]] = defaultdict(list)
    collectives = [r for r in rank.operations if rank.op(r) not in ("send", "recv") and r.timing != ev.BY_CALL]
    for record in sorted(collectives, key=lambda r: (r.group, r.seq)):
        seen[rank.groups[record.group]["name"]].append(
            (rank.op(record), rank.dtypes.get(record.dtype), record.size_bytes)
        )
    return seen


def with_reduce_scatter(ours: list[Seen], theirs: list[Seen]) -> list[Seen]:
    """``theirs`` with the all_reduces that make up a reduce_scatter of ``ours`` put together again."""
    left, told = list(theirs), []
    for op, dtype, size in ours:
        if op == "reduce_scatter":
            total = 0
            while left and left[0][0] == "all_reduce" and total < size:
                total += left.pop(0)[2]
            told.append((op, dtype, total))
        elif left:
            told.append(left.pop(0))
    return told + left


def compare(rank: RankRecords, entries: list[dict[str, Any]], after: Sequence[str] = ()) -> None:
    """Fail unless the records of a rank are what the recorder saw there: op, dtype, size, order, in every group.

    Args:
        after: what the default group did after the recorder was asked.
    """
    ours = probed(rank)
    theirs = recorded(entries, {group["name"]: group["size"] for group in rank.groups.values()})
    for op in reversed(after):
        assert ours["0"].pop()[0] == op
    for group, seen in ours.items():
        assert with_reduce_scatter(seen, theirs[group]) == seen
    assert set(theirs) <= set(ours)
