"""The one list of alerts: every one fires where it must and is silent where it must not, by Prometheus's own judgement."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from commwatch_agent.notify.alert_rules import labels_by_series
from commwatch_alerts.catalogue import Catalogue, read, shipped
from commwatch_alerts.check import check as check_list
from commwatch_alerts.export import prometheus
from commwatch_alerts.model import Rule
from commwatch_alerts.text import to_go
from tests.alerts.cases import CASES, MANY, RANK, THRESHOLDS, Case, gauge, series
from tests.alerts.impatient import impatient
from tests.alerts.promtool import check, evaluate, promtool
from tests.helpers import examples, needs

LIST = read(shipped("rules.yaml"))
NAMES = sorted({rule.name for rule in LIST.alerts})


def written(directory: Path, text: str) -> Path:
    """A rule file."""
    (directory / "rules.yaml").write_text(text, encoding="utf-8")
    return directory / "rules.yaml"


@pytest.mark.parametrize("first", [0, 1, 2])
def test_every_case(tmp_path: Path, first: int) -> None:
    """Each alert fires just above its threshold and when its ``for`` is over, not before, and its texts are those that we render."""
    names = NAMES[first::3]
    evaluate(tmp_path, read(shipped("rules.yaml"), THRESHOLDS), [case for case in CASES if case.alert in names])


def test_cases_are_complete() -> None:
    """There is a case in which each alert of the list fires at each severity, and one in which it does not."""
    everything = {(rule.name, rule.severity) for rule in LIST.alerts}
    assert {(case.alert, severity) for case in CASES for severity in case.severities} == everything
    silent = {
        (name, severity)
        for name, severity in everything
        for case in CASES
        if case.alert == name and severity not in case.severities
    }
    assert silent == everything


def test_metrics_and_labels_exist() -> None:
    """The list names only series that agents serve, labels that those have."""
    check_list(LIST, labels_by_series())


def test_every_threshold_is_used() -> None:
    """A threshold that no rule has would be a setting without effect."""
    used = set(re.findall(r"\$([a-z_]+)", shipped("rules.yaml")))
    assert {threshold.name for threshold in LIST.thresholds} == used
    assert all(threshold.low <= threshold.default <= threshold.high for threshold in LIST.thresholds)


@pytest.mark.parametrize("extreme", ["default", "low", "high"])
def test_prometheus_takes_it(tmp_path: Path, extreme: str) -> None:
    """promtool's linter has nothing to say, whatever the thresholds are."""
    values = {threshold.name: getattr(threshold, extreme) for threshold in LIST.thresholds}
    check(written(tmp_path, prometheus(read(shipped("rules.yaml"), values))))


def test_changed_threshold(tmp_path: Path) -> None:
    """A threshold that is set moves the edge, in the expression and in the text."""
    changed = read(shipped("rules.yaml"), {"comm_share": 0.4})
    both = [
        Case(
            "CommShareHigh",
            "above",
            gauge("comm_share_ratio", 0.401, **RANK),
            ("warning",),
            300,
            {"job_id": "j"},
            0.401,
        ),
        Case("CommShareHigh", "below", gauge("comm_share_ratio", 0.4, **RANK)),
    ]
    evaluate(tmp_path, changed, both)
    assert "more than 40%." in changed.alerts[0].description


def test_keeps_firing(tmp_path: Path) -> None:
    """After its condition has ended an alert stays for ``keep_firing_for``, so one good minute does not resolve it."""
    there = series("commwatch_comm_share_ratio", f"0.5x40 0.1x{MANY}", **RANK)
    evaluate(
        tmp_path, LIST, [Case("CommShareHigh", "kept", there, ("warning",), 300, {"job_id": "j"}, 0.5, ends_s=915)]
    )


