"""The real NCCL loads our profiler plugin: its times are what was played, its choices what NCCL logs, and nothing is counted twice."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from commwatch.probe.native.library import PLUGIN
from commwatch.wire import events as ev
from tests.cuda_rig.build import TREE
from tests.cuda_rig.played_jobs import Played, Run, pairs, wrong
from tests.e2e.torchjob import RankRecords

pytestmark = [pytest.mark.cuda_rig, pytest.mark.timeout(600)]

#: Scenes of collectives without messages to the own rank, which all-to-alls have.
SCENES = ("coalesced", "groups", "sharded", "replicated", "tensors")
#: Without the second, NCCL reports wrong times after a broadcast.
ON = {"COMMWATCH_NCCL_PLUGIN": "on", "NCCL_ALLGATHERV_ENABLE": "0"}
#: Part of the operations whose times NCCL's thread may report too late, on two busy cores; these have times from events.
LATE = 0.5
THEIR_PLUGIN = TREE / "tests" / "collectors" / "nccl_plugin" / "their_plugin.c"
CHOICE = re.compile(r"NCCL INFO (\w+): (\d+) Bytes -> Algo (\w+) proto (\w+) channel\{Lo\.\.Hi\}=\{(\d+)\.\.(\d+)\}")


def counted(rank: RankRecords) -> Counter[tuple[str, int]]:
    return Counter((rank.op(record), record.size_bytes) for record in rank.operations)


@pytest.mark.real_gpu
@pytest.mark.parametrize("scene", SCENES)
def test_operations(run: Run, scene: str) -> None:
    """The same operations are recorded as without the plugin, and most have NCCL's times."""
    played, usual = run(scene, **ON), run(scene)
    for rank, same in zip(played.ranks, usual.ranks, strict=True):
        assert rank.lost == 0
        assert counted(rank) == counted(same)
        assert not any(record.timing == ev.BY_NCCL for record in same.operations)
        assert sum(record.timing == ev.BY_NCCL for record in rank.operations) >= (1 - LATE) * len(rank.operations)


@pytest.mark.real_gpu
@pytest.mark.parametrize("scene", ["messages", "pipelined"])
def test_messages(run: Run, scene: str) -> None:
    """Messages have times from events, as NCCL may note the end of a send long before the peer has received it."""
    played, usual = run(scene, **ON), run(scene)
    for rank, same in zip(played.ranks, usual.ranks, strict=True):
        assert (rank.lost, counted(rank)) == (0, counted(same))
        messages = rank.of("send", "recv")
        assert {record.timing for record in messages if not record.flags & ev.UNTIMED} == {ev.BY_EVENTS}
        assert len(messages) >= 32


@pytest.mark.real_gpu
@pytest.mark.parametrize("scene", SCENES)
def test_durations(run: Run, scene: str) -> None:
    """A duration by NCCL is that of the kernels, within 2% or 20 µs, also on idle streams and of the first operation."""
    found = [
        ((record.end_ns - record.start_ns) / 1e3, (kernel["end"] - kernel["begin"]) / 1e3)
        for record, kernel in pairs(run(scene, **ON), idle=True)
        if record.timing == ev.BY_NCCL
    ]
    assert len(found) >= 5
    assert wrong(found) == []


@pytest.mark.parametrize(
    ("scene", "setting", "op"), [("replicated", "1", "broadcast"), ("collectives", "0", "all_to_all")]
)
def test_what_breaks_times(run: Run, scene: str, setting: str, op: str) -> None:
    """After a broadcast, or a message to the own rank, NCCL reports times of other operations: then durations come from events, and are right."""
    played = run(scene, **ON | {"NCCL_ALLGATHERV_ENABLE": setting})
    found = list(pairs(played))
    assert len(found) > 20
    assert wrong([((r.end_ns - r.start_ns) / 1e3, (k["end"] - k["begin"]) / 1e3) for r, k in found]) == []
    for rank in played.ranks:
        first = min(record.launch_ns for record in rank.of(op))
        assert not any(record.timing == ev.BY_NCCL for record in rank.operations if record.launch_ns > first)


