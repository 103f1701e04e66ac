"""Advice from the API names the same late ranks as the report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from commwatch_agent.incidents.answers import IncidentDetails, details_of
from commwatch_agent.incidents.incident import JOB_ENDED, Incident
from commwatch_agent.questions import reports
from tests.helpers import EPOCH_NS, MS, Watch, group_entry, mark, operation, write_ring

STEPS = 60


def late_for_a_part(began_s: float, ended_s: float) -> IncidentDetails:
    """Rank 1 is late for a time in which rank 0 waits 80% for it."""
    began, ended = EPOCH_NS / 1e9 + began_s, EPOCH_NS / 1e9 + ended_s
    one = Incident("late", "straggler", "warning", "ended", "job", "run", ("1",), began, began, ended, ended, JOB_ENDED)
    return details_of(replace(one, ranks=(1,), waiting=(0,), cost_rank_s=0.8 * (ended - began)))


@pytest.mark.parametrize("last_s", [None, 300.0])
def test_late_rank_of_an_ended_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_s: float | None) -> None:
    """A rank that was late in a third of an ended job is late in the advice of API and report; of one that runs, those that are late now are."""
    watch = Watch(tmp_path)
    for rank in (0, 1):
        records = [mark(0, MS)]
        for n in range(STEPS):
            end = (n + 1) * 100 * MS
            took = 80 if n > 2 * STEPS // 3 and rank == 0 else 10
            records += [operation(start_ns=end - took * MS, end_ns=end, seq=n), mark(n + 1, end + MS)]
        write_ring(watch.rings, records, [group_entry(0, (0, 1), "data")], rank=rank, world_size=2)
    watch.tick(7000 * MS)
    own = reports.of_history(watch.agent, "job")
    monkeypatch.setattr(reports, "details_of_run", lambda *_: [late_for_a_part(4.0, 6.0)])
    report = reports.report(watch.agent, "job", own=own, last_s=last_s, command="")
    answer = reports.advice(watch.agent, "job", own=own, last_s=last_s, asked=None)
    assert [each.title for each in answer.data][:1] == ["rank 1 is late and the others wait for it"]
    assert [(each.title, each.because) for each in answer.data] == [
        (each.title, each.because) for each in report.advice
    ]
    for late in ({}, {0: 0.5}):
        now = reports.advice(watch.agent, "job", own=own._replace(late=late), last_s=last_s, asked=None)
        of_ranks = [each.title for each in now.data if each.rule == "straggler"]
        assert of_ranks == ["rank 0 is late and the others wait for it"] * len(late)
