"""What advice on a job is based on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from commwatch_agent.incidents.answers import details_of
from commwatch_agent.incidents.incident import EvidenceItem, Incident
from commwatch_agent.report.job_advice import of_last_life
from commwatch_collectors.nccl.views import Finding
from tests.agent.incidents.test_job_rules import NOW, rank

LOST = Finding("gloo_peer_lost", "error", "a peer ended", "by rank 0", "", "", [])
SLOW = replace(LOST, name="socket_transport", severity="warning")
IN_LOG = EvidenceItem("nccl_log", NOW, "a peer ended", {"finding": "gloo_peer_lost"})
FIRST = Incident(
    "1" * 16, "nccl_fault", "warning", "ended", "train", "key", ("gloo_peer_lost",), NOW, NOW, NOW, NOW + 1, evidence=(IN_LOG,)
)  # fmt: skip
AGAIN = replace(FIRST, id="2" * 16, began_at=NOW + 30, ended_at=NOW + 31, number=1)


@pytest.mark.parametrize(
    ("incidents", "restart", "names"),
    [
        ([FIRST], 1, ["socket_transport"]),
        ([FIRST], 0, ["gloo_peer_lost", "socket_transport"]),
        ([FIRST, AGAIN], 1, ["gloo_peer_lost", "socket_transport"]),
        ([replace(FIRST, ended_at=None)], 1, ["gloo_peer_lost", "socket_transport"]),
        ([], 1, ["gloo_peer_lost", "socket_transport"]),
    ],
    ids=["of an earlier life", "never restarted", "it came again", "it lasts", "not known"],
)
def test_findings_of_the_last_life(incidents: list[Incident], restart: int, names: list[str]) -> None:
    """Advice on a job that its launcher has started again leaves out what logs showed of an earlier life only."""
    ranks = [rank(number, restart=restart, started_at=NOW + 10) for number in range(2)]
    found = of_last_life([LOST, SLOW], map(details_of, incidents), ranks)
    assert [each.name for each in found] == names
