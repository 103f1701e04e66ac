"""The state machine of alerts: beside Prometheus over recorded series, and by hand where Prometheus has no say."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from commwatch_alerts.evaluator import AWAY_S, LEAST_WARM_S, OUTAGE_S, Evaluator
from commwatch_alerts.model import FIRING, PENDING, RESOLVED, Alert, Record, Rule
from commwatch_alerts.promql import UnsupportedExpression
from commwatch_alerts.series import Samples
from tests.alerts.recorded import INTERVAL_S, Recorded, agree, parsed
from tests.helpers import needs

WALL_S = 1_700_000_000.0


def rule(name: str = "High", expr: str = "share > 0.3", for_s: float = 0, keep_s: float = 0, **more: object) -> Rule:
    """A rule whose text is its name and value."""
    texts = {"severity": "warning", "summary": "", "description": "", **more}
    return Rule(name, expr, for_s, keep_s, **texts)  # type: ignore[arg-type]


def text(template: str, labels: Mapping[str, str], value: float, also: Mapping[str, float]) -> str:
    """A text that shows all that it was given."""
    return f"{template} {labels.get('rank')} {value:g} {dict(also)}" if template else ""


class Run:
    """An evaluator under the clocks of a test: one round every 15 seconds."""

    def __init__(
        self, *rules: Rule, records: Sequence[Record] = (), state: str | None = None, at_s: float = 0, wall_s: float = 0
    ) -> None:
        self.evaluator = Evaluator(rules, records, text)
        self.samples = Samples(self.evaluator.needs)
        self.at_s, self.wall_s = at_s, WALL_S + wall_s
        if state is not None:
            self.evaluator.restore(json.loads(state), self.at_s, self.wall_s)

    def round(self, **series: float) -> list[Alert]:
        """Samples by their name, or ``share`` by rank as ``r0``; what is active or resolved then."""
        named = {
            (f'share{{rank="{name[1:]}"}}' if name[0] == "r" and name[1:].isdigit() else name): value
            for name, value in series.items()
        }
        self.samples.add(self.at_s, {parsed(name): value for name, value in named.items()})
        found = self.evaluator.evaluate(self.at_s, self.wall_s, self.samples)
        self.at_s += INTERVAL_S
        self.wall_s += INTERVAL_S
        return found

    def states(self, values: Sequence[float | None]) -> list[str]:
        """The first letter of the state of the one alert, round by round; ``-``: there is none."""
        return [
            one[0].state[0] if (one := self.round(**({} if value is None else {"r0": value}))) else "-"
            for value in values
        ]

    def stopped(self) -> str:
        """What an agent that is killed now leaves."""
        return json.dumps(self.evaluator.state(), allow_nan=False)


# -- beside Prometheus ------------------------------------------------------------------------


def bumps(*parts: tuple[int, float | None]) -> list[float | None]:
    """Values that stay for so many steps each."""
    return [value for steps, value in parts for _ in range(steps)]


SHARES: Recorded = {
    'share{job_id="a",rank="0"}': bumps((4, 0.1), (20, 0.5), (1, 0.2), (5, 0.5), (10, 0.1), (3, 0.4), (17, 0.1)),
    'share{job_id="a",rank="1"}': bumps((10, None), (12, 0.31), (6, None), (9, 0.35), (23, 0.29)),
    'share{job_id="b",rank="0"}': [0.6 if step % 4 else 0.1 for step in range(60)],
    'share{job_id="b",rank="1"}': [math.nan if step % 11 == 0 else 0.4 for step in range(60)],
    'ops_total{job_id="a",rank="0"}': [float(step * 10) for step in range(20)]
    + [float((step - 20) * 10) for step in range(20, 60)],
    'ops_total{job_id="a",rank="1"}': [None] * 7 + [float(max(0, step - 25)) for step in range(53)],
}
SHAPES = [(for_s, keep_s) for for_s in (0, 15, 30, 60, 300) for keep_s in (0, 15, 60, 100)]


@pytest.mark.parametrize(("for_s", "keep_s"), SHAPES)
def test_firing_intervals(tmp_path: Path, for_s: float, keep_s: float) -> None:
    """Alerts are pending and firing at the very evaluations at which Prometheus has them so."""
    needs(shutil.which("promtool"), "promtool")
    rules = [
        rule("ShareHigh", "share > 0.3", for_s, keep_s),
        rule("ShareHigh", "share > 0.45", for_s, keep_s, severity="critical"),
        rule("JobHigh", "avg by (job_id) (share) > 0.3", for_s, keep_s),
        rule("Slow", "rate(ops_total[2m]) < 0.5", for_s, keep_s),
        rule("SlowRecorded", "job:ops:rate1m < 1 and on (job_id) share > 0.2", for_s, keep_s),
        rule("Silent", 'absent(share{job_id="a",rank="1"})', for_s, keep_s),
        rule("Always", "vector(1)", for_s, keep_s),
    ]
    records = [
        Record("job_rank:ops:rate1m", "rate(ops_total[1m])"),
        Record("job:ops:rate1m", "max by (job_id) (job_rank:ops:rate1m)"),
    ]
    assert agree(tmp_path, rules, records, SHARES).total() > 30


def test_disagreement_is_seen(tmp_path: Path) -> None:
    """The comparison with Prometheus fails where one of both has another rule."""
    needs(shutil.which("promtool"), "promtool")
    one = rule("ShareHigh", "share > 0.3", 30)
    with pytest.raises(AssertionError, match="FAILED"):
        agree(tmp_path, [one], [], SHARES, theirs=[rule("ShareHigh", "share > 0.3", 45)])


# -- by hand ----------------------------------------------------------------------------------


def test_for_at_its_edge() -> None:
    """An alert fires at the evaluation at which its condition has held for exactly ``for``, and not at the one before."""
    assert Run(rule(for_s=60)).states([0.5] * 6) == list("ppppff")
    assert Run(rule(for_s=61)).states([0.5] * 6) == list("pppppf")
    assert Run(rule(for_s=0)).states([0.5, 0.1]) == list("fr")


def test_one_checkpoint_step_fires_nothing() -> None:
    """A condition that holds for shorter than ``for``, again and again, never fires and never tells anybody."""
    assert set(Run(rule(for_s=60)).states([0.1, 0.5, 0.5, 0.5, 0.5] * 8)) == {"-", "p"}


def test_gap_while_firing() -> None:
    """One good step does not resolve an alert that is kept firing; the end of ``keep_firing_for`` does, with one notice."""
    assert Run(rule(keep_s=30)).states([0.5, 0.1, 0.5, 0.1, 0.1, 0.1, 0.1]) == list("fffffr-")


def test_times_and_texts() -> None:
    """An alert says when its condition began, when it fired and when it ended, what it is about, and the latest number."""
    run = Run(rule(for_s=15, summary="now"))
    pending, firing, resolved = (run.round(r0=value)[0] for value in (0.5, 0.6, 0.2))
    assert (pending.state, firing.state, resolved.state) == (PENDING, FIRING, RESOLVED)
    assert resolved == Alert(
        "High", {"alertname": "High", "severity": "warning", "rank": "0"}, {"summary": "now 0 0.6 {}", "description": ""},
        0.6, RESOLVED, active_at=WALL_S, fired_at=WALL_S + 15, resolved_at=WALL_S + 30,
    )  # fmt: skip
    assert pending.id == firing.id == resolved.id
    assert run.round(r0=0.5)[0].id != pending.id


def test_further_numbers() -> None:
    """Further numbers come from the element with the same labels; they are missing if there is none, or more than one."""
    also = {"exposed": "exposed", "limit": "limit", "all": "share"}
    run = Run(rule(summary="is", also=also, on=("rank",)))
    (alert,) = run.round(
        r0=0.5,
        **{
            'exposed{rank="0",x="y"}': 0.25,
            'exposed{rank="1"}': 0.5,
            'limit{rank="0",a="1"}': 1,
            'limit{rank="0",a="2"}': 2,
        },
    )
    assert alert.annotations["summary"] == "is 0 0.5 {'exposed': 0.25, 'all': 0.5}"


def test_link_to_the_runbook() -> None:
    """An alert leads to the section of its name where there is a runbook."""
    evaluator = Evaluator([rule(expr="vector(1)")], [], text, "https://runbook/#{}".format)
    (alert,) = evaluator.evaluate(0, WALL_S, Samples(evaluator.needs))
    assert alert.annotations["runbook_url"] == "https://runbook/#High"


def test_a_thousand_at_once() -> None:
    """A thousand alerts are a thousand: each once, through all states."""
    run = Run(rule(for_s=15))
    high = {f"r{n}": 0.5 for n in range(1000)}
    for expected in (PENDING, FIRING, FIRING):
        found = run.round(**high)
        assert len({alert.id for alert in found}) == len(found) == 1000
        assert {alert.state for alert in found} == {expected}
    assert {alert.state for alert in run.round(**dict.fromkeys(high, 0.0))} == {RESOLVED}
    assert run.round() == []


def test_one_rule_fails() -> None:
    """A rule that cannot be evaluated says why, keeps its alerts as they are, and stops no other."""
    broken = rule("Broken", "share * on () limit > 0.3")
    run = Run(broken, rule(), records=[Record("x:y", "share * on () share")])
    assert {alert.name for alert in run.round(r0=0.5, limit=1)} == {"Broken", "High"}
    assert run.evaluator.failing == {}
    found = run.round(r0=0.1, limit=1, **{'limit{a="b"}': 1})
    assert {alert.name: alert.state for alert in found} == {"Broken": FIRING, "High": RESOLVED}
    assert list(run.evaluator.failing) == ["Broken"]
    assert "many-to-many" in run.evaluator.failing["Broken"]
    run.round(r0=0.1, r1=0.1)
    assert list(run.evaluator.failing) == ["x:y"]


def test_two_alerts_of_one_name() -> None:
    """A rule whose alerts could not be told apart fails, as it does in Prometheus."""
    run = Run(rule(expr='{__name__=~"a|b"} > 0'))
    assert run.round(a=1, b=1) == []
    assert "two alerts" in run.evaluator.failing["High"]


def test_rules_for_prometheus_alone() -> None:
    """Rules that only Prometheus can judge are not even read."""
    alone = rule("Down", "up offset 5m == 0", prometheus_only=True)
    assert Run(alone, records=[Record("x", "nonsense(", prometheus_only=True)]).round() == []
    with pytest.raises(UnsupportedExpression, match="Down: offset"):
        Run(rule("Down", "up offset 5m == 0"))


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
def test_clock_is_set(step_s: float) -> None:
    """A wall clock that is set by an hour, forward or back, neither fires nor resolves anything; times shown stay in order of events."""
    run = Run(rule("Pending", "share > 0.3", 60), rule("Kept", "share > 0.4", 0, 60))
    run.round(r0=0.5)
    run.wall_s += step_s
    found = {alert.name: alert for alert in run.round(r0=0.35)}
    assert {name: alert.state for name, alert in found.items()} == {"Pending": PENDING, "Kept": FIRING}
    assert found["Pending"].active_at == WALL_S
    assert [alert.state for _ in range(3) for alert in run.round(r0=0.35)] == [
        PENDING,
        FIRING,
        PENDING,
        FIRING,
        FIRING,
        FIRING,
    ]
    assert {alert.name: alert.state for alert in run.round(r0=0.35)} == {"Pending": FIRING, "Kept": RESOLVED}


# -- over a restart ---------------------------------------------------------------------------


def killed(values: Sequence[float], away_s: float = 20, *rules: Rule) -> Run:
    """An agent that has begun anew, on another boot's clock, after one that saw these values was killed."""
    first = Run(*rules)
    first.states(values)
    last_s = first.wall_s - INTERVAL_S - WALL_S
    return Run(*rules, state=first.stopped(), at_s=7.0, wall_s=last_s + away_s)


