"""Rules through ``promtool``: checked, and evaluated over synthetic series."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from commwatch_alerts.catalogue import Catalogue, read, shipped
from commwatch_alerts.export import RUNBOOK_URL, prometheus, runbook
from commwatch_alerts.model import Record, Rule
from commwatch_alerts.text import render
from tests.alerts.cases import EVERY_S, Case
from tests.helpers import needs


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    needs(shutil.which("promtool"), "promtool")
    # What it evaluates is small: it need not collect garbage as often as a server does.
    env = {**os.environ, "GOGC": "400"}
    return subprocess.run(["promtool", *map(str, arguments)], env=env, capture_output=True, text=True, check=False)


def check(file: Path) -> None:
    """Prometheus takes a rule file, and its linter has nothing to say."""
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", file)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


def exported(directory: Path) -> Path:
    """Our list as a rule file."""
    file = directory / "rules.yaml"
    file.write_text(prometheus(read(shipped("rules.yaml"))), encoding="utf-8")
    return file


def evaluate(directory: Path, catalogue: Catalogue, cases: Sequence[Case]) -> None:
    """Have promtool evaluate the exported list over the series of all cases; what fires is what they say, text and all.

    Each alert has a rule file of its own: all rules over all series would take many times as long.
    """
    files = []
    for name in sorted({case.alert for case in cases}):
        only = _only(catalogue, name)
        rules = {rule.severity: rule for rule in only.alerts}
        (directory / f"{name}.rules.yaml").write_text(prometheus(only), encoding="utf-8")
        tests = [
            {
                "interval": f"{EVERY_S}s",
                "name": f"{name}: {case.why}",
                "input_series": [{"series": series, "values": values} for series, values in case.series.items()],
                "alert_rule_test": _looks(case, [rules[severity] for severity in case.severities]),
            }
            for case in cases
            if case.alert == name
        ]
        whole = {
            "rule_files": [str(directory / f"{name}.rules.yaml")],
            "evaluation_interval": f"{EVERY_S}s",
            "tests": tests,
        }
        files.append(directory / f"{name}.test.yaml")
        files[-1].write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
    done = promtool("test", "rules", *files)
    assert done.returncode == 0, done.stdout + done.stderr


def _only(catalogue: Catalogue, name: str) -> Catalogue:
    """The alerts of a name, with the records that they read."""
    alerts = tuple(rule for rule in catalogue.alerts if rule.name == name)
    return replace(catalogue, alerts=alerts, records=records_for(catalogue, str(alerts)))


def records_for(catalogue: Catalogue, reads: str) -> tuple[Record, ...]:
    """The records whose names are in a text, with those that they read themselves; to evaluate the others takes most of the time."""
    found: dict[str, Record] = {}
    while new := {each.name: each for each in catalogue.records if each.name in reads and each.name not in found}:
        found |= new
        reads = " ".join(each.expr for each in new.values())
    return tuple(each for each in catalogue.records if each.name in found)


def _looks(case: Case, firing: Sequence[Rule]) -> list[dict[str, Any]]:
    """When to look, and what there must be: nothing until it fires, and nothing at all where nothing is to."""
    if not firing:
        times = range(0, case.until_s, 60)
        return [{"eval_time": f"{at_s}s", "alertname": case.alert, "exp_alerts": []} for at_s in times]
    there, nothing = [_told(case, rule) for rule in firing], list[dict[str, Any]]()
    looks = {case.at_s: there}
    if case.at_s:
        looks[case.at_s - EVERY_S] = nothing
    if case.ends_s is not None:
        looks |= {case.ends_s - EVERY_S: there, case.ends_s: nothing}
    return [{"eval_time": f"{at_s}s", "alertname": case.alert, "exp_alerts": told} for at_s, told in looks.items()]


def _told(case: Case, rule: Rule) -> dict[str, Any]:
    """The alert as it must come, its texts rendered by us."""
    texts = {
        name: render(template, case.labels, case.value, case.also)
        for name, template in (("summary", rule.summary), ("description", rule.description))
    }
    texts["runbook_url"] = runbook(RUNBOOK_URL, rule.name)
    return {"exp_labels": {**case.labels, "severity": rule.severity}, "exp_annotations": texts}
