"""Operations by what NCCL chose for them: their sums over ranks, and what is wrong with a choice."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from commwatch.probe.native.library import PLUGIN
from commwatch.wire import events as ev
from commwatch_agent.analysis.advice_input import nccl_choices
from commwatch_agent.analysis.nccl_operations import nccl_operations, slow_choices
from commwatch_agent.ingest.batches import ingest_records
from commwatch_agent.ingest.jobs import JobTable
from commwatch_agent.model.cells import MOST_KINDS
from commwatch_agent.model.nccl_views import NcclOperations
from commwatch_agent.report import report
from tests.agent.prometheus.test_metrics import page as page_of
from tests.agent.prometheus.test_metrics import samples
from tests.helpers import MS, Trainer, Watch, group_entry, identity, mark, operation, packed

#: Ring/Simple with four channels, and so on: the bits of a record's ``aux``.
RING_SIMPLE_4, TREE_LL_1, TREE_LL_2 = 2 | 3 << 4 | 4 << 6, 1 | 1 << 4 | 1 << 6, 1 | 1 << 4 | 2 << 6


def timed(
    aux: int, *, ms: int, size: int, op: str = "all_reduce", timing: int = ev.BY_NCCL, tag: int = 0
) -> tuple[int, ...]:
    """An operation with this choice."""
    return (*operation(op, start_ns=MS, end_ns=(1 + ms) * MS, size=size, group=1, timing=timing, tag=tag)[:-1], aux)


def ends(last: int, us: int) -> int:
    """The ``tag`` of an operation whose channel ``last`` ended so long after the first one."""
    return us << ev.CHANNEL_BITS | last + 1


def recorded(*ranks: list[tuple[int, ...]]) -> JobTable:
    """A job of ranks with these operations."""
    aggregate = JobTable()
    for rank, operations in enumerate(ranks):
        about = {
            "job": "job",
            "rank": rank,
            "world_size": len(ranks),
            "restart": 0,
            "wall_offset_ns": 0,
            "host": "host",
            "pid": 1 + rank,
        }
        totals = aggregate.open(f"ring{rank}", about)
        totals.learn([group_entry(1, (0, 1), "pair")])
        ingest_records(totals, packed(*operations))
    return aggregate


def of_ranks(*ranks: list[tuple[int, ...]]) -> list[NcclOperations]:
    """The answer for ranks with these operations."""
    return nccl_operations(recorded(*ranks).jobs.values())


def test_sums() -> None:
    """Each choice has its count, mean and busbw over all ranks, the one with the most time first; other timings do not count."""
    mine = [timed(RING_SIMPLE_4, ms=4, size=1 << 20), timed(TREE_LL_1, ms=1, size=1 << 20)]
    others = [timed(RING_SIMPLE_4, ms=2, size=1 << 20), timed(RING_SIMPLE_4, ms=9, size=1 << 20, timing=ev.BY_EVENTS)]
    first, second = of_ranks(mine, others)
    assert (first.job_id, first.group, first.op, first.size_log2) == ("job", "pair", "all_reduce", 20)
    assert (first.algorithm, first.protocol, first.channels) == ("Ring", "Simple", 4)
    assert (first.ranks, first.count, first.bytes, first.mean_s) == ([0, 1], 2, 2 << 20, 0.003)
    assert first.busbw == pytest.approx((2 << 20) / 0.006)  # with two ranks, busbw is algbw
    assert (second.algorithm, second.protocol, second.channels, second.ranks) == ("Tree", "LL", 1, [0])


@pytest.mark.parametrize(("aux", "size", "wrong"), [
    (TREE_LL_1, 64 << 20, True), (TREE_LL_1, 16 << 20, True), (TREE_LL_1, 4 << 20, False), (RING_SIMPLE_4, 64 << 20, False), (0, 64 << 20, False),
])  # fmt: skip
def test_remark(aux: int, size: int, wrong: bool) -> None:
    """LL for a large operation is remarked on; for a small one, or another protocol, or an unknown choice, nothing is."""
    (found,) = of_ranks([timed(aux, ms=1, size=size)])
    assert ("half of what LL sends are flags" in found.remark) is wrong


def test_ends_of_channels() -> None:
    """The channel that ended last most often, over all ranks, has its share of the operations; the time between first and last is a mean."""
    of_one = [
        timed(RING_SIMPLE_4, ms=4, size=1 << 21, tag=ends(last, us)) for last, us in ((3, 500), (3, 700), (0, 100))
    ]
    (found,) = of_ranks(of_one, [timed(RING_SIMPLE_4, ms=4, size=1 << 21, tag=ends(3, 300))])
    assert (found.last_channel, found.last_share) == (3, 0.75)
    assert found.apart_s == pytest.approx(4e-4)
    assert found.remark == ""
    (unknown,) = of_ranks([timed(RING_SIMPLE_4, ms=4, size=1 << 21), timed(RING_SIMPLE_4, ms=4, size=1 << 21, tag=-1)])
    assert (unknown.last_channel, unknown.last_share, unknown.apart_s) == (None, None, None)
    # The tag of a message is its own.
    (message,) = of_ranks([timed(RING_SIMPLE_4, ms=4, size=1 << 21, op="send", tag=ends(3, 300))])
    assert message.last_channel is None


@pytest.mark.parametrize(("ranks", "wrong"), [(8, True), (32, True), (64, False)])
def test_large_groups(ranks: int, wrong: bool) -> None:
    """Where each rank's part of an operation is small, latency counts, and NCCL may well choose LL: no remark."""
    aggregate = JobTable()
    totals = aggregate.open("ring", identity(world_size=ranks))
    totals.learn([group_entry(1, tuple(range(ranks)), "all")])
    ingest_records(totals, packed(timed(TREE_LL_1, ms=1, size=64 << 20)))
    (found,) = nccl_operations(aggregate.jobs.values())
    assert bool(found.remark) is wrong


