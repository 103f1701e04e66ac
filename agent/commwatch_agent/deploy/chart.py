"""The parts of the Helm chart that come from the templates of ``commwatch manifest k8s``, the list of alerts and the dashboards.

``make chart`` writes them beside the chart's own files: ``python -m commwatch_agent.deploy.chart deploy/helm/commwatch``.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from commwatch_agent.config import NOT_LABELS, SETTINGS
from commwatch_agent.deploy.kubernetes import CHART_ONLY, FIELD, templates
from commwatch_alerts.catalogue import RULES, Catalogue, read, shipped
from commwatch_alerts.export import RUNBOOK_URL, dumped, prometheus_rule
from commwatch_dashboards.export import plain

_FIELDS = '{{- $f := include "commwatch.fields" . | fromJson }}\n'
_END = "{{- end }}\n"
_HEAD = "{{- /* Made by `make chart` from the templates in agent/commwatch_agent/deploy. */}}\n"
#: When a kind is part of the release, beside the mode.
_WANTED = {
    ("sidecar", "Job"): ".Values.trainer.enabled",
    ("sidecar", "PodMonitor"): ".Values.podMonitor.enabled",
    ("sidecar", "NetworkPolicy"): ".Values.networkPolicy.enabled",
    ("sidecar", "PersistentVolumeClaim"): ".Values.history.size",
    ("daemonset", "ServiceMonitor"): '.Values.serviceMonitor.enabled (not (include "commwatch.loopback" .))',
    # Policies do not apply to the node's network.
    ("daemonset", "NetworkPolicy"): ".Values.networkPolicy.enabled (not .Values.hostNetwork)",
}
#: Fields that may be empty; a line with an empty one is left out.
_OPTIONAL = {
    *(
        "attach_node",
        "ca_file",
        "config",
        "connection",
        "dns_policy",
        "gpus",
        "healthz",
        "history_claim",
        "host",
        "host_network",
        "insecure",
    ),
    *(
        "node_field",
        "peer_name",
        "peers",
        "readyz",
        "require_token",
        "runtime_class",
        "secret_group",
        "state_volume",
        "tls_cert",
        "tls_key",
    ),
    *("token_file", "token_folder", "token_mode", "token_secret"),
}

#: Thresholds in the list of alerts.
_IN_TEXT, _THRESHOLD = re.compile(r"\{\$([a-z][a-z0-9_]*):percent\}"), re.compile(r"\$([a-z][a-z0-9_]*)")

#: Settings that follow from other values of the chart, or from its folders.
OF_THE_CHART = ("dir", "state", "node", "port", "token_file", "tls_cert", "tls_key")


def files(schema: str) -> dict[str, str]:
    """Return the text of each file by its path in the chart.

    Args:
        schema: of the values, as JSON; without that of the agents' settings.
    """
    catalogue = read(shipped(RULES))
    whole = schema.replace('"settings": {}', f'"settings": {_settings_schema(catalogue)}')
    made = {"values.schema.json": whole, "files/rules.yaml": _rules(shipped(RULES))}
    made |= {f"files/{name}": text for name, text in plain(RUNBOOK_URL).items()}
    for mode in ("sidecar", "daemonset"):
        for text in templates(mode):
            kind = re.findall(r"^kind: (\w+)$", text, re.MULTILINE)[0]
            condition = f'eq .Values.mode "{mode}"'
            if wanted := _WANTED.get((mode, kind)):
                condition = f"and ({condition}) {wanted}"
            body = "".join(map(_line, text.splitlines(keepends=True)))
            made[f"templates/{mode}-{kind.lower()}.yaml"] = f"{_HEAD}{{{{- if {condition} }}}}\n{_FIELDS}{body}{_END}"
    return made


def _settings_schema(catalogue: Catalogue) -> str:
    """Return the schema of the agents' settings as JSON, with the names and ranges of thresholds and the names of kinds."""
    found = {key: each.kind.schema for key, each in SETTINGS.items() if key not in OF_THE_CHART}
    limits = {each.name: {"type": "number", "minimum": each.low, "maximum": each.high} for each in catalogue.thresholds}
    found["thresholds"] = {"type": "object", "additionalProperties": False, "properties": limits}
    found["kinds"] = {**found["kinds"], "propertyNames": {"enum": list(catalogue.kinds)}}
    names = found["labels"]["propertyNames"]
    taken = sorted({*names["not"]["enum"], *NOT_LABELS})  # the agent has its settings from a file
    found["labels"] = {**found["labels"], "propertyNames": {**names, "not": {"enum": taken}}}
    lines = ",\n".join(f"        {json.dumps(key)}: {json.dumps(each)}" for key, each in found.items())
    return f'{{\n      "type": "object", "additionalProperties": false, "properties": {{\n{lines}\n      }}\n    }}'


def _rules(text: str) -> str:
    """Return the list of alerts as YAML for ``templates/rules.yaml``, which applies thresholds and kinds of the settings as agents do.

    ``@NAME@`` is a threshold in an expression, ``@NAME:percent@`` in a text. Alerts also have ``kind`` and ``variant``. ``not_below`` has
    thresholds with those that must not be above them.
    """
    catalogue = read(_THRESHOLD.sub(r"@\1@", _IN_TEXT.sub(r"@\1:percent@", text)))
    (group,) = prometheus_rule(catalogue, RUNBOOK_URL, "", None, None)["spec"]["groups"]
    records, alerts = group["rules"][: len(catalogue.records)], group["rules"][len(catalogue.records) :]
    alerts = [
        {**made, "kind": rule.kind, "variant": rule.variant}
        for made, rule in zip(alerts, catalogue.alerts, strict=True)
    ]
    defaults = {each.name: each.default for each in catalogue.thresholds}
    pairs = {each.name: each.not_below for each in catalogue.thresholds if each.not_below is not None}
    whole = {"thresholds": defaults, "not_below": pairs, "rules": [*records, *alerts]}
    return "# Made by `make chart`.\n" + dumped(whole)


def _line(line: str) -> str:
    """Return a line of a template for Helm."""
    if CHART_ONLY in line:
        return line
    filled = FIELD.sub(lambda found: f"{{{{ toJson $f.{found[1]} }}}}", line)
    optional = [f"$f.{name}" for name in FIELD.findall(line) if name in _OPTIONAL]
    if not optional:
        return filled
    margin = line[: len(line) - len(line.lstrip())]
    return f"{margin}{{{{- if {' '.join(['and', *optional][len(optional) == 1 :])} }}}}\n{filled}{margin}{_END}"


def main(chart: Path) -> None:
    """Write the files into the folder of the chart."""
    schema = (chart.parent / "values.schema.json").read_text(encoding="utf-8")
    for name, text in files(schema).items():
        (chart / name).parent.mkdir(parents=True, exist_ok=True)
        (chart / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
