"""The parts of the Helm chart that come from the templates of ``commwatch manifest k8s``, the list of alerts and the dashboards.

``make chart`` writes them beside the chart's own files: ``python -m commwatch_agent.deploy.chart deploy/helm/commwatch``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from commwatch_agent.deploy.kubernetes import CHART_ONLY, FIELD, templates
from commwatch_alerts.catalogue import read, shipped
from commwatch_alerts.export import RUNBOOK_URL, prometheus
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
    ("daemonset", "ServiceMonitor"): ".Values.serviceMonitor.enabled",
    # Policies do not apply to the node's network.
    ("daemonset", "NetworkPolicy"): ".Values.networkPolicy.enabled (not .Values.hostNetwork)",
}
#: Fields that may be empty; a line with an empty one is left out.
_OPTIONAL = {
    *("attach_node", "dns_policy", "gpus", "history_claim", "host_network", "node_field", "peer_name", "peers"),
    *("runtime_class", "state_volume", "token_file", "token_folder", "token_group", "token_mode", "token_secret"),
}


def files() -> dict[str, str]:
    """Return the text of each file by its path in the chart."""
    made = {"files/rules.yaml": prometheus(read(shipped("rules.yaml")))}
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
    for name, text in files().items():
        (chart / name).parent.mkdir(parents=True, exist_ok=True)
        (chart / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
