"""Reading the list: what it means, and what is said of a mistake: one line that names the entry and the key."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from commwatch_agent.notify.alert_rules import labels_by_series
from commwatch_alerts import catalogue
from commwatch_alerts.catalogue import CatalogueError, read, shipped
from commwatch_alerts.check import check
from commwatch_alerts.durations import duration, seconds
from commwatch_alerts.export import kubernetes, prometheus
from commwatch_alerts.model import Kind
from tests.helpers import examples

LIST = """
thresholds:
  much: {default: 0.3, low: 0, high: 1, unit: ratio, help: "too much"}
kinds:
  wide: {severity: info, opens_after: 5m, ends_after: 60s, runbook: TooMuch, help: "it is too much"}
records:
  - record: job:commwatch_comm_share_ratio:avg
    expr: avg by (job_id) (commwatch_comm_share_ratio)
alerts:
  - alert: TooMuch
    kind: wide
    above: much
    expr: job:commwatch_comm_share_ratio:avg > $much
    for: 1h5m
    keep_firing_for: 90s
    severity: warning
    summary: "{job_id}: {value:percent} > {$much:percent}"
    description: "[{exposed:percent}]"
    also: {exposed: avg by (job_id) (commwatch_exposed_comm_share_ratio)}
    also_on: [job_id]