@pytest.mark.parametrize("scene", ["sharded", "replicated"])
def test_choices(run: Run, scene: str) -> None:
    """Algorithm, protocol and channels of each collective are those that NCCL logs."""
    played = run(scene, **ON, NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="TUNING")
    logged = Counter[tuple[str, int, str, str, int]]()
    for function, size, algorithm, protocol, low, high in CHOICE.findall(played.output):
        # NCCL counts what one rank contributes.
        wide = int(size) * (2 if function in ("AllGather", "ReduceScatter") else 1)
        logged[function, wide, algorithm.lower(), protocol.lower(), int(high) - int(low) + 1] += 1
    names = {
        "AllReduce": ("all_reduce", "barrier"),
        "AllGather": ("all_gather",),
        "ReduceScatter": ("reduce_scatter",),
        "Broadcast": ("broadcast",),
    }
    rank = played.ranks[0]  # only this one logs them
    recorded = Counter[tuple[str, int, str, str, int]]()
    for record in rank.operations:
        choice = ev.nccl_choice(record.timing, record.aux)
        if choice.algorithm and choice.protocol and choice.channels:
            function = next(name for name, ops in names.items() if rank.op(record) in ops)
            size = record.size_bytes or 4  # NCCL's barrier sums one number
            recorded[function, size, choice.algorithm.lower(), choice.protocol.lower(), choice.channels] += 1
    logged = Counter({key: number for key, number in logged.items() if key[0] in names})
    assert recorded - logged == Counter()
    assert recorded.total() >= (1 - LATE) * logged.total() > 0


def test_channel_that_is_behind(run: Run) -> None:
    """Of each collective it is known which channel ended last, and how long after the first, as it was played."""
    played = run("sharded", **ON, PLAYED_NCCL_APART_US="90")
    for rank in played.ranks:
        found = [
            (ev.nccl_choice(record.timing, record.aux).channels, ev.channel_ends(record.timing, record.tag))
            for record in rank.operations
            if record.timing == ev.BY_NCCL
        ]
        several = [(channels, ends) for channels, ends in found if channels is not None and channels > 1]
        assert len(several) > 10
        assert {ends.last for channels, ends in several} <= {channels - 1 for channels, _ in several}
        assert all(ends.apart_s == pytest.approx(90e-6, abs=2e-6) for _, ends in several)
        assert all(ends == ev.ChannelEnds() for channels, ends in found if channels == 1)


def of_foreign(rank: RankRecords) -> list[ev.Record]:
    """The operations that PyTorch did not make."""
    return [record for record in rank.operations if rank.groups[record.group]["name"].startswith("nccl:")]


def test_foreign(run: Run) -> None:
    """Operations that another library makes, and each of their replays, appear once, under their communicator, with sizes; collectives have durations."""
    played = run("foreign", **ON)
    for number, (rank, report) in enumerate(zip(played.ranks, played.reports, strict=True)):
        message = "send" if number == 0 else "recv"
        ours = of_foreign(rank)
        sizes = {
            ("all_reduce", 4 << 18): 5,
            ("all_gather", 4 << 18): 5,
            (message, 4 << 17): 5,
            ("all_reduce", 4 << 16): 10,
        }
        assert Counter((rank.op(record), record.size_bytes) for record in ours) == sizes
        timed = [record for record in ours if record.timing == ev.BY_NCCL]
        assert {rank.op(record) for record in ours if record not in timed} == {message}
        assert {rank.op(record) for record in timed} == {"all_reduce", "all_gather"}
        assert len(rank.operations) - len(ours) == 6
        comms = Counter(kernel["comm"] for kernel in report["nccl"])
        foreign = next(comm for comm, kernels in comms.items() if kernels == len(ours))
        collectives = [k for k in report["nccl"] if k["comm"] == foreign and not k["ops"].startswith(("Send", "Recv"))]
        kernels = sorted(int(k["end"] - k["begin"]) for k in collectives)
        durations = sorted(record.end_ns - record.start_ns for record in timed)
        assert wrong([(ns / 1e3, true / 1e3) for ns, true in zip(durations, kernels, strict=True)]) == []


