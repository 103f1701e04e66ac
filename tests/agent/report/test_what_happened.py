"""What happened in a run: faults before their consequences, in the report as text, page and JSON; length, costs and end count them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from commwatch_agent.incidents.answers import IncidentDetails, details_of
from commwatch_agent.incidents.incident import JOB_ENDED, RECOVERED, EvidenceItem, Incident
from commwatch_agent.report import charts, report, report_page, report_text
from commwatch_agent.report.what_happened import (
    ended_by,
    happened,
    html,
    last_at,
    late_within,
    lines,
    scarce_cores,
    standstill_s,
)
from tests.helpers import Watch, group_entry, identity, operation, write_ring

AT = 1_700_000_000.0
#: As py-spy prints it.
STACK = 'Thread 7 (idle): "MainThread"\n    load (/home/me/train.py:88)\n    <module> (/home/me/train.py:120)\n'


def fault(
    name: str,
    kind: str,
    *ranks: int,
    severity: str = "critical",
    cause: str = "",
    after_s: float = 0.0,
    lasted_s: float = 60.0,
    cost_s: float | None = None,
    consequence_of: str | None = None,
    outcome: str = JOB_ENDED,
    evidence: tuple[EvidenceItem, ...] = (),
) -> IncidentDetails:
    """An ended incident."""
    began, ended = AT + after_s, AT + after_s + lasted_s
    one = Incident(name, kind, severity, "ended", "train", "run", (name,), began, began + 10, ended, ended, outcome)
    return details_of(
        replace(
            one,
            cause=cause,
            says=f"{kind} says <{name}>",
            ranks=ranks,
            cost_rank_s=cost_s,
            consequence_of=consequence_of,
            evidence=evidence,
        )
    )


def item(source: str, text: str, **data: object) -> EvidenceItem:
    return EvidenceItem(source, AT, text, data)


def text(*incidents: IncidentDetails) -> str:
    return "\n".join(lines(happened(incidents), 200, failed=True))


def test_causes_before_consequences() -> None:
    """Each fault comes with all that follows from it, also through others; the most severe come first, then the earliest; pending ones do not count."""
    hang = fault("hang", "hang", 1, consequence_of="lost", after_s=2)
    waits = fault("waits", "stalled", 1, consequence_of="hang", after_s=1)
    lost, late = fault("lost", "rank_lost", 1, after_s=3), fault("late", "straggler", 2, severity="warning")
    found = happened([waits, late, hang, lost, replace(late, id="not yet", state="pending")])
    assert [(one.cause.id, [each.id for _, each in one.effects]) for one in found] == [
        ("lost", ["hang", "waits"]),
        ("late", []),
    ]
    assert [one.cause.id for one in happened([hang])] == ["hang"]  # its cause is not known here
    circle = [replace(hang, consequence_of="waits"), waits]
    assert [[each.id for each in one.every] for one in happened(circle)] == [["waits", "hang"]]


@pytest.mark.parametrize(
    ("waited", "why", "shown"),
    [(None, "", False), (0.19, "", False), (0.2, "", True), (0.62, "computes", True), (0.62, "no_core", False)],
)
def test_ranks_without_cores(waited: float | None, why: str, shown: bool) -> None:
    """That the ranks lacked cores is among what happened, with the share of the time, also where there is no incident; not where a late rank lacked more."""
    late = replace(fault("late", "straggler", 1, severity="warning"), why_code=why)
    for found in ([], happened([late])) if why in {"", "computes"} else (happened([late]),):
        scarce = scarce_cores(waited, found)
        terminal, page = list(lines(found, 80, failed=False, scarce=scarce)), html(found, failed=False, scarce=scarce)
        for whole in (" ".join(" ".join(terminal).split()), " ".join(page)):
            assert ("what happened" in whole.lower()) == (shown or bool(found))
            assert (f"had no core, {100 * (waited or 0):.0f}% of the time" in whole) == shown
        assert max(map(len, terminal), default=0) <= 80


def test_what_ended_the_job_comes_before_cores() -> None:
    """That the ranks lacked cores comes first, but after what ended a job that failed."""
    found = happened([fault("lost", "rank_lost", 1)])
    scarce = scarce_cores(0.5, found)
    for failed in (False, True):
        for whole in (
            "\n".join(lines(found, 200, failed=failed, scarce=scarce)),
            "\n".join(html(found, failed=failed, scarce=scarce)),
        ):
            assert (whole.index("lacked CPU cores") > whole.index("Rank died")) == failed


def test_what_ended_a_job() -> None:
    """A job was ended by its earliest fault that did not recover; a late rank or an information ends none."""
    hang, lost = fault("hang", "hang", 2), fault("lost", "rank_lost", 1, after_s=30, lasted_s=30)
    assert ended_by(happened([hang, lost])) == "Hang: rank 2"
    assert ended_by(happened([lost])) == lost.says
    assert ended_by(happened([replace(hang, outcome=RECOVERED), lost])) == lost.says
    assert ended_by(happened([fault("stall", "stalled", 1, severity="info"), lost])) == "Stall: rank 1"
    harmless = [fault("late", "straggler", 2), fault("all", "rank_lost", severity="info")]
    assert ended_by(happened(harmless)) == ended_by([]) == ""


def test_length_and_costs() -> None:
    """A hang counts as long as it lasted; of faults at one time, only the costliest counts."""
    first, same = fault("a", "hang", 1, cost_s=240.0), fault("b", "stalled", 2, after_s=10, lasted_s=20, cost_s=40.0)
    later, late = fault("c", "desync", 3, after_s=100, cost_s=8.0), fault("d", "straggler", 2, lasted_s=900, cost_s=9.0)
    found = happened([first, same, later, late])
    assert (last_at(found), standstill_s(found)) == (AT + 160, 248.0)
    assert (last_at([]), standstill_s([])) == (0.0, 0.0)


def test_late_ranks() -> None:
    """A late rank has the share of the time that the others waited for it, in all of it or a part of it; one below 5% is not late."""
    late = replace(fault("late", "straggler", 2, lasted_s=100, cost_s=90.0), waiting=[0, 1, 3])
    assert late_within([late], AT - 100, AT + 100) == {2: 0.15}
    assert late_within([late], AT + 50, AT + 100) == {2: 0.3}
    assert late_within([late], AT - 900, AT + 100) == late_within([late], AT + 200, AT + 300) == {}
    assert late_within([replace(late, cost_rank_s=None)], AT, AT + 100) == {}


def test_in_words() -> None:
    """A fault has severity, title, length, cost, sentence, what it was at first, place, stack and remedy, and then what followed."""
    evidence = (
        item("probe", "rank 2 is stopped", cause="stopped", kind="hang"),
        item("stack", "rank 2", rank=2, place="load (train.py:88)", stack=STACK),
    )
    hang = fault("hang", "hang", 2, cause="dead", cost_s=240.0, evidence=evidence)
    said = text(
        hang,
        fault("lost", "rank_lost", 2, consequence_of="hang"),
        fault("i", "waiting", 1, severity="info", outcome=RECOVERED),
    )
    for part in (
        "  * ENDED THE JOB  Hang: rank 2, ",
        "4m00s of rank time",
        "    at first: rank 2 is stopped\n    hang says <hang>\n    rank 2 was in load (train.py:88)\n    Python stack, ",
        "\n      load (/home/me/train.py:88)\n      <module> (/home/me/train.py:120)\n    to do: Read the end",
        "\n    therefore: Rank died: rank 2, ",
        "\n  also: Long wait: rank 1, ",
    ):
        assert part in said
    assert text() == ""


def test_long_stack() -> None:
    """Of a stack with more than eight frames, the innermost and those of the user's code are shown, and how many are not."""
    inner = [f"call_{n} (/v/site-packages/torch/module.py:{n})" for n in range(9)]
    stack = "\n    ".join(['Thread 7: "MainThread"', *inner, "extra (/me/ddp.py:23)", "main (/me/ddp.py:59)"])
    said = text(
        fault("hang", "hang", 2, evidence=(item("stack", "rank 2", rank=2, place="extra (ddp.py:23)", stack=stack),))
    )
    shown = f"      {inner[0]}\n      extra (/me/ddp.py:23)\n      main (/me/ddp.py:59)\n"
    assert f"first:\n{shown}      … 8 more frames: `commwatch diagnose` shows them\n" in said


