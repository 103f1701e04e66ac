"""A job of eight ranks on four hosts: each agent answers for all of it as the rings do, whatever happens to other agents and to clocks."""

from __future__ import annotations

import signal
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from tests.e2e import ring_figures
from tests.e2e.four_nodes import CULPRIT, HOSTS, PER_HOST, RANKS, Site, latest, moment, of_all, shown_whole, site
from tests.e2e.hosts import Host
from tests.e2e.torchjob import RankRecords, read_rings
from tests.helpers import RunningAgent, agent, wait_for

STEPS = "steps?limit=10000"
#: Seconds by which the monotonic clocks of hosts are ahead, and how far apart the ends of a collective may be by the compared clocks.
AHEAD_S, TOGETHER_NS = (0, 5, 90_000, 1), 20_000_000


def by_rank_and_op(rings: list[RankRecords]) -> dict[tuple[int, str], Any]:
    """Operations, bytes and seconds of each rank and op, from the records themselves."""
    sums: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for ring in rings:
        for record in ring.operations:
            of = sums[ring.rank, ring.op(record)]
            of[0] += 1
            of[1] += record.size_bytes
            of[2] += (record.end_ns - record.start_ns) / 1e9
    return {key: (int(count), int(size), pytest.approx(took_s)) for key, (count, size, took_s) in sums.items()}


def told(rows: list[dict[str, Any]]) -> dict[tuple[int, str], tuple[int, int, float]]:
    """The same of a summary."""
    return {(row["by"]["rank"], row["by"]["op"]): (row["count"], row["bytes"], row["seconds"]) for row in rows}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_whole_job(tmp_path: Path) -> None:
    """While agents are killed, stopped and restarted the others answer for the rest; in the end each agent's figures are those of all rings."""
    with site(tmp_path) as job:
        kept = job.keep_rings(tmp_path / "kept")
        disturb(job)
        agents = job.agents
        for one in agents:
            assert len(job.of_job(one, "ranks")) == RANKS
            (verdict,) = wait_for(partial(job.of_job, one, "verdicts"), "the verdict")
            assert (verdict["kind"], verdict["ranks"]) == ("straggler", [CULPRIT])
            late = partial(job.of_job, one, "advice")
            wait_for(lambda: f"of the time for rank {CULPRIT}" in str(late()), "advice on the late rank")  # noqa: B023
        live = [shown_whole(job, one, "top", "--job", "four")["shown"] for one in agents]
        moments = [moment(host, one) for host, one in zip(job.hosts, agents, strict=True)]
        job.end()
        rings = read_rings(kept)
        assert [ring.rank for ring in rings] == list(range(RANKS))
        assert [ring.lost for ring in rings] == [0] * RANKS
        expected = by_rank_and_op(rings)
        for one in agents:
            summary = partial(job.of_job, one, "summary?by=rank,op")
            wait_for(lambda: told(summary()["rows"]) == expected, "the figures of the rings")  # noqa: B023
        ended = [Ended(one, check_operations(job, one, rings), job.of_job(one, STEPS)) for one in agents]
        known = {(step.rank, step.seq): step for ring in rings for step in ring_figures.steps_of(ring)}
        for top in live:
            check_top(top, known)
        long = long_steps(ended[0].steps)  # which the page leaves out; a busy machine has some
        for each in moments:
            check_tiles(each["job"], {key: step for key, step in known.items() if key not in long})
        with agent(kept) as whole:
            check_against(whole, job, rings, ended)
        for each in ended:
            check_page(job, each.agent, rings, long_steps(each.steps))


class Ended(NamedTuple):
    """What an agent answered after the end of the job."""

    agent: RunningAgent
    #: What ``top`` shows.
    top: dict[str, Any]
    steps: list[dict[str, Any]]