"""
#: What is changed in it into what, and what the message must say.
MISTAKES = [
    ("thresholds:", "thresholds", "not valid YAML"),
    ("records:", "recrods:", "unknown key 'recrods'; did you mean records?"),
    (
        "job:commwatch_comm_share_ratio:avg > $much",
        '"a!\\nb"',
        r"not valid PromQL: unexpected character after '!': '\n'",
    ),
    ("low: 0,", "", "thresholds: much: lacks the key 'low'"),
    ("low: 0,", "low: none,", "thresholds: much: low: needs a number, not 'none'"),
    ("default: 0.3", "default: 1.3", "thresholds: much: needs a number from 0 to 1, not 1.3"),
    ("default: 0.3", "default: .nan", "thresholds: much: default: needs a number"),
    ("much: {", "much: {not_below: mcuh, ", "thresholds: much: not_below: unknown threshold 'mcuh'; known are much"),
    (
        "much: {",
        "more: {default: 0.4, low: 0, high: 1, unit: ratio, help: x}\n  much: {not_below: more, ",
        "thresholds: more (0.4, the default) must not be above much (0.3, the default)",
    ),
    ("much: {", "Much: {", "thresholds: Much: needs a name of lower-case letters"),
    ("much: {", "8080: {", "thresholds: 8080: needs a name of lower-case letters"),
    ('help: "too much"', "help: 7", "thresholds: much: help: needs a text"),
    ("record: job:commwatch_comm_share_ratio:avg", "record: share", "share: record: needs a name such as level:metric"),
    ("alert: TooMuch", "alert: too_much", "too_much: alert: needs a name such as CommShareHigh, not 'too_much'"),
    (
        "alert: TooMuch",
        "name: TooMuch",
        "alert 1: unknown key 'name'; known are alert, kind, variant, above, below, expr",
    ),
    ("alert: TooMuch\n    kind:", "kind:", "alert 1: lacks the key 'alert'"),
    ("default: 0.3", "default: true", "thresholds: much: default: needs a number, not true"),
    ("severity: warning", "severity: page", "TooMuch: severity: needs one of info, warning, critical, not 'page'"),
    ("severity: warning", "colour: red", "TooMuch: unknown key 'colour'"),
    ("    severity: warning\n", "", "TooMuch: lacks the key 'severity'"),
    ("for: 1h5m", "for: 5", "TooMuch: for: needs a duration such as 90s or 5m, not 5"),
    ("for: 1h5m", "for: 5x", "TooMuch: for: needs a duration"),
    ("for: 1h5m", "prometheus_only: maybe", "TooMuch: prometheus_only: needs true or false, not 'maybe'"),
    ("> $much", "> $mcuh", "TooMuch: expr: unknown threshold 'mcuh'; known are much"),
    ("{$much:percent}", "{$mcuh:percent}", "TooMuch: summary: unknown threshold 'mcuh'"),
    ("{$much:percent}", "{$much:metres}", "TooMuch: summary: unknown format 'metres'"),
    ("{value:percent} >", "{value} >", "TooMuch: summary: {value} needs a format"),
    ("{value:percent} >", "{values:percent} >", "TooMuch: summary: there is no number 'values'; put it into 'also'"),
    ("{value:percent} >", "{value:metres} >", "TooMuch: summary: unknown format 'metres'; known are percent"),
    ("[{exposed:percent}]", "[{exposed:percent}", "TooMuch: description: a clause has no end"),
    ("[{exposed:percent}]", "{exposed:percent}]", "TooMuch: description: ']' does not belong here"),
    ("[{exposed:percent}]", "{exposed:percent", "TooMuch: description: '{' does not belong here"),
    ("[{exposed:percent}]", "no number", "TooMuch: also: exposed: no text uses it"),
    ("also: {exposed:", "also: {value:", "TooMuch: also: 'value' is reserved for the number of 'expr'"),
    ("also_on: [job_id]", "also_on: job_id", "TooMuch: also_on: needs a list of labels"),
    ("also_on: [job_id]", "on: [job_id]", "TooMuch: unknown key 'True'"),
    ("    kind: wide\n", "", "TooMuch: lacks the key 'kind'"),
    ("kind: wide", "kind: tall", "TooMuch: kind: unknown 'tall'; known are wide"),
    ("kind: wide", "kind: wide\n    variant: Wide", "TooMuch: variant: needs a name of lower-case letters"),
    ("above: much", "above: mcuh", "TooMuch: above: unknown threshold 'mcuh'; known are much"),
    ("above: much", "below: 0.3", "TooMuch: below: needs the name of a threshold, not 0.3"),
    ("runbook: TooMuch", "runbook: TooLittle", "kinds: wide: runbook: there is no alert 'TooLittle'"),
    (
        "opens_after: 5m",
        "opens_after: soon",
        "kinds: wide: opens_after: needs a duration such as 90s or 5m, not 'soon'",
    ),
    ("ends_after: 60s", f"ends_after: {'9' * 400}s", "kinds: wide: ends_after: needs a duration"),
    ("ends_after: 60s", "ends: 60s", "kinds: wide: unknown key 'ends'; known are severity, opens_after, ends_after"),
    ("severity: info, opens", "severity: page, opens", "kinds: wide: severity: needs one of info, warning"),
    # -- what only a look at the expressions tells --
    ("avg by (job_id) (commwatch_comm", "avg by (job_id (commwatch_comm", "ratio:avg: expr: not valid PromQL"),
    ("(commwatch_comm_share_ratio)", "(commwatch_com_share_ratio)", "there is no metric 'commwatch_com_share_ratio'"),
    ("job:commwatch_comm_share_ratio:avg > $much", "job:x:y > $much", "TooMuch: expr: there is no metric 'job:x:y'"),
    ("avg by (job_id) (commwatch_exposed", "avg by (job) (commwatch_exposed", "no common label 'job_id'"),
    ("also_on: [job_id]", "also_on: [rank]", "TooMuch: also: exposed: it and the alert have no common label 'rank'"),
    ("{job_id}:", "{rank}:", "TooMuch: summary: the alert has no label 'rank'; it has job_id"),
    ("(commwatch_comm_share_ratio)", '(commwatch_comm_share_ratio{grup="x"})', "has no label 'grup'"),
    ("avg by (job_id) (commwatch_comm", "avg by (jobid) (commwatch_comm", "avg has no label 'jobid'"),
    ("job:commwatch_comm_share_ratio:avg > $much", "max_over_time(ups[5m:1m]) > $much", "there is no metric 'ups'"),
    ("> $much", "> on (group) commwatch_build_info", "the left of > has no label 'group'"),
]


def checked(text: str) -> catalogue.Catalogue:
    """A list, read and checked."""
    found = read(text)
    check(found, labels_by_series())
    return found


def refusal(text: str) -> str:
    """What is said of a wrong list; nothing of a right one."""
    try:
        checked(text)
    except CatalogueError as error:
        return str(error)
    return ""


def test_what_an_entry_means() -> None:
    """Thresholds stand in expressions and texts, durations are seconds."""
    found = checked(LIST)
    (rule,) = found.alerts
    assert (rule.expr, rule.for_s, rule.keep_firing_for_s) == ("job:commwatch_comm_share_ratio:avg > 0.3", 3900, 90)
    assert rule.summary == "{job_id}: {value:percent} > 30%"
    assert (rule.on, list(rule.also), rule.prometheus_only) == (("job_id",), ["exposed"], False)
    assert [(each.name, each.value) for each in found.thresholds] == [("much", 0.3)]
    assert (rule.kind, rule.variant, rule.above, rule.below) == ("wide", "", 0.3, None)
    assert found.kinds == {"wide": Kind("wide", "info", 300, 60, "it is too much", "TooMuch")}
    assert read(LIST, {"much": 0.4}).alerts[0].expr.endswith("> 0.4")
    assert read(LIST, {"much": 0.4}).alerts[0].above == 0.4


@pytest.mark.parametrize(("old", "new", "says"), MISTAKES)
def test_mistakes(old: str, new: str, says: str) -> None:
    """Each mistake is refused, in one line that names the entry and the key."""
    assert old in LIST
    with pytest.raises(CatalogueError) as refused:
        checked(LIST.replace(old, new, 1))
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_twins() -> None:
    """An alert may be there twice only with different severities."""
    entry = LIST[LIST.index("  - alert") :]
    with pytest.raises(CatalogueError, match=r"alerts: TooMuch \(warning\) is defined twice"):
        read(LIST + entry)
    assert len(read(LIST + entry.replace("severity: warning", "severity: critical")).alerts) == 2


@pytest.mark.parametrize("given", [{"much": 2.0}, {"much": float("nan")}, {"other": 0.5}])
def test_thresholds_that_are_set(given: dict[str, float]) -> None:
    """A threshold out of its range, or one that there is not, is refused by name."""
    with pytest.raises(CatalogueError, match=f"thresholds: .*{next(iter(given))}"):
        read(LIST, given)


@examples(300)
@given(st.data())
def test_any_change_is_read_or_refused(data: st.DataObject) -> None:
    """Whatever somebody types into the list, it is read or refused, never more than that."""
    at = data.draw(st.integers(0, len(LIST)))
    new = data.draw(st.text("{}[]():$,'\"-\n abe190~!*&%|>\x00é", max_size=6))
    assert "\n" not in refusal(LIST[:at] + new + LIST[at + data.draw(st.integers(0, 8)) :])


@pytest.mark.parametrize("text", ["", "7", "[]", "alerts: 7", "alerts: [7]", "thresholds: 7", "records: [{}]", "- a"])
def test_other_yaml(text: str) -> None:
    """YAML that is no list of alerts is refused."""
    with pytest.raises(CatalogueError):
        read(text)


def test_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where PyYAML has no libyaml, the list means the same."""
    fast = read(shipped("rules.yaml"))
    monkeypatch.setattr(catalogue, "_LOADER", yaml.SafeLoader)
    assert read(shipped("rules.yaml")) == fast


