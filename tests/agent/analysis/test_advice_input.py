"""What advice and the split of the communication share take from the steps of a job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commwatch.wire import events as ev
from commwatch_agent.analysis.advice_input import Counts, Sums, beyond_of_groups, most_on_a_host
from commwatch_agent.analysis.network_advice import Network
from commwatch_agent.analysis.verdicts import merged_groups
from commwatch_agent.model.api_views import Row
from commwatch_agent.model.views import GroupView, StepView
from commwatch_agent.report.job_advice import lately
from tests.agent.model.test_model_parts import DTYPES, ENTRY, FLOAT, PASS
from tests.helpers import MS, Watch, group_entry, mark, operation, write_ring

USUAL_S, LONG_S = 0.1, 1.1


def step(rank: int, seq: int, comm_s: float, long: bool = False) -> StepView:
    """A step whose communication is all in one group."""
    took_s = LONG_S if long else USUAL_S
    share = comm_s / took_s
    return StepView("job", rank, seq, 0.0, took_s, took_s, comm_s, share, None, None, {"data": share}, None, long)


def of_rank(rank: int, wait_s: float) -> Row:
    """What a rank waited in all."""
    return Row({"rank": rank}, 1, None, 1, 1, 1.0, None, None, None, None, None, wait_s, None, 0, 0, None, None)


def counts(long: int, waits_s: dict[int, float]) -> Counts:
    """Two ranks with ten usual steps each; rank 1 also has long ones, in which it communicates for a second more."""
    steps = {rank: [step(rank, seq, 0.05) for seq in range(10)] for rank in (0, 1)}
    usual = {rank: list(of) for rank, of in steps.items()}
    steps[1] += [step(1, 10 + seq, 1.05, long=True) for seq in range(long)]
    sums = Sums([], [of_rank(rank, wait_s) for rank, wait_s in waits_s.items()])
    return Counts(0, steps, usual, sums, sums, {"data": 0.5})


@pytest.mark.parametrize(("waits_s", "waited_s"), [({0: 9.0, 1: 0.5}, 0.5), ({0: 0.5, 1: 9.0}, 4.0), ({0: 9.0}, 0.0)])
def test_no_more_than_it_waited(waits_s: dict[int, float], waited_s: float) -> None:
    """Long communication of a rank in its long steps is waiting only as far as this rank waited: the rest is not taken from what others waited."""
    assert beyond_of_groups(counts(4, waits_s))["data"] == pytest.approx((4.0, waited_s))


def test_without_long_steps() -> None:
    """Without long steps there is nothing to leave out."""
    assert beyond_of_groups(counts(0, {0: 9.0, 1: 0.5})) == {}


def used(label: str, members: list[int], here: list[int]) -> GroupView:
    """A group as the agent of a node describes it."""
    return GroupView("job", f"{label} {members}", label, "0", label, len(members), members, here, True)


HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}


def test_groups_of_one_node() -> None:
    """The agent of one node counts the ranks of a group that it sees: fewer than the group has, if the group spans nodes."""
    groups = [used("dp", [0, 1, 2, 3], [0, 1]), used("tp", [0, 1], [0, 1])]
    assert most_on_a_host(groups, {0: "a", 1: "a"}) == {"dp": 2, "tp": 2}


def test_groups_of_all_nodes() -> None:
    """With the data of all nodes, ranks are counted by host, so that a group across nodes is seen to span them; one group of a label is enough."""
    of_nodes = merged_groups(
        [
            used("dp", [0, 1, 2, 3], [0, 1]),
            used("dp", [0, 1, 2, 3], [2, 3]),
            used("tp", [0, 1], [0, 1]),
            used("tp", [2, 3], [2, 3]),
            used("cp", [0, 2], [0]),
            used("cp", [0, 2], [2]),
            used("cp", [0, 1], [0, 1]),
        ]
    )
    assert most_on_a_host(of_nodes, HOSTS) == {"dp": 2, "tp": 2, "cp": 1}


def test_ranks_that_compete_for_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are late in turn have uneven work; not if they wait for cores meanwhile, which an agent knows that watches the job."""
    watch = Watch(tmp_path)
    for rank in (0, 1):
        records = [mark(0, MS)]
        for n in range(60):
            end = (n + 1) * 100 * MS
            records += [
                operation(start_ns=end - (10 if n % 2 == rank else 60) * MS, end_ns=end, seq=n),
                mark(n + 1, end + MS),
            ]
        write_ring(watch.rings, records, [group_entry(0, (0, 1), "data")], rank=rank, world_size=2)
    watch.tick(7000 * MS)
    (job,) = watch.agent.jobs()
    ranks = watch.agent.ranks(job.job_id)
    for share, number in ((None, 1), (0.05, 1), (0.2, 0)):
        views = [replace(view, core_wait_share=share) for view in ranks]
        monkeypatch.setattr(watch.agent, "ranks", lambda _, views=views: views)
        found = lately(watch.agent, job, (), None, network=Network(), late=lambda _: {}, recorded=lambda: None)
        assert len([each for each in found if each.rule == "uneven_work"]) == number
        assert ("scarce_cores" in [each.rule for each in found]) == (share == 0.2)


