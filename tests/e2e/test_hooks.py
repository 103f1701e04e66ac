"""Both hooks write the same records, whatever a job does; and they are what PyTorch's Flight Recorder saw (tests/e2e/recorder.py).

All other tests with jobs have the native hook, but for those of what the hooks themselves do in the trainer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest

from commwatch.wire import events as ev
from commwatch.wire import splits
from commwatch.wire.ring_reader import RingReader
from tests.e2e.recorder import compare
from tests.e2e.torchjob import RankRecords, alone, read_rings, results, run_job, said

#: Those of one job have spaces between them.
WORKLOADS = [
    "plain asynchronous coalesced point_to_point subgroups inference",
    "ddp",
    "fsdp",
    "tensor_parallel",
    "functional",
    "compiled",
    pytest.param("inductor", marks=pytest.mark.long),  # builds C++ for 20 s of a core
]


class Workload(NamedTuple):
    """A script of ``jobs/``; ``FOLDER`` among its arguments is the test's own."""

    script: str
    arguments: tuple[object, ...] = ()
    #: 0: one process, without a launcher.
    ranks: int = 2
    env: Mapping[str, str] = MappingProxyType({})

    def __str__(self) -> str:
        return "-".join((self.script.removesuffix(".py"), *map(str, self.arguments)))


FOLDER = "FOLDER"
KINDS_OF_STEPS = ("plain", "zero", "groups", "explicit")
#: Further orders of optimizers, which either hook takes in as those above.
MORE_KINDS_OF_STEPS = ("two", "accumulate", "gan", "critic", "random", "quick")
JOBS = (
    Workload("identity.py", (FOLDER,), 4),
    Workload("install_late.py", env={"COMMWATCH": "0"}),
    *(Workload("steps.py", (kind, 6)) for kind in KINDS_OF_STEPS),
    *(pytest.param(Workload("steps.py", (kind, 6)), marks=pytest.mark.long) for kind in MORE_KINDS_OF_STEPS),
    Workload("late.py", ranks=3),
    Workload("train.py"),
    Workload("pipeline.py", (4, 2), 3),
    Workload("ops.py", (300,), env={"COMMWATCH_SLOTS": "256"}),
    Workload("awkward.py"),
    Workload("gpus.py"),
    Workload("tags.py", ranks=0),
    Workload("many_peers.py", ranks=0, env={"COMMWATCH_SLOTS": str(1 << 15)}),
    Workload("unknown_ops.py", ranks=0, env={"WORLD_SIZE": "", "COMMWATCH": "0"}),
    Workload("estimate.py", ranks=0, env={"WORLD_SIZE": "1"}),
    Workload("strangers.py", (1, 5), 0, {"RANK": "5", "WORLD_SIZE": "8"}),
    Workload("strangers.py", (1, 5, 6, 5), 0, {"RANK": "5", "WORLD_SIZE": ""}),
    Workload("moved.py", (FOLDER,), 0, {"COMMWATCH": "0", "COMMWATCH_DIR": "run", "WORLD_SIZE": ""}),
)
#: What rank 0 of ``splits.py`` sends to each of three ranks, and expects from each, by the number of the operation.
SPLITS = (
    ((16, 0, 24), (8, 16, 24)),
    ((8, 8, 8), (8, 8, 8)),
    ((0, 4, 8), (0, 4, 8)),
    ((0, 0, 0), (0, 0, 0)),
)
#: Where the probe's thread has the GIL before a thread whose operation has ended, it sees the end first.
LOOKED = {"native": set[int](), "python": {ev.BY_POLL}}


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
            *workload.split(),
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
        for name in MORE.keys() & workload.split():
            MORE[name](*ranks)
    for native, python in zip(seen["native"], seen["python"], strict=True):
        same_records(native, python)
        ends = zip(ordered(native), ordered(python), strict=True)
        assert all(theirs.timing in {ours.timing} | LOOKED["python"] for ours, theirs in ends)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_same_records(job: Workload, tmp_path: Path) -> None:
    """Under either hook a job has the same records, field by field but for times, the same names, identity and loss."""
    seen = {}
    for hook in ("native", "python"):
        place = tmp_path / hook
        place.mkdir()
        arguments = [str(place) if argument == FOLDER else str(argument) for argument in job.arguments]
        env = {"COMMWATCH_JOB": "same", "COMMWATCH_HOOK": hook, **job.env}
        if job.ranks:
            run_job(place, job.script, *arguments, nproc=job.ranks, **env)
        else:
            said(alone(place, job.script, *arguments, **env))
        seen[hook] = read_rings(place / "run" if job.env.get("COMMWATCH_DIR") else place)
        assert [rank.identity["hook"] for rank in seen[hook]] == [hook] * max(1, len(seen[hook]))
    for native, python in zip(seen["native"], seen["python"], strict=True):
        same_records(native, python)
        assert native.lost == python.lost
        for what in ("rank", "world_size", "local_rank", "restart", "job_id"):
            assert native.identity.get(what) == python.identity.get(what), what