def test_killed_while_pending() -> None:
    """The time for which a condition has held counts on after a restart, the time without an agent left out."""
    run = killed([0.5] * 3, 20, rule(for_s=75))  # held for 30 s
    assert run.states([0.5] * 5) == list("pppff")
    forgotten = killed([0.5] * 3, OUTAGE_S + 1, rule(for_s=75))
    assert forgotten.states([0.5] * 6) == list("pppppf")


def test_killed_while_pending_and_over_since() -> None:
    """A pending alert whose condition has ended meanwhile goes without a notice, once that is known."""
    run = killed([0.5] * 3, 20, rule(for_s=75))
    assert run.states([0.1] * 6) == list("pppp--")


def test_killed_while_firing() -> None:
    """A firing alert is the same one after a restart, fires on, and is resolved with a notice when it is over."""
    first = Run(rule())
    (before,) = first.round(r0=0.5)
    run = Run(rule(), state=first.stopped(), at_s=3.0, wall_s=200)
    (after,) = run.round(r0=0.6)
    assert (after.id, after.state, after.fired_at) == (before.id, FIRING, before.fired_at)
    warm = round(LEAST_WARM_S / INTERVAL_S)
    assert run.states([0.6] * warm + [0.1, 0.1]) == [*"f" * warm, "r", "-"]


