"""Findings: each kind is found in its own cases and not in similar ones, with its text and the lines that show it.

The cases of a kind stand in ``tests/fixtures/nccl/findings/KIND.txt``: ``== found: WORDS`` or ``== not found``, then the
lines of a log behind a margin. ``>`` in the margin marks the lines that must be the evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from commwatch_collectors.nccl.account import Account
from commwatch_collectors.nccl.checks.evidence import Live
from commwatch_collectors.nccl.checks.findings import MOST_EVIDENCE, findings
from commwatch_collectors.nccl.checks.rules import RULES
from commwatch_collectors.nccl.topology import views
from commwatch_collectors.nccl.views import SEVERITIES, Finding

NCCL = Path(__file__).parents[2] / "fixtures" / "nccl"
CASES = NCCL / "findings"


class Case(NamedTuple):
    """A log in which a kind of finding is, or is not."""

    kind: str
    number: int
    #: A part of what it says; ``None`` if it must not be found.
    says: str | None
    lines: list[str]
    #: Numbers of the lines that show it.
    evidence: set[int]


def _cases(path: Path) -> Iterator[Case]:
    blocks = path.read_text().removeprefix("== ").split("\n== ")
    for number, block in enumerate(blocks):
        head, *marked = block.splitlines()
        found, _, says = head.partition(": ")
        assert found in ("found", "not found"), head
        evidence = {at for at, line in enumerate(marked, start=1) if line.startswith("> ")}
        yield Case(path.stem, number, says or None, [line[2:] for line in marked], evidence)


ALL = [case for path in sorted(CASES.glob("*.txt")) for case in _cases(path)]
FOUND = [case for case in ALL if case.says is not None]
NOT_FOUND = [case for case in ALL if case.says is None]


def _name(case: Case) -> str:
    return f"{case.kind}-{case.number}"


def _account(lines: list[str], source: str = "job.log") -> Account:
    account = Account()
    for number, line in enumerate(lines, start=1):
        account.add(line, source, number)
    return account


def _of(case: Case) -> list[Finding]:
    return [finding for finding in findings(_account(case.lines)) if finding.name == case.kind]


@pytest.mark.parametrize("case", FOUND, ids=_name)
def test_found(case: Case) -> None:
    """A kind is found, with its text, and with the lines that show it, exactly as in the file."""
    saying = [finding for finding in _of(case) if case.says is not None and case.says in finding.says]
    assert len(saying) == 1, [finding.says for finding in _of(case)]
    shown = saying[0].evidence
    numbers = {seen.line for seen in shown}
    assert numbers <= case.evidence
    assert len(numbers) == len(shown) == min(len(case.evidence), MOST_EVIDENCE)
    assert all(seen.text == case.lines[seen.line - 1].strip() and seen.file == "job.log" for seen in shown)


@pytest.mark.parametrize("case", NOT_FOUND, ids=_name)
def test_not_found(case: Case) -> None:
    """A log that only looks similar gives no finding of that kind."""
    assert [finding.says for finding in _of(case)] == []


def test_every_rule_has_both() -> None:
    """Every rule has a log with the finding and one without it, and every case belongs to a rule."""
    names = {rule.name for rule in RULES}
    assert {case.kind for case in FOUND} == names
    assert {case.kind for case in NOT_FOUND} == names


def test_healthy() -> None:
    """A job on two nodes in good order gives no findings, and half of it (one node's log) gives none either."""
    lines = (NCCL / "healthy.log").read_text().splitlines()
    assert findings(_account(lines)) == []
    assert findings(_account([line for line in lines if not line.startswith("bee:")])) == []


def test_sorted() -> None:
    """Findings come worst first."""
    lines = [line for case in reversed(FOUND) for line in case.lines]
    order = [SEVERITIES.index(finding.severity) for finding in findings(_account(lines))]
    assert order == sorted(order)
    assert set(order) == {0, 1, 2}


def test_evidence_is_bounded() -> None:
    """However many ranks say it, it is found once, counted, and shown by at most so many lines."""
    text = "comm 0x{0:x} rank {0} nranks 99 cudaDev 0 nvmlDev 0 busId 1b000 commId 0x5ee - Init START"
    lines = [f"ant:{rank}:{rank} [0] NCCL INFO ncclCommInitRank {text.format(rank)}" for rank in range(1, 99)]
    (found,) = findings(_account(lines))
    assert found.says == "communicator 0x5ee (99 ranks): ranks 1-98 began; the log has nothing from rank 0"
    assert [seen.line for seen in found.evidence] == [1, 2, 3, 4, 5]


def test_as_many_ranks_as_somebody_wrote() -> None:
    """A huge size in a damaged or hostile line costs no memory or time, because nothing is created for each rank."""
    most = (1 << 63) - 1
    text = f"comm 0x1 rank 7 nranks {most} cudaDev 0 nvmlDev 0 busId 1b000 commId 0x5ee - Init START"
    account = _account([f"ant:1:1 [0] NCCL INFO ncclCommInitRank {text}"])
    (found,) = findings(account)
    assert (
        found.says
        == f"communicator 0x5ee ({most} ranks): rank 7 began; the log has nothing from ranks 0-6, 8-{most - 1}"
    )
    (view,) = views(account)
    assert (view.in_sight, view.missing_ranks[:9]) == ("7", [0, 1, 2, 3, 4, 5, 6, 8, 9])
    assert len(view.missing_ranks) == 400
    watchdog = (
        "[rank{0}]:[E507 11:22:33.445566 ProcessGroupNCCL.cpp:600] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=31, OpType=ALLREDUCE, NumelIn=64, NumelOut=64, Timeout(ms)=90000) ran for 90050 milliseconds "
        "before timing out."
    )
    (found,) = findings(_account([watchdog.format(0), watchdog.format(most)]))
    assert f"the log has nothing from ranks 1-{most - 1}" in found.says


@pytest.mark.parametrize("case", FOUND, ids=_name)
def test_texts(case: Case) -> None:
    """All that a finding says is there: one line without end for what was found, whole sentences for meaning and advice."""
    for finding in _of(case):
        assert finding.severity in SEVERITIES
        for text in (finding.title, finding.says):
            assert text.strip() == text != ""
            assert "\n" not in text
        for text in (finding.means, finding.do):
            assert text[0].isupper()
            assert text.endswith(".")
            assert "  " not in text


def test_names_are_unique() -> None:
    """No two rules share a name or a title, because people and programs distinguish findings by them."""
    assert len({rule.name for rule in RULES}) == len({rule.title for rule in RULES}) == len(RULES)


def test_several_files() -> None:
    """Evidence names the file that it comes from."""
    account = Account()
    account.add("ant:1:2 [0] NCCL INFO NCCL version 2.25.1+cuda12.8", "ant.log", 7)
    account.add("bee:1:2 [0] NCCL INFO NCCL version 2.26.2+cuda12.8", "bee.log", 9)
    (found,) = findings(account)
    assert found.name == "version_mismatch"
    assert [(seen.file, seen.line) for seen in found.evidence] == [("ant.log", 7), ("bee.log", 9)]


def test_what_was_not_kept() -> None:
    """If a log has more facts than are kept, a finding gives the number of the others."""
    account = Account(most_facts=3)
    for number in range(1, 9):
        account.add(f"ant:1:2 [0] NCCL INFO NCCL_BUFFSIZE set by environment to {number}.", "job.log", number)
    assert [(found.name, found.says) for found in findings(account)] == [
        ("cut_output", "6 further distinct facts not kept: the findings cover only the first part")
    ]


def test_faults_after_the_room_is_used() -> None:
    """However many facts came before, warnings and time-outs at the end are found, within the bound of all."""
    account = Account(most_facts=1_000)
    watchdog = next(case for case in FOUND if case.kind == "watchdog_timeout").lines
    lines = [f"ant:1:2 [0] NCCL INFO NCCL_BUFFSIZE set by environment to {number}." for number in range(2_000)]
    lines += ["ant:1:2 [0] misc/x.cc:3 NCCL WARN Cuda failure 'out of memory'", *watchdog]
    for number, line in enumerate(lines, 1):
        account.add(line, "job.log", number)
    found = {finding.name: finding.says for finding in findings(account)}
    assert sorted(found) == ["cuda_error", "cut_output", "watchdog_timeout"]
    assert "rank 2 raised ValueError" in found["watchdog_timeout"]
    for number in range(1_000):
        account.add(f"ant:1:2 [0] misc/x.cc:3 NCCL WARN Cuda failure 'odd {number}'", "job.log", number)
    assert 20 < len(account.warnings) < 100


def _running(host: str, pid: int, comm: str, nodes: int, *texts: str) -> list[str]:
    """What one of four ranks on ``nodes`` nodes prints in its init."""
    about = f"comm 0x{pid:x} rank {pid % 4} nranks 4 cudaDev 0 nvmlDev 0 busId {pid % 4 + 1}b000 commId {comm} - Init"
    layout = f"comm 0x{pid:x} rank {pid % 4} nRanks 4 nNodes {nodes} localRanks {4 // nodes} localRank 0 MNNVL 0"
    head = f"{host}:{pid}:{pid} [0] NCCL INFO"
    return [
        f"{head} {text}"
        for text in (f"ncclCommInitRank {about} START", *texts, layout, f"ncclCommInitRank {about} COMPLETE")
    ]


def _names(*logs: list[str]) -> list[str]:
    return [found.name for found in findings(_account([line for lines in logs for line in lines]))]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (("Using network Socket",), ("Using network IB",)),
        (("NET/IB : GPU Direct RDMA Disabled for HCA 0 'mlx5_0'",), ()),
        (("NCCL_NVLS_ENABLE set by environment to 1.",), ("NVLS multicast support is not available on dev 0",)),
        (
            ("NCCL_COLLNET_ENABLE set by environment to 1.",),
            ("Channel 00/0 : 1[1] -> 2[0] [send] via NET/IB/0/GDRDMA",),
        ),
    ],
    ids=["network", "gdr", "nvls", "sharp"],
)
def test_two_jobs_in_one_log(one: tuple[str, ...], two: tuple[str, ...]) -> None:
    """A job on one node is not expected to have or use what another job on two nodes has, because both are in one log."""
    first = [line for pid in range(100, 104) for line in _running("ant", pid, "0xaaa", 1, *one)]
    second = [
        line for pid in range(200, 204) for line in _running("bee" if pid < 202 else "cat", pid, "0xbbb", 2, *two)
    ]
    assert _names(first, second) == []


