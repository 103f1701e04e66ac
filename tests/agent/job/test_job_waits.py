"""Waits in groups that span nodes: what the nodes send gives the waits of a join over all ranks, whatever is missing and whatever clocks show."""

from __future__ import annotations

import random
import zlib
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire import events as ev
from commwatch.wire.numbers import NUMBERS
from commwatch_agent.history.store import Writer
from commwatch_agent.ingest.collective_join import Part, split
from commwatch_agent.job import wait_source
from commwatch_agent.job.job_waits import JobWaits, RankWait, joined_waits
from commwatch_agent.job.packed import packed
from commwatch_agent.job.wait_parts import MOST_COLLECTIVES, MOST_NS, RUN, GroupPart, WaitPart
from commwatch_agent.job.wait_source import wait_part
from commwatch_agent.model.cells import Cell, Counted, GroupInfo, StepRecord
from commwatch_agent.model.views import WaitView
from tests.helpers import examples, identity, operation
from tests.helpers import packed as records_of

S = 10**9
NOW = 1_700_000_000 * S
WORLD = GroupInfo("world", "world", "world", "", (0, 1, 2), 3, True)
Record = tuple[int, ...]
#: Records by rank.
Ranks = Mapping[int, Sequence[Record]]


def history(
    path: Path,
    ranks: Ranks,
    *,
    ahead_ns: int = 0,
    groups: Sequence[GroupInfo] = (WORLD,),
    steps_from: int | None = None,
    **who: Any,
) -> Path:
    """The history of a node: its ranks' records, by a clock that is ahead, and one step that begins at ``steps_from`` on it."""
    store = Writer(path)
    for rank, records in ranks.items():
        about = identity(job="job", rank=rank, **{"wall_offset_ns": NOW + ahead_ns, **who})
        row = store.ring(f"{rank}.{about['restart']}.{about['pid']}", about, NOW)
        for number, group in enumerate(groups):
            store.group(row.id, number, group)
        store.append(row, records_of(*records), len(records))
        if steps_from is not None:
            store.steps(row, [StepRecord(1, steps_from, steps_from + S, None, None)], None)
    assert store.commit()
    store.close()
    return path


def sent(path: Path, most: int = MOST_COLLECTIVES, clock: Callable[[], float] = lambda: 0.0) -> WaitPart:
    """What the node of a history sends."""
    return wait_part(path, "job", most, clock)


def sums(found: Sequence[RankWait]) -> dict[tuple[int, str, int | None, int], tuple[int, int]]:
    """Joined collectives and waits by rank, op, size and slot."""
    return {(each.rank, each.op, each.size, each.slot_ns): (each.joined, each.wait_ns) for each in found}


