"""Verdicts on collectives whose numbers go on at 0 are those on all others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commwatch.wire.numbers import HALF, NUMBERS
from commwatch_agent.analysis.verdict import Verdict
from commwatch_agent.ingest.stragglers import LateWindow
from commwatch_agent.job.rank_parts import put_together
from commwatch_agent.model.views import Failed, RankView
from tests.agent.analysis.test_ended_operations import S, buckets, node
from tests.agent.analysis.test_verdicts import LEFT, WORLD, judged, op, rank
from tests.agent.job.test_rank_parts import parts_of
from tests.helpers import examples

DAY_S = 86_400.0
#: Numbers just after a begin.
after = st.integers(0, 4)
ops = st.builds(
    lambda name, group, seq, age_s, queued: op(name, seq, age_s, group, queued=queued),
    st.sampled_from(["all_reduce", "all_reduce", "broadcast"]),
    st.sampled_from("wwl"),
    after,
    st.sampled_from([1.0, 20.0, 60.0]),
    st.sampled_from([False, False, True]),
)
raised = st.builds(
    lambda seq, ago_s, latest: Failed("all_reduce", "w", seq, "float32", 4000, ago_s, is_latest=latest),
    after,
    st.sampled_from([5.0, 30.0, 100.0]),
    st.booleans(),
)
views = st.builds(
    lambda last, idle_s, state, flying, failed: replace(
        rank(0, *flying, state=state),
        last_seq=last,
        launched_s={group: idle_s for group in last if idle_s is not None},
        failed=failed,
    ),
    st.dictionaries(st.sampled_from("wl"), after, max_size=2),
    st.sampled_from([None, 1.0, 30.0]),
    st.sampled_from(["running", "running", "running", "gone", "ended"]),
    st.lists(ops, max_size=2),
    st.lists(raised, max_size=2),
)


def moved(view: RankView, by: int) -> RankView:
    """A rank with other numbers of collectives."""

    last = {group: (seq + by) % NUMBERS for group, seq in view.last_seq.items()}
    in_flight = [replace(each, seq=(each.seq + by) % NUMBERS) for each in view.in_flight]
    failed = [replace(each, seq=(each.seq + by) % NUMBERS) for each in view.failed]
    return replace(view, last_seq=last, in_flight=in_flight, failed=failed)


def without_words(found: list[Verdict], by: int) -> list[Verdict]:
    """Verdicts with other numbers, and without texts, in which there are numbers, too."""
    return [replace(each, says="", seq=None if each.seq is None else (each.seq + by) % NUMBERS) for each in found]


@given(st.lists(views, min_size=1, max_size=4), st.integers(-4, -1) | st.integers(0, NUMBERS - 1))
@examples(300)
def test_any_begin(found: list[RankView], by: int) -> None:
    """Wherever the numbers of groups begin, the verdicts are the same: hangs, ranks behind, and ranks that disagree."""
    ranks = [replace(view, rank=number, local_rank=number, pid=number) for number, view in enumerate(found)]
    verdicts = judged(*(moved(view, by) for view in ranks), groups=(WORLD, LEFT))
    assert without_words(verdicts, 0) == without_words(judged(*ranks, groups=(WORLD, LEFT)), by)


def test_rank_that_is_behind() -> None:
    """The others are inside collective 2, and a rank has only ended the last one but one before 0: that rank is the culprit."""
    others = [rank(number, op(seq=2), last=1) for number in (0, 1, 2)]
    (verdict,) = judged(*others, rank(3, last=NUMBERS - 2))
    assert (verdict.cause, verdict.ranks, verdict.waiting, verdict.seq) == ("not_joined", [3], [0, 1, 2], 2)


def test_rank_inside_an_earlier_one() -> None:
    """A rank that is inside the last collective before 0 waits for those that are beyond it."""
    (verdict,) = judged(
        rank(0, op(seq=NUMBERS - 1), last=NUMBERS - 2), *(rank(number, last=3) for number in (1, 2)), rank(3, last=NUMBERS - 2)
    )  # fmt: skip
    assert (verdict.cause, verdict.ranks, verdict.waiting, verdict.seq) == ("not_joined", [3], [0], NUMBERS - 1)


def test_launched_less() -> None:
    """Of ranks whose ends are not seen, the one behind is named, and how far all of them are."""

    def launched(number: int, seq: int) -> RankView:
        return replace(rank(number), last_seq={"w": seq}, launched_s={"w": 30.0})

    (verdict,) = judged(*(launched(number, 2) for number in (0, 1, 2)), launched(3, NUMBERS - 1))
    assert (verdict.ranks, verdict.waiting, verdict.seq) == ([3], [0, 1, 2], 2)
    assert "launched operation 2 of group world 30.0 s ago, rank 3 operation 4294967295" in verdict.says


@pytest.mark.parametrize("last", [6, 3_000_000_000, HALF + 6])
def test_raised_long_ago(last: int) -> None:
    """A rank that did not come is named, although a collective raised on it so long ago that its number is no longer behind."""
    old = Failed("all_reduce", "w", 5, "float32", 4000, DAY_S)
    others = [rank(number, op(seq=last + 1), last=last) for number in (0, 1, 2)]
    (verdict,) = judged(*others, rank(3, last=last, failed=[old]))
    assert (verdict.cause, verdict.ranks) == ("not_joined", [3])


@pytest.mark.parametrize("across", [1, 25, 49])
def test_nodes_are_joined(across: int) -> None:
    """Late ranks of groups that span nodes are those of a job whose numbers do not go on at 0."""

    def windows(by: int) -> list[tuple[str, str, LateWindow]]:
        found = parts_of(node((0, 1), 2), node((2, 3), 2)), parts_of(buckets((0, 1), 80), buckets((2, 3), 80), now_ns=20 * S)  # fmt: skip
        return [
            each
            for columns in found
            for each in put_together(replace(one, seq=[(seq + by) % NUMBERS for seq in one.seq]) for one in columns)
        ]

    assert [vars(each) for *_, each in windows(-across)] == [vars(each) for *_, each in windows(0)]
