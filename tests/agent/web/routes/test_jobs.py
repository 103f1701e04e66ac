"""The REST API of a real agent over records written by hand: right numbers, filters, pages, clear errors."""

from __future__ import annotations

import csv
import io
import sqlite3
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import events as ev
from commwatch.wire.ring import CURSOR, RingWriter
from tests.helpers import (
    ANY_CLOCK,
    MS,
    RunningAgent,
    agent,
    end_rank,
    group_entry,
    mark,
    operation,
    wait_for,
    write_ring,
)

S = 1000 * MS
#: Unix time of the trainers' monotonic zero: the beginning of a roll-up of 10 s, some minutes ago.
BASE = int(time.time()) // 10 * 10 - 600
UNKNOWN_OP = 32
_ODD = (UNKNOWN_OP, *operation("barrier", seq=5, start_ns=70 * MS, end_ns=71 * MS, size=0, flags=ev.NO_SIZE)[1:])


def rings_of(directory: Path) -> Path:
    """The directory in which the agent of a run directory looks for rings, created as the agent creates it."""
    directory.mkdir(mode=0o700, exist_ok=True)
    (directory / "rings").mkdir(mode=0o700, exist_ok=True)
    return directory / "rings"


def one_rank(rings: Path, rank: int) -> RingWriter:
    """One rank of four of the job ``train``."""
    mesh = group_entry(1, (0, 1) if rank < 2 else (2, 3), "mesh_tp", group_id="tp-a" if rank < 2 else "tp-b")
    world = group_entry(0, (0, 1, 2, 3), group_id="world")
    records = [
        mark(0, 1),
        # Rank k comes k ms late, all finish together: the transfer took 7 ms.
        operation("all_reduce", start_ns=rank * MS, end_ns=10 * MS, seq=0, size=4_000_000, dtype=1),
        operation("all_gather", start_ns=20 * MS, end_ns=24 * MS, seq=1, size=8_000_000),
        operation("broadcast", start_ns=30 * MS, end_ns=32 * MS, seq=2, size=1_000_000, peer=0),
        operation("barrier", start_ns=40 * MS, end_ns=41 * MS, seq=3, size=0, flags=ev.NO_SIZE),
        operation("reduce_scatter", start_ns=50 * MS, end_ns=51 * MS, size=2_000_000, group=1),
        _ODD,
        mark(1, 100 * MS, exposed_ns=9 * MS),
        # In no whole step: of one in which it ran the communication would not be known.
        operation(
            "all_reduce", start_ns=101 * MS, end_ns=101 * MS, seq=4, size=100, flags=ev.UNTIMED, timing=ev.BY_NONE
        ),
    ]
    if rank < 2:
        peer, p2p = 1 - rank, ("send", "recv")[rank]
        records.insert(
            -2, operation(p2p, start_ns=80 * MS, end_ns=84 * MS, size=500_000, peer=peer, tag=7, waited_us=1500)
        )
    if rank == 0:  # in another roll-up, 20 s later
        late = 20 * S
        records += [
            operation("all_reduce", start_ns=late, end_ns=late + 2 * MS, seq=6, size=1000),
            operation("all_reduce", start_ns=late + 3 * MS, end_ns=late + 9 * MS, seq=7, size=1000, flags=ev.FAILED),
        ]
    names = [world, mesh, {"dtype": 1, "name": "bfloat16"}, {"op": UNKNOWN_OP, "name": "c10d::swap"}]
    writer = write_ring(rings, records, names, job="train", rank=rank, world_size=4, wall_offset_ns=BASE * S)
    if rank == 3:
        # A machine has been up for that long when its tests begin.
        oldest = operation("all_reduce", start_ns=0, end_ns=0, seq=8, launch_ns=time.monotonic_ns() - 100 * S, size=77)
        assert writer.begin(*oldest) >= 0
    return writer


