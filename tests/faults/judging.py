"""Whether what was concluded of a job of the fault matrix is right."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from tests.faults.scenarios import LATE, Scenario

#: Alerts that are right in a job without a fault: it may communicate much.
TRUE_SHARES = ("CommShareHigh", "CommShareCritical", "ExposedCommHigh")
#: Kinds of incidents of which that is true, too; and how long before its fault an incident may have begun.
TRUE_KINDS, EARLY_S = ("comm_bound", "exposed_comm", "bandwidth_low"), 30.0
#: A verdict must have ended so many seconds after its fault.
ENDS_S = 15.0
#: A verdict is steady that is there in so many polls from the first one on.
STEADY = 0.9

#: Seconds from the fault, and kind, cause and ranks of each verdict then.
Poll = tuple[float, list[tuple[str, str, tuple[int, ...]]]]


class Outcome(NamedTuple):
    """What was concluded of one job."""

    scenario: Scenario
    #: Seconds from the fault to the first right verdict; ``None``: there was none.
    after_s: float | None
    #: Part of the polls from then on that had it.
    steady: float
    #: Wrong verdicts, as kind, cause and ranks; each once. And what is wrong in the report.
    wrong: tuple[str, ...]

    @property
    def right(self) -> bool:
        """The culprit in time and steadily, and nothing wrong."""
        if not self.scenario.kinds:
            return not self.wrong
        in_time = self.after_s is not None and self.after_s <= self.scenario.within_s
        return in_time and self.steady >= STEADY and not self.wrong


def trained_on(scenario: Scenario, ranks_there: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with a job that should have gone on to the end: its ranks run, in the life that the fault leaves them."""
    life = int(scenario.fault.startswith("restart"))
    running = [each for each in ranks_there if each["state"] == "running" and each["restart"] == life]
    return [] if len(running) == scenario.size else [f"only {len(running)} ranks run"]


def reported(
    scenario: Scenario, advice: list[tuple[str, str]], headline: str, found: list[dict[str, Any]]
) -> list[str]:
    """What is wrong in the first advice and in the line on communication, beside the latest verdicts.

    A straggler comes first in the advice, and an even job names no rank. Above the 30% line the headline names the straggler.
    Communication is not the bottleneck where waiting for the straggler is most of it.
    """
    late = [title for rule, title in advice if rule == "straggler"]
    if scenario.lasts_s is not None:  # it is long over
        return []
    if scenario.kinds != LATE:
        return [f"advice: {title}" for title in late if not scenario.kinds]
    expected = " ".join(("rank" + "s" * (len(scenario.ranks) > 1), ", ".join(map(str, scenario.ranks)), ""))
    wrong = []
    if headline and not (advice and advice[0][1].startswith(expected)):
        wrong.append(f"first advice: {advice[0][1] if advice else 'none'}")
    if "above 30%" in headline and expected.strip() not in headline:
        wrong.append(f"headline: {headline}")
    share = re.search(r"(\d+)%", headline)
    others = 1 - len(scenario.ranks) / scenario.size  # the share is a mean over all ranks, of which these wait
    cost = others * max((each["cost_share"] or 0.0 for each in found), default=0.0)
    if "communication is the bottleneck" in headline and share and 200 * cost > int(share[1]):
        wrong.append("headline: communication is the bottleneck")
    return wrong


def alerted(scenario: Scenario, alerts: dict[str, list[dict[str, Any]]], incidents: list[dict[str, Any]]) -> list[str]:
    """What is wrong in the alerts, pending ones too: an even job has none but on a true share, and none names a rank that is not at fault.

    A rank that dies of the fault of another is lost, too: no message is sent about an incident that another one explains.
    """
    died = {rank for one in incidents if one["kind"] == "rank_lost" and one["consequence_of"] for rank in one["ranks"]}
    every = [each for some in alerts.values() for each in some if not excused(scenario, each)]
    if not scenario.kinds:
        return [f"alert: {each['name']}" for each in every if each["name"] not in TRUE_SHARES]
    named = [(each["name"], each["labels"]["rank"]) for each in every if "rank" in each["labels"]]
    excused_of = {"RankLost": scenario.named | died}
    return [
        f"alert: {name} of rank {rank}" for name, rank in named if int(rank) not in excused_of.get(name, scenario.named)
    ]


def excused(scenario: Scenario, found: dict[str, Any]) -> bool:
    """Whether an alert or an incident is information on a long wait of a job that has such waits."""
    return scenario.rhythm and found["severity"] == "info"


def remembered(scenario: Scenario, began: float, incidents: list[dict[str, Any]]) -> list[str]:
    """What is wrong in the incidents: those of the fault name its ranks and its begin, and all others are their consequences or a true share."""
    incidents = [one for one in incidents if not excused(scenario, one)]
    # A rank that dies of the fault of another is none of those at fault.
    of_fault = [
        one
        for one in incidents
        if one["kind"] in scenario.kinds or (one["kind"] == "rank_lost" and not one["consequence_of"])
    ]
    others = [
        one for one in incidents if one not in of_fault and one["kind"] not in TRUE_KINDS and not one["consequence_of"]
    ]
    wrong = [f"incident: {one['kind']} {one['cause']} {one['ranks']}" for one in others]
    if not scenario.kinds:
        return wrong + [f"incident: {one['kind']} {one['ranks']}" for one in of_fault]
    named = {rank for one in of_fault for rank in one["ranks"]}
    wrong += [] if named == scenario.named else [f"incidents: ranks {sorted(named)}"]
    first = min((one["began_at"] for one in of_fault), default=began)
    # A straggler begins with the window in which it is late, a corruption with the check that shows it.
    return wrong + (
        []
        if began - EARLY_S < first < began + scenario.within_s
        else [f"incident: began {first - began:.0f} s after the fault"]
    )


def judge(scenario: Scenario, polls: list[Poll]) -> Outcome:
    """What the polls come to. Two culprits may be named in one verdict, or in two."""
    right, wrong = [], list[str]()
    for at_s, found in polls:
        named = {rank for kind, _, ranks in found if kind in scenario.kinds for rank in ranks}
        if scenario.lasts_s is None or at_s < scenario.lasts_s:
            right.append((at_s, named == scenario.named))
        elif named and at_s >= scenario.lasts_s + ENDS_S:
            wrong.append("a verdict after the fault's end")
        wrong += [
            f"{kind} {cause} {','.join(map(str, ranks))}"
            for kind, cause, ranks in found
            if kind not in scenario.kinds or not set(ranks) <= scenario.named
        ]
    first = next((n for n, (_, is_right) in enumerate(right) if is_right), None)
    if first is None:
        return Outcome(scenario, None, 0.0, tuple(dict.fromkeys(wrong)))
    later = [is_right for _, is_right in right[first:]]
    return Outcome(scenario, right[first][0], sum(later) / len(later), tuple(dict.fromkeys(wrong)))


def expected(scenario: Scenario) -> str:
    """The verdicts that are right."""
    return "/".join(sorted(scenario.kinds)) or "nothing"