def test_of_the_history(tmp_path: Path) -> None:
    """The history gives the same sums as the live totals; operations of one kernel, and those with other times, are left out."""
    watch = Watch(tmp_path)
    shared = timed(RING_SIMPLE_4 | ev.SHARED_KERNEL, ms=9, size=1 << 20)
    of_four = [timed(RING_SIMPLE_4, ms=4, size=1 << 20, tag=ends(2, us)) for us in (100, 250)]
    records = [*of_four, timed(TREE_LL_1, ms=2, size=64 << 20), shared]
    with Trainer(watch.rings / "job.r0.0.ring") as trainer:
        trainer.call("name", [(group_entry(1, (0, 1), "pair"),)])
        trainer.write([*records, timed(RING_SIMPLE_4, ms=3, size=1 << 20, timing=ev.BY_EVENTS)])
        watch.tick(20 * MS)
        live = nccl_operations(watch.aggregate.jobs.values())
        watch.tick(20_000 * MS)
    (job,) = watch.agent.jobs()
    stored = nccl_choices(watch.agent, job.job_id)
    assert len(stored) == len(live) == 2
    for mine, other in zip(stored, live, strict=True):
        assert asdict(mine) == {name: pytest.approx(value) for name, value in asdict(other).items()}
    operations = watch.agent.operations(0, 1 << 62, None, lambda _: True, 10)
    assert sorted(each.shared_kernel for each in operations) == [False, False, False, False, True]
    assert sorted(each.channels_apart_s or 0 for each in operations) == [0, 0, 0, 1e-4, 2.5e-4]


def test_history_without_times_of_nccl(tmp_path: Path) -> None:
    """Where NCCL timed nothing, only the latest operations are read, and nothing is found."""
    watch = Watch(tmp_path)
    with Trainer(watch.rings / "job.r0.0.ring") as trainer:
        trainer.write([operation(start_ns=MS, end_ns=2 * MS)])
        watch.tick(20_000 * MS)
    (job,) = watch.agent.jobs()
    assert nccl_choices(watch.agent, job.job_id) == []


@pytest.mark.parametrize(("aux", "named"), [(TREE_LL_1, True), (RING_SIMPLE_4, False)])
def test_advice_from_the_history(tmp_path: Path, aux: int, named: bool) -> None:
    """The report of a job whose gradients of 64 MiB go by LL has the advice; with Ring/Simple it has not."""
    watch = Watch(tmp_path)
    with Trainer(watch.rings / "job.r0.0.ring") as trainer:
        trainer.call("name", [(group_entry(1, (0, 1), "dp"),)])
        for n in range(40):
            begin_ns = n * 100 * MS
            fields = operation(
                start_ns=begin_ns + 50 * MS, end_ns=begin_ns + 90 * MS, seq=n, size=64 << 20, group=1, timing=ev.BY_NCCL
            )
            trainer.write([(*fields[:-1], aux), mark(n, begin_ns + 100 * MS)])
        watch.tick(20_000 * MS)
    (job,) = watch.agent.jobs()
    built = report.build(watch.agent, job.job_id, watch.path, "commwatch report")
    assert built is not None
    found = [each for each in built.advice if each.rule == "nccl_choice"]
    assert len(found) == named
    assert all("Tree/LL for all_reduce of group dp" in each.title for each in found)


def chosen(**more: Any) -> NcclOperations:
    """Twenty all_reduces of 64 MiB with Tree/LL, at 5 GB/s."""
    (found,) = of_ranks([timed(TREE_LL_1, ms=13, size=64 << 20)] * 20)
    return replace(found, **{"busbw": 5e9, **more})


SIMPLE: dict[str, Any] = {"algorithm": "Ring", "protocol": "Simple", "remark": ""}