def populate(rings: Path) -> list[RingWriter]:
    """Three jobs: ``train`` runs on four ranks, ``eval`` has the same ranks and has ended, ``lost`` vanished."""
    running = [one_rank(rings, rank) for rank in range(4)]
    ended = [
        write_ring(
            rings,
            [operation("broadcast", start_ns=i * S, end_ns=i * S + i * MS, seq=i, size=1 << 20) for i in range(1, 101)],
            [group_entry(0, (0, 1), group_id="eval-world")],
            job="eval",
            rank=rank,
            wall_offset_ns=(BASE + 100) * S,
        )
        for rank in range(2)
    ]
    for writer in ended:
        writer.close(1)
    gone = write_ring(rings, [], job="lost", world_size=1, wall_offset_ns=BASE * S)
    for writer in (*ended, gone):
        end_rank(writer)
    return running


@contextmanager
def populated(directory: Path) -> Iterator[RunningAgent]:
    """An agent that has read everything of ``populate``; the ranks that run end after it."""
    writers = populate(rings_of(directory))
    with agent(directory, constants=ANY_CLOCK) as running:
        states = {"train": "running", "eval": "ended", "lost": "ended"}
        wait_for(lambda: {j["job_id"]: j["state"] for j in running.get("/api/v1/jobs")} == states, "the jobs")
        wait_for(lambda: sum(r["records"] for r in running.get("/api/v1/ranks")) == 240, "the records")
        yield running
    for writer in writers:
        end_rank(writer)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningAgent]:
    """Asked by all tests here."""
    with populated(tmp_path_factory.mktemp("api") / "run") as running:
        yield running


