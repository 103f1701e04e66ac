"""Lines of the agent's log about jobs and incidents: one for each change, none while nothing changes."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from commwatch_agent.incidents.evidence import Evidence
from commwatch_agent.incidents.incident import JOB_ENDED, RECOVERED, Incident
from commwatch_agent.notify.journal import MOST_LINES, JobState, Journal, Line, incident_lines, job_lines

NOW = 1_700_000_000.0
JOB = JobState(
    "train", size=16, user="ann", script="train.py", restart=0, began_at=NOW - 2, ended_at=None, is_over=False, ranks=8, lost=0, records=5, records_lost=0,
)  # fmt: skip
OVER = JOB._replace(is_over=True, ended_at=NOW + 58, records=900, records_lost=3)
HANG = Incident(
    "1a2b", "stalled", "warning", "open", "train", "key", ("g",), NOW, NOW, NOW + 60, says="rank 3 does not come"
)


def said(lines: list[Line]) -> list[tuple[str, str]]:
    return [(line.fields["event"], line.says) for line in lines]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, None, []),
        (None, JOB, [("job_began", "job train: began, world size 16, user ann, train.py")]),
        (None, JOB._replace(user="", script=""), [("job_began", "job train: began, world size 16")]),
        (None, JOB._replace(began_at=NOW - 90), [("job_found", "job train: found, has run for 90.0 s, world size 16, user ann, train.py")]),
        (None, JOB._replace(began_at=NOW - 11), [("job_found", "job train: found, has run for 11.0 s, world size 16, user ann, train.py")]),
        (None, JOB._replace(began_at=NOW - 9), [("job_began", "job train: began, world size 16, user ann, train.py")]),
        (JOB, JOB._replace(records=99), []),
        (JOB, JOB._replace(name="train#2"), [("job_renamed", "job train: is now called train#2")]),
        (JOB, OVER, [("job_ended", "job train: ended after 60.0 s, 8 ranks here; 900 records read, 3 lost")]),
        (JOB, OVER._replace(lost=2), [("job_ended", "job train: ended after 60.0 s, 8 ranks here, 2 of them without a clean exit; 900 records read, 3 lost")]),
        (OVER, OVER, []),
        (OVER, None, []),
        (JOB, None, [("job_ended", "job train: ended, 8 ranks here; 5 records read, 0 lost")]),
        (OVER, JOB._replace(restart=1), [("job_began", "job train: began again (restart 1), world size 16, user ann, train.py")]),
        (JOB, JOB._replace(restart=1), [("job_began", "job train: began again (restart 1), world size 16, user ann, train.py")]),
        (None, OVER, [
            ("job_began", "job train: began, world size 16, user ann, train.py"),
            ("job_ended", "job train: ended after 60.0 s, 8 ranks here; 900 records read, 3 lost"),
        ]),
        (None, OVER._replace(began_at=NOW - 90, ended_at=NOW - 12), [
            ("job_ended", "job train: ended after 78.0 s, 8 ranks here; 900 records read, 3 lost"),
        ]),
    ],
)  # fmt: skip
def test_jobs(before: JobState | None, after: JobState | None, expected: list[tuple[str, str]]) -> None:
    """A run has one line when it begins, or is found by an agent that starts later (here 10 s ago), one at each restart, and one at its end."""
    now = {} if after is None else {"key": after}
    assert said(list(job_lines({} if before is None else {"key": before}, now, NOW, NOW - 10))) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, HANG, [("incident_opened", "incident 1a2b opened: warning stalled in job train: rank 3 does not come")]),
        (None, replace(HANG, job_id=""), [("incident_opened", "incident 1a2b opened: warning stalled: rank 3 does not come")]),
        (HANG, replace(HANG, says="for longer"), []),
        (HANG, replace(HANG, severity="info"), []),
        (HANG, replace(HANG, severity="critical"), [("incident_worse", "incident 1a2b is now: critical stalled in job train: rank 3 does not come")]),
        (HANG, replace(HANG, kind="hang"), [("incident_changed", "incident 1a2b is now: warning hang in job train: rank 3 does not come")]),
        (HANG, replace(HANG, state="ended", ended_at=NOW + 90, outcome=RECOVERED), [
            ("incident_ended", "incident 1a2b ended: warning stalled in job train: recovered after 90.0 s"),
        ]),
        (HANG, replace(HANG, state="ended", ended_at=NOW + 90, outcome=JOB_ENDED), [
            ("incident_ended", "incident 1a2b ended: warning stalled in job train: its job ended after 90.0 s"),
        ]),
        (HANG, None, []),
    ],
)  # fmt: skip
def test_incidents(before: Incident | None, after: Incident | None, expected: list[tuple[str, str]]) -> None:
    """An incident has one line when it opens, when it gets worse or becomes another kind, and when it ends; none as it goes on or gets milder."""
    now = {} if after is None else {after.id: after}
    assert said(list(incident_lines({} if before is None else {before.id: before}, now))) == expected


def test_what_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    """An agent that starts does not log incidents that the history has, nor one that is only pending; it logs their end."""
    with caplog.at_level(logging.INFO, "commwatch"):
        journal = Journal(NOW, [HANG])
        journal(Evidence(NOW), [HANG, replace(HANG, id="new", state="pending")])
        assert caplog.messages == []
        journal(Evidence(NOW), [replace(HANG, state="ended", ended_at=NOW + 90, outcome=RECOVERED)])
    (line,) = caplog.messages
    assert line.startswith("incident 1a2b ended")


def test_many_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """Very many changes at once are counted, not listed, so that a user who makes them does not fill the log."""
    with caplog.at_level(logging.INFO, "commwatch"):
        Journal(NOW)(Evidence(NOW), [replace(HANG, id=str(number)) for number in range(MOST_LINES + 5)])
    assert len(caplog.messages) == MOST_LINES + 1
    assert caplog.messages[-1] == "5 more changes of jobs and incidents at the same time"