@given(st.integers(0, 10**6))
def test_durations(whole: int) -> None:
    """Seconds, written as people do, are the same seconds."""
    assert seconds(duration(whole)) == whole


@pytest.mark.parametrize("text", ["", "5", "m", "1.5h", "-5m", "5m1h", "5 m", "1d", "9" * 400 + "h", "٣s"])
def test_no_durations(text: str) -> None:
    """What is no duration is none."""
    assert seconds(text) is None


def test_kubernetes_has_the_same() -> None:
    """The PrometheusRule has the groups of the rule file, and what it was told beside."""
    found = read(shipped("rules.yaml"))
    for url in ("https://example.org/runbook", "file:///x"):
        rules = yaml.safe_load(prometheus(found, url))
        resource = yaml.safe_load(kubernetes(found, url, "mine", "monitoring", {"release": "prometheus"}))
        assert resource["spec"] == rules
        assert (resource["apiVersion"], resource["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
        assert resource["metadata"] == {"name": "mine", "namespace": "monitoring", "labels": {"release": "prometheus"}}
    assert yaml.safe_load(kubernetes(found))["metadata"] == {"name": "commwatch"}


def test_export_has_everything() -> None:
    """Every record and alert is exported, in order, and every alert has its severity, its texts and its place in the runbook."""
    found = read(shipped("rules.yaml"))
    (group,) = yaml.safe_load(prometheus(found, "https://example.org/r"))["groups"]
    rules = group["rules"]
    assert [rule["record"] for rule in rules if "record" in rule] == [record.name for record in found.records]
    alerts = [rule for rule in rules if "alert" in rule]
    assert [(rule["alert"], rule["labels"]) for rule in alerts] == [
        (rule.name, {"severity": rule.severity}) for rule in found.alerts
    ]
    for made, rule in zip(alerts, found.alerts, strict=True):
        assert made["annotations"]["runbook_url"] == f"https://example.org/r#{rule.name.lower()}"
        assert set(made["annotations"]) == {"summary", "description", "runbook_url"}
        assert seconds(made.get("for", "0s")) == rule.for_s
        assert seconds(made.get("keep_firing_for", "0s")) == rule.keep_firing_for_s
        assert not re.search(r"\$[a-z_]+ *[<>]", made["expr"])
