"""The timeline of a real DDP job has its profiles, on one clock: the same collectives lie beside each other."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from tests.chrome_trace import Slice, Trace, read
from tests.e2e.test_profile import JOB, goes_on, profiled, steps, training
from tests.helpers import agent, commwatch, wait_for


def slices_of(path: str) -> Counter[str]:
    """The names of the slices of threads in a trace that torch has written."""
    found = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return Counter(each["name"] for each in found if each["ph"] == "X" and isinstance(each["pid"], int))


def of_profile(trace: Trace, rank: int) -> list[Slice]:
    """The slices of a rank's profiles."""
    (pid,) = (pid for pid, name in trace.processes.items() if name == f"rank {rank}, torch.profiler")
    return [each for each in trace.slices if each.pid == pid and each.cat != "exposed"]


def beside(trace: Trace, rank: int, taken: dict[str, Any]) -> list[bool]:
    """Whether each collective in a profile's steps lies beside the same rank's operation of that name."""
    origin_s = trace.about["Unix time of 0, in ns"] / 1e9
    own = [each for each in trace.of("operation") if each.rank == rank]
    found = []
    for each in of_profile(trace, rank):
        op = each.name.removeprefix("gloo:")
        if op != each.name and taken["begin_at"] <= origin_s + each.end_ns / 1e9 <= taken["end_at"]:
            found.append(any(o.name == op and o.start_ns < each.end_ns and each.start_ns < o.end_ns for o in own))
    return found


def test_profile_in_timeline(tmp_path: Path) -> None:
    """A trace for each profiled rank is in the timeline, with all its slices; a damaged one is named, and the rest is there."""
    run, out = tmp_path / "run", tmp_path / "trace.json.gz"
    with agent(run) as running, training(run) as job:
        wait_for(lambda: steps(running) > 10, "steps")
        taken = profiled(run, "--steps", "5")
        goes_on(running)
        job.finish()
    done = commwatch("timeline", JOB, "--dir", run, "--last", "all", "--out", out)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(", 2 profiles\n")
    trace = read(out)
    for rank, profile in taken.items():
        assert Counter(each.name for each in of_profile(trace, rank)) == slices_of(profile["trace"])
        exposed = [each.end_ns - each.start_ns for each in trace.of("exposed") if each.rank == rank]
        assert sum(exposed) == round(1e9 * profile["profile"]["exposed_s"]) > 0
        places = beside(trace, rank, profile)
        assert len(places) >= 5
        assert all(places)
        (note,) = (note for name, note in trace.about["profiles"].items() if name.startswith(f"rank {rank},"))
        assert note["compared"] == len(places)
    done = commwatch("timeline", JOB, "--dir", run, "--last", "all", "--no-profiles", "--out", out)
    assert done.stdout.endswith(" marks\n")
    assert not [name for name in read(out).processes.values() if "profiler" in name]
    Path(taken[0]["trace"]).write_bytes(Path(taken[0]["trace"]).read_bytes()[:-1000])
    done = commwatch("timeline", JOB, "--dir", run, "--last", "all", "--out", out)
    assert done.returncode == 0
    assert done.stderr == f"commwatch: {taken[0]['trace']} cannot be read: Compressed file ended before the end-of-stream marker was reached\n"  # fmt: skip
    assert Counter(each.name for each in of_profile(read(out), 1)) == slices_of(taken[1]["trace"])