def disturb(job: Site) -> None:
    """Once there is a verdict, kill an agent and start it again, and stop another one; meanwhile the first one answers for the rest."""
    first = job.agents[0]
    wait_for(lambda: job.of_job(first, "verdicts"), "the verdict")
    job.agents[3].kill()
    assert {rank["rank"] for rank in job.of_job(first, "ranks", HOSTS - 1)} == set(range(RANKS - PER_HOST))
    job.agents[3] = job.start(job.hosts[3])
    wait_for(lambda: len(job.of_job(first, "ranks")) == RANKS, "the ranks of the agent that is back")
    job.agents[2].process.send_signal(signal.SIGSTOP)
    try:
        assert {rank["rank"] for rank in job.of_job(first, "ranks", HOSTS - 1)} == {0, 1, 2, 3, 6, 7}
    finally:
        job.agents[2].process.send_signal(signal.SIGCONT)


def check_page(job: Site, one: RunningAgent, rings: list[RankRecords], long: set[tuple[int, int]]) -> None:
    """What an agent sends to its page of a time range is what the rings say: the plots, the table of operations, and the timeline."""
    ends_at = [one.end_ns / 1e9 for ring in rings for one in ring_figures.operations_of(ring)]
    window = f"since={min(ends_at) // 10 * 10:.0f}&until={max(ends_at) // 10 * 10 + 10:.0f}"
    past = wait_for(lambda: of_all(one.get(f"/api/v1/past?{window}&job=four")), "all nodes to answer")["data"]
    expected = ring_figures.slots(rings, long)
    assert part(past["slots"], expected) == expected
    expected = ring_figures.table(rings)
    rows = job.of_job(one, f"summary?{window}&by=group,op")["rows"]
    assert part(by_name(rows), expected) == expected
    took_ns = {ring.rank: [record.end_ns - record.start_ns for record in ring.operations] for ring in rings}
    for track in past["timeline"]["tracks"]:
        recorded = sorted(took_ns.pop(track["rank"]))
        for _, duration_us, *_ in track["bars"]:
            at = bisect_left(recorded, duration_us * 1000)
            nearest = min(recorded[max(0, at - 1) : at + 1], key=lambda each: abs(each - duration_us * 1000))
            # Whole µs, by the clock of another host, whose rate is estimated from few seconds.
            assert duration_us == pytest.approx(nearest / 1000, rel=1e-3, abs=2)
        assert track["bars"]
    assert took_ns == {}