@pytest.mark.parametrize(("passes", "optimizers", "is_advised"), [(1, 1, False), (4, 1, True), (4, 2, False)])
def test_several_backward_passes(tmp_path: Path, passes: int, optimizers: int, *, is_advised: bool) -> None:
    """Buckets that the records name four times before each optimizer step are exchanged three times too often; not with several optimizers."""
    watch = Watch(tmp_path)
    names = [group_entry(0, (0, 1), "data"), ENTRY, *({"dtype": code, "name": name} for code, name in DTYPES.items())]
    for rank in (0, 1):
        records = [mark(0, MS, optimizer=0)]
        for n in range(60):
            begins = [n * 100 * MS + (10 + 5 * each) * MS for each in range(passes * len(PASS))]
            records += [
                operation(start_ns=begin, end_ns=begin + 4 * MS, seq=n * len(begins) + at, size=4 * PASS[at % len(PASS)], dtype=FLOAT)
                for at, begin in enumerate(begins)
            ]  # fmt: skip
            records.append(mark(n + 1, (n + 1) * 100 * MS, began_ns=(n + 1) * 100 * MS - MS, optimizer=n % optimizers))
        write_ring(watch.rings, records, names, rank=rank, world_size=2)
    watch.tick(7000 * MS)
    (job,) = watch.agent.jobs()
    found = lately(watch.agent, job, (), None, network=Network(), late=lambda _: {}, recorded=lambda: None)
    assert ("exchange_once" in [each.rule for each in found]) == is_advised


def test_late_ranks_of_a_job_that_is_watched(tmp_path: Path) -> None:
    """Advice names the current stragglers of a job that an agent watches, and no rank if there are none; else those of the recorded steps."""
    watch = Watch(tmp_path)
    for rank in (0, 1):
        records = [mark(0, MS)]
        for n in range(60):
            end = (n + 1) * 100 * MS
            records += [operation(start_ns=end - (10 if rank else 60) * MS, end_ns=end, seq=n), mark(n + 1, end + MS)]
        write_ring(watch.rings, records, [group_entry(0, (0, 1), "data")], rank=rank, world_size=2)
    watch.tick(7000 * MS)
    (job,) = watch.agent.jobs()
    for late, title in ((None, "rank 1 is late"), ({1: 0.2}, "rank 1 is late"), ({}, ""), ({0: 0.3}, "rank 0 is late")):
        now = {job.started_at: late}
        found = lately(watch.agent, job, (), None, network=Network(), late=now.get, recorded=lambda: None)
        (named, *_) = [each.title for each in found if each.rule == "straggler"] or [""]
        assert named.startswith(title)
        assert bool(named) == bool(title)


@pytest.mark.parametrize(("exposed_ms", "is_late"), [(None, True), (55, True), (2, False)])
def test_hidden_behind_compute(tmp_path: Path, exposed_ms: int | None, *, is_late: bool) -> None:
    """Of recorded steps, a rank that begins its operations later is not late if the other one computed meanwhile."""
    watch = Watch(tmp_path)
    for rank in (0, 1):
        exposed_ns = None if exposed_ms is None else (exposed_ms if rank == 0 else 2) * MS
        records = [mark(0, MS)]
        for n in range(60):
            end = (n + 1) * 100 * MS
            records += [
                operation(start_ns=end - (10 if rank else 60) * MS, end_ns=end, seq=n, flags=ev.ASYNC),
                mark(n + 1, end + MS, exposed_ns=exposed_ns),
            ]
        write_ring(watch.rings, records, [group_entry(0, (0, 1), "data")], rank=rank, world_size=2)
    watch.tick(7000 * MS)
    (job,) = watch.agent.jobs()
    found = lately(watch.agent, job, (), None, network=Network(), late=lambda _: None, recorded=lambda: None)
    assert any(each.rule == "straggler" for each in found) == is_late
