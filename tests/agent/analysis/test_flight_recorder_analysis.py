"""What follows from dumps of the Flight Recorder: the verdicts of ``verdicts``, by the same rules. Dumps of NCCL, made by hand."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from commwatch_agent.analysis.flight_recorder_analysis import (
    RankDump,
    last_operations,
    positions,
    take,
    take_all,
    text,
)
from commwatch_agent.incidents.conclude import of_dumps
from commwatch_agent.incidents.judging import judged_dumps
from commwatch_collectors.node.flight_recorder import BadDump, load
from tests.collectors.node.test_flight_recorder import BEGIN_NS, dump_of, entry, pending
from tests.helpers import commwatch, table

S = 1_000_000_000


def taken(rank: int, *entries: dict[str, Any], after_s: float = 60, ranks: str = "[0, 1]") -> RankDump:
    """The dump of a rank, written so long after the first record."""
    dump = load(pickle.dumps(dump_of(*entries, ranks=ranks)))
    return RankDump(f"trace_{rank}", rank, BEGIN_NS + round(after_s * S), dump)


def test_healthy() -> None:
    """Ranks whose operations have all ended, or have just begun, have nothing wrong with them."""
    done = [entry(n, n + 1) for n in range(3)]
    assert judged_dumps([taken(0, *done), taken(1, *done)]) == []
    assert judged_dumps([taken(0, *done, pending(3, 4), after_s=4), taken(1, *done, after_s=4)]) == []
    assert judged_dumps([]) == []


def test_not_joined() -> None:
    """A rank that has not entered what the other waits in is named, with what and for how long."""
    done = [entry(n, n + 1) for n in range(3)]
    (verdict,) = judged_dumps([taken(0, *done, pending(3, 4), pending(4, 5, "scheduled")), taken(1, *done)])
    assert (verdict.kind, verdict.cause, verdict.ranks, verdict.waiting) == ("stalled", "not_joined", [1], [0])
    assert (verdict.op, verdict.seq, verdict.group, verdict.job_id) == ("all_reduce", 4, "default_pg", "the dumps")
    assert verdict.since_s == 57
    assert verdict.source == "flight_recorder"


def test_stuck_inside() -> None:
    """If all ranks have entered and none completes, the network between them is to blame."""
    both = [entry(0, 1), pending(1, 2)]
    (verdict,) = judged_dumps([taken(0, *both), taken(1, *both)])
    assert (verdict.kind, verdict.cause, verdict.ranks) == ("hang", "stuck", [0, 1])
    assert "every rank has entered" in verdict.says


MESH = {
    "0": {"name": "1", "desc": "tp", "ranks": "[0, 1]"},
    "1": {"name": "2", "desc": "dp", "ranks": "[0, 2]"},
}


@pytest.mark.parametrize("timed", [True, False])
def test_queued_behind_another_group(timed: bool) -> None:
    """A rank is not inside an operation that its GPU has not reached: only who is missing in the group before it is named."""

    def of(name: str, made: dict[str, Any]) -> dict[str, Any]:
        about = (
            {}
            if timed
            else {"state": made["state"].replace("started", "scheduled"), "time_discovered_started_ns": None}
        )
        return {**made, "process_group": ("1" if name == "tp" else "2", name), **about}

    def of_rank(rank: int, *entries: dict[str, Any]) -> RankDump:
        dump = load(pickle.dumps({**dump_of(*entries), "pg_config": MESH}))
        return RankDump(f"trace_{rank}", rank, BEGIN_NS + 600 * S, dump)

    tp, dp = of("tp", entry(0, 1)), of("dp", entry(1, 1))
    behind = of("tp", pending(3, 2, "scheduled", time_discovered_started_ns=None))
    found = judged_dumps(
        [of_rank(0, tp, dp, of("dp", pending(2, 2)), behind), of_rank(1, tp, of("tp", pending(2, 2))), of_rank(2, dp)]
    )
    assert [(each.kind, each.cause, each.group, each.ranks) for each in found] == [("stalled", "not_joined", "dp", [2])]


def test_different_operations() -> None:
    """Ranks in different operations, or in the same with different data, at one place disagree."""
    other = pending(1, 2, profiling_name="nccl:broadcast")
    (verdict,) = judged_dumps([taken(0, entry(0, 1), pending(1, 2)), taken(1, entry(0, 1), other)])
    assert (verdict.kind, verdict.cause, verdict.ranks) == ("desync", "ops", [0, 1])
    larger = pending(1, 2, input_sizes=[[4096]], output_sizes=[[4096]])
    (verdict,) = judged_dumps([taken(0, entry(0, 1), pending(1, 2)), taken(1, entry(0, 1), larger)])
    assert (verdict.kind, verdict.cause) == ("desync", "sizes")


def test_rank_without_a_dump() -> None:
    """A member without a dump is unknown, and the verdict names it."""
    (verdict,) = judged_dumps([taken(0, entry(0, 1), pending(1, 2), ranks="[0, 1, 2]"), taken(1, entry(0, 1), pending(1, 2), ranks="[0, 1, 2]")])  # fmt: skip
    assert (verdict.kind, verdict.cause, verdict.ranks) == ("stalled", "unseen", [2])
    assert "no data from rank 2" in verdict.says


def test_overwritten() -> None:
    """A rank whose recorder has lost what it did in a group is not blamed for that."""
    tp: dict[str, Any] = {"process_group": ("1", "tp")}
    waits = taken(0, entry(0, 1), pending(1, 2, **tp))
    config = {"1": {"name": "1", "desc": "tp", "ranks": "[0, 1]"}}
    for first, blamed in ((0, True), (5000, False)):
        said = dump_of(entry(first, 1))
        said["pg_config"].update(config)
        other = RankDump("trace_1", 1, BEGIN_NS + 60 * S, load(pickle.dumps(said)))
        waits.dump.members["1", "tp"] = (0, 1)
        assert bool(judged_dumps([waits, other])) is blamed


def test_messages_are_not_judged() -> None:
    """The recorder does not show whether a thread waits for a send or a recv."""
    recv = pending(1, 2, profiling_name="nccl:recv 0<-1", is_p2p=True, p2p_seq_id=1)
    assert judged_dumps([taken(0, entry(0, 1), recv), taken(1, entry(0, 1))]) == []


def test_groups_of_one_name() -> None:
    """Groups with one name and different members, as the rows of a mesh, are kept apart."""
    rows = [taken(rank, entry(0, 1), *[pending(1, 2)] * (rank == 0), ranks="[0, 1]" if rank < 2 else "[2, 3]") for rank in range(4)]  # fmt: skip
    (verdict,) = judged_dumps(rows)
    assert (verdict.ranks, verdict.waiting) == ([1], [0])


def test_last_operations() -> None:
    """Of each group the oldest that waits, with how many behind it, else the latest; what waits comes first."""
    tp: dict[str, Any] = {"process_group": ("1", "undefined")}
    one = taken(0, entry(0, 1), entry(1, 7, **tp), pending(2, 2), pending(3, 3, "scheduled"))
    waiting, ended = last_operations(one)
    assert (waiting.group, waiting.seq, waiting.state, waiting.behind, waiting.age_s) == (
        "default_pg",
        2,
        "started",
        1,
        58,
    )
    assert (ended.group, ended.seq, ended.done) == ("1", 7, True)
    assert positions(one) == [
        "default_pg: all_reduce 2 started, not completed, called 58.0 s before the dump, 1 more behind it (/job/train.py:33 in train)",
        "1: all_reduce 7 completed, the latest (/job/train.py:33 in train)",
    ]
    assert positions(taken(0)) == ["the dump has no collectives"]


# -- files


def write(path: Path, *entries: dict[str, Any], at_s: float = 60) -> Path:
    """A dump in a file that was written so long after the first record."""
    path.write_bytes(pickle.dumps(dump_of(*entries), 2))
    os.utime(path, ns=(BEGIN_NS + round(at_s * S), BEGIN_NS + round(at_s * S)))
    return path


def test_ranks_by_name(tmp_path: Path) -> None:
    """The file name gives the rank of a dump, as PyTorch writes it; without a number the rank is unknown."""
    for name, rank in (("comm_lib_trace_rank_12", 12), ("trace3.json", 3), ("nccl_trace_rank_0", 0)):
        assert take(write(tmp_path / name, entry())).rank == rank
    with pytest.raises(BadDump, match="does not end with"):
        take(write(tmp_path / "dump", entry()))
    assert take(tmp_path / "dump", 5).rank == 5
    with pytest.raises(BadDump, match="not a file"):
        take(tmp_path)
    os.mkfifo(tmp_path / "pipe_0")
    with pytest.raises(BadDump, match="not a file"):
        take(tmp_path / "pipe_0")


def test_copied_earlier_than_it_happened(tmp_path: Path) -> None:
    """A file that claims to be older than what is in it is as old as the newest of that."""
    assert take(write(tmp_path / "t0", entry(9), at_s=0)).at_ns == BEGIN_NS + 9 * S + 5_000_000


def test_damaged_files(tmp_path: Path) -> None:
    """Files that are no dumps, or a second one of a rank, are passed over and named; the others are judged."""
    good, twice = write(tmp_path / "t0", entry(0, 1), pending(1, 2)), write(tmp_path / "u0", entry())
    (tmp_path / "t1").write_text("torn")
    dumps, damaged = take_all([good, tmp_path / "t1", tmp_path / "t2", twice])
    assert [each.rank for each in dumps] == [0]
    assert list(damaged) == [str(tmp_path / "t1"), str(tmp_path / "t2"), str(twice)]
    (incident,) = of_dumps(dumps, table())
    assert (incident.kind, incident.ranks, incident.evidence[0].source) == ("stalled", (1,), "flight_recorder")
    assert incident.began_at == pytest.approx(incident.last_at - 59)
    said = text([incident.says], dumps, damaged)
    assert "t1 is skipped: not a dump of the Flight Recorder" in said
    assert "t2 is skipped: No such file or directory" in said
    assert "no data from rank 1" in said


def test_command(tmp_path: Path) -> None:
    """The exit code is 0 if nothing is wrong, 2 if a file was skipped or an argument is wrong, and 1 with a verdict."""
    healthy = [write(tmp_path / f"t{rank}", entry(0, 1)) for rank in (0, 1)]
    done = commwatch("diagnose", "--flight-recorder", *healthy)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("nothing wrong in the dumps of 2 ranks\n")
    assert commwatch("diagnose", "--flight-recorder", *healthy, tmp_path / "t2").returncode == 3
    for wrong in (("host", "--flight-recorder", str(healthy[0])), ("--flight-recorder", str(tmp_path / "t2"))):
        done = commwatch("diagnose", *wrong)
        assert (done.returncode, done.stdout) == (2, "")
    write(tmp_path / "t0", entry(0, 1), pending(1, 2))
    done = commwatch("diagnose", "--json", "--flight-recorder", *healthy)
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert [told[name][0]["kind"] for name in ("verdicts", "incidents")] == ["stalled"] * 2
