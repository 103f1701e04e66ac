"""The page of one incident, as a value."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

from commwatch_agent.incidents.answers import view_of
from commwatch_agent.incidents.incident import EvidenceItem, Incident
from commwatch_agent.report.html_frame import prose
from commwatch_agent.report.incident_page import incident_page
from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.export import runbook
from tests.agent.report.test_svg import HOSTILE

NOON = 1_795_000_000.0
STACK = 'Thread 7 (active): "MainThread"\n    load (train.py:88)\n    <module> (train.py:12)'
HANG = Incident(
    "0c7d1e52a9b3f846", "hang", "warning", "open", "train", "run", ("dp", "6"), NOON, NOON + 10, NOON + 60,
    cause="stopped", says="stalled: rank 2 has not joined; its process is stopped", ranks=(2,), waiting=(0, 1, 3),
    nodes=("node-a",), group="dp", op="all_reduce", seq=6, cost_rank_s=240.0,
    evidence=(
        EvidenceItem("stack", NOON + 11, "rank 2 is in load (train.py:88)", {"pid": 77, "place": "load (train.py:88)", "stack": STACK}),
        EvidenceItem("probe", NOON + 10, "ranks 0-1, 3 are in all_reduce 6"),
    ),
)  # fmt: skip


def page_of(incident: Incident, cause: Incident | None = None, *consequences: Incident) -> str:
    """The page of an incident."""
    links = [("runbook", "/runbook#collectivehang")]
    explains = None if cause is None else view_of(cause)
    return incident_page(view_of(incident), incident.evidence, explains, map(view_of, consequences), links)


def words(page: str) -> str:
    """What a reader sees of a page."""
    body = page.partition("<main>")[2]
    return " ".join(unescape(re.sub("<[^>]*>", " ", body)).split())


def test_page() -> None:
    """The page has all that is known: what, where, when, at which cost, what to do, effects, and the evidence in order of time with the stack."""
    lost = replace(HANG, id="1" * 16, kind="rank_lost", cause="died", says="rank 2 died")
    bound = replace(HANG, id="2" * 16, kind="comm_bound", cause="", ranks=(), says="comm share 80%", evidence=())
    shown = page_of(HANG, lost, bound)
    text = words(shown)
    for part in (
        "Hang: rank 2 stalled: rank 2 has not joined; its process is stopped",
        "A consequence of Rank died: rank 2",
        "State open, warning", "Job train", "Nodes node-a", "Culprits rank 2", "Waiting ranks 0-1, 3", "Operation all_reduce 6 of group dp",
        "for 60.0 s so far", "Cost 4m00s of rank time", "Where in the code load (train.py:88)",
        "What to do Find out who suspended the process (SIGSTOP: a debugger, a shell's job control, an administrator), and let it continue: kill -CONT 77 .",
        "High communication share : comm share 80%",
    ):  # fmt: skip
        assert part in text, part
    assert text.index("ranks 0-1, 3 are in all_reduce 6") < text.index("rank 2 is in load (train.py:88)")
    assert f"<pre>{STACK}</pre>".replace('"', "&quot;").replace("<module>", "&lt;module&gt;") in shown
    for link in (
        "/incidents/1111111111111111", "/incidents/2222222222222222", "/runbook#collectivehang", "/?job=train", f"/api/v1/incidents/{HANG.id}",
    ):  # fmt: skip
        assert f'href="{link}"' in shown
    assert "<code>kill -CONT 77</code>" in shown


def test_what_is_not_known_is_absent() -> None:
    """What is not known is left out; an incident that has ended tells how."""
    bare = Incident(
        "3" * 16, "agent_fault", "warning", "ended", "", "", ("x",), NOON, NOON, NOON + 5, ended_at=NOON + 5
    )
    text = words(page_of(replace(bare, outcome="recovered")))
    for absent in (
        "Job",
        "Nodes",
        "Culprits",
        "Waiting",
        "Operation",
        "Cost",
        "Where in the code",
        "Consequences",
        "Evidence",
    ):
        assert absent not in text, absent
    assert "State ended, warning" in text
    assert "State ended with the job, warning" in words(page_of(replace(bare, outcome="job_ended")))


def test_foreign_text_is_text() -> None:
    """Whatever jobs, groups, operations, places and stacks are called, the page has no markup of theirs."""

    def tags(foreign: str) -> list[str]:
        item = EvidenceItem(foreign, NOON, foreign, {"stack": foreign, "place": foreign, "pid": foreign})
        odd = replace(HANG, job_id=foreign, says=foreign, group=foreign, op=foreign, nodes=(foreign,), evidence=(item,))
        return re.findall(r"<[a-z/!]\w*", page_of(odd, odd, odd))

    assert tags(HOSTILE) == tags("plain")


def test_runbook() -> None:
    """The runbook is a page with headings, links, lists and code; each section that an alert or a kind names has its anchor, and each link leads somewhere."""
    page, found = prose(shipped("runbook.md")), read(shipped("rules.yaml"))
    anchors = set(re.findall(r'id="([^"]*)"', page))
    names = {rule.name for rule in found.alerts} | {kind.runbook for kind in found.kinds.values()}
    assert {runbook("", name).lstrip("#") for name in names} <= anchors
    links = re.findall(r'href="([^"]*)"', page)
    assert links
    assert all(link.startswith(("#", "https://")) for link in links)
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    assert page.count("<h1>") == 1
    assert "<h1>Runbook</h1>" in page
    assert "<pre><code" in page
    for markup in ("## ", "**", "```", "]("):
        assert markup not in page