def part(found: list[dict[str, Any]], like: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with only the columns that ``like`` has."""
    return [{name: row[name] for name in like[0]} for row in found] if like else found


def check_against(whole: RunningAgent, job: Site, rings: list[RankRecords], ended: list[Ended]) -> None:
    """Each agent's percentiles, bandwidths, steps and groups are those of an agent that has all rings."""
    records = {ring.rank: len(ring.records) for ring in rings}
    wait_for(lambda: records_by_rank(whole.get("/api/v1/ranks?job=four")) == records, "it to read all records")
    summaries = [f"summary?by={by}" for by in ("op,size", "rank", "group_id,rank")]
    expected = {question: figures(whole.get(f"/api/v1/{question}&job=four")["rows"]) for question in summaries}
    all_steps, report = whole.get(f"/api/v1/{STEPS}&job=four"), whole.get("/api/v1/report?job=four")
    groups = members(whole.get("/api/v1/groups?job=four"))
    for one, top, mine in ended:
        assert steps(mine) == steps(all_steps)
        # An agent that was restarted does not know the steps before, with which it compares the next ones.
        alike = long_steps(mine) == long_steps(all_steps)
        assert {each: figures(job.of_job(one, each)["rows"]) for each in summaries} == expected
        assert members(job.of_job(one, "groups")) == groups
        assert records_by_rank(top["ranks"]) == records
        check_report(shown_whole(job, one, "report", "four"), report, alike)


def check_top(top: dict[str, Any], known: dict[tuple[int, int], ring_figures.Step]) -> None:
    """What ``top`` showed of the latest steps of the running job is what the rings say: ``known``, by rank and number."""
    assert {step["rank"] for step in top["steps"]} == set(range(RANKS))
    for step in top["steps"]:
        expected = known[step["rank"], step["seq"]]
        assert step["end_at"] == pytest.approx(expected.end_ns / 1e9, rel=0, abs=1e-6)
        of_ring = (expected.took_ns / 1e9, expected.comm_ns / 1e9)
        assert (step["duration_s"], step["comm_s"]) == pytest.approx(of_ring, abs=1e-9)


def check_operations(job: Site, one: RunningAgent, rings: list[RankRecords]) -> dict[str, Any]:
    """The tables of operations in ``top`` and on the live page are what the rings say of the last half minute and of the last minute.

    Returns what ``top`` shows. Each agent counts the age of what it sums up from its own clock, in intervals of 10 s: where a question
    comes to one agent before the end of an interval and to another one after it, their sums are not of the same time.
    """

    def same() -> dict[str, Any] | None:
        found: dict[str, Any] = shown_whole(job, one, "top", "--job", "four")["shown"]
        since = found["by_operation"]["since"]
        # On a busy machine the job may have ended half a minute ago.
        expected = [] if since is None else ring_figures.lately(rings, since)
        return found if part(by_name(found["by_operation"]["rows"]), expected) == expected else None

    top: dict[str, Any] = wait_for(same, "the operations of all rings in top")
    host, address = job.hosts[job.agents.index(one)], f"{one.url}/api/v1/stream?job=four"

    def equal() -> bool:
        # The last minute is whole intervals of 10 s; the event may be some seconds old.
        begin = time.time() // 10 * 10 - 60
        rows = by_name(host.call(partial(latest, "operations"), address)["rows"])
        lately = [ring_figures.lately(rings, begin + more) for more in (-10, 0, 10)]
        return any(part(rows, each) == each for each in lately)

    wait_for(equal, "the operations of all rings on the page")
    return top


def by_name(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows by group and op."""
    return sorted(rows, key=lambda row: str(row["by"]))


def check_tiles(page: dict[str, Any], known: dict[tuple[int, int], ring_figures.Step]) -> None:
    """The lines of ranks and the tiles of the live page were what the rings say of the latest steps."""
    assert [line["rank"] for line in page["ranks"]] == list(range(RANKS))
    for line in page["ranks"]:
        steps = [step for (rank, _), step in sorted(known.items()) if rank == line["rank"]]
        told = pytest.approx((line["step_s"], line["comm"]), rel=1e-6)
        assert any(each == told for each in ring_figures.tiles(steps, line["step"]))
    lines = page["ranks"]
    assert page["step_s"] == pytest.approx(median(line["step_s"] for line in lines))
    assert page["comm"] == pytest.approx(sum(line["comm"] for line in lines) / RANKS)
    assert page["step"] == max(line["step"] for line in lines)


def check_report(mine: dict[str, Any], expected: dict[str, Any], alike: bool) -> None:
    """A report's figures are those of all rings, with the waits in groups across hosts; those of steps if the same ones are long."""
    names = (
        "steps",
        "step_p50_s",
        "step_p95_s",
        "comm_share",
        "exposed_share",
        "comm_ranks",
        "group_shares",
        "records",
        "lost",
        "unjoined_share",
    )
    of_steps = ("step_p50_s", "step_p95_s", "comm_share", "exposed_share", "group_shares", "wait_share")
    compared = [name for name in names if alike or name not in of_steps]
    assert {name: mine[name] for name in compared} == {name: pytest.approx(expected[name]) for name in compared}
    # A collective within a host of which the killed agent had stored one part and not the other is never joined.
    waited = ("wait_share", "wait_hours") if alike else ("wait_hours",)
    assert {name: mine[name] for name in waited} == {name: pytest.approx(expected[name], rel=1e-3) for name in waited}
    assert figures(mine["operations"]) == figures(expected["operations"])
    of_rank = ("rank", "state", "steps", *(("step_p50_s", "comm_share", "exposed_share") if alike else ()))
    lines, expected_lines = ([[line[name] for name in of_rank] for line in one["ranks"]] for one in (mine, expected))
    assert lines == expected_lines
    waits, expected_waits = ([line["wait_s"] for line in one["ranks"]] for one in (mine, expected))
    assert waits == pytest.approx(expected_waits, rel=1e-3, abs=0.01)
    assert min(mine["ranks"], key=lambda line: line["wait_s"])["rank"] == CULPRIT


def records_by_rank(views: list[dict[str, Any]]) -> dict[int, int]:
    """How many records of each rank were read."""
    return {view["rank"]: view["records"] for view in views}


def members(groups: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The ranks of each group."""
    return {group["group_id"]: group["ranks"] for group in groups}


def steps(views: list[dict[str, Any]]) -> set[tuple[int, int, str]]:
    """Steps by rank and number, with their length and their share of communication."""
    return {(view["rank"], view["seq"], f"{view['duration_s']:.6g} {view['comm_share']}") for view in views}


def long_steps(views: list[dict[str, Any]]) -> set[tuple[int, int]]:
    """Rank and number of the long steps."""
    return {(view["rank"], view["seq"]) for view in views if view["long"]}


def figures(rows: list[dict[str, Any]]) -> list[str]:
    """The figures of a summary that do not depend on where the ranks of a group are, to six digits."""
    names = ("by", "ranks", "group_size", "count", "bytes", "seconds", "p50_s", "p95_s", "p99_s", "algbw", "busbw")
    values = [[row[name] for name in names] for row in rows]
    return sorted(str([f"{one:.6g}" if isinstance(one, float) else one for one in row]) for row in values)


@pytest.mark.parametrize(
    "numbers",
    [pytest.param((0, 2), id="first and a day ahead"), pytest.param(range(HOSTS), marks=pytest.mark.long, id="every")],
)
def test_clocks_that_differ(tmp_path: Path, numbers: Sequence[int]) -> None:
    """On hosts whose clocks differ by a second to a day, the late rank is named and waits least, and the timeline has all ranks on one clock."""
    with site(tmp_path, AHEAD_S) as job:
        for number in numbers:
            host, one = job.hosts[number], job.agents[number]
            (verdict,) = wait_for(partial(job.of_job, one, "verdicts"), "the verdict")
            assert (verdict["kind"], verdict["cause"], verdict["ranks"]) == ("straggler", "late", [CULPRIT])
            ends = wait_for(partial(ends_of_collectives, host, one), "all ranks in the timeline")
            assert median(max(of) - min(of) for of in ends) < TOGETHER_NS
            waits = wait_for(partial(waits_of_report, job, one), "a report with waits")
            assert min(waits, key=waits.__getitem__) == CULPRIT


def waits_of_report(job: Site, one: RunningAgent) -> dict[int, float]:
    """How long each rank waited by the report of all nodes; empty while most of the young job's operations have no join yet."""
    lines = shown_whole(job, one, "report", "four")["ranks"]
    return {line["rank"]: line["wait_s"] for line in lines if line["wait_s"] is not None}


def ends_of_collectives(host: Host, one: RunningAgent) -> list[list[int]]:
    """For each all_reduce of the job in the live page's timeline, the ends of all ranks in ns; empty until it has all ranks."""
    seen = host.call(partial(latest, "timeline"), f"{one.url}/api/v1/stream?job=four")
    if seen is None or [track["rank"] for track in seen["tracks"]] != list(range(RANKS)):
        return []
    ends = defaultdict[int, list[int]](list)
    for track in seen["tracks"]:
        for start_us, duration_us, _, op, group, seq, *_ in track["bars"]:
            if (seen["ops"][op], seen["groups"][group]) == ("all_reduce", "default_pg"):
                ends[seq].append(1000 * (start_us + duration_us))
    return [of for of in ends.values() if len(of) == RANKS]
