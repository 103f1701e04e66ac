"""Numbers and repetitions from other users: their cost is bounded, whatever they claim."""

from __future__ import annotations

import heapq
import json
import zlib
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from commwatch.wire import bounded, ring_reader
from commwatch.wire import events as ev
from commwatch.wire.ring_reader import RingReader
from commwatch_agent.analysis import flight_recorder_analysis
from commwatch_agent.analysis.pipelines import directions
from commwatch_agent.history import chunks, operations
from commwatch_agent.history.chunks import Damaged
from commwatch_agent.history.history import History
from commwatch_agent.incidents.judging import judged_dumps
from commwatch_agent.ingest import optimizer_rounds, rank_totals, step_accounting, steps
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.optimizer_rounds import EachPass, Mark
from commwatch_agent.ingest.rank_totals import LAST_NS, RankTotals
from commwatch_agent.ingest.step_accounting import StepAccounting
from commwatch_agent.ingest.steps import EXPLICIT, StepTracker
from commwatch_agent.ingest.tables import side_tables
from commwatch_agent.model.cells import OTHER
from commwatch_agent.model.intervals import Intervals
from commwatch_agent.model.sketch import Packed
from commwatch_collectors.nccl import ras
from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.evidence import Log
from commwatch_collectors.nccl.text import Process, parse_line
from commwatch_collectors.node import flight_recorder
from tests.helpers import EPOCH_NS, MS, Trainer, Watch, group_entry, identity, mark, operation, packed, write_ring

ALWAYS = (0, 1 << 62)
S = 1000 * MS


def a_book() -> RankTotals:
    book = RankTotals(identity(), {})
    book.learn([group_entry()])
    return book


# -- rings ----------------------------------------------------------------------------------------


def test_optimizers_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of optimizers with ever new numbers a bounded number of marks is held, and steps of others are found afterwards as before."""
    most = 512
    monkeypatch.setattr(steps, "MOST_HELD", most)
    tracker = StepTracker()
    for n in range(2 * most):
        tracker.feed(Mark(n, n, n * S, n * S + 1, None, 0))
    assert len(vars(tracker)["_held"]) < most
    after = range(2 * most, 2 * most + 4)
    told = [step.seq for n in after for step in tracker.feed(Mark(n, EXPLICIT, n * S, n * S, None, 0))]
    assert told == [*after][1:]


def test_step_of_optimizers_without_end() -> None:
    """A step that optimizers never end is ended where there are too many of them."""
    rule = EachPass(frozenset({0}))
    for n in range(3 * optimizer_rounds.MOST_HELD):
        rule.feed(Mark(n, n, n * S, n * S + 1, None, 0, same_pass=n > 0))
    assert 0 < len(rule.open) <= 2 * optimizer_rounds.MOST_HELD


def test_steps_of_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps claim to be within a minute, shares cover a bounded number of them; all are counted."""
    monkeypatch.setattr(step_accounting, "MOST_RECENT", 16)
    book = StepAccounting()
    for n in range(1000):
        book.mark(
            ev.Record._make(
                (
                    n + 1,
                    *mark(
                        n,
                        n + 1,
                    ),
                    n + 1,
                )
            )
        )
    assert (len(book.totals.recent), book.totals.count) == (16, 999)


def test_moments_that_no_step_claims() -> None:
    """Moments in the far future are not searched at each step, and a step's own moments count, in whatever order they come."""
    book = StepAccounting()
    for launch in (1 << 60, 3 * S, 1 << 61, 3 * S + 1):
        book.add_untimed([launch])
    held = vars(book)
    assert held["_untimed"] == sorted(held["_untimed"])
    for n in range(1, 6):
        book.mark(
            ev.Record._make(
                (
                    n,
                    *mark(
                        n,
                        n * S + S // 2,
                    ),
                    n,
                )
            )
        )
    assert [step.comm_ns is None for step in book.take()] == [False, True, False, False]
    assert held["_untimed"] == [1 << 60, 1 << 61]