def test_graphs(run: Run) -> None:
    """Each replay of PyTorch's own graphs has NCCL's times, within 2% or 20 µs, and its choices; none is counted twice."""
    played = run("inference", **ON)
    for rank, report in zip(played.ranks, played.reports, strict=True):
        assert not of_foreign(rank)
        _, *records = sorted(rank.operations, key=lambda record: record.seq)
        kernels = sorted((k for k in report["nccl"] if k["replayed"]), key=lambda kernel: int(kernel["begin"]))
        assert len(records) == len(kernels) == 300
        timed = [(r, k) for r, k in zip(records, kernels, strict=True) if r.timing == ev.BY_NCCL]
        assert len(timed) >= (1 - LATE) * len(records)
        assert wrong([((r.end_ns - r.start_ns) / 1e3, (k["end"] - k["begin"]) / 1e3) for r, k in timed]) == []
        assert all(record.flags & ev.UNTIMED for record in records if record.timing != ev.BY_NCCL)
        assert all(ev.nccl_choice(r.timing, r.aux).protocol for r, _ in timed)
    assert undisturbed(played)
    assert [counted(rank) for rank in played.ranks] == [counted(rank) for rank in run("inference").ranks]


def test_replays_that_nccl_does_not_count(run: Run) -> None:
    """Replays after a call outside of graphs have no times, because NCCL reports those of other operations; no time is wrong."""
    played = run("replayed", **ON)
    for rank, report in zip(played.ranks, played.reports, strict=True):
        records = sorted(rank.operations, key=lambda record: record.seq)
        kernels = sorted(report["nccl"], key=lambda kernel: int(kernel["begin"]))
        timed = [(r, k) for r, k in zip(records, kernels, strict=True) if r.timing == ev.BY_NCCL]
        assert wrong([((r.end_ns - r.start_ns) / 1e3, (k["end"] - k["begin"]) / 1e3) for r, k in timed]) == []


@pytest.mark.parametrize("version", [4, 6])
def test_chained(run: Run, tmp_path: Path, version: int) -> None:
    """Another plugin, of this version or an older one, sees as many operations as ours, with handles of its own."""
    plugin = tmp_path / "libtheirs.so"
    flags = ["-std=c11", "-shared", "-fPIC", f"-I{PLUGIN}", f"-DVERSION={version}"]
    subprocess.run(["gcc", *flags, str(THEIR_PLUGIN), "-o", str(plugin)], check=True, timeout=60)
    for scene in ("collectives", "sharded"):
        theirs_at = tmp_path / scene
        played = run(scene, **ON, NCCL_PROFILER_PLUGIN=str(plugin), THEIRS_REPORT=str(theirs_at))
        theirs: list[dict[str, Any]] = [json.loads(path.read_text()) for path in tmp_path.glob(f"{scene}-*")]
        assert len(theirs) == 2
        for rank, counts in zip(played.ranks, theirs, strict=True):
            messages = 4 * len(rank.of("all_to_all"))  # a send and a recv with each of two ranks
            assert counts["4"] == messages
            assert counts["2"] == len(rank.operations) - len(rank.of("all_to_all"))
            assert (counts["wrong"], counts["no_parent"]) == (0, 0)
            assert counts["inits"] == counts["finalizes"] > 0
            ours = sum(record.timing == ev.BY_NCCL for record in rank.operations)
            assert scene == "collectives" or ours >= (1 - LATE) * len(rank.operations)


def test_end_of_a_job(run: Run) -> None:
    """A group that is destroyed with operations in flight, graphs that are replayed: the job ends, and counts as without the plugin."""
    for scene in ("destroyed", "replayed"):
        with_it, without = run(scene, **ON), run(scene)
        assert [counted(rank) for rank in with_it.ranks] == [counted(rank) for rank in without.ranks]


def undisturbed(played: Played) -> bool:
    return all((report["captures_disturbed"], report["disturbed"]) == (0, {}) for report in played.reports)


def test_captures(run: Run) -> None:
    """Captures are not disturbed."""
    assert undisturbed(run("captured", **ON))
    assert undisturbed(run("foreign", **ON))
