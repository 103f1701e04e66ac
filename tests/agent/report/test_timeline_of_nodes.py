"""The timeline of a job on nodes whose clocks differ: that of one node with all ranks, up to the jitter of the network."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from pydantic import TypeAdapter

from commwatch_agent.questions.answer import text_of
from commwatch_agent.report.chrome_trace import TraceMark, pid_of
from commwatch_agent.report.timeline_export import Exported, NodeTrace, Window, export, own_trace, write
from commwatch_agent.report.timeline_parts import Page, TimelinePart, part_of, trace_of
from tests.chrome_trace import Trace, parsed
from tests.helpers import EPOCH_NS, MS, Watch, group_entry, mark, operation, write_ring

#: By node: its ranks, how far its clock is ahead, and by how much it runs too fast.
NODES = (((0, 1), 0, 0.0), ((2, 3), 5000 * MS, 1e-4), ((4,), -3210 * MS, -1e-4))
STEPS, JITTER_NS = 400, 20_000


def node_of(directory: Path, ranks: tuple[int, ...], ahead_ns: int = 0, drift: float = 0.0) -> Watch:
    """A node with ranks of a job: collectives of all ranks, which end together, and messages from each rank to the next."""
    directory.mkdir()
    watch, jitter = Watch(directory), Random(ahead_ns)

    def by_clock(at_ns: int) -> int:
        return round(at_ns * (1 + drift)) + (jitter.randrange(JITTER_NS) if ahead_ns else 0)

    for rank in ranks:
        records = [mark(0, by_clock(1))]
        for step in range(STEPS):
            at = (1 + 50 * step) * MS
            message = {"seq": step // 2, "size": 1 << 20, "tag": 1}
            records.append(
                operation(start_ns=by_clock(at + rank * MS), end_ns=by_clock(at + 20 * MS), seq=step, size=1 << 20)
            )
            if rank == 1 + step % 2:  # rank 1 sends to rank 2, which is on another node
                op, peer = ("send", 2) if rank == 1 else ("recv", 1)
                begin = at - (50 * MS if rank == 2 else 0)
                records.append(
                    operation(
                        op, start_ns=by_clock(begin + 25 * MS), end_ns=by_clock(begin + 30 * MS), peer=peer, **message
                    )
                )
            records.append(mark(step + 1, by_clock(at + 40 * MS), exposed_ns=MS))
        names = [group_entry(0, tuple(range(5)), "dp", group_id="world")]
        write_ring(watch.rings, records, names, job="job", rank=rank, world_size=5, wall_offset_ns=EPOCH_NS + ahead_ns)
    watch.tick(60_000 * MS)
    return watch


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> list[Watch]:
    """The nodes, and one that has all ranks."""
    directory = tmp_path_factory.mktemp("nodes")
    every = tuple(rank for ranks, _, _ in NODES for rank in ranks)
    return [
        *(node_of(directory / str(ranks[0]), ranks, ahead, drift) for ranks, ahead, drift in NODES),
        node_of(directory / "all", every),
    ]


def sent(path: Path, page: Page, marks: tuple[TraceMark, ...] = ()) -> TimelinePart:
    """A page as the agent of another node reads it."""
    return TypeAdapter(TimelinePart).validate_json(text_of(part_of(path, "job", page, marks)).body)


def paged(path: Path, last_s: float | None, most: int) -> NodeTrace:
    """The timeline of another node, in pages."""
    return trace_of(
        sent(path, Page(last_s, None, None, most)),
        lambda page: sent(path, Page(last_s, page.from_ns, page.cursor, most)),
    )


def traced(nodes: list[Watch], last_s: float | None = None, most: int = 100) -> tuple[Exported, Trace]:
    """The timeline of all nodes, as the first makes it."""
    out = io.StringIO()
    others = [paged(node.path, last_s, most) for node in nodes[1:-1]]
    with own_trace(nodes[0].path, "job", Window(last_s), (), alone=False) as own:
        found = write([own, *others], "job", Window(last_s), {}, out)
    return found, parsed(out.getvalue().encode())


def times(trace: Trace, cat: str) -> dict[tuple[Any, ...], tuple[int, int]]:
    """Begin and end of each slice, by what it is; from the same moment for all traces."""
    origin = int(trace.about["Unix time of 0, in ns"])
    return {
        (each.rank, each.name, each.args.get("seq")): (each.start_ns + origin, each.end_ns + origin)
        for each in trace.of(cat)
    }


@pytest.mark.parametrize("most", [pytest.param(7, marks=pytest.mark.long), 100, 10_000])
def test_one_clock(nodes: list[Watch], most: int) -> None:
    """Clocks that are seconds apart and drift by 100 ppm are taken out; each operation and step is there once, whatever the pages."""
    found, trace = traced(nodes, None, most)
    expected, whole = _of_one(nodes[-1].path, Window(None))
    assert found == expected
    assert trace.processes == {pid_of(rank): f"rank {rank}" for rank in range(5)}
    for cat in ("operation", "step"):
        mine, theirs = times(trace, cat), times(whole, cat)
        assert mine.keys() == theirs.keys()
        assert max(abs(a - b) for at in mine for a, b in zip(mine[at], theirs[at], strict=True)) < 2 * JITTER_NS
    assert sorted(trace.arrows) == sorted(whole.arrows)
    assert (1, 2, "message") in trace.arrows


@cache
def _of_one(path: Path, window: Window) -> tuple[Exported, Trace]:
    out = io.StringIO()
    return export(path, "job", window, (), out), parsed(out.getvalue().encode())


def test_clocks_in_the_trace(nodes: list[Watch]) -> None:
    """The trace's metadata have offset and drift of each clock, with an uncertainty that holds."""
    first, second, third = traced(nodes)[1].about["clocks"].values()
    assert first == "all times are by this clock"
    for found, (_, ahead_ns, drift) in ((second, NODES[1]), (third, NODES[2])):
        assert 0 < found["uncertainty_us"] < 2 * JITTER_NS / 1000
        assert found["drift_ppm"] == pytest.approx(drift * 1e6, abs=3)
        at_middle = drift * STEPS * 25 * MS
        assert found["ahead_ms"] == pytest.approx((ahead_ns + at_middle) / MS, abs=1.5)


