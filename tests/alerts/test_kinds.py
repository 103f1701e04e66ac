"""Kinds of incidents: which there are, which alerts belong to them, and what settings change."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml

from commwatch_agent.text.units import IN_TEXTS
from commwatch_alerts.catalogue import CatalogueError, read, shipped
from commwatch_alerts.export import prometheus
from commwatch_alerts.model import INFO, SEVERITIES, WARNING, KindSettings
from commwatch_alerts.text import render
from tests.alerts.promtool import promtool

LIST = read(shipped("rules.yaml"))
#: As in the file, before thresholds are filled in.
ENTRIES = yaml.load(shipped("rules.yaml"), yaml.CSafeLoader)["alerts"]
KINDS = {
    "hang", "stalled", "waiting", "desync", "rank_lost", "straggler", "uneven_work", "comm_bound", "exposed_comm", "slow_link", "link_saturated",
    "bandwidth_low", "corruption", "nccl_fault", "gpu_fault", "gpu_underused", "network_fault", "init_incomplete", "capture_incomplete", "agent_fault",
}  # fmt: skip


def test_closed_list() -> None:
    """Every kind that the product knows has an entry, and there is no other."""
    assert set(LIST.kinds) == KINDS


def test_durations() -> None:
    """An incident opens no later than the first of its alerts fires, and goes on for a minute or more after its condition."""
    for kind in LIST.kinds.values():
        rows = [rule.for_s for rule in LIST.rows(kind.name)]
        assert kind.opens_after_s is not None or rows, kind.name
        assert (kind.opens_after_s or 0) <= min(rows, default=math.inf), kind.name
        assert kind.ends_after_s >= 60, kind.name


def test_thresholds_are_those_of_the_expression() -> None:
    """The agent compares with the same threshold as Prometheus: the expression has it on the right side of the comparison."""
    for entry in ENTRIES:
        for key, sign in (("above", ">"), ("below", "<")):
            if key in entry:
                assert f"{sign} ${entry[key]}" in entry["expr"], entry["alert"]
        assert not {"above", "below"} & set(entry) or not entry.get("prometheus_only"), entry["alert"]


def test_worse_rows_have_higher_thresholds() -> None:
    """Of alerts with one name and variant, which differ by severity, the worse one comes later and has the higher threshold."""
    found: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for rule in LIST.alerts:
        found.setdefault((rule.name, rule.variant), []).append((SEVERITIES.index(rule.severity), rule.above or 0.0))
    several = [rows for rows in found.values() if len(rows) > 1]
    assert several
    assert all(rows == sorted(rows) for rows in several)


def test_which_rows_hold() -> None:
    """A condition has the alerts of its kind and variant whose threshold its number exceeds."""

    def holding(kind: str, variant: str, value: float) -> list[tuple[str, str]]:
        return [(row.name, row.severity) for row in LIST.rows(kind) if row.holds(variant, value)]

    assert holding("comm_bound", "", 0.3) == []
    assert holding("comm_bound", "", 0.42) == [("CommShareHigh", "warning")]
    assert holding("comm_bound", "", 0.6) == [("CommShareHigh", "warning"), ("CommShareCritical", "critical")]
    assert holding("comm_bound", "quiet", 0.6) == [("CommShareHigh", "info"), ("CommShareCritical", "info")]
    assert holding("comm_bound", "idle_links", 0.05) == [("LinkUnderused", "info")]
    assert holding("stalled", "", 70) == [("CollectiveStalled", "warning")]
    assert holding("desync", "", 0) == [("CollectiveDesync", "critical")]
    assert holding("bandwidth_low", "own_best", 0.4) == [("EfficiencyDropped", "warning")]
    assert holding("bandwidth_low", "bus", 1e9) == []  # no floor is set
    assert holding("agent_fault", "", 0) == [("CollectorDown", "warning")]
    names = {rule.name for rule in LIST.alerts if rule.kind == "agent_fault"}
    assert names == {"CollectorDown", "AgentGone", "AgentDown"}


def test_disabled() -> None:
    """A disabled kind has no alerts, here and in Prometheus; the others stay."""
    found = read(shipped("rules.yaml"), None, {"straggler": KindSettings(enabled=False)})
    assert not found.kinds["straggler"].enabled
    assert found.rows("straggler") == ()
    assert found.alerts == tuple(rule for rule in LIST.alerts if rule.kind != "straggler")
    assert found.records == LIST.records
    assert "StragglerAcrossNodes" not in prometheus(found)


def test_capped_severity() -> None:
    """A kind and its alerts are no worse than the settings allow; of two that differ only by a threshold the lower one stays."""
    given = {name: KindSettings(severity=WARNING) for name in ("hang", "stalled", "waiting", "comm_bound")}
    found = read(shipped("rules.yaml"), None, given)
    assert (found.kinds["hang"].severity, found.kinds["waiting"].severity) == ("warning", "info")
    assert {rule.severity for rule in found.alerts if rule.kind == "hang"} == {"warning"}
    assert [(rule.severity, rule.above) for rule in found.rows("stalled")] == [("warning", 60)]
    assert [(rule.name, rule.severity, rule.variant) for rule in found.rows("comm_bound")][:4] == [
        ("CommShareHigh", "warning", ""),
        ("CommShareHigh", "info", "quiet"),
        ("CommShareCritical", "warning", ""),
        ("CommShareCritical", "info", "quiet"),
    ]
    assert [rule for rule in found.alerts if rule.kind not in given] == [
        rule for rule in LIST.alerts if rule.kind not in given
    ]


def test_duration_of_ones_own() -> None:
    """The duration of the settings is that of the kind and of each of its alerts, here and in Prometheus."""
    found = read(shipped("rules.yaml"), None, {"comm_bound": KindSettings(for_s=90)})
    assert {rule.for_s for rule in found.rows("comm_bound")} == {90}
    assert {rule.for_s for rule in found.alerts if rule.kind == "comm_bound"} == {90}
    exported = yaml.safe_load(prometheus(found))["groups"][0]["rules"]
    assert {rule["for"] for rule in exported if rule.get("alert", "").startswith("CommShare")} == {"1m30s"}
    at_once = read(shipped("rules.yaml"), None, {"comm_bound": KindSettings(for_s=0)})
    assert {rule.for_s for rule in at_once.rows("comm_bound")} == {0}


@pytest.mark.parametrize("settings", [KindSettings(severity=INFO), KindSettings(for_s=0), KindSettings(enabled=False)])
def test_prometheus_takes_it(tmp_path: Path, settings: KindSettings) -> None:
    """Prometheus takes the list whatever the settings of kinds are."""
    file = tmp_path / "rules.yaml"
    file.write_text(prometheus(read(shipped("rules.yaml"), None, dict.fromkeys(LIST.kinds, settings))))
    done = promtool("check", "rules", "--lint=none", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_unknown_kind() -> None:
    """A kind in the settings that does not exist is refused, with those that do."""
    with pytest.raises(CatalogueError, match="kinds: unknown 'hangs'; did you mean hang"):
        read(shipped("rules.yaml"), None, {"hangs": KindSettings()})


@pytest.mark.parametrize(
    ("template", "value", "text"),
    [
        ("{value:percent}", 0.5327, "53%"),
        ("{value:percent}", 0.0042, "0.4%"),
        ("{value:seconds}", 36.524318, "36.5 s"),
        ("{value:seconds}", 754.4, "12m34s"),
        ("{value:seconds}", 0.01234, "12.3 ms"),
        ("{value:bytes}/s", 1.23456e9, "1.23 GB/s"),
        ("{value:number}", 12345.0, "12345"),
    ],
)
def test_rounded_for_people(template: str, value: float, text: str) -> None:
    """Numbers of the agent's messages have no more digits than people read."""
    assert render(template, {}, value, {}, IN_TEXTS) == text