def test_labels_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communication of more group labels than are measured each for itself is measured together."""
    monkeypatch.setattr(step_accounting, "MOST_LABELS", 4)
    book = StepAccounting()
    book.mark(
        ev.Record._make(
            (
                1,
                *mark(
                    0,
                    S,
                ),
                1,
            )
        )
    )
    for n in range(10):
        book.busy(f"group {n}").add(S + n, S + n + 1)
    book.mark(
        ev.Record._make(
            (
                2,
                *mark(
                    1,
                    2 * S,
                ),
                2,
            )
        )
    )
    (step,) = book.take()
    assert (step.comm_ns, dict(step.groups)) == (10, {**{f"group {n}": 1 for n in range(4)}, OTHER: 6})


def test_pieces_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of operations that are all of one moment so many pieces are kept, of each label and of all together; messages among them."""
    monkeypatch.setattr(step_accounting, "MOST_PIECES", 32)
    monkeypatch.setattr(step_accounting, "_MOST_TOGETHER", 64)
    unions = [Intervals() for _ in range(8)]
    for union in unions:
        for n in range(20):
            union.add(2 * n, 2 * n + 1)
    step_accounting.trim(unions)
    assert {(len(union.starts), union.ends[-1]) for union in unions} == {(8, 39)}
    book = a_book()
    ingest_records(book, packed(*(operation("recv", peer=1, start_ns=2 * n, end_ns=2 * n + 1) for n in range(500))))
    assert [len(union.starts) for union in vars(book)["_p2p_busy"].values()] == [32]
    assert sum(cell.busy_ns for _, cell in book.cells()) == 500


def test_peers_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages with more peers than there can be are counted, the rest without their peers."""
    monkeypatch.setattr(side_tables, "MOST_PEERS", 10)
    book = a_book()
    ingest_records(book, packed(*(operation("recv", peer=peer, start_ns=0, end_ns=9) for peer in range(100))))
    assert len(book.messages) == 11
    assert sum(messages.count for messages in book.messages.values()) == 100
    assert book.messages[0, ev.OP_CODE["recv"], -1].count == 90


def test_kinds_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of more kinds than exist are counted, the rest as one; kinds known before stay separate."""
    monkeypatch.setattr(rank_totals, "MOST_KINDS", 10)
    book = a_book()
    known = operation(start_ns=0, end_ns=9, size=1)
    odd = [
        (op, 0, 0, -1, 0, 1 << size, 0, 0, 0, 0, 9, 0, ev.BY_CALL, 0) for op in range(100, 120) for size in range(20)
    ]
    for slot in range(3):
        later = [(*each[:9], slot * 10 * S, slot * 10 * S + 9, *each[11:]) for each in (known, *odd, known)]
        ingest_records(book, packed(*((*each[:6], each[9], *each[7:]) for each in later)))
    counts: Counter[tuple[str, str]] = Counter()
    for key, cell in book.cells():
        counts[book.group(key.group).label, book.op_name(key.op)] += cell.count
    assert sum(counts.values()) == 3 * 402
    assert counts["default_pg", "all_reduce"] == 6
    assert counts[OTHER, "unknown"] > 3 * 380
    assert len(book.totals) <= 11


def test_end_that_nobody_saw(tmp_path: Path) -> None:
    """One operation that ends in the far future keeps no slot open: what follows it is in sums, and the next agent does not count it again."""
    watch = Watch(tmp_path)
    with Trainer(watch.rings / "a.ring", identity()) as trainer:
        trainer.call("name", [(group_entry(),)])
        trainer.write([operation(start_ns=0, end_ns=1 << 61)])
        trainer.write([operation(start_ns=n * MS, end_ns=(n + 1) * MS) for n in range(50)])
        for now_ns in (S, 2 * S, 30 * S):
            watch.tick(now_ns)
        with History(watch.store.path) as history:
            assert [(row.running, row.next_n, row.rolled_n) for row in history.rings()] == [(True, 51, 51)]