def collectives(number: int, seed: int) -> dict[int, list[Record]]:
    """Records of three ranks in collectives of two ops and sizes that end together, each later than the one before."""
    chance, found = random.Random(seed), defaultdict[int, list[Record]](list)
    for seq in range(number):
        end, op, size = (seq + 1) * S // 3, chance.choice(["all_reduce", "all_gather"]), chance.choice([4096, 5000])
        for rank in range(3):
            start = end - chance.randrange(1, S // 3)
            found[rank].append(operation(op, start_ns=start, end_ns=end, seq=seq, size=size))
    return found


def expected(
    ranks: Ranks, but_for: frozenset[int] = frozenset()
) -> dict[tuple[int, str, int | None, int], tuple[int, int]]:
    """The sums of a join of all parts (``collective_join.split``), but for some collectives."""
    found: dict[tuple[int, str, int | None, int], tuple[int, int]] = {}
    for records in zip(*ranks.values(), strict=True):
        parts = [
            Part(rank, each[0], each[6], each[10], each[10] - each[9], None)
            for rank, each in zip(ranks, records, strict=True)
        ]
        (op, seq, size, end) = (records[0][at] for at in (0, 7, 5, 10))
        for part, wait_ns in split(parts).waits if seq not in but_for else ():
            at = part.rank, ev.OPS[op - 1], 1 << (size - 1).bit_length(), (NOW + end) // (10 * S) * 10 * S
            joined, waited = found.get(at, (0, 0))
            found[at] = joined + 1, waited + wait_ns
    return found


@given(number=st.integers(1, 200), seed=st.integers(0, 99), alone=st.integers(0, 2))
@examples(20)
def test_waits_are_those_of_a_join(
    tmp_path_factory: pytest.TempPathFactory, number: int, seed: int, alone: int
) -> None:
    """Whichever ranks are on which node, joined collectives and waits by rank, op, size and slot are those of a join over all ranks."""
    directory, ranks = tmp_path_factory.mktemp("waits"), collectives(number, seed)
    one = sent(history(directory / "one", {alone: ranks[alone]}))
    other = sent(history(directory / "other", {rank: records for rank, records in ranks.items() if rank != alone}))
    assert sums(list(joined_waits([one, other]))) == expected(ranks)
    assert sums(list(joined_waits([other, one, replace(one)]))) == expected(ranks), "an agent with two addresses"
    assert list(joined_waits([one])) == list(joined_waits([other])) == [], "a node is missing"


def test_startup_apart(tmp_path: Path) -> None:
    """Waits before the first step of the ranks are apart from those in steps, and are added to cells of the startup only."""
    ranks, begin_ns = collectives(60, 4), 7 * S
    one = sent(history(tmp_path / "one", {0: ranks[0]}, steps_from=begin_ns))
    other = sent(history(tmp_path / "other", {1: ranks[1], 2: ranks[2]}, ahead_ns=S // 2, steps_from=begin_ns))
    found = list(joined_waits([one, other]))
    early, late = ([each for each in found if each.startup is startup] for startup in (True, False))
    before = {rank: [each for each in of if each[10] <= begin_ns] for rank, of in ranks.items()}
    assert sum(each.joined for each in early if not each.rank) == len(before[0]) == 21
    assert sum(each.wait_ns for each in early) == sum(wait for _, wait in expected(before).values())
    assert sum(each.joined for each in late if not each.rank) == 39
    kinds = [each for each in found if (each.rank, each.op) == (0, "all_reduce")]
    cells: dict[tuple[int | None, bool], Cell] = defaultdict(Cell)
    for each in kinds:
        cells[each.size, each.startup].count += each.joined
    counted = [
        Counted("job", 0, "world", "world", 3, "all_reduce", size, cell, startup=startup)
        for (size, startup), cell in cells.items()
    ]
    JobWaits(found).add_to(counted, 0)
    for startup in (True, False):
        waits = [cell.wait_ns for (_, of), cell in cells.items() if of is startup]
        assert sum(waits) == sum(each.wait_ns for each in kinds if each.startup is startup)


def test_clocks_are_not_compared(tmp_path: Path) -> None:
    """A clock that is a day ahead moves the waits of its node to the slots of that clock, and changes no wait."""
    ranks = collectives(90, 1)
    day = 86_400 * S
    one = sent(history(tmp_path / "one", {0: ranks[0]}))
    other = sent(history(tmp_path / "other", {1: ranks[1], 2: ranks[2]}, ahead_ns=day))
    moved = {
        (rank, op, size, slot + (day if rank else 0)): of for (rank, op, size, slot), of in expected(ranks).items()
    }
    assert sums(list(joined_waits([one, other]))) == moved


@pytest.mark.parametrize("alone", [0, 40, 512])
def test_a_missing_collective(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: int) -> None:
    """Collectives that one rank has not recorded, or in another op, are left out, with the others of their runs unless they are the latest."""
    monkeypatch.setattr(wait_source, "ALONE", alone)
    every, kind = collectives(200, 2), (ev.OP_CODE["all_reduce"], 4096)
    ranks = {rank: [each for each in of if (each[0], each[5]) == kind] for rank, of in every.items()}
    seqs = [record[7] for record in ranks[0]]
    lost, odd = seqs[-3], seqs[-1]
    one = sent(history(tmp_path / "one", {0: [record for record in ranks[0] if record[7] != lost]}))
    strange = [(ev.OP_CODE["all_gather"], *record[1:]) if record[7] == odd else record for record in ranks[2]]
    other = sent(history(tmp_path / "other", {1: ranks[1], 2: strange}))
    found, wanted = sums(list(joined_waits([one, other]))), expected(ranks, frozenset({lost, odd}))
    if alone:
        assert found == wanted
    else:
        missing = {at: joined - found.get(at, (0, 0))[0] for at, (joined, _) in wanted.items()}
        assert 0 < max(missing.values()) < RUN
        assert all(found[at] == wanted[at] for at, number in missing.items() if not number)


def test_what_is_not_joined(tmp_path: Path) -> None:
    """Left out is what an agent does not join: failed, untimed or unaligned operations, late ends, messages, ops with a root, groups on one node,
    groups that the probe came late to, and earlier processes of a rank."""
    good = operation(start_ns=S, end_ns=2 * S, seq=5)
    bad = [
        operation(start_ns=S, end_ns=2 * S, seq=seq, flags=flags, timing=timing, op=op, group=group)
        for seq, (flags, timing, op, group) in enumerate(
            [
                (ev.FAILED, 1, "all_reduce", 0), (ev.UNTIMED, 1, "all_reduce", 0), (ev.UNALIGNED, 1, "all_reduce", 0),
                (ev.ASYNC, ev.BY_WAIT, "all_reduce", 0), (0, 1, "broadcast", 0), (0, 1, "send", 0), (0, 1, "all_reduce", 1),
                (0, 1, "all_reduce", 2), (0, ev.COUNTED, "all_reduce", 0), (0, 1, "all_reduce", 7),
            ],
            start=10,
        )
    ]  # fmt: skip
    bad += [operation(start_ns=2 * S, end_ns=S, seq=30), operation(start_ns=0, end_ns=MOST_NS + 1, seq=31)]
    groups = (WORLD, replace_group(WORLD, "here", (0, 1)), WORLD._replace(group_id="late", aligned=False))
    path = history(tmp_path / "one", {0: [good], 1: [good]}, groups=groups, pid=1, started_ns=-S)
    history(path, {0: [good, *bad], 1: [good, *bad]}, groups=groups, pid=2)
    (part,) = sent(path).groups
    assert (part.group_id, part.ranks, part.seq, [kind.op for kind in part.kinds]) == (
        "world",
        [0, 1],
        packed(numbers(5)),
        ["all_reduce"],
    )


def replace_group(group: GroupInfo, group_id: str, ranks: tuple[int, ...]) -> GroupInfo:
    """A group of other ranks."""
    return group._replace(group_id=group_id, ranks=ranks, size=len(ranks))


def numbers(*values: int) -> Any:
    """Values as an array."""
    import numpy as np

    return np.array(values, np.int64)


def test_lives_of_a_job(tmp_path: Path) -> None:
    """After a restart, numbers begin again; collectives of different lives are not taken for one."""
    ranks, later = collectives(8, 3), collectives(8, 4)
    paths = [tmp_path / "one", tmp_path / "other"]
    for restart, of_life in enumerate((ranks, later)):
        history(paths[0], {0: of_life[0]}, restart=restart)
        history(paths[1], {1: of_life[1], 2: of_life[2]}, restart=restart)
    found = list(joined_waits(map(sent, paths)))
    total = sum(wait_ns for of_life in (ranks, later) for _, wait_ns in expected(of_life).values())
    assert (sum(each.joined for each in found), sum(each.wait_ns for each in found)) == (3 * 16, total)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of too many collectives, of too many parts, and when time is over, the latest are sent."""
    ranks = {
        rank: [operation(start_ns=seq * S, end_ns=(seq + 1) * S, seq=seq) for seq in range(5000)] for rank in (0, 1)
    }
    path = history(tmp_path / "one", ranks)
    (part,) = sent(path, most=100).groups
    assert sorted(seqs(part)) == list(range(4900, 5000))
    ticks = iter([0.0, 0.0, 4.0])
    (part,) = sent(path, clock=lambda: next(ticks)).groups
    assert 0 < len(seqs(part)) < 5000
    assert sorted(seqs(part)) == list(range(5000 - len(seqs(part)), 5000))
    monkeypatch.setattr(wait_source, "MOST_PARTS", 4000)
    (part,) = sent(path).groups
    assert sorted(seqs(part)) == list(range(5000 - len(seqs(part)), 5000))
    assert len(seqs(part)) < 3500


def seqs(part: GroupPart) -> list[int]:
    """The numbers of the collectives in a part."""
    from commwatch_agent.job.wait_parts import columns_of

    found: list[int] = columns_of(part).seq.tolist()
    return found


def test_wrong_parts(tmp_path: Path) -> None:
    """What no agent sends is refused: texts that are no columns, columns of other lengths, numbers out of range, other ops."""
    ranks = collectives(20, 5)
    (part,) = sent(history(tmp_path / "one", {0: ranks[0], 1: ranks[1]})).groups
    count = len(seqs(part))
    bomb = b64encode(zlib.compress(bytes(1 << 24))).decode()
    for wrong in (
        {"seq": "?"}, {"seq": "AAAA"}, {"seq": bomb}, {"duration_ns": bomb}, {"seq": packed(numbers())}, {"ranks": [0]},
        {"ranks": [1, 1]}, {"seq": packed(numbers(*[7] * count))}, {"seq": packed(numbers(*range(-1, count - 1)))},
        {"shortest_ns": packed(numbers(*[S] * count))}, {"shortest_ns": packed(numbers(*[-1] * count))},
        {"kinds": [kind._replace(op="send") for kind in part.kinds]}, {"kinds": part.kinds[:1]},
        {"length": packed(numbers(count))}, {"ranks": list(range(1 << 21))}, {"slot": packed(numbers(1 << 40))},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"."):
            GroupPart(**{**asdict(part), "kinds": part.kinds, **wrong})


def cell(rank: int, count: int, group: str = "world", op: str = "all_reduce", label: str = "") -> Counted:
    """A cell without waits."""
    found = Cell()
    found.count = count
    return Counted("job", rank, label or group, group, 3, op, 4096, found)


def wait(rank: int, slot: int, joined: int, group: str = "world") -> RankWait:
    """A rank that waited 1 s in each of some collectives."""
    return RankWait(rank, group, "all_reduce", 4096, slot * 10 * S, joined, joined * S)


def test_waits_are_known_or_absent() -> None:
    """A window has the waits of a group and op if nine in ten of its operations are joined, else none of them."""
    waits = JobWaits([wait(rank, slot, 5) for rank in range(3) for slot in (1, 2)])
    for from_ns, count, joined in ((0, 11, 10), (0, 12, 0), (20 * S, 5, 5), (20 * S, 6, 0), (30 * S, 5, 0)):
        cells = [*(cell(rank, count) for rank in range(3)), cell(0, 7, "tp")]
        waits.add_to(cells, from_ns)
        assert [(one.cell.joined, one.cell.wait_ns) for one in cells] == 3 * [(joined, joined * S)] + [(0, 0)]


def test_groups_of_one_label() -> None:
    """Groups with one label are one row of a report, so the waits of one of them are not added without those of the others."""
    waits = JobWaits([wait(0, 1, 5, "dp0")])
    for others, joined in ((0, 5), (1, 0)):
        cells = [cell(0, 5, "dp0", label="dp"), *(cell(1, 5, "dp1", label="dp") for _ in range(others))]
        waits.add_to(cells, 0)
        assert [one.cell.joined for one in cells] == [joined, *others * [0]]


def test_waits_over_time() -> None:
    """The waits by rank and time begin where those of nearly all operations are known; they are added to the waits of other groups."""
    waits = JobWaits([wait(0, slot, 5) for slot in (1, 2)])
    tp = [WaitView(0, 10.0 * slot, 10.0, 1.0) for slot in range(4)]

    def shown(*cells: Counted) -> list[tuple[float, float]]:
        waits.add_to(cells, 0)
        return sorted((view.start_at, view.wait_s) for view in waits.over_time(tp, cells))

    assert shown(cell(0, 10)) == [(0.0, 1.0), (10.0, 6.0), (20.0, 6.0), (30.0, 1.0)]
    assert shown(cell(0, 20)) == [(20.0, 6.0), (30.0, 1.0)], "not from the slot in which the known ones begin"
    assert shown(cell(0, 20), cell(0, 10, "other")) == [], "nothing is known of a group"
    assert shown(cell(0, 10), cell(0, 10, "other", "broadcast")) == shown(cell(0, 10)), "not symmetric"


@given(seed=st.integers(0, 99), before_zero=st.integers(1, 699), most=st.sampled_from([100, 600, MOST_COLLECTIVES]))
@examples(15)
def test_numbers_go_on(tmp_path_factory: pytest.TempPathFactory, seed: int, before_zero: int, most: int) -> None:
    """The latest collectives are sent, and their waits are the same, wherever their numbers go on at 0."""
    directory, ranks = tmp_path_factory.mktemp("waits"), collectives(700, seed)

    def found(of_ranks: Ranks, name: str) -> tuple[list[list[int]], list[RankWait]]:
        one = sent(history(directory / f"{name}1", {0: of_ranks[0]}), most)
        other = sent(history(directory / f"{name}2", {rank: of_ranks[rank] for rank in (1, 2)}), most)
        return [seqs(part) for node in (one, other) for part in node.groups], list(joined_waits([one, other]))

    moved = {
        rank: [(*each[:7], (each[7] - before_zero) % NUMBERS, *each[8:]) for each in records]
        for rank, records in ranks.items()
    }
    (numbers, waits), (expected_numbers, expected_waits) = found(moved, "moved"), found(ranks, "plain")
    assert numbers == [[(seq - before_zero) % NUMBERS for seq in part] for part in expected_numbers]
    assert sums(waits) == sums(expected_waits)