@pytest.mark.parametrize(
    "others",
    [
        [],
        [chosen(**SIMPLE, busbw=20e9, size_log2=28)],  # of another size
        [chosen(**SIMPLE, busbw=5e9, count=3)],  # too few to compare with
        [chosen(**SIMPLE, busbw=5e9, group_id="other")],
        [chosen(**SIMPLE, busbw=5e9, op="all_gather")],
    ],
)
def test_slow_choice(others: list[NcclOperations]) -> None:
    """LL for large operations is found, once for each group and op, and compared only with what is alike."""
    (found,) = slow_choices([chosen(), *others, chosen(size_log2=25)])
    assert (found.chosen, found.faster) == (chosen(), None)


def test_faster() -> None:
    """Another protocol that reached more at about this size is named, the fastest one."""
    others = [
        chosen(**{**SIMPLE, "algorithm": name}, busbw=busbw, size_log2=27)
        for name, busbw in (("Ring", 20e9), ("Tree", 9e9))
    ]
    (found,) = slow_choices([chosen(), *others])
    assert found.faster == others[0]


@pytest.mark.parametrize(
    "found",
    [
        [chosen(count=9)],
        [chosen(), chosen(**SIMPLE, busbw=6e9)],  # measured, and hardly faster
        [chosen(**SIMPLE)],
        [chosen(algorithm="NVLS", protocol="Simple", remark="")],
        [chosen(algorithm="PAT", protocol="Simple", remark="")],
        [chosen(algorithm="Tree", protocol="LL128", remark="")],
        [],
    ],
)
def test_no_slow_choice(found: list[NcclOperations]) -> None:
    """Few operations, LL that is as fast as others, and all other choices of NCCL are left alone."""
    assert list(slow_choices(found)) == []


def test_queue() -> None:
    """The time in the queue is the mean from launch to the begin of the kernels."""
    late = [
        (
            *operation(
                "all_reduce", launch_ns=MS, start_ns=(1 + ms) * MS, end_ns=9 * MS, size=8, group=1, timing=ev.BY_NCCL
            )[:-1],
            TREE_LL_1,
        )
        for ms in (2, 4)
    ]
    (found,) = of_ranks(late)
    assert found.queued_s == pytest.approx(0.003)


def test_metrics() -> None:
    """Metrics count collectives by algorithm and protocol, of all sizes and numbers of channels; messages have neither."""
    mine = [
        timed(TREE_LL_1, ms=1, size=1 << 20),
        timed(TREE_LL_2, ms=2, size=3 << 20),
        timed(2 << 6, ms=4, size=9, op="send"),
    ]
    page = samples(page_of(recorded(mine, [timed(RING_SIMPLE_4, ms=4, size=1 << 20)])))
    found = {
        (
            name.removeprefix("commwatch_nccl_operation").removesuffix("_total"),
            *(dict(labels)[label] for label in ("rank", "algorithm", "protocol")),
        ): value
        for (name, labels), value in page.items()
        if name.startswith("commwatch_nccl_operation")
    }
    assert found == {
        ("s", "0", "Tree", "LL"): 2,
        ("_seconds", "0", "Tree", "LL"): pytest.approx(0.003),
        ("_bus_bytes", "0", "Tree", "LL"): 4 << 20,
        ("s", "1", "Ring", "Simple"): 1,
        ("_seconds", "1", "Ring", "Simple"): pytest.approx(0.004),
        ("_bus_bytes", "1", "Ring", "Simple"): 1 << 20,
    }


def test_unknown_choice() -> None:
    """Messages, and operations whose parts differ, have no algorithm."""
    (found,) = of_ranks([timed(2 << 6, ms=1, size=100, op="send")])
    assert (found.algorithm, found.protocol, found.channels) == (None, None, 2)


def test_bounded() -> None:
    """However many choices a writer invents, their number is bounded, and all are counted."""
    kinds = [(aux, size) for aux in range(MOST_KINDS // 3 + 500) for size in (1, 64, 4096)]
    found = of_ranks([timed(aux, ms=1, size=size) for aux, size in kinds])
    assert len(found) <= MOST_KINDS + 1
    assert sum(each.count for each in found) == len(kinds) > MOST_KINDS + 1


def test_operations_of_one_kernel() -> None:
    """Operations that ran in one kernel with others do not count: their own times are not known."""
    alone, beside = timed(RING_SIMPLE_4, ms=1, size=1024), timed(RING_SIMPLE_4 | ev.SHARED_KERNEL, ms=9, size=1024)
    (found,) = of_ranks([alone, beside])
    assert (found.count, found.mean_s, found.channels) == (1, 0.001, 4)


def test_names() -> None:
    """The names are those of the plugin, in its order."""
    header = (PLUGIN / "commwatch_nccl.h").read_text()
    for name, ours in (("kAlgorithms", ev.ALGORITHMS), ("kProtocols", ev.PROTOCOLS)):
        (listed,) = re.findall(rf"{name}\[\] = {{(.*?)}};", header)
        assert tuple(re.findall(r'"(\w+)"', listed)) == ours
    assert (re.findall(r"kProtocolAt = (\d+), kChannelsAt = (\d+)", header)) == [("4", "6")]