def test_jobs_alike() -> None:
    """What several jobs, or runs of one, have alike is one finding."""
    first, second = (
        [
            line
            for pid in range(at, at + 4)
            for line in _running("ant" if pid < at + 2 else "bee", pid, comm, 2, "Using network Socket")
        ]
        for at, comm in ((100, "0xaaa"), (200, "0xbbb"))
    )
    (found,) = findings(_account([*first, *second]))
    assert found.says == "4 processes on ant, bee on TCP sockets; the log names no other network"
    assert len(found.evidence) == MOST_EVIDENCE


def test_processes_without_a_communicator() -> None:
    """They are compared with a remark that they may be of several jobs, and not at all beside a job or between two runs."""
    loose = ["ant:1:2 [0] NCCL INFO NCCL version 2.25.1+cuda12.8", "bee:3:4 [0] NCCL INFO NCCL version 2.26.2+cuda12.8"]
    (found,) = findings(_account(loose))
    assert found.says == "2.25.1 (ant pid 1); 2.26.2 (bee pid 3) (in one log, which may hold several jobs)"
    assert findings(_account(loose), live=Live(past={("ant", 1)})) == []
    job = [line for pid in range(100, 104) for line in _running("ant", pid, "0xaaa", 1)]
    assert _names(job, loose) == []
