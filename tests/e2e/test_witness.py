"""The probe against PyTorch's Flight Recorder: the same operations, one for one (tests/e2e/recorder.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from tests.e2e.recorder import compare
from tests.e2e.torchjob import RankRecords, read_rings, results, run_job

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
            compare(rank, entries, after=["barrier"])  # the script's last, which comes after the recorder was asked
            assert all(record.end_ns >= record.start_ns >= record.launch_ns > 0 for record in rank.operations)
            assert {r.timing for r in rank.operations} - LOOKED[hook] <= {ev.BY_FUTURE, ev.BY_WAIT, ev.BY_CALL}
        if workload in MORE:
            MORE[workload](*ranks)
    for native, python in zip(seen["native"], seen["python"], strict=True):
        assert (native.groups, native.dtypes, native.ops) == (python.groups, python.dtypes, python.ops)
        assert without_times(native) == without_times(python)
        ends = zip(ordered(native), ordered(python), strict=True)
        assert all(theirs.timing in {ours.timing} | LOOKED["python"] for ours, theirs in ends)


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


def messages(first: RankRecords, second: RankRecords) -> None:
    """Sends and receives carry peer, tag, their own numbering and size; the recorder does not see them on Gloo."""
    sends = [(r.peer, r.tag, r.seq, r.size_bytes) for r in first.of("send")]
    assert sends == [(1, 0, 0, 32), (1, 7, 0, 32), (1, 0, 1, 32)]
    assert [(r.peer, r.tag, r.seq) for r in second.of("recv")] == [(0, 0, 0), (0, 7, 0), (-1, 0, 0)]


def barriers(*ranks: RankRecords) -> None:
    """A monitored barrier, which the recorder leaves out on Gloo, is seen, and its end known from the call itself."""
    for rank in ranks:
        assert len([r for r in rank.of("barrier") if r.timing == ev.BY_CALL]) == 1


#: What the recorder does not see of a workload.
MORE: dict[str, Callable[..., None]] = {"point_to_point": messages, "plain": barriers}