def test_long_away() -> None:
    """A firing alert that nobody has looked at for minutes is over, with a notice: its job may have ended days ago."""
    run = killed([0.5], AWAY_S + 1, rule())
    assert run.states([0.1, 0.1]) == ["r", "-"]


def test_firing_through_the_warm_up() -> None:
    """What fired before a restart is not resolved because windows are short: it is judged once they are as long as its rule's."""
    ranged = rule(expr="job:ops:rate < 1 and on () max_over_time(share[2m]) > 0")
    records = [Record("job:ops:rate", "rate(ops[5m])")]
    first = Run(ranged, records=records)
    for step in range(3):
        alerts = first.round(ops=step, r0=1)
    assert [alert.state for alert in alerts] == [FIRING]
    again = Run(ranged, records=records, state=first.stopped(), wall_s=60)
    states = [alert.state for _ in range(22) for alert in again.round()]
    assert states == [FIRING] * 20 + [RESOLVED]  # at 300 s
    still = Run(ranged, records=records, state=first.stopped(), wall_s=60)
    assert {alert.state for step in range(40) for alert in still.round(ops=step, r0=1)} == {FIRING}


def test_kept_firing_over_a_restart() -> None:
    """The time for which an alert is kept firing goes on while no agent is there."""
    run = killed([0.5, 0.1], 100, rule(keep_s=170))
    assert run.states([0.1] * 7) == list("fffffr-")  # 100 s away, 75 s here


def test_rule_that_is_no_more() -> None:
    """A firing alert whose rule has been taken from the list is resolved with a notice, a pending one just goes."""
    first = Run(rule(), rule("Slow", for_s=60))
    first.round(r0=0.5)
    run = Run(rule("Other"), state=first.stopped(), wall_s=60)
    assert [(alert.name, alert.state, alert.resolved_at) for alert in run.round()] == [("High", RESOLVED, WALL_S + 60)]
    assert run.round() == []


def test_state_of_a_state() -> None:
    """What was taken up is what would be left again, before any round and after it."""
    first = Run(rule(), rule("Slow", for_s=60))
    first.round(r0=math.inf)
    state = first.stopped()
    second = Run(rule(), rule("Slow", for_s=60), state=state, at_s=40, wall_s=0)
    assert json.loads(second.stopped())["active"] == json.loads(state)["active"]
    second.round(r0=math.inf)
    assert json.loads(second.stopped())["active"] == json.loads(state)["active"]