def test_recorded_job(tmp_path: Path) -> None:
    """Of a recorded job that waits for its link, is freed and loses a rank, Prometheus raises the bottleneck and the loss, and no other alert."""
    recorded = (Path(__file__).parents[1] / "fixtures" / "alerts" / "two_ranks.txt").read_text(encoding="utf-8")
    lines = [line.split(" ", 1) for line in recorded.splitlines() if not line.startswith("#")]
    file = written(tmp_path, prometheus(read(impatient(), THRESHOLDS)))
    fired = 'group by (alertname) (count_over_time(ALERTS{alertstate="firing"}[12m]))'
    expected = ("BusBandwidthLow", "CommShareCritical", "CommShareHigh", "ExposedCommHigh", "RankLost")
    samples = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in expected]
    test = {
        "interval": "15s",
        "input_series": [{"series": series, "values": values} for series, values in lines],
        "promql_expr_test": [{"expr": fired, "eval_time": "11m", "exp_samples": samples}],
    }
    whole = {"rule_files": [str(file)], "evaluation_interval": "15s", "tests": [test]}
    (tmp_path / "test.yaml").write_text(json.dumps(whole))
    done = promtool("test", "rules", tmp_path / "test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


AWKWARD = 'a"b\\c{{ $value }}\n{d}[e] é $1 %s'


def test_awkward_label_values(tmp_path: Path) -> None:
    """Quotes, braces, newlines and signs in a label's value come through as they are, and find their further numbers."""
    about = {"job_id": AWKWARD, "rank": "0"}
    there = gauge("comm_share_ratio", 0.42, **about) | gauge("exposed_comm_share_ratio", 0.25, **about)
    other = gauge("exposed_comm_share_ratio", 0.5, job_id="other", rank="0")
    case = Case(
        "CommShareHigh", "awkward", there | other, ("warning",), 300, {"job_id": AWKWARD}, 0.42, {"exposed": 0.25}
    )
    evaluate(tmp_path, LIST, [case])


NUMBERS = [
    0.0,
    1.0,
    -1.0,
    0.5,
    12.5,
    999.0,
    1000.0,
    59.99,
    60.0,
    3599.0,
    3601.0,
    90061.0,
    1e-3,
    3.3e-7,
    123456.0,
    1.5e9,
    -7e12,
    1e18,
    12345678.0,
]
FORMS = "{value:percent} {value:seconds} {value:bytes} {value:number}[ of {rank}][ or {other:bytes}][; {name}] {other:seconds}."


@pytest.mark.parametrize("known", [True, False])
def test_numbers(tmp_path: Path, known: bool) -> None:
    """Each format makes the same text here and in Prometheus, of numbers large and small; clauses are left out alike."""
    rule = Rule(
        "Number",
        "commwatch_number",
        0,
        0,
        "info",
        summary=FORMS,
        description="{n}: " + FORMS,
        also={"other": "commwatch_other"},
        on=("n",),
    )
    cases = []
    for n, value in enumerate([*NUMBERS, float("inf"), float("nan")]):
        labels = {"n": str(n), "rank": "3" if n % 2 else ""}
        said = {"inf": "+Inf", "nan": "NaN"}.get(str(value), repr(value))
        there = series("commwatch_number", f"{said} {said}", n=str(n), **({"rank": "3"} if n % 2 else {}))
        there |= series("commwatch_other", f"{said} {said}", n=str(n) if known else "x", instance="b")
        shown = {"instance": "a:9477", "job": "commwatch", **{key: text for key, text in labels.items() if text}}
        cases.append(Case("Number", str(value), there, ("info",), 0, shown, value, {"other": value} if known else {}))
    evaluate(tmp_path, Catalogue((), (rule,), ()), cases)
    assert "query" in to_go(rule.summary, rule)


_SIGNS = st.text(st.characters(codec="utf-8", exclude_characters="{}[]", exclude_categories=("C", "Z")) | st.just(" "))
_FIELDS = st.sampled_from(["{value:percent}", "{n}", "{rank}", "{absent}", "{other:number}", "{gone:seconds}"])
_CLAUSE = st.lists(_SIGNS | _FIELDS, max_size=4).map("".join)
_TEMPLATE = st.lists(_CLAUSE | _CLAUSE.map("[{}]".format), min_size=1, max_size=5).map("".join)


@settings(examples(5), phases=[Phase.generate])  # to shrink what failed takes longer than to read it
@given(st.lists(_TEMPLATE.filter(str.strip), min_size=20, max_size=20))
def test_any_template(tmp_path_factory: pytest.TempPathFactory, templates: list[str]) -> None:
    """Whatever signs, fields and clauses a template has, Prometheus makes the text of it that we do."""
    also = {"other": "commwatch_other", "gone": "commwatch_gone"}
    rules = [
        Rule(f"T{n}", "commwatch_x", 0, 0, "info", summary=text, description=text, also=also, on=("n",))
        for n, text in enumerate(templates)
    ]
    labels = {"instance": "a:9477", "job": "commwatch", "n": "1", "rank": "0"}
    there = gauge("x", 0.42, n="1", rank="0") | gauge("other", 7, n="1") | gauge("gone", 8, n="2")
    cases = [Case(rule.name, rule.summary, there, ("info",), 0, labels, 0.42, {"other": 7.0}) for rule in rules]
    evaluate(tmp_path_factory.mktemp("any"), Catalogue((), tuple(rules), ()), cases)


def test_one_message_for_an_agent_that_is_gone() -> None:
    """Alertmanager holds ``AgentDown`` back while ``AgentGone`` fires for the same agent: the labels that must be equal are on both."""
    (rule,) = (
        each
        for each in yaml.safe_load(shipped("alertmanager.yml"))["inhibit_rules"]
        if each["source_matchers"] == ["alertname = AgentGone"]
    )
    assert rule["target_matchers"] == ["alertname = AgentDown"]
    assert rule["equal"] == ["job", "instance"]
    for name in ("AgentGone", "AgentDown"):
        firing = [case.labels.keys() for case in CASES if case.alert == name and case.severities]
        assert firing
        assert all(labels >= set(rule["equal"]) for labels in firing)


def test_sample_configuration() -> None:
    """Alertmanager takes the configuration that we ship, and routes each severity to its receiver."""
    needs(shutil.which("amtool"), "amtool")
    file = Path(__file__).parents[2] / "alerts" / "commwatch_alerts" / "alertmanager.yml"

    def amtool(*arguments: str | Path) -> str:
        done = subprocess.run(["amtool", *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "SUCCESS" in amtool("check-config", file)
    for severity, receiver in (("critical", "pager"), ("warning", "chat"), ("info", "log")):
        routed = amtool("config", "routes", "test", f"--config.file={file}", f"severity={severity}", "alertname=X")
        assert routed.split() == [receiver]
    text = file.read_text(encoding="utf-8")
    for pattern in re.findall(r'alertname =~ "([^"]+)"', text) + re.findall(r"alertname = (\w+)", text):
        for part in pattern.split("|"):
            assert any(re.fullmatch(part, name) for name in NAMES), part