def test_what_ended_the_job_comes_first() -> None:
    """What ended a failed job is the first fault in text and page, before worse and earlier ones; otherwise the worst comes first."""
    worse = [
        fault(f"bad{number}", "corruption", number, outcome=RECOVERED, after_s=-9.0 - number) for number in range(8)
    ]
    found = happened([*worse, fault("stall", "stalled", 1, severity="warning")])
    said = text(*[each for one in found for each in one.every])
    assert said.splitlines()[2].startswith("  * ENDED THE JOB  Stall: rank 1, ")
    assert said.count("Stall: rank 1") == 1
    assert html(found, failed=True)[1].startswith("<h3>ENDED THE JOB  Stall: rank 1, ")
    for shown in ("\n".join(lines(found, 200, failed=False)), "\n".join(html(found, failed=False))):
        assert shown.index("Corrupt data: rank 7") < shown.index("Stall: rank 1")


def test_what_ended_the_last_run() -> None:
    """After a restart of the ranks, what ended the last run ended the job, not what ended a run before."""
    first = fault("first", "rank_lost", 1, severity="warning", after_s=-100.0, lasted_s=0.0)
    last = fault("last", "rank_lost", 2, severity="warning", lasted_s=0.0)
    for both in ((first, last), (last, first)):
        assert ended_by(happened(both)) == "rank_lost says <last>"
        assert text(*both).splitlines()[2].startswith("  * ENDED THE JOB  Rank died: rank 2")
    hang = fault("hang", "hang", 0, lasted_s=90.0)
    assert ended_by(happened([first, hang])) == "Hang: rank 0"


