"""Export the list as a rule file for Prometheus, or as a ``PrometheusRule`` for its operator in Kubernetes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from commwatch_alerts.catalogue import Catalogue
from commwatch_alerts.durations import duration
from commwatch_alerts.model import Record, Rule
from commwatch_alerts.text import to_go

#: Default URL of the runbook: every agent serves it, this one on the reader's host. ``--runbook-url`` sets another.
RUNBOOK_URL = "http://localhost:9477/runbook"
GROUP = "commwatch"
_HEAD = "# Made by `commwatch alerts export`. Do not edit; change the list of alerts or its thresholds instead.\n"


def runbook(url: str, name: str) -> str:
    """Return the URL of an alert's section in the runbook."""
    return f"{url}#{name.lower()}"


def prometheus(catalogue: Catalogue, runbook_url: str = RUNBOOK_URL) -> str:
    """Return a rule file for ``rule_files`` of Prometheus 2.42 or later."""
    return _HEAD + dumped({"groups": _groups(catalogue, runbook_url)})


def kubernetes(
    catalogue: Catalogue,
    runbook_url: str = RUNBOOK_URL,
    name: str = "commwatch",
    namespace: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> str:
    """Return the ``PrometheusRule`` of ``prometheus_rule`` as YAML."""
    return _HEAD + dumped(prometheus_rule(catalogue, runbook_url, name, namespace, labels))


def prometheus_rule(
    catalogue: Catalogue, runbook_url: str, name: str, namespace: str | None, labels: Mapping[str, str] | None
) -> dict[str, Any]:
    """Return the list as a ``PrometheusRule`` object.

    Args:
        namespace: namespace of the object; ``None``: the namespace that it is applied in.
        labels: labels that match the operator's ``ruleSelector``.
    """
    metadata: dict[str, Any] = {"name": name}
    if namespace is not None:
        metadata["namespace"] = namespace
    if labels:
        metadata["labels"] = dict(labels)
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": metadata,
        "spec": {"groups": _groups(catalogue, runbook_url)},
    }


def _groups(catalogue: Catalogue, runbook_url: str) -> list[dict[str, Any]]:
    # One group, because its rules are evaluated in order, so that alerts see records of their own moment.
    rules = [_record(record) for record in catalogue.records]
    rules += [_alert(rule, runbook_url) for rule in catalogue.alerts]
    return [{"name": GROUP, "rules": rules}]


def _record(record: Record) -> dict[str, Any]:
    return {"record": record.name, "expr": record.expr}


def _alert(rule: Rule, runbook_url: str) -> dict[str, Any]:
    made: dict[str, Any] = {"alert": rule.name, "expr": rule.expr}
    if rule.for_s:
        made["for"] = duration(rule.for_s)
    if rule.keep_firing_for_s:
        made["keep_firing_for"] = duration(rule.keep_firing_for_s)
    made["labels"] = {"severity": rule.severity}
    made["annotations"] = {
        "summary": to_go(rule.summary, rule),
        "description": to_go(rule.description, rule),
        "runbook_url": runbook(runbook_url, rule.name),
    }
    return made


#: Numbers and bools of other YAML readers, such as kubectl, that PyYAML takes for text: 1e3, 08, 0o17, y.
_AMBIGUOUS = re.compile(r"[-+]?(?:0o[0-7]+|\.?[\d_.]+(?:[eE][-+]?[\d_]+)?)|[yYnN]")


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block, ambiguous text in quotes, and repeated values in full (no YAML aliases)."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def dumped(value: object) -> str:
    """Return YAML for people: keys in their order, lines not wrapped."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