def test_window(nodes: list[Watch]) -> None:
    """A window is of the job's end, by one clock: it has the operations that it has where one node has all ranks."""
    found, trace = traced(nodes, 3.0)
    expected, whole = _of_one(nodes[-1].path, Window(3.0))
    assert abs(found.operations - expected.operations) <= 7, "only those at its begin, within the jitter, may differ"
    assert 0 < found.operations < STEPS * 5
    assert len(times(trace, "operation").keys() ^ times(whole, "operation").keys()) <= 7


def test_cut(nodes: list[Watch]) -> None:
    """Where only a first page is known of each node, the trace goes back as far as all of them do."""
    out = io.StringIO()
    parts = [sent(node.path, Page(None, None, None, 100)) for node in nodes[:-1]]
    found = write([trace_of(part) for part in parts], "job", Window(None), {}, out)
    assert found.cut
    by_rank: dict[int, list[int]] = {}
    for each in parsed(out.getvalue().encode()).of("operation"):
        if each.name == "all_reduce":
            by_rank.setdefault(each.rank, []).append(each.args["seq"])
    assert by_rank.keys() == set(range(5))
    first = [min(seqs) for seqs in by_rank.values()]
    assert 0 < min(first) <= max(first) <= min(first) + 1, "the ends at the begin may differ by the jitter"
    assert {len(seqs) + min(seqs) for seqs in by_rank.values()} == {STEPS}


def test_pages_are_not_kept(nodes: list[Watch]) -> None:
    """An operation of another node takes no memory once it is read: neither the first page nor later ones are kept."""
    pages = [sent(nodes[1].path, Page(None, None, None, 100))]

    def more(page: TimelinePart) -> TimelinePart:
        pages.append(sent(nodes[1].path, Page(None, page.from_ns, page.cursor, 100)))
        return pages[-1]

    operations = iter(trace_of(pages[0], more).operations)
    for number in range(250):
        assert sum(len(page.operations) for page in pages) == 100 * len(pages) - number
        next(operations)
    assert len(pages) == 3