@pytest.mark.parametrize("cause", ["interrupted", "all", "died"])
def test_stall_that_was_ended_by_hand(cause: str) -> None:
    """A stall lasted until the end of a job of which all ranks were ended at once; that of one ended it."""
    found = [
        fault("stall", "stalled", 1, severity="warning"),
        fault("lost", "rank_lost", cause=cause, severity="info", after_s=60, consequence_of="stall"),
    ]
    head = "ENDED THE JOB" if cause == "died" else "UNTIL THE END"
    assert text(*found).splitlines()[2].startswith(f"  * {head}  Stall: rank 1, ")


def test_foreign_names_begin_no_line() -> None:
    """A line is not broken inside a name of the job's."""
    name = "x " * 30 + "(y * CRITICAL.py:1)"
    said = text(fault("hang", "hang", 2, evidence=(item("stack", "rank 2", place=name),)))
    assert name in said


def test_in_report(tmp_path: Path) -> None:
    """Text, page and JSON of the report have what happened before its figures, and the length of a hang; without any, none has the section."""
    watch = Watch(tmp_path / "watch")
    write_ring(watch.rings, [operation(start_ns=0, end_ns=1)], [group_entry(0, (0,))], **identity())
    watch.tick(10**9)
    (job,) = watch.agent.jobs()
    began = job.last_seen_at
    hang = replace(fault("<a>", "hang", 2, cost_s=8.0), began_at=began, last_at=began + 8, ended_at=began + 8)
    for incidents in ([hang], []):
        built = report.build(watch.agent, job.job_id, watch.path, "again", incidents=incidents)
        assert built is not None
        page = report_page.html(built, charts.gather(watch.agent, job.job_id))
        said = report_text.text(built)
        assert ("what happened\n" in said, "hang says <<a>>" in said, "of standstill" in said) == (bool(incidents),) * 3
        assert ("What happened" in page, "ang says &lt;&lt;a&gt;&gt;" in page) == (bool(incidents),) * 2
        assert [each["says"] for each in json.loads(report.as_json(built))["incidents"]] == [
            one.says for one in incidents
        ]
        assert built.duration_s == job.last_seen_at - job.started_at + (8 if incidents else 0)
        if incidents:
            assert said.index("what happened") < said.index("\n  cost")