def same_records(native: RankRecords, python: RankRecords) -> None:
    """Fail unless a rank's names and records are those of the other hook, but for times."""
    assert by_id(native) == by_id(python)
    assert (native.dtypes, native.ops) == (python.dtypes, python.ops)
    assert without_times(native) == without_times(python)


def by_id(rank: RankRecords) -> dict[str, dict[str, Any]]:
    """A rank's groups by their common id: threads come to their groups in any order, which decides the numbers of groups in the ring."""
    return {entry["group_id"]: {**entry, "group": None} for entry in rank.groups.values()}


def without_time(rank: RankRecords, record: ev.Record) -> tuple[int | str, ...]:
    """All of a record that does not depend on when things happened."""
    size = record.size_bytes if record.op else 0
    # Groups that torch.distributed does not know are never joined, and each hook numbers their operations in its own way.
    group = rank.groups.get(record.group)
    seq = record.seq if group is None or group["ranks"] is not None else -1
    group_id = "" if group is None else group["group_id"]
    # Whether a wait is seen may depend on when the operation ends, but for a step mark, in which this bit says something else.
    flags = record.flags & ~ev.WAIT_SEEN if record.op else record.flags
    return record.op, record.dtype, group_id, record.peer, record.tag, size, seq, flags


def ordered(rank: RankRecords) -> list[ev.Record]:
    """A rank's records in an order that does not depend on when things happened."""
    return sorted(rank.records, key=partial(without_time, rank))


def without_times(rank: RankRecords) -> list[tuple[int | str, ...]]:
    """Of all of a rank's records what does not depend on when things happened."""
    return [without_time(rank, record) for record in ordered(rank)]


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


@pytest.mark.parametrize("hook", ["native", "python"])
def test_split_sizes(hook: str, tmp_path: Path) -> None:
    """Either hook notes what a rank sends to each rank in an all_to_all, and expects from each; not of a call that is not valid."""
    area, group = noted_splits(tmp_path, hook, 3)
    assert [splits.find(area, group, seq) for seq in range(len(SPLITS) + 3)] == [*SPLITS, None, None, None]


@pytest.mark.parametrize("hook", ["native", "python"])
def test_split_sizes_of_many(hook: str, tmp_path: Path) -> None:
    """Of a group with more ranks than an entry has room for, none are noted; the calls are recorded as any."""
    most, more = (
        noted_splits(tmp_path / str(size), hook, size) for size in (splits.MOST_MEMBERS, splits.MOST_MEMBERS + 1)
    )
    assert splits.find(*most, 1) == ((8,) * splits.MOST_MEMBERS,) * 2
    assert more[0].count(0) == len(more[0])


def noted_splits(directory: Path, hook: str, size: int) -> tuple[bytes, int]:
    """What a hook notes of the split sizes of ``splits.py`` with so many ranks; and the number of its group."""
    directory.mkdir(exist_ok=True)
    said(alone(directory, "splits.py", size, COMMWATCH_HOOK=hook, WORLD_SIZE=str(size)))
    (rank,) = read_rings(directory)
    assert len(rank.of("all_to_all")) >= len(SPLITS)
    (path,), (group,) = (directory / "rings").glob("*.ring"), rank.groups
    with closing(RingReader(path)) as reader:
        return reader.splits(), group
