"""Collectives past PyTorch's time-out in jobs with several process groups: each report counts for its rank and group."""

from __future__ import annotations

import pytest

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.findings import findings
from commwatch_collectors.nccl.lives import Warned


def report(job: int, rank: int, seq: int, group: str, *, ran_ms: int = 600_012, enqueued: int = 0) -> list[str]:
    """What PyTorch prints for one time-out: a first line without the group, then progress, then the report again."""
    work = (
        f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType=ALLREDUCE, NumelIn=64, "
        f"NumelOut=64, Timeout(ms)=600000) ran for {ran_ms} milliseconds before timing out."
    )
    head = f"[rank{job}]:[E507 11:22:33.445566 ProcessGroupNCCL.cpp:632] "
    scope = f"[{group} Rank {rank}] "
    return [
        head + work,
        f"{head}{scope}Timeout at NCCL work: {seq}, last enqueued NCCL work: {enqueued or seq}, last completed NCCL work: {seq - 1}.",
        f"{head}{scope}Process group watchdog thread terminated with exception: {work}",
        f"  what():  {scope}Process group watchdog thread terminated with exception: {work}",
    ]


def gpus(number: int, guid: int) -> str:
    """A process group as PyTorch names it: its number counts in each process alone, its GUID in the job."""
    return f"PG ID {number} PG GUID {guid}(mesh)"


def says(*reports: list[str], more: tuple[str, ...] = ()) -> list[str]:
    """What the findings of a log of these reports say."""
    account = Account()
    for number, line in enumerate([*more, *(line for lines in reports for line in lines)], 1):
        account.add(line, "job.log", number)
    return [found.says for found in findings(account) if found.name == "watchdog_timeout"]


def test_one_rank_is_silent() -> None:
    """In a mesh only the rank that never reported is suspected, in each group that waits: never one that waits in another."""
    reports = [
        report(0, 0, 50, gpus(1, 1)),
        report(2, 1, 10, gpus(2, 3)),
        report(3, 1, 10, gpus(2, 4)),
    ]
    found = says(*reports, more=("[rank1]: a line of rank 1",))
    assert len(found) == 3
    assert all(text.endswith("; rank 1 did not report: look there first") for text in found)
    assert all(
        text.endswith("the log has nothing from rank 1: look there first, then at the network")
        for text in says(*reports)
    )


def test_equal_reports_of_twin_groups() -> None:
    """Equal reports of two groups are of four ranks, and none of them is suspected."""
    assert says(*(report(job, job % 2, 50, gpus(1, 1 + job // 2), ran_ms=600_012 + job % 2) for job in range(4))) == [
        f"not finished in process group {group} after 600 s: ALLREDUCE with SeqNum 50 on ranks {ranks}, group mesh; "
        "each rank in the log waits, perhaps in different process groups"
        for group, ranks in ((1, "0-1"), (2, "2-3"))
    ]


def test_progress_of_another_group() -> None:
    """Numbers of launched collectives are compared in one group only: a group that has launched fewer is not behind another."""
    reports = (report(job, job % 2, 50 + 40 * (job // 2), gpus(1, 1 + job // 2)) for job in range(4))
    assert not any("launched least" in text for text in says(*reports))


def test_progress_of_one_group() -> None:
    """A rank that launched less than the others of its group is suspected, with its rank in the job."""
    found = says(report(4, 0, 7, gpus(1, 5)), report(6, 1, 40, gpus(1, 5)))
    assert found == [
        "not finished after 600 s: ALLREDUCE with SeqNum 7 on rank 4, ALLREDUCE with SeqNum 40 on rank 6, group mesh; "
        "rank 4 had launched least: look there first"
    ]


def test_behind_because_it_waits_elsewhere() -> None:
    """A rank that launched less in a group, and reported in another, is late because of that one: it is not suspected."""
    late = report(0, 0, 50, gpus(1, 1))
    behind = report(0, 0, 9, gpus(2, 3))[1]
    found = says(late, [behind], report(2, 1, 10, gpus(2, 3)), report(1, 1, 50, gpus(1, 1)))
    assert len(found) == 2
    assert not any("launched least" in text for text in found)


@pytest.mark.parametrize("group", ["PG 1", "PG ID 1"])
def test_no_guid(group: str) -> None:
    """Without a GUID the number of a group may be of several groups: no rank is suspected by what it launched."""
    reports = [report(job, job % 2, 50 + 40 * (job // 2), group) for job in range(4)]
    (found,) = says(*reports)
    assert found.endswith("ranks 2-3; each rank in the log waits, perhaps in different process groups")
    (found,) = says(reports[0], reports[3], more=("[rank1]: a line", "[rank2]: a line"))
    assert found.endswith("; ranks 1-2 did not report: look there first")


def test_each_report_is_heard_once() -> None:
    """A report is one time-out, however often PyTorch prints it; an equal one of another rank is another."""
    account = Account()
    heard: list[Warned] = []
    for job in range(4):
        for number, line in enumerate(report(job, job % 2, 50, gpus(1, 1 + job // 2)), 1):
            heard += account.add(line, "job.log", number)
    assert [warned.kind for warned in heard] == ["timeout"] * 4


def test_one_number_in_two_groups() -> None:
    """A rank that waits in two groups, in collectives of one number, waits in both; the operation of one is not taken for the other's."""
    tensor, data = gpus(2, 3), gpus(3, 8)
    status = "[rank5]:[E507 11:22:34.445566 ProcessGroupNCCL.cpp:2241] [{} Rank 1]  failure detected by watchdog at work sequence id: 50 "
    status += "PG status: last enqueued work: 50, last completed work: 49"
    found = says(report(5, 1, 50, tensor), [status.format(data)])
    assert [text.partition(";")[0] for text in found] == [
        "not finished in process group 3 after 600 s: ALLREDUCE with SeqNum 50 on rank 5, group mesh",
        "not finished in process group 8: work 50 on rank 5, group mesh",
    ]


def test_many_ranks() -> None:
    """Reports of all ranks of a large job are one finding, and each rank is counted."""
    (found,) = says(*(report(rank, rank, 50, "PG ID 0 PG GUID 0(default_pg)") for rank in range(600)))
    assert found == (
        "not finished after 600 s: ALLREDUCE with SeqNum 50 on ranks 0-599; all ranks in the log entered it: suspect the network"
    )