def test_slot_that_no_clock_has_come_to() -> None:
    """After an end of the far future the slots are those of the clock again, and the last minute is of it."""
    book = a_book()
    ingest_records(book, packed(operation(start_ns=0, end_ns=1 << 61)))
    book.tick(EPOCH_NS + S)
    assert [slot for slot, _, _ in book.take_closed()] == [((1 << 61) + EPOCH_NS) // (10 * S) * (10 * S)]
    ingest_records(book, packed(operation(start_ns=2 * S, end_ns=3 * S), first=1))
    book.tick(EPOCH_NS + 20 * S)
    assert [slot - EPOCH_NS for slot, _, _ in book.take_closed()] == [0]
    assert [slot - EPOCH_NS for slot, _, _ in book.lately(20 * S)] == [0]
    assert LAST_NS > 20 * S


def test_ended_life_is_small() -> None:
    """What is kept of a rank that has ended is its sums, packed: a job may run again and again."""
    book = a_book()
    ingest_records(book, packed(*(operation(start_ns=3 * n * n, end_ns=3 * n * n + n + 1) for n in range(1000))))
    before = [(key, cell.count, dict(cell.bins)) for key, cell in book.cells()]
    book.finish()
    assert [(key, cell.count, dict(cell.bins)) for key, cell in book.cells()] == before
    assert all(isinstance(cell.bins, Packed) for _, cell in book.cells())
    assert not any(union.starts for union in vars(book.steps)["_busy"].values())


def test_names_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of lines read from a names file is limited, empty lines included, and so is the number of values in a line."""
    monkeypatch.setattr(ring_reader, "MOST_NAMES", 8)
    monkeypatch.setattr(ring_reader, "_MOST_VALUES", 100)
    path = write_ring(tmp_path, [], names=[]).path
    with closing(RingReader(path)) as reader:
        names = path.with_suffix(".names")
        names.write_text('{"op": 40, "name": "a"}\n\n\n' + json.dumps({"x": [[]] * 200}) + "\n")
        assert [entry["op"] for entry in reader.names()] == [40]
        with names.open("a") as file:
            file.write("".join(f'{{"op": {op}, "name": "b"}}\n' for op in range(41, 60)))
        assert [entry["op"] for entry in reader.names()] == [41, 42, 43, 44]
        assert reader.names() == []


class _Counted(tuple[int, ...]):
    """The members of a group; to search them counts."""

    searched = 0

    def __contains__(self, rank: object) -> bool:
        _Counted.searched += 1
        return super().__contains__(rank)


def test_peers_among_many_members() -> None:
    """A page does not search the members of a group for each peer."""
    book = a_book()
    info = book.groups[0]
    book.groups[0] = info._replace(ranks=_Counted(range(300)), size=300)
    ingest_records(book, packed(*(operation("recv", peer=peer, start_ns=0, end_ns=9) for peer in range(1, 300))))
    found = directions(book)
    assert {way: messages.count for (_, way), messages in found.items()} == {"backward": 150, "forward": 149}
    assert _Counted.searched < 3


# -- the history ----------------------------------------------------------------------------------


def test_operations_behind_the_far_future(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each chunk has an end of the far future, so that all overlap, operations still come in order, all, and few are held at a time."""
    monkeypatch.setattr(operations, "MOST_WAITING", 64)
    most, push = 0, heapq.heappush

    def counted(heap: list[Any], each: Any) -> None:
        nonlocal most
        push(heap, each)
        most = max(most, len(heap))

    monkeypatch.setattr(heapq, "heappush", counted)
    watch = Watch(tmp_path)
    row = watch.store.ring("u", identity(), EPOCH_NS)
    for at in range(0, 4096, chunks.CHUNK_RECORDS):
        ends = [(1 << 60) if n == at else n + 1 for n in range(at, at + chunks.CHUNK_RECORDS)]
        records = [operation(start_ns=0, end_ns=end, seq=at + n) for n, end in enumerate(ends)]
        watch.store.append(row, packed(*records, first=at), at + chunks.CHUNK_RECORDS)
    assert watch.store.commit()
    looked: list[None] = []
    found = watch.agent.operations(0, EPOCH_NS + S, None, lambda _: True, 5000, go_on=lambda: looked.append(None))
    assert [one.seq for one in found] == [n for n in reversed(range(4096)) if n % chunks.CHUNK_RECORDS]
    assert all(newer.end_at >= older.end_at for newer, older in pairwise(found))
    assert most <= 64 + chunks.CHUNK_RECORDS
    assert len(looked) >= 4


def test_chunk_that_unpacks_without_end(tmp_path: Path) -> None:
    """A chunk of a history that unpacks to more than a chunk can hold is damaged, and not unpacked."""
    damaged = Damaged()
    assert damaged.unpacked(tmp_path, 1, zlib.compress(bytes(2 * chunks.CHUNK_RECORDS * ev.RECORD_SIZE))) is not None
    assert damaged.unpacked(tmp_path, 2, zlib.compress(bytes(ev.RECORD_SIZE << 15))) is None
    assert len(damaged) == 1


# -- other files, and answers ---------------------------------------------------------------------


def test_json_of_many_values() -> None:
    """JSON with too many values is refused before any is created; with the maximum it is read."""
    for text in ("[[], {}, 1]", b"[[], {}, 1]", bytearray(b"[[], {}, 1]")):
        assert bounded.load(text, 5) == [[], {}, 1]
        with pytest.raises(ValueError, match="more than 4 values"):
            bounded.load(text, 4)
        assert bounded.load(text, 5, 3) == [[], {}, 1]
        with pytest.raises(ValueError, match="more than 2 lists and objects"):
            bounded.load(text, 5, 2)


def test_dump_of_many_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dump in JSON is bounded by its values, as one in pickle is by its steps."""
    monkeypatch.setattr(flight_recorder, "MOST_STEPS", 100)
    with pytest.raises(flight_recorder.BadDump, match="more than 100 values"):
        flight_recorder.load(b'{"version": "2", "entries": [' + b"[]," * 100 + b"1]}")


@pytest.mark.parametrize(
    "data", [b"\x80\x02" + b"}" * 101 + b".", b"\x80\x02" + b"(t" * 101 + b".", b"{" + b"[]," * 101]
)
def test_dump_of_many_containers(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """Lists and objects in a dump, which take the most memory, have a lower limit, in JSON and in pickle."""
    monkeypatch.setattr(flight_recorder, "MOST_CONTAINERS", 100)
    with pytest.raises(flight_recorder.BadDump, match=r"more than 100 (containers|lists and objects)"):
        flight_recorder.load(data)


def test_dump_of_many_groups(tmp_path: Path) -> None:
    """Of the groups in a dump so many are judged, those used latest."""
    entries = [
        {"process_group": [str(n), "d"], "profiling_name": "nccl:all_reduce", "time_created_ns": 1, "collective_seq_id": 1, "state": "scheduled"}
        for n in range(2000)
    ]  # fmt: skip
    path = tmp_path / "dump_0"
    path.write_text(json.dumps({"version": "2", "entries": entries}))
    taken = flight_recorder_analysis.take(path)
    assert taken.dump.unknown == 2000 - flight_recorder.MOST_GROUPS
    assert {entry.group[0] for entry in taken.dump.entries} == {
        str(n) for n in range(2000 - flight_recorder.MOST_GROUPS, 2000)
    }
    assert judged_dumps([taken]) is not None


def ras_text(size: int, *blocks: str) -> str:
    head = f"NCCL version 2.27.3 compiled with CUDA 12\n  0 1 1 1 {size} 1 RUNNING OK\n"
    says = "  Communicator ranks have different AllReduce operation counts\n"
    return head + "".join(f"#0-0 ({n:x}) MISMATCH\n{says}{block}\n" for n, block in enumerate(blocks))


def test_ras_of_many_ranks() -> None:
    """An answer of RAS in text costs no more than it names, however many ranks it counts without their names."""
    with pytest.raises(ras.RasError, match="without their names"):
        ras.parse(ras_text(999_999_999, "  999999999 ranks have launched up to operation 5"))
    one = "  Rank 7 has launched up to operation 4 -- GPU 0 managed by process 1 on node n"
    status = ras.parse(ras_text(999_999_999, *[f"  3 ranks have launched up to operation 5\n{one}"] * 50))
    assert {tuple(member.rank for member in comm.members) for comm in status.communicators} == {(7,)}
    (comm,) = ras.parse(
        ras_text(4, f"  3 ranks have launched up to operation 5\n{one.replace('7', '2', 1)}")
    ).communicators
    assert [(member.rank, member.counts) for member in comm.members] == [
        (rank, {"all_reduce": 4 if rank == 2 else 5}) for rank in range(4)
    ]


# -- NCCL's logs ----------------------------------------------------------------------------------


def test_threads_without_end() -> None:
    """Threads beyond the limit of an account take no memory; their lines are counted as overflow."""
    account = Account(100)
    for tid in range(1000):
        account.add(f"h:1:{tid} [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/IPC", "log", tid)
    (life,) = account.lives.values()
    assert len(life.pending) < 100
    assert account.overflow == 1000 - len(life.pending)


def test_long_lines_without_end() -> None:
    """A fact takes room by the length of its message."""
    account = Account(1000)
    account.add("h:1:1 [0] NCCL WARN short", "log", 0)
    for n in range(1, 10):
        account.add(f"h:1:1 [0] NCCL WARN {n} {'x' * 50_000}", "log", n)
    assert (len(account.warnings), account.overflow) == (3, 7)


class _Hosts(Collection[str]):
    """Hosts that may be looked up, but not gone through."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("gone through")


def test_hosts_without_end() -> None:
    """A line that is glued to a message is separated by looking up known hosts; of several with the same end the longest counts."""
    line = "h0:1:1 [0] NCCL INFO fooxnode1:2:2 [0] NCCL INFO Foo"
    for hosts, text in ((("node1", "1"), "foox"), (("xnode1", "node1"), "foo"), ((), "")):
        assert parse_line(line, _Hosts(*hosts))[0].text == text


def test_torn_hosts() -> None:
    """A host name with few lines is a torn part of another name, if that has ten times as many lines, the same pid and the same ending."""
    account = Account()
    for n in range(30):
        account.add(f"node1:7:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.{n}<0>", "log", n)
    for n, head in enumerate(("de1:7:1", "de1:8:1", "e1:7:1", "other:7:1")):
        account.add(f"{head} [0] NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>", "log", 30 + n)
    assert [(process.host, process.pid) for process in account.processes] == [
        ("node1", 7),
        ("de1", 7),
        ("de1", 8),
        ("other", 7),
    ]


def test_jobs_that_grow_together() -> None:
    """Processes that share communicators, directly or through others, belong to one job; others do not."""
    account, line = Account(), 0
    for pids in ((1, 2), (3, 4), (5, 6), (2, 3), (7, 8), (4, 5)):
        comm = f"{line:x}"
        for rank, pid in enumerate(pids):
            about = f"comm 0x{comm}{pid} rank {rank} nranks 2 cudaDev 0 nvmlDev 0 busId 1000 commId 0x{comm}"
            account.add(f"h:{pid}:1 [0] NCCL INFO ncclCommInitRankConfig {about} - Init START", "log", line)
            line += 1
    jobs = Log(account).jobs
    together = [{process.pid for process, job in jobs.items() if job == which} for which in set(jobs.values())]
    assert sorted(map(sorted, together)) == [[1, 2, 3, 4, 5, 6], [7, 8]]
    assert Process("", "h", 1) in jobs