def rows(running: RunningAgent, query: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Lines of a summary by what they are split by."""
    return {tuple(row["by"].values()): row for row in running.get(f"/api/v1/summary?{query}")["rows"]}


# -- numbers ------------------------------------------------------------------------------------


def test_jobs(asked: RunningAgent) -> None:
    """A job has its state, its ranks, and when it began and was last seen."""
    jobs = {job["job_id"]: job for job in asked.get("/api/v1/jobs")}
    assert [jobs[name]["ranks"] for name in ("train", "eval", "lost")] == [[0, 1, 2, 3], [0, 1], [0]]
    assert (jobs["train"]["world_size"], jobs["train"]["restarts"], jobs["train"]["lost"]) == (4, 0, 0)
    assert jobs["train"]["started_at"] == BASE
    assert jobs["train"]["last_seen_at"] > BASE
    assert next(iter(jobs)) == "eval"  # the latest started


def test_jobs_with_figures(asked: RunningAgent) -> None:
    """With ``figures``, the same jobs have duration, steps and shares beside what they have without; ``limit`` keeps the latest."""
    plain, full = asked.get("/api/v1/jobs"), asked.get("/api/v1/jobs?figures=true")
    figures = {job["job_id"]: {name: job.pop(name) for name in job.keys() - plain[0].keys()} for job in full}
    running = [job.pop("last_seen_at") for job in (*plain, *full) if job["job_id"] == "train"]
    assert (len(running), full) == (2, plain)
    train = figures["train"]
    assert train.pop("duration_s") > 0
    assert train == {"steps": 1, "step_p50_s": None, "comm_share": None, "exposed_share": None}, "one step is too few"
    assert [job["job_id"] for job in asked.get("/api/v1/jobs?figures=true&limit=2")] == [j["job_id"] for j in plain[:2]]
    assert len(asked.get("/api/v1/jobs?limit=1")) == 1


@pytest.mark.parametrize(
    ("key", "ranks", "count", "size", "seconds", "algbw", "busbw", "wait"),
    [
        # 4 x 4 MB in 10 + 9 + 8 + 7 ms and one of 1 kB in 2 ms; factor 2 * 3/4. Four more are untimed: no part in bandwidth.
        (("default_pg", "all_reduce"), 4, 9, 16_001_400, 0.036, 16_001_000 / 0.036, 1.5 * 16_001_000 / 0.036, 0.006),
        # 8 MB in 4 ms; factor 3/4; all came at once.
        (("default_pg", "all_gather"), 4, 4, 32_000_000, 0.016, 2e9, 1.5e9, 0.0),
        # 1 MB in 2 ms; factor 1; the root did not come late.
        (("default_pg", "broadcast"), 4, 4, 4_000_000, 0.008, 5e8, 5e8, 0.0),
        (("default_pg", "barrier"), 4, 4, 0, 0.004, None, None, 0.0),
        (("default_pg", "c10d::swap"), 4, 4, 0, 0.004, None, None, None),
        # 2 MB in 1 ms in groups of two; factor 1/2.
        (("mesh_tp", "reduce_scatter"), 4, 4, 8_000_000, 0.004, 2e9, 1e9, 0.0),
        (("default_pg", "send"), 1, 1, 500_000, 0.004, 1.25e8, 1.25e8, None),
    ],
)
def test_summary_numbers(
    asked: RunningAgent, key: tuple[str, str], ranks: int, count: int, size: int, seconds: float,
    algbw: float | None, busbw: float | None, wait: float | None,
) -> None:  # fmt: skip
    """Bandwidths, times and waits of a summary are those worked out by hand."""
    row = rows(asked, "job=train")[key]
    assert (row["ranks"], row["count"], row["bytes"]) == (ranks, count, size)
    assert row["seconds"] == pytest.approx(seconds)
    assert (row["algbw"], row["busbw"]) == (pytest.approx(algbw), pytest.approx(busbw))
    assert row["wait_s"] == pytest.approx(wait)
    assert row["group_size"] == (2 if key[0] == "mesh_tp" else 4)
    assert row["p2p_wait_s"] == (pytest.approx(0.0015) if key[1] == "send" else None)


def test_summary_failed_and_untimed(asked: RunningAgent) -> None:
    """Failed operations are counted apart, untimed ones as operations without a duration."""
    row = rows(asked, "job=train&op=all_reduce")["default_pg", "all_reduce"]
    assert (row["failed"], row["untimed"]) == (1, 4)


def test_summary_percentiles(asked: RunningAgent) -> None:
    """Percentiles of 1 to 100 ms are within 2.2% of the true ones."""
    row = rows(asked, "job=eval")["default_pg", "broadcast"]
    assert row["count"] == 200
    found = [row["p50_s"], row["p95_s"], row["p99_s"]]
    assert found == pytest.approx([0.050, 0.095, 0.099], rel=0.022)


def test_summary_dimensions(asked: RunningAgent) -> None:
    """`by` splits by any dimension, several at once, or not at all; the parts add up to the whole."""
    (total,) = asked.get("/api/v1/summary?by=")["rows"]
    for by in ("job_id", "rank", "group", "group_id", "op", "size", "job_id,rank,group,group_id,op,size"):
        answer = asked.get(f"/api/v1/summary?by={by}")
        assert answer["by"] == by.split(",")
        assert all(list(row["by"]) == by.split(",") for row in answer["rows"])
        for field in ("count", "bytes", "failed", "untimed"):
            assert sum(row[field] for row in answer["rows"]) == total[field]
        assert sum(row["seconds"] for row in answer["rows"]) == pytest.approx(total["seconds"])
    assert set(rows(asked, "job=train&by=group_id")) == {("world",), ("tp-a",), ("tp-b",)}
    sizes = {
        size: row["count"] for (op, size), row in rows(asked, "job=train&by=op,size").items() if op == "all_reduce"
    }
    assert sizes == {1 << 22: 4, 128: 4, 1024: 1}
    assert (("barrier", None)) in rows(asked, "job=train&by=op,size")


def test_summary_filters(asked: RunningAgent) -> None:
    """Filters keep what they name, alone and together."""
    assert set(rows(asked, "job=train&group=mesh_tp")) == {("mesh_tp", "reduce_scatter")}
    assert rows(asked, "job=train&rank=2&op=all_reduce&by=rank")[2,]["seconds"] == pytest.approx(0.008)
    assert rows(asked, "by=job_id&op=broadcast")["train",]["count"] == 4
    assert rows(asked, "job=train&op=nothing") == {}


def test_ranks_and_what_is_in_flight(asked: RunningAgent) -> None:
    """A rank has its state, its last collective per group, and its operations in flight with their age."""
    ranks = {(rank["job_id"], rank["rank"]): rank for rank in asked.get("/api/v1/ranks")}
    assert {key: rank["state"] for key, rank in ranks.items()} == {
        **{("train", k): "running" for k in range(4)}, ("eval", 0): "ended", ("eval", 1): "ended", ("lost", 0): "gone",
    }  # fmt: skip
    first, last = ranks["train", 0], ranks["train", 3]
    assert (first["in_flight"], first["last_seq"], first["records"]) == ([], {"world": 6, "tp-a": 0}, 12)
    assert (last["host"], last["local_rank"], last["hook"], last["restart"]) == ("host", 3, "python", 0)
    (stuck,) = last["in_flight"]
    assert (stuck["op"], stuck["group_id"], stuck["seq"], stuck["size_bytes"], stuck["blocked"]) == (
        "all_reduce", "world", 8, 77, False,
    )  # fmt: skip
    assert stuck["age_s"] >= 90
    assert ranks["eval", 0]["heartbeat_age_s"] is None


def test_groups(asked: RunningAgent) -> None:
    """Groups with one description are distinguished by their id and members."""
    groups = {group["group_id"]: group for group in asked.get("/api/v1/groups?job=train")}
    assert {name: group["members"] for name, group in groups.items()} == {
        "world": [0, 1, 2, 3], "tp-a": [0, 1], "tp-b": [2, 3],
    }  # fmt: skip
    assert groups["tp-a"]["group"] == groups["tp-b"]["group"] == "mesh_tp"
    assert (groups["tp-b"]["ranks"], groups["tp-b"]["size"], groups["tp-b"]["aligned"]) == ([2, 3], 2, True)


def test_steps(asked: RunningAgent) -> None:
    """A step's communication is the union of its operations, its exposed part what the mark says."""
    steps = {step["rank"]: step for step in asked.get("/api/v1/steps?job=train")}
    assert set(steps) == {0, 1, 2, 3}
    # From 0 (+1 ns) to 100 ms: 8 + 4 + 2 + 1 + 1 ms, the unknown op's 1 ms, no send or recv on rank 2.
    assert steps[2]["duration_s"] == pytest.approx(0.1)
    assert (steps[2]["comm_s"], steps[2]["comm_share"]) == (pytest.approx(0.017), pytest.approx(0.17))
    assert (steps[2]["exposed_s"], steps[2]["exposed_share"]) == (pytest.approx(0.009), pytest.approx(0.09))
    # Rank 1 waited 1.5 ms of its recv's 4: only they count.
    assert steps[1]["comm_s"] == pytest.approx(0.0195)
    assert [s["rank"] for s in asked.get("/api/v1/steps?job=train&rank=1&limit=5")] == [1]


def test_collective_side_by_side(asked: RunningAgent) -> None:
    """The ranks of one collective are listed together, with who waited and for whom."""
    found = asked.get("/api/v1/collectives/world/0")
    assert (found["complete"], found["late_rank"]) == (True, 3)
    assert (found["transfer_s"], found["lateness_s"]) == (pytest.approx(0.007), pytest.approx(0.002))
    assert [part["wait_s"] for part in found["ranks"]] == pytest.approx([0.003, 0.002, 0.001, 0.0])
    assert [part["operation"]["rank"] for part in found["ranks"]] == [0, 1, 2, 3]
    rooted = asked.get("/api/v1/collectives/world/2")
    assert (rooted["complete"], rooted["transfer_s"], rooted["late_rank"]) == (False, None, None)
    half = asked.get("/api/v1/collectives/world/6")
    assert (half["complete"], len(half["ranks"])) == (False, 1)


# -- single operations --------------------------------------------------------------------------


def test_operation_fields(asked: RunningAgent) -> None:
    """A single operation has its names, times and bandwidths; what does not apply is null."""
    (found,) = asked.get("/api/v1/ops?job=train&rank=1&seq=0&op=all_reduce")["operations"]
    assert (found["group"], found["group_size"], found["dtype"], found["peer"]) == ("default_pg", 4, "bfloat16", None)
    assert (found["start_at"], found["end_at"]) == (pytest.approx(BASE + 0.001), pytest.approx(BASE + 0.010))
    assert (found["algbw"], found["busbw"]) == (pytest.approx(4e6 / 0.009), pytest.approx(6e6 / 0.009))
    (sent,) = asked.get("/api/v1/ops?job=train&op=send")["operations"]
    assert (sent["peer"], sent["tag"], sent["p2p_wait_s"]) == (1, 7, pytest.approx(0.0015))
    untimed = asked.get("/api/v1/ops?job=train&rank=2&seq=4")["operations"][0]
    assert (untimed["duration_s"], untimed["algbw"], untimed["timing"]) == (None, None, "none")
    (barrier,) = asked.get("/api/v1/ops?job=train&rank=2&op=barrier")["operations"]
    assert (barrier["size_bytes"], barrier["busbw"], barrier["tag"]) == (None, None, None)
    assert [o["seq"] for o in asked.get("/api/v1/ops?job=train&min_seconds=0.0095")["operations"]] == [0]


def test_time_windows(asked: RunningAgent) -> None:
    """A window may be given in Unix seconds, as an ISO time or as an age, and means the same."""
    iso = datetime.fromtimestamp(BASE + 15, timezone.utc)
    fixed = [str(BASE + 15), f"{BASE + 15}.0", iso.isoformat(), iso.isoformat().replace("+00:00", "Z")]
    fixed.append(iso.replace(tzinfo=None).isoformat())

    def moments() -> list[str]:
        age_s = time.monotonic() - 15  # by the clock of the records
        return [urllib.parse.quote(form) for form in (*fixed, f"{age_s:.1f}s", f"{age_s / 60:.3f}m")]

    for at in range(len(moments())):
        since = asked.get(f"/api/v1/ops?job=train&since={moments()[at]}")["operations"]
        assert [o["seq"] for o in since] == [7, 6], moments()[at]
        assert len(asked.get(f"/api/v1/ops?job=train&until={moments()[at]}")["operations"]) == 30, moments()[at]
        assert rows(asked, f"job=train&since={moments()[at]}")["default_pg", "all_reduce"]["count"] == 1
    assert asked.get("/api/v1/steps?job=train&since=1m") == []
    covered = asked.get(f"/api/v1/summary?job=train&until={BASE + 15}")
    assert (covered["since"], covered["until"]) == (BASE, BASE + 10)


def test_pages_visit_each_operation_once(tmp_path: Path) -> None:
    """Page after page visits every operation once, newest first, though the ranks' chunks overlap."""
    rings = rings_of(tmp_path / "run")
    per_rank, ranks = 2500, 3
    for rank in range(ranks):  # every rank has its own pace; many end in the same nanosecond; some end out of order
        ends = [(1 + i * (3 - rank) + (7 if i % 5 else 0)) * MS for i in range(per_rank)]
        made = [operation(start_ns=end - MS, end_ns=end, seq=i) for i, end in enumerate(ends)]
        end_rank(write_ring(rings, made, slots=4096, rank=rank, wall_offset_ns=BASE * S))
    with agent(tmp_path / "run", constants=ANY_CLOCK) as running:
        wait_for(lambda: [j["state"] for j in running.get("/api/v1/jobs")] == ["ended"], "the job to be read")
        for filters, expected in (("", per_rank * ranks), ("&rank=1", per_rank)):
            seen: list[dict[str, Any]] = []
            cursor: str | None = ""
            while cursor is not None:
                page = running.get(f"/api/v1/ops?limit=997{filters}{f'&cursor={cursor}' if cursor else ''}")
                seen += page["operations"]
                cursor = page["cursor"]
            assert len({operation["id"] for operation in seen}) == len(seen) == expected
            assert len({(operation["rank"], operation["seq"]) for operation in seen}) == expected
            ends_at = [int(operation["id"].split("-")[0]) for operation in seen]
            assert ends_at == sorted(ends_at, reverse=True)


def test_csv_equals_json(asked: RunningAgent) -> None:
    """CSV has the same operations, fields and values as JSON, and the cursor in a header."""
    answer = asked.get("/api/v1/ops?limit=25")
    with urllib.request.urlopen(f"{asked.url}/api/v1/ops?limit=25&format=csv", timeout=30) as response:
        assert response.headers["Content-Type"].startswith("text/csv")
        assert response.headers["X-Next-Cursor"] == answer["cursor"]
        table = list(csv.DictReader(io.StringIO(response.read().decode(), newline="")))
    assert len(table) == 25
    assert table == [
        {name: "" if value is None else str(value) for name, value in operation.items()}
        for operation in answer["operations"]
    ]


def test_live_and_stored_add_up(tmp_path: Path) -> None:
    """While an agent runs, stored and live cells add up to what was read: no gap and no double at the 10 s seams."""
    writer = write_ring(
        rings_of(tmp_path / "run"), [], slots=1 << 15, world_size=1, wall_offset_ns=int(time.time()) * S
    )
    total, stop = 20_000, threading.Event()

    def train() -> None:
        for i in range(total):  # half a second a record: a seam every 20
            writer.write(*operation(start_ns=i * 500 * MS, end_ns=i * 500 * MS + MS, seq=i))
            if i % 100 == 99 and stop.wait(0.01):
                return

    trainer = threading.Thread(target=train)
    with agent(tmp_path / "run", constants=ANY_CLOCK) as running:
        wait_for(lambda: running.get("/api/v1/jobs"), "the job")
        trainer.start()
        try:
            seen = 0
            while seen < total:
                answer = running.get("/api/v1/summary?by=&until=8999999999")["rows"]
                written = int(writer.counters[CURSOR])
                for row in answer:
                    assert seen <= row["count"] <= written
                    seen = row["count"]
                    assert row["bytes"] == 4096 * seen
                    assert row["seconds"] == pytest.approx(0.001 * seen)
        finally:
            stop.set()
            trainer.join()
    end_rank(writer)


def test_coarse_roll_ups_cover_five_minutes(tmp_path: Path) -> None:
    """A summary out of merged roll-ups says that it covers all the operations in it."""
    begin = (int(time.time()) - 3 * 3600) // 300 * 300
    records = [operation(start_ns=t * S, end_ns=t * S + MS, seq=t) for t in (5, 200)]
    end_rank(write_ring(rings_of(tmp_path / "run"), records, wall_offset_ns=begin * S, boot_id="an earlier one"))
    at_once = {"commwatch_agent.history.retention.COARSEN_AFTER_NS": -600 * S}
    with agent(tmp_path / "run", constants=at_once) as running:

        def merged() -> bool:
            with sqlite3.connect(next((tmp_path / "run").glob("history-*.sqlite"))) as history:
                found = history.execute("SELECT coarse FROM rollup").fetchall()
            history.close()
            return found == [(1,)]

        wait_for(merged, "old roll-ups to be merged")
        answer = running.get("/api/v1/summary")
        assert answer["rows"][0]["count"] == 2
        assert (answer["since"], answer["until"]) == (begin, begin + 300)