def test_clock_that_is_not_known(tmp_path: Path, nodes: list[Watch]) -> None:
    """A node that shares no collectives with the others keeps its times, and is marked in the trace's metadata; the trace has the marks of all nodes."""
    lonely = Watch(tmp_path)
    names = [group_entry(0, (9,), group_id="alone")]
    write_ring(lonely.rings, [operation(start_ns=MS, end_ns=2 * MS)], names, job="job", rank=9, wall_offset_ns=EPOCH_NS)
    lonely.tick(60_000 * MS)
    out = io.StringIO()
    marks = (TraceMark(EPOCH_NS + MS, "verdict hang", 9, {"says": "it hangs"}),)
    other = trace_of(sent(lonely.path, Page(None, None, None, 10), marks))
    with own_trace(nodes[0].path, "job", Window(None), (), alone=False) as own:
        write([own, other], "job", Window(None), {}, out)
    trace = parsed(out.getvalue().encode())
    assert str(list(trace.about["clocks"].values())[1]).startswith("not compared")
    assert times(trace, "operation")[9, "all_reduce", 0] == (EPOCH_NS + MS, EPOCH_NS + 2 * MS)
    assert [each["name"] for each in trace.instants] == ["verdict hang"]


def test_incidents_of_all_nodes(nodes: list[Watch]) -> None:
    """An incident that several nodes have is shown once, at the ranks that any of them knows."""
    whole = Page(None, None, None, 100_000)
    out, jobs = io.StringIO(), [watch.agent.jobs()[0] for watch in nodes]
    ranks = [job.ranks[0] for job in jobs]

    def mark_of(node: int, name: str, rank: int | None) -> TraceMark:
        at_ns = int(jobs[node].started_at * 1e9) + 1000 * MS
        return TraceMark(at_ns, f"incident {name}", rank, {"id": name}, at_ns + 1000 * MS)

    others = [
        trace_of(sent(nodes[1].path, whole, (mark_of(1, "a", ranks[1]), mark_of(1, "b", None)))),
        trace_of(sent(nodes[2].path, whole, (mark_of(2, "a", ranks[1]),))),
    ]
    marks = (mark_of(0, "a", None), mark_of(0, "b", None))
    with own_trace(nodes[0].path, "job", Window(None), marks, alone=False) as own:
        write([own, *others], "job", Window(None), {}, out)
    found = parsed(out.getvalue().encode()).of("mark")
    assert sorted((each.name, each.rank) for each in found) == [
        ("incident a", ranks[1]),
        ("incident b", min(ranks[:3])),
    ]


@pytest.mark.parametrize("ahead_s", [-3600, 0, 30])
def test_window_by_an_unknown_clock(tmp_path: Path, nodes: list[Watch], ahead_s: int) -> None:
    """The window of a node whose clock cannot be compared is by its own clock, and changes that of the other nodes as little as they change it."""
    lonely, ahead_ns, window = Watch(tmp_path), ahead_s * 1000 * MS, Window(5.0)
    records = [operation(start_ns=at * 1000 * MS, end_ns=at * 1000 * MS + MS, seq=at) for at in range(20)]
    write_ring(
        lonely.rings,
        records,
        [group_entry(0, (9,), group_id="alone")],
        job="job",
        rank=9,
        wall_offset_ns=EPOCH_NS + ahead_ns,
    )
    lonely.tick(60_000 * MS)
    other = trace_of(sent(lonely.path, Page(window.last_s, None, None, 100)))
    own, _ = _of_one(nodes[0].path, window)
    with own_trace(nodes[0].path, "job", window, (), alone=False) as first:
        found = write([first, other], "job", window, {}, io.StringIO())
    assert own.operations > 0
    assert (found.operations, found.steps, found.cut) == (own.operations + 5, own.steps, False)


def test_parts_that_are_not_sound(nodes: list[Watch]) -> None:
    """A part with an index that has no name is refused when it is read; a cursor that no page has, when it is asked for."""
    found = json.loads(text_of(part_of(nodes[0].path, "job", Page(None, None, None, 5), ())).body)
    found["groups"] = []
    with pytest.raises(ValueError, match="without a name"):
        TypeAdapter(TimelinePart).validate_python(found)
    with pytest.raises(ValueError, match=r"invalid literal|unpack"):
        part_of(nodes[0].path, "job", Page(None, None, "x", 5), ())
