"""The list as a rule file for Prometheus, and as a ``PrometheusRule`` for its operator in Kubernetes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from commwatch.alerts.catalogue import Catalogue, duration
from commwatch.alerts.model import Record, Rule
from commwatch.alerts.text import to_go

#: Where the runbook stands; people who keep their own say so with ``--runbook-url``.
#: Every agent serves the runbook; this one is reached on its node.
RUNBOOK_URL = "http://localhost:9477/runbook"
GROUP = "commwatch"
_HEAD = "# Made by `commwatch alerts export` out of the one list; change that, or its thresholds, not this file.\n"


def runbook(url: str, name: str) -> str:
    """Where the section of an alert stands."""
    return f"{url}#{name.lower()}"


def prometheus(catalogue: Catalogue, runbook_url: str = RUNBOOK_URL) -> str:
    """A rule file for ``rule_files`` of Prometheus, 2.42 or later."""
    return _HEAD + dumped({"groups": _groups(catalogue, runbook_url)})


def kubernetes(
    catalogue: Catalogue,
    runbook_url: str = RUNBOOK_URL,
    name: str = "commwatch",
    namespace: str | None = None,
    labels: Mapping[str, str] | None = None,
) -> str:
    """The same groups as a ``PrometheusRule``, as ``prometheus_rule``."""
    return _HEAD + dumped(prometheus_rule(catalogue, runbook_url, name, namespace, labels))


def prometheus_rule(
    catalogue: Catalogue, runbook_url: str, name: str, namespace: str | None, labels: Mapping[str, str] | None
) -> dict[str, Any]:
    """The object itself.

    Args:
        namespace: where it is to be; ``None``: where it is applied.
        labels: by which the operator finds it, as its ``ruleSelector`` says.
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
    # One group: within one, rules are evaluated in order, so that alerts see what was recorded at the same moment.
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


class _Dumper(yaml.SafeDumper):
    """Texts of several lines stay readable, and what stands twice is written twice."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def dumped(value: object) -> str:
    """YAML for people: keys in their order, no line broken that was whole."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1 << 20)
