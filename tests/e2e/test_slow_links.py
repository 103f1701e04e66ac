"""Jobs over several hosts on links of which one is slow: it is named, and no rank is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.faults.links import CASES, JOB, hosts_of, open_incidents, running
from tests.helpers import RunningAgent, wait_for


def kinds(agents: list[RunningAgent]) -> dict[str, dict[str, Any]]:
    """The open incidents by kind."""
    return {each["kind"]: each for each in open_incidents(agents)}


def test_slow_link(tmp_path: Path) -> None:
    """One link of three at a tenth of the others is named by its ends and its device; nothing else is wrong, and each agent says the same."""
    case = next(each for each in CASES if each.name == "a tenth of three")
    with hosts_of(case) as hosts, running(case, hosts, tmp_path) as agents:
        found = wait_for(lambda: kinds(agents).get("slow_link"), "the slow link")
        sender, receiver = hosts[1], hosts[0]
        assert f"({sender.address}) to " in found["says"]
        assert f"({receiver.address}) over {sender.device} is slow" in found["says"]
        assert (found["title"], found["ranks"], found["waiting"]) == ("Slow link", [], [0, 1, 2])
        assert kinds(agents).keys() == {"slow_link"}
        for each in agents:
            listed = wait_for(lambda: each.get(f"/api/v1/incidents?job={JOB}&scope=job")["data"], "it elsewhere")  # noqa: B023
            assert {one["id"] for one in listed if one["kind"] == "slow_link"} == {found["id"]}
