"""What ``commwatch diagnose`` says of the answers of agents: values in, text and exit code out."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from commwatch_agent.commands.diagnosis import Diagnosis, as_json, doubts, exit_code, text, without_look
from commwatch_agent.incidents.answers import IncidentDetails
from commwatch_agent.incidents.incident import EvidenceItem
from commwatch_agent.model.views import JobView, RankView, Usual
from commwatch_agent.sources.stack_capture import Evidence
from commwatch_agent.text.units import time_of_day
from commwatch_collectors.node.judged_activity import Activity
from tests.agent.commands.test_top import NOW, SINCE, in_flight, incident, of_job, rank

COMMAND = "commwatch diagnose"
JOB = of_job().job


def details(kind: str, *ranks: int, evidence: tuple[EvidenceItem, ...] = (), **more: Any) -> IncidentDetails:
    """An open incident of the job, with its evidence."""
    return IncidentDetails(**vars(incident(kind, *ranks, **more)), evidence=list(evidence))


def two(second: RankView | None = None, **more: Any) -> list[RankView]:
    """Two ranks that communicate; ``more``: of both."""
    fields = {"quiet_s": 0.2, "longest_quiet_s": 1.0, "probe_mode": "full"} | more
    return [rank(0, **fields), second or rank(1, **fields)]


def seen(ranks: list[RankView], *incidents: IncidentDetails, **more: Any) -> Diagnosis:
    """The answers on one running job."""
    return Diagnosis(jobs=[JOB], ranks=ranks, incidents=list(incidents), **more)


def said(of: Diagnosis) -> tuple[int, list[str]]:
    """Exit code, and lines."""
    found = doubts(of, NOW)
    return exit_code(of, found), text(of, found, [], COMMAND).splitlines()


def test_healthy() -> None:
    """A job whose ranks all run and communicate is healthy; so is one that has been quiet for as long before, and one that is quiet for a moment."""
    healthy = (0, ["healthy: 1 running job, 2 ranks"])
    assert said(seen(two())) == healthy
    assert said(seen(two(quiet_s=20.0, longest_quiet_s=25.0))) == healthy
    assert said(seen(two(quiet_s=4.0, longest_quiet_s=0.5))) == healthy
    assert said(seen([rank(0, quiet_s=0.1, longest_quiet_s=1.0), rank(1)])) == healthy
    assert said(Diagnosis()) == (0, ["no running job"])


def waiting(age_s: float, longest_s: float | None = None, last: int = 7) -> Diagnosis:
    """Rank 0 has been in an operation that usually takes 1 ms, and rank 1 sleeps."""
    op = replace(in_flight(age_s), place=Usual(40, longest_s))
    calm = {"quiet_s": age_s, "longest_quiet_s": 25.0, "probe_mode": "full"}
    sleeps = rank(
        1, last_seq={"g1": last}, activity=Activity("asleep", "is asleep in a timer", age_s, is_working=False), **calm
    )
    return seen([rank(0, in_flight=[op], last_seq={"g1": 7}, **calm), sleeps])


def test_wait_that_is_no_incident_yet() -> None:
    """While an operation takes longer than ever there, a job is not called healthy: who waits, and who has not come so far, is information."""
    says = "rank 0 of train in all_reduce 8 of group dp for 4.00 s, usually 1 ms"
    missing = "; rank 1 has not come so far (rank 1 is asleep in a timer)"
    assert said(waiting(4)) == (
        0,
        ["no verdict yet: 1 running job, 2 ranks", f"not yet certain: {says}{missing}"],
    )
    assert said(waiting(4, last=8))[1][1] == f"not yet certain: {says}"
    for usual in (waiting(2.5), waiting(4, longest_s=5.0)):
        assert said(usual) == (0, ["healthy: 1 running job, 2 ranks"])


@pytest.mark.parametrize(
    ("ranks", "code", "doubt"),
    [
        (two(rank(1, state="gone", ended_at=NOW - 1)), 1, "rank 1 (train) died (no clean end) 1.00 s ago"),
        (
            two(rank(1, state="ended", raised="ValueError", raised_at="load (a.py:3)", ended_at=NOW - 2)),
            1,
            "rank 1 (train) ended with ValueError in load (a.py:3) 2.00 s ago",
        ),
        (two(rank(1, process="stopped")), 1, "rank 1 (train) is stopped"),
        (two(rank(1, heartbeat_age_s=9.0)), 0, "rank 1 (train) does not run its Python code"),
        (
            two(quiet_s=12.0, longest_quiet_s=0.5),
            0,
            "no operation or step of train has ended for 12.0 s; before, the longest such time was 500 ms",
        ),
        (
            two(quiet_s=72.0, longest_quiet_s=0.5),
            1,
            "no operation or step of train has ended for 72.0 s; before, the longest such time was 500 ms",
        ),
        (two(quiet_s=12.0, longest_quiet_s=None), 0, "whether train makes progress is not known"),
        (two(quiet_s=None, longest_quiet_s=None), 0, "whether train makes progress is not known"),
        (two(quiet_s=None, longest_quiet_s=None, records=0), 0, "train has not communicated yet"),
        (two(state="left", quiet_s=None, longest_quiet_s=None), 0, "no rank of train runs any more"),
        (
            [*two(quiet_s=None, longest_quiet_s=None, records=0)[:1], *two(state="left")[1:]],
            0,
            "whether train makes progress is not known",
        ),
        (two()[:1], 0, "no data from rank 1 (train)"),
        (
            two(probe_mode="counters"),
            0,
            "train is recorded in part: no operation of ranks 0-1; the rest is only counted, because the probe was above its budget; "
            "a hang shows only the missing ranks",
        ),
    ],
)
def test_not_certain(ranks: list[RankView], code: int, doubt: str) -> None:
    """A job is not healthy if a rank has died, is stopped or is missing, or if it is quiet for longer than ever; 0 if that may be nothing."""
    found, lines = said(seen(ranks))
    assert (found, lines[1:]) == (code, [f"{'no incident yet' if code else 'not yet certain'}: {doubt}"])
    assert lines[0].startswith(f"{'something is wrong' if code else 'no verdict yet'}: 1 running job, ")


def test_pending() -> None:
    """A pending incident is not certain, unless an open one explains it."""
    pending = details("comm_bound", state="pending", says="communication takes 60%", id="p", cost_rank_s=None)
    since = f"since {time_of_day(NOW - 12)}, for 12.0 s so far"
    assert said(seen(two(), pending)) == (
        0,
        [
            "no verdict yet: 1 running job, 2 ranks",
            f"not yet certain: comm_bound (train), {since}: communication takes 60%",
        ],
    )
    lines = said(seen(two(), details("hang", 1, id="h"), replace(pending, consequence_of="h")))[1]
    assert not any("comm_bound" in line for line in lines)


def test_for_information() -> None:
    """An open incident for information is shown; the exit code is that of nothing wrong."""
    code, lines = said(seen(two(), details("waiting", 1, severity="info")))
    assert (code, lines[0]) == (0, "INFO  waiting: rank 1 (train)")


def test_one_look_shows_nothing_of_a_late_rank() -> None:
    """Stacks are taken of culprits of which no agent has one; not of a rank that is only late, which is somewhere else in each moment."""
    taken = EvidenceItem("stack", NOW, "rank 3 is in load", {"rank": 3, "stack": "load"})
    hang = details("hang", 2, 3, evidence=(taken,), waiting=[0, 1])
    job = hang.job_id
    assert without_look([hang]) == {(job, 0), (job, 1), (job, 3)}
    assert without_look([details("straggler", 1)]) == {(job, 1)}
    assert without_look([details("straggler", 2), details("hang", 2)]) == set()


def test_block() -> None:
    """An incident is a block: what, where, when, cost, what to do, the stack of the culprit; its consequences are short, below it."""
    stack = EvidenceItem(
        "stack", NOW, "rank 1 is in load", {"rank": 1, "stack": 'Thread 1: "MainThread"\n    load (train.py:88)'}
    )
    lost = details("rank_lost", 1, id="l", says="rank 1 died", remedy="Read its log.", evidence=(stack,))
    hang = details("hang", 1, id="h", consequence_of="l", says="process dead")
    bound = details("comm_bound", id="c", consequence_of="h")
    code, lines = said(seen(two(rank(1, state="gone")), bound, hang, lost))
    assert (code, lines) == (
        1,
        [
            "WARNING  Rank died: rank 1 (train)",
            "  rank 1 died",
            "  in load (train.py:88)",
            f"  at {time_of_day(NOW - 12)}; cost 24.0 s of rank time",
            "  To do: Read its log.",
            "  Python stack:",
            '    Thread 1: "MainThread"',
            "        load (train.py:88)",
            f"  Consequence: Hang: rank 1, {SINCE}",
            f"    Consequence: comm_bound, {SINCE}",
        ],
    )


ENDED: JobView = replace(
    JOB, state="ended", failed=True, exit_code=137, ending="exit code 137 (SIGKILL)", last_seen_at=NOW
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [("hang", 1), ("desync", 1), ("rank_lost", 1), ("stalled", 1), ("init_incomplete", 1), ("straggler", 0)],
)
def test_ended_job(kind: str, code: int) -> None:
    """Of an ended job the incidents come in the order in which they began, and its end last; 1 if it hung, disagreed or lost a rank."""
    over: dict[str, Any] = {"state": "ended", "ended_at": NOW, "outcome": "job_ended", "place": ""}
    first = details("straggler", 0, began_at=NOW - 90, **over)
    found, lines = said(Diagnosis(ended=ENDED, incidents=[details(kind, 1, **over), first]))
    heads = [line for line in lines if line.startswith(("WARNING", "CRITICAL"))]
    assert (found, len(heads), heads[0]) == (code, 2, "WARNING  Late rank: rank 0 (train)")
    assert lines[-1].startswith(f"train failed at {time_of_day(NOW)}: exit code 137 (SIGKILL)")
    assert lines[2] == f"  {time_of_day(NOW - 90)}, for 90.0 s, until the job ended; cost 24.0 s of rank time"


def test_how_a_job_ended() -> None:
    """A job that failed ended by what its incidents show, as report and `jobs` have it, whether it is asked for or only the latest."""
    hang = details("hang", 1, state="ended", ended_at=NOW, outcome="job_ended")
    died = replace(
        ENDED, exit_code=None, ending="rank 0 died (no clean end) at 12:00:00 UTC, first of 2", last_seen_at=NOW - 90
    )
    how = f"train failed at {time_of_day(NOW - 90)}: Hang: rank 1"
    assert said(Diagnosis(ended=died, incidents=[hang]))[1][-1] == how
    assert said(Diagnosis(latest=died, of_latest=[hang]))[1][-1].startswith(f"{how}; `commwatch diagnose train`")
    recovered = replace(hang, outcome="recovered")
    assert said(Diagnosis(ended=died, incidents=[recovered]))[1][-1] == f"train failed: {died.ending}"


@pytest.mark.parametrize("kind", ["stalled", "init_incomplete"])
def test_stall_that_ended_no_job(kind: str) -> None:
    """A stall of an ended job is wrong only if it lasted until the job ended, and the job did not end well."""
    over = details(kind, 1, state="ended", ended_at=NOW, outcome="job_ended")
    assert said(Diagnosis(ended=replace(ENDED, failed=None), incidents=[over]))[0] == 1
    assert said(Diagnosis(ended=replace(ENDED, failed=False, ending=""), incidents=[over]))[0] == 0
    assert said(Diagnosis(ended=ENDED, incidents=[replace(over, outcome="recovered")]))[0] == 0


def test_ended_at_once() -> None:
    """That all ranks were ended at once is shown, and is nothing wrong: it is known only some seconds later, and the exit code stays."""
    code, lines = said(Diagnosis(ended=ENDED, incidents=[details("rank_lost", severity="info", cause="all")]))
    assert (code, lines[0].split()[0]) == (0, "INFO")


def test_ended_well() -> None:
    """An ended job without incidents is named as that; without a running job, the latest that ended is named, with the command that shows it."""
    fine = replace(ENDED, failed=False, ending="")
    more = "it had no incident: `commwatch report train` shows where its time went"
    assert said(Diagnosis(ended=fine)) == (0, [f"train ended at {time_of_day(NOW)}; {more}"])
    assert said(Diagnosis(latest=fine))[1] == [
        "no running job",
        f"train ended at {time_of_day(NOW)}; `commwatch diagnose train` shows what happened",
    ]
    assert "`commwatch diagnose 'a b'`" in said(Diagnosis(latest=replace(fine, job_id="a b")))[1][1]


def test_between_two_lives() -> None:
    """A job that failed in the last minute, and whose launcher is not known to have ended, may be started again: a line has that, and something is wrong."""
    lost = replace(ENDED, exit_code=None, ending="rank 1 died (no clean end)", last_seen_at=NOW - 12)
    again = "not yet certain: whether the launcher of train starts it again"
    for between in (Diagnosis(latest=lost), Diagnosis(ended=lost)):
        code, lines = said(between)
        assert (code, lines[-1]) == (1, again)
    assert said(Diagnosis(latest=replace(lost, restarts=2)))[1][-1] == f"{again}, as 2 times before"
    cancelled = replace(lost, ranks=[0, 1], ending="ranks 0-1 died (no clean end) at 12:00:00 UTC")
    assert said(Diagnosis(ended=cancelled))[0] == 0
    for over in (replace(lost, exit_code=1), replace(lost, last_seen_at=NOW - 70), replace(lost, failed=None)):
        code, lines = said(Diagnosis(latest=over))
        assert (code, len(lines)) == (0, 2), lines


def test_silent_agents() -> None:
    """An agent that does not answer is named, and makes the answer incomplete unless something is wrong."""
    silent = {"http://node2:9477": "refused"}
    code, lines = said(seen(two(), silent=silent))
    assert (code, lines[0]) == (3, "http://node2:9477 does not answer: refused")
    assert said(seen(two(), details("hang", 1), silent=silent))[0] == 1
    assert said(Diagnosis(ended=ENDED, silent=silent))[0] == 3


def test_json() -> None:
    """Programs get verdicts, incidents with their evidence, silent agents, and an ended job."""
    item = EvidenceItem("probe", NOW, "a sentence", {"kind": "hang"})
    found = json.loads(as_json(seen(two(), details("hang", 1, evidence=(item,))), []))
    assert found.keys() == {"verdicts", "incidents", "silent", "evidence"}
    assert found["incidents"][0]["evidence"][0]["text"] == "a sentence"
    assert json.loads(as_json(Diagnosis(ended=ENDED), []))["job"]["ending"] == "exit code 137 (SIGKILL)"


def test_over() -> None:
    """A fault that is over while its alert fires is no reason for exit code 1, and there is nothing to do about it."""
    hang = details("hang", 1, remedy="Let it continue.", holds=False)
    of = seen(two(), hang)
    shown = text(of, [], [], COMMAND)
    assert shown.startswith(f"OVER  {hang.title} (")
    assert ("To do" in shown, "healthy: " in shown, exit_code(of, [])) == (False, True, 0)
    assert exit_code(seen(two(), replace(hang, holds=True)), []) == 1


def test_stack_of_this_command() -> None:
    """Where the agent could take no stack, but this command can, the remedy does not say that there is none."""
    hang = details("hang", 1, remedy="Look at it. No Python stack of rank 1: py-spy could not read the process.")
    of = seen(two(), hang)
    taken = Evidence(hang.job_id, 1, "python_stack", "wait (a.py:1)")
    assert "No Python stack" in text(of, [], [], COMMAND)
    shown = text(of, [], [taken], COMMAND)
    assert ("To do: Look at it.\n" in shown, "No Python stack" in shown) == (True, False)


def test_words_of_others() -> None:
    """What agents say of their jobs does nothing to a terminal."""
    evil = "job\x1b[2J\x07"
    of = seen(two(), details("hang", 1, says=evil, title=evil, place=evil, job_id=evil), silent={evil: evil})
    shown = text(of, doubts(of, NOW), [], COMMAND)
    assert "\x1b" not in shown
    assert "\x07" not in shown
