"""The probe against PyTorch's Flight Recorder: the same operations, one for one.

What the recorder leaves out or names otherwise on Gloo, and the probe sees:

- ``send`` and ``recv`` are not recorded;
- ``monitored_barrier`` is not recorded;
- a ``reduce_scatter`` is recorded as the all_reduces it is made of: one for ``reduce_scatter_tensor``, one a rank for the
  list form, one a tensor for the coalesced form.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from commwatch.collectors import events as ev
from tests.e2e.torchjob import RankRecords, read_rings, results, run_job

DTYPES = {
    "Float": ("float32", 4),
    "Double": ("float64", 8),
    "BFloat16": ("bfloat16", 2),
    "Long": ("int64", 8),
    "Byte": ("uint8", 1),
    "Int": ("int32", 4),
}
WORKLOADS = [
    "plain",
    "asynchronous",
    "coalesced",
    "point_to_point",
    "subgroups",
    "ddp",
    "fsdp",
    "tensor_parallel",
    "functional",
    "compiled",
    "inference",
]
#: Where the probe's thread has the GIL before a thread whose operation has ended, it sees the end first.
LOOKED = {"native": set[int](), "python": {ev.BY_POLL}}
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


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("workload", WORKLOADS)
def test_witness(workload: str, tmp_path: Path) -> None:
    """Either hook sees the collectives the Flight Recorder sees: op, dtype, size, order, on every rank and group.

    And the two write the same records, field by field, but for times.
    """
    seen = {}
    for hook in ("native", "python"):
        output = run_job(
            tmp_path / hook,
            "witness.py",
            workload,
            COMMWATCH_HOOK=hook,
            COMMWATCH_JOB="witness",
            TORCH_FR_BUFFER_SIZE="20000",
        )
        ranks = seen[hook] = read_rings(tmp_path / hook)
        assert [(rank.rank, rank.identity["hook"]) for rank in ranks] == [(0, hook), (1, hook)]
        for rank, entries in zip(ranks, results(output), strict=True):
            check_against_recorder(rank, entries)
            assert {r.timing for r in rank.operations} - LOOKED[hook] <= {ev.BY_FUTURE, ev.BY_WAIT, ev.BY_CALL}
    for native, python in zip(seen["native"], seen["python"], strict=True):
        assert (native.groups, native.dtypes, native.ops) == (python.groups, python.dtypes, python.ops)
        assert without_times(native) == without_times(python)
        ends = zip(ordered(native), ordered(python), strict=True)
        assert all(theirs.timing in {ours.timing} | LOOKED["python"] for ours, theirs in ends)


def check_against_recorder(rank: RankRecords, entries: list[dict[str, Any]]) -> None:
    """The records of a rank are what the recorder saw there."""
    ours = probed(rank)
    theirs = recorded(entries, {group["name"]: group["size"] for group in rank.groups.values()})
    # The script's last barrier comes after the recorder was asked.
    last = ours["0"].pop()
    assert last[0] == "barrier"
    for group, seen in ours.items():
        assert with_reduce_scatter(seen, theirs[group]) == seen
    assert set(theirs) <= set(ours)
    assert all(record.end_ns >= record.start_ns >= record.launch_ns > 0 for record in rank.operations)


def without_time(record: ev.Record) -> tuple[int, ...]:
    """All of a record that does not depend on when things happened."""
    size = record.size_bytes if record.op else 0
    return record.op, record.dtype, record.group, record.peer, record.tag, size, record.seq, record.flags


def ordered(rank: RankRecords) -> list[ev.Record]:
    """A rank's records in an order that does not depend on when things happened."""
    return sorted(rank.records, key=without_time)


def without_times(rank: RankRecords) -> list[tuple[int, ...]]:
    """Of all of a rank's records what does not depend on when things happened."""
    return [without_time(record) for record in ordered(rank)]


@pytest.mark.usefixtures("hook")
def test_point_to_point(tmp_path: Path) -> None:
    """Sends and receives carry peer, tag, their own numbering and size; the recorder does not see them on Gloo."""
    run_job(tmp_path, "witness.py", "point_to_point")
    first, second = read_rings(tmp_path)
    assert [(r.peer, r.tag, r.seq, r.size_bytes) for r in first.of("send")] == [
        (1, 0, 0, 32),
        (1, 7, 0, 32),
        (1, 0, 1, 32),
    ]
    assert [(r.peer, r.tag, r.seq) for r in second.of("recv")] == [(0, 0, 0), (0, 7, 0), (-1, 0, 0)]


@pytest.mark.usefixtures("hook")
def test_monitored_barrier(tmp_path: Path) -> None:
    """A monitored barrier, which the recorder leaves out on Gloo, is seen, and its end known from the call itself."""
    run_job(tmp_path, "witness.py", "plain")
    for rank in read_rings(tmp_path):
        assert len([r for r in rank.of("barrier") if r.timing == ev.BY_CALL]) == 1
