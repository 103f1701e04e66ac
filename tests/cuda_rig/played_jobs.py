"""Jobs on the played driver that ran to their end, and their durations beside the played ones."""

from __future__ import annotations

import json
import os
import subprocess
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from commwatch.wire import events as ev
from commwatch_collectors.node.flight_recorder import Dump, load
from tests.cuda_rig.job import command_of, environment
from tests.cuda_rig.traces import traced
from tests.e2e.torchjob import RankRecords, read_rings

#: Largest error of a duration: this part of it, or so many µs. A real GPU shared by several jobs takes time to begin and to end a kernel.
PART, LEAST_US = 0.05 if os.environ.get("REAL_GPU") == "1" else 0.02, 20.0


class Played(NamedTuple):
    """A job that has ended."""

    directory: Path
    #: By rank: what commwatch recorded, what the driver played, what the Flight Recorder has.
    ranks: list[RankRecords]
    reports: list[dict[str, Any]]
    recorder: list[Dump]
    output: str


Run = Callable[..., Played]


def runner(libraries: Path | None, folder: Callable[[str], Path]) -> Run:
    """Return a function that runs a scene, each with the same settings once.

    Args:
        libraries: the folder of the played driver; ``None``: scenes run on a real GPU, and what it did is read from PyTorch's traces.
        folder: makes a new folder with a name.
    """

    @cache
    def run(scene: str, hook: str = "native", **settings: str) -> Played:
        directory = folder(scene)
        report = str(directory / "played-%r.json")
        env = environment(libraries, directory, COMMWATCH_HOOK=hook, PLAYED_REPORT=report, **settings)
        command = command_of(scene, directory)
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=250, check=False)
        output = done.stdout + done.stderr
        assert (done.returncode, done.stdout.count("is done")) == (0, 2), output[-5000:]
        assert "commwatch: " not in output
        dumps = sorted(directory.glob("recorder-*.pickle"))
        ranks = read_rings(directory)
        if libraries is None:
            reports = [traced(directory / f"trace-{rank.rank}.json", rank.identity["wall_offset_ns"]) for rank in ranks]
        else:
            reports = [json.loads((directory / f"played-{rank}.json").read_text()) for rank in range(2)]
        return Played(directory, ranks, reports, [load(path.read_bytes()) for path in dumps], output)

    return run


def pairs(played: Played, *, idle: bool = False) -> Iterator[tuple[ev.Record, dict[str, Any]]]:
    """The operations with a duration, each with the kernels that ran it as one: those queued between its launch and the next.

    ``idle``: also those that found their stream idle: their start event is over before their kernel is queued.
    """
    for rank, report in zip(played.ranks, played.reports, strict=True):
        on_device = sorted((r for r in rank.operations if r.flags & ev.ON_DEVICE), key=lambda record: record.launch_ns)
        launches = [record.launch_ns for record in on_device]
        kernel_of: dict[int, dict[str, Any]] = {}
        for kernel in sorted(report["nccl"], key=lambda kernel: int(kernel["queued"])):
            if not kernel["replayed"]:
                number = bisect_right(launches, kernel["queued"]) - 1
                kernel_of[number] = {**kernel_of.get(number, kernel), "end": kernel["end"]}
        for number, kernel in kernel_of.items():
            record = on_device[number]
            # The launch of a barrier also prepares the number that it sums.
            timed = not record.flags & ev.UNTIMED and rank.op(record) != "barrier"
            if number >= 0 and timed and (idle or kernel["begin"] > kernel["queued"]):
                yield record, kernel


def timed(played: Played, *, polled: bool = True) -> list[tuple[float, float]]:
    """Durations as recorded and as they were played, in µs; ``polled``: also those from polls."""
    return [
        ((record.end_ns - record.start_ns) / 1e3, (kernel["end"] - kernel["begin"]) / 1e3)
        for record, kernel in pairs(played)
        if polled or record.timing == ev.BY_EVENTS
    ]


def wrong(found: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those of such durations whose error is too large."""
    return [(us, true) for us, true in found if abs(us - true) > max(PART * true, LEAST_US)]
